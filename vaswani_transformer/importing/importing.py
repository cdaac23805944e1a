"""Models of other toolkits as model folders of ours: `vaswani import`."""

import importlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..data.tokenization import refuse_special_files
from ..errors import UserError, one_line
from ..evaluation.records import tensors_sha256
from ..files import check_path
from ..hub.card_facts import facts_of
from ..hub.model_card import render_card
from ..loading import check_settings, load_model, quiet_transformers, refuse_exported
from ..model.checkpoint_vaswani import WEIGHT_TYPES, check_finite
from ..model.configuration_vaswani import VaswaniConfig
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..output_folder import OutputFolder, is_empty, locked
from ..training.run_folder import IMPORT, RECIPE
from .download import download, is_hub_name
from .refused import refuse
from .source import Facts, Imported, ImportOptions, model_type

#: Modules of this room, in the order in which they are asked, and the fields of `ImportOptions` that each takes.
FORMATS = {
    "pickles": (),
    "marianmt": ("positions",),
    "fsmt": (),
    "marian": ("vocabularies",),
    "fairseq": ("vocabularies", "bpe_codes"),
}
WEIGHTS, CARD = "model.safetensors", "README.md"
_HARMLESS = 10**8  # parameters, 800 MB in float64: so many may come from files that are smaller


class Import(NamedTuple):
    """What `import_model` did."""

    folder: Path
    format: str  # of the source, in words
    parameters: int  # tied ones counted once
    facts: Facts
    has_tokenizer: bool


def import_model(
    source: str | Path,
    output: str | Path,
    *,
    vocabularies: Iterable[str | Path] = (),
    bpe_codes: str | Path | None = None,
    positions: str | None = None,
    overwrite: bool = False,
) -> Import:
    """Write a model of another toolkit as a model folder of ours, with its tokenizer and a card.

    The format is found out by the files. No code in them runs.

    Args:
        source: a file or folder, or the name `owner/name` of a model on the Hub, which is downloaded.
        output: a new or empty folder; it appears when all of it is written and has been loaded once.
        vocabularies: one file of both sides, or those of source and target, where they do not lie beside the source.
        bpe_codes: the merges of byte-pair encoding, of fairseq.
        positions: `"marian"` or `"transformers"`, of a folder of `MarianMTModel`: what it was trained with. By default
            Marian's, unless the Trainer of transformers has left files there.
        overwrite: replace an imported model in the output folder.

    Raises:
        UserError: for a source that is missing, damaged, of no known format or outside of the paper's architecture, an
            option that its format does not take, parameters that are missing, left over or of another shape, and an
            output that is there.
    """
    options = ImportOptions(
        vocabularies=tuple(_file(path, "vocabulary") for path in vocabularies),
        bpe_codes=None if bpe_codes is None else _file(bpe_codes, "bpe_codes"),
        positions=positions,
    )
    check_path(source, "source")
    with locked(output):
        written = _check_output(Path(output), overwrite)
        path, name = _found(source)
        format = _format_of(path)
        _check_options(format, options)
        imported = _read(format, path, options)
        imported.facts.source = name or imported.facts.source or path.resolve().name
        with quiet_transformers(), written.staging() as place:
            staging = place / "model"
            parameters = _write(imported, staging, path, Path(output).resolve().name)
            written.place(staging, last=WEIGHTS, stale=written.names())
    return Import(Path(output).absolute(), format.NAME, parameters, imported.facts, imported.tokenizer is not None)


def _file(path: str | Path, name: str) -> Path:
    check_path(path, name)
    if not Path(path).is_file():
        raise UserError(f"{name} {path} is no file: give one")
    return Path(path)


def _check_output(output: Path, overwrite: bool) -> OutputFolder:
    """Refuse an output that would destroy anything but an earlier import."""
    written = OutputFolder(output)
    if is_empty(output):
        return written
    if not overwrite:
        raise UserError(f"output {output} is not empty: give another one, or --overwrite to replace a model in it")
    if IMPORT not in written or RECIPE in written:  # a training may have started from an imported model
        raise UserError(f"output {output} holds no imported model that could be overwritten: give another folder")
    return written


def _formats() -> list[ModuleType]:
    return [importlib.import_module(f".{name}", __package__) for name in FORMATS]


def _found(source: str | Path) -> tuple[Path, str]:
    """Where a source lies, and the address of its page if it is a model on the Hub."""
    path = Path(source)
    if path.is_file() or path.is_dir():
        return path, ""
    if path.exists():
        raise UserError(f"{source} is neither a file nor a folder: give one")
    if is_hub_name(str(source)):
        return download(str(source)), f"https://huggingface.co/{source}"
    raise UserError(f"there is no {source}: give a file or folder, or the name owner/name of a model on the Hub")


def _format_of(source: Path) -> ModuleType:
    """The module that reads a source."""
    if source.is_dir():
        refuse_exported(source)
        refuse_special_files(source)
    refuse(source)
    formats = _formats()
    for format in formats:
        if format.is_one(source):
            return format
    known = "; ".join(format.NAME for format in formats)
    raise UserError(f"{source} ({_in_words(source)}) is in no format that can be imported. There are: {known}")


def _in_words(source: Path) -> str:
    if source.is_file():
        return f"a file of {source.stat().st_size:,} bytes"
    if kind := model_type(source):
        return f"a {kind!r:.50} model of transformers"
    names = sorted(path.name for path in source.iterdir())
    more = f" and {len(names) - 8:,} more" if names[8:] else ""
    return f"a folder with {', '.join(names[:8])}{more}" if names else "an empty folder"


