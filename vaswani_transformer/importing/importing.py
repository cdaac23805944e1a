"""Models of other toolkits as model folders of ours: `vaswani import`."""

import inspect
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from huggingface_hub import snapshot_download

from ..data.tokenization import refuse_special_files
from ..errors import UserError, reading
from ..exported import refuse_exported
from ..hub.card_facts import facts_of
from ..hub.model_card import render_card
from ..loading import load_model, quiet_transformers
from ..model.checkpoint_vaswani import check_finite
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..output_folder import written_at_once
from ..training.run_folder import IMPORT
from . import fairseq, marian, marianmt
from .source import Facts, Imported, model_type

#: Modules of this room, in the order in which they are asked; the options of
#: `import_model` that apply to each are parameters of its `read`.
FORMATS = (marianmt, marian, fairseq)
WEIGHTS, CARD = "model.safetensors", "README.md"
_NOT_OURS = (
    "Other architectures (NLLB, T5, BART, OpenNMT) cannot be; what was converted for CTranslate2 stays there;"
    " of FSMT (facebook/wmt19-*) give fairseq's own checkpoint; a model of ours ('vaswani') needs no import"
)
# Files of a repository on the Hub that are fetched: weights, and what may accompany them. training_args.bin is never
# read: that it exists shows that transformers' Trainer was at work.
_OF_HUB = ["*.safetensors", "pytorch_model.bin", "*.npz", "*.pt", "*.json", "*.txt", "*.model", "*.spm", "*.yml",
           "*.yaml", "README.md", "LICENSE", "training_args.bin", "*codes", "code"]  # fmt: skip


class Import(NamedTuple):
    """The result of `import_model`."""

    folder: Path
    format: str  # of the source, in words
    parameters: int  # tied ones counted once
    facts: Facts


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

    The format is detected from the files. No code in them runs.

    Args:
        source: a file or folder, or the name `owner/name` of a model on the Hub, which is downloaded; without a
            connection what the cache of `huggingface_hub` has of it.
        output: a new or empty folder; it appears when all of it is written and has been loaded once.
        vocabularies: one file of both sides, or those of source and target, if they are not beside the source.
        bpe_codes: the merges of byte-pair encoding, of fairseq.
        positions: `"marian"` or `"transformers"`, of a folder of `MarianMTModel`: what it was trained with. By default
            Marian's, unless the Trainer of transformers has left files there.
        overwrite: replace an imported model in the output folder.

    Raises:
        UserError: for a source that is missing, damaged, of an unknown format or outside of the paper's architecture, a
            model that the Hub does not show to this user, an option that the format does not take, parameters that are
            missing, unexpected or of another shape, and an output that is not empty.
    """
    options = {"vocabularies": tuple(map(Path, vocabularies)), "positions": positions}
    options |= {"bpe_codes": Path(bpe_codes)} if bpe_codes else {}
    options = {name: value for name, value in options.items() if value}
    with written_at_once(output, overwrite, last=WEIGHTS, kind=IMPORT) as staging:
        path, page = Path(source), ""
        is_hub_name = re.fullmatch(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", str(source), re.ASCII) is not None
        if is_hub_name and not path.exists():
            with reading(source):
                path = Path(snapshot_download(str(source), allow_patterns=_OF_HUB, ignore_patterns="*/*"))
            page = f"https://huggingface.co/{source}"
        format = _format_of(path)
        for name in sorted(options.keys() - inspect.signature(format.read).parameters):
            option = {"vocabularies": "--vocabulary", "bpe_codes": "--bpe-codes"}.get(name, f"--{name}")
            raise UserError(f"{option} does not apply to {format.NAME}: leave it out")
        with reading(path), quiet_transformers():
            imported = format.read(path, **options)
            imported.facts.source = page or imported.facts.source or path.resolve().name
            parameters = _write(imported, staging, Path(output).resolve().name)
    return Import(Path(output).absolute(), format.NAME, parameters, imported.facts)


def _format_of(source: Path) -> ModuleType:
    """Return the module that reads a source."""
    refuse_exported(source if source.is_dir() else source.parent)
    if source.is_dir():
        refuse_special_files(source)
    for format in FORMATS:
        if format.matches(source):
            return format
    kind = model_type(source)
    described = f"a {kind!r:.50} model of transformers" if kind else "a folder" if source.is_dir() else "a file"
    described = described if source.exists() else "which does not exist, and is not a name owner/name on the Hub"
    known = "Known formats: " + "; ".join(format.NAME for format in FORMATS)
    raise UserError(f"{source} ({described}) is not in a format that can be imported. {known}. {_NOT_OURS}")


def _write(imported: Imported, staging: Path, name: str) -> int:
    """Write all files of an imported model, and load them once; returns the number of parameters."""
    check_finite(imported.weights.items(), "the original")
    with torch.device("meta"):  # shapes and no values: a configuration may ask for more than the files hold
        model = VaswaniForConditionalGeneration(imported.config)
    model.load_state_dict(_with_ties(imported.weights, model), assign=True)  # raises for names and shapes that differ
    model.tie_weights()
    if others := model.generation_config.update(**imported.generation):  # those that it does not have
        note = f"Search settings of the original that have no counterpart here: {', '.join(sorted(others))}."
        imported.facts = replace(imported.facts, notes=(*imported.facts.notes, note))
    model.save_pretrained(staging, max_shard_size="1TB")
    imported.tokenizer.save_pretrained(staging)
    text = json.dumps(asdict(imported.facts), indent=2, ensure_ascii=False)
    (staging / IMPORT).write_text(text + "\n", encoding="utf-8")
    load_model(staging, "cpu")  # as every command will
    repo_id = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)
    (staging / CARD).write_text(render_card(facts_of(model, repo_id, staging)), encoding="utf-8", newline="\n")
    return model.num_parameters()


def _with_ties(weights: dict[str, torch.Tensor], model) -> dict[str, torch.Tensor]:
    """Return copies of the weights, tied ones, which must be equal, under each of their names; none share memory."""
    ties = model.all_tied_weights_keys
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        # Plain memory: safetensors would write the view of a complex number's imaginary part without its sign.
        copy = tensor.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
        if not torch.equal(copies.setdefault(ties.get(name, name), copy), copy):
            raise UserError(f"{name} differs from {ties[name]}, to which the configuration ties it")
    return copies | {name: copies[ties[name]] for name in model.state_dict() if ties.get(name) in copies}