def _read(format: ModuleType, source: Path, options: ImportOptions) -> Imported:
    try:
        with quiet_transformers():
            return format.read(source, options)
    except UserError:
        raise
    except (OSError, MemoryError):
        raise
    except Exception as error:  # configurations that cannot be, and values of a wrong kind, make errors of many kinds
        raise UserError(f"{source} cannot be imported: {one_line(error)}") from error


def _check_options(format: ModuleType, options: ImportOptions) -> None:
    names = {"vocabularies": "--vocabulary", "bpe_codes": "--bpe-codes"}
    for name, value in vars(options).items():
        if value and name not in FORMATS[format.__name__.rpartition(".")[2]]:
            raise UserError(f"{names.get(name, f'--{name}')} does not apply to {format.NAME}: leave it out")


def _write(imported: Imported, staging: Path, source: Path, name: str) -> int:
    """Write all files of an imported model, and load them once; returns the number of parameters."""
    model = _new_model(imported.config, source)
    weights = _fitted(imported.weights, model, source)
    try:
        check_finite(weights.items(), str(source))
    except ValueError as error:
        raise UserError(one_line(error)) from error
    model.load_state_dict(weights, assign=True, strict=False)  # all are there; buffers are not saved
    model.tie_weights()
    model.generation_config.update(**_followed(imported, source))
    model.save_pretrained(staging, max_shard_size="1TB")
    if imported.tokenizer is not None:
        imported.tokenizer.save_pretrained(staging)
    text = json.dumps(asdict(imported.facts), indent=2, ensure_ascii=False)
    (staging / IMPORT).write_text(text + "\n", encoding="utf-8")
    _check_loads(staging, source, imported.tokenizer is not None)
    repo_id = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)
    card = render_card(facts_of(model, repo_id, staging, tensors_sha256(staging)))
    (staging / CARD).write_text(card, encoding="utf-8", newline="\n")
    return model.num_parameters()


def _check_loads(folder: Path, source: Path, has_tokenizer: bool) -> None:
    """Load what was written, as every command will."""
    if not has_tokenizer:
        VaswaniForConditionalGeneration.from_pretrained(folder)
        return
    try:
        load_model(folder, "cpu")
    except UserError as error:  # which names a folder that nobody will find
        line = str(error).replace(str(folder), "the imported model")
        raise UserError(f"{source} cannot be used after its import: {line}") from error


def _followed(imported: Imported, source: Path) -> dict[str, Any]:
    """The search settings that our search follows; a note in the facts names the others."""
    followed, others = {}, []
    for name, value in imported.generation.items():
        try:
            check_settings({name: value}, source, imported.config.target_vocab_size)
            followed[name] = value
        except UserError:
            others.append(name)
    if others:
        note = f"Search settings of the original that have no counterpart here: {', '.join(sorted(others))}."
        imported.facts = replace(imported.facts, notes=(*imported.facts.notes, note))
    return followed


def _new_model(config: VaswaniConfig, source: Path) -> VaswaniForConditionalGeneration:
    """A model without values."""
    files = [path for path in source.iterdir() if path.is_file()] if source.is_dir() else [source]
    size = sum(path.stat().st_size for path in files)
    if config.num_parameters() > max(_HARMLESS, size // 2):  # no type of weights has less than 2 bytes
        raise UserError(
            f"{source} describes a model of {config.num_parameters():,} parameters, and files of {size:,} bytes cannot"
            " hold so many: configuration and weights must come from the same model"
        )
    with torch.device("meta"):
        return VaswaniForConditionalGeneration(config)


def _fitted(weights: dict[str, torch.Tensor], model, source: Path) -> dict[str, torch.Tensor]:
    """The weights under the names of a model, each tied one once; every name and shape that differs is in the error."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    ties = model.all_tied_weights_keys
    for name in weights.keys() & shapes.keys():
        _check_kind(name, weights[name], source)
    there = {ties.get(name, name) for name in weights}
    faults = [f"{name} is missing" for name in shapes if ties.get(name, name) == name and name not in there]
    faults += [f"{name[:200]!r} is left over" for name in weights if name not in shapes]
    faults += [
        f"{name} has the shape {tuple(tensor.shape)} and should have {shapes[name]}"
        for name, tensor in weights.items()
        if name in shapes and tuple(tensor.shape) != shapes[name]
    ]
    if faults:
        raise UserError(f"the weights in {source} do not fit its configuration: {'; '.join(faults)}")
    fitted: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in weights.items():
        tensor = tensor.detach().resolve_neg().contiguous()
        written_name = ties.get(name, name)
        if written_name not in fitted:
            # safetensors refuses tensors that share memory.
            shared = tensor.untyped_storage().data_ptr() in storages
            fitted[written_name] = tensor.clone() if shared else tensor
            storages.add(fitted[written_name].untyped_storage().data_ptr())
        elif not _same_bits(tensor, fitted[written_name]):
            raise UserError(f"{name} in {source} differs from {written_name}, to which the configuration ties it")
    return fitted


def _check_kind(name: str, tensor: torch.Tensor, source: Path) -> None:
    types = WEIGHT_TYPES.values()
    if tensor.dtype not in types or tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise UserError(
            f"{name} in {source} is a tensor of {tensor.dtype} ({layout}, on {tensor.device.type}): weights must be"
            f" dense tensors of {', '.join(map(str, types))}, with data; save them so"
        )


def _same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors are the same; NaN is the same as itself."""
    return tensor.dtype == other.dtype and torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))
