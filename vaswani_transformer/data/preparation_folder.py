"""A folder in which pairs are prepared: what it holds already, whether that may be resumed, replaced or removed."""

import contextlib
import logging
import os
from pathlib import Path

from ..errors import UserError
from ..files import file_sha256, is_inner, is_local, remove_files, remove_leftovers, set_aside
from ..json_and_yaml import read_json
from ..output_folder import OutputFolder
from ..recipes.recipe import Recipe
from .parallel_text import PairSource
from .prepared import (
    DATA_FIELDS,
    FORMAT,
    LIMIT_FIELDS,
    MANIFEST,
    TOKENIZER,
    TOKENIZER_FIELDS,
    TRAIN,
    UNFINISHED,
    VALIDATION,
    VERSION,
    open_prepared,
    read_manifest,
)
from .tasks import OTHER, TASKS, task_notes, write_json
from .text_files import file_stamp
from .tokenization import load_tokenizer, tokenizer_sha256

logger = logging.getLogger(__name__)


def settings_of(recipe: Recipe, train: PairSource, validation: PairSource | None) -> dict:
    """What decides the content: a preparation is resumed with the same only."""
    fields = {name: getattr(recipe, name) for name in (*LIMIT_FIELDS, *DATA_FIELDS)}
    fields |= {name: None if recipe.tokenizer_folder else getattr(recipe, name) for name in TOKENIZER_FIELDS}
    files = list(train.files)
    if validation is None or recipe.tokenizer_folder is None:
        fields["seed"] = recipe.seed  # chooses what is held out, and the tokenizer's sample
    if validation is not None:
        del fields["validation_size"]
        files += validation.files
    return {
        "format": FORMAT,
        "version": VERSION,
        "recipe": fields,
        "tokenizer": recipe.tokenizer_folder and tokenizer_sha256(load_tokenizer(recipe.tokenizer_folder)),
        "files": {str(path): list(file_stamp(path)) for path in files},
    }


def is_usable(folder: Path, settings: dict) -> bool:
    """Whether what is prepared there, if anything, is of these settings, and whole if it is finished."""
    try:
        if (folder / MANIFEST).exists():
            finished_manifest(folder, settings)
        else:
            _check_unfinished(folder, settings)
        return True
    except UserError:
        return False


def finished_manifest(folder: Path, settings: dict) -> dict:
    """The manifest of a finished preparation, which must have these settings and all its shards."""
    manifest = read_manifest(folder)
    files = {path: size for path, (size, _) in settings["files"].items()}
    tokenizer = manifest["tokenizer"]["sha256"] if settings["tokenizer"] else None
    _check_same(folder, settings | {"files": files}, manifest | {"tokenizer": tokenizer})
    open_prepared(folder)
    remove_intermediate(folder)
    return manifest


def start_or_resume(folder: Path, settings: dict) -> None:
    """Note the settings in a new folder, or compare them with those of the preparation that is resumed."""
    if settings != _check_unfinished(folder, settings):
        remove_intermediate(folder)  # nothing else is made yet, so that a wrong setting may be corrected
        write_json(folder / UNFINISHED, settings)


def _check_unfinished(folder: Path, settings: dict) -> dict:
    """The settings in the folder; if a preparation has begun there they must be these."""
    path = folder / UNFINISHED
    earlier = read_json(path, OTHER) if path.exists() else {}
    if (folder / TOKENIZER).exists():
        _check_same(folder, settings, earlier)
    return earlier


def remove_intermediate(folder: Path) -> None:
    """Remove what only an unfinished preparation needs."""
    notes = task_notes(folder)
    if is_local(folder):
        for path in notes:
            path.unlink()
        for path in (folder, folder / TASKS):
            remove_leftovers(path)
        with contextlib.suppress(OSError):  # something else is there, or nothing
            (folder / TASKS).rmdir()
    elif notes:
        folder.fs.rm([path.path for path in notes])
    (folder / UNFINISHED).unlink(missing_ok=True)


def _check_same(folder: Path, settings: dict, earlier: dict) -> None:
    """Refuse a folder that was started with other settings or from other files."""
    earlier = {"recipe": {}, "files": {}, "tokenizer": None} | earlier
    if not all(isinstance(earlier[name], dict) for name in ("recipe", "files")):
        raise UserError(f"{folder} holds what no preparation has written: {OTHER}")
    if [earlier.get(name) for name in ("format", "version")] != [FORMAT, VERSION]:
        raise UserError(f"{folder} was prepared by another version: {OTHER}")
    # An earlier version did not note the seed of a tokenizer: it took the first pairs.
    changed = _differing(settings["recipe"], {"seed": settings["recipe"].get("seed")} | earlier["recipe"])
    changed += ["tokenizer"] if settings["tokenizer"] != earlier["tokenizer"] else []
    if changed:
        raise UserError(
            f"{folder} was prepared with other settings ({', '.join(changed)}): give the same ones, {OTHER}"
        )
    changed = _differing(settings["files"], earlier["files"])
    if changed:
        raise UserError(f"{changed[0]} is not as it was when the preparation of {folder} started: {OTHER}")


def _differing(one: dict, other: dict) -> list[str]:
    return sorted(name for name in one | other if one.get(name) != other.get(name))


def check_ours(folder: Path) -> OutputFolder | None:
    """Refuse a folder with something else in it, and no preparation: nothing there is touched.

    Returns:
        The folder, None in a store.
    """
    output = OutputFolder(folder) if is_local(folder) else None
    notes = _read_json(folder / MANIFEST) or _read_json(folder / UNFINISHED)
    if notes.get("format") != FORMAT and any(folder.glob("[!.]*")):
        raise UserError(f"{folder} is not empty and holds no preparation: give another --output")
    return output


def _read_json(path: Path) -> dict:
    with contextlib.suppress(OSError, UserError):
        return read_json(path, "remove it")
    return {}


def remove_prepared(folder: Path, output: OutputFolder | None) -> None:
    """Remove what a preparation has made and nothing else; cut off, it leaves an unfinished preparation.

    What has been changed, or is damaged, is set aside.

    Raises:
        UserError: for a file that was never ours in the place of one of ours, and in a store; nothing is removed then.
    """
    if output is None:
        if any(folder.glob("*")):
            raise UserError(f"{folder} is not on this machine, where nothing is removed: remove it yourself first")
        return
    notes = _read_json(folder / MANIFEST) or _read_json(folder / UNFINISHED)
    try:
        written = [facts for part in notes.get("parts", {}).values() for facts in (part["index"], *part["shards"])]
        written += [
            facts for path in task_notes(folder) for facts in (_read_json(path).get("result") or {}).get("shards", ())
        ]
        made = {Path(facts["file"]).name: (facts["bytes"], facts["sha256"]) for facts in written}
        made = {name: facts for name, facts in made.items() if is_inner(name)}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"the manifest in {folder} is damaged: remove the folder, or give another --output") from error
    tokenizer = output.names(f"{TOKENIZER}/")
    output.check([MANIFEST, *tokenizer])
    for name, facts in made.items():
        path = folder / name
        is_same = path.is_file() and (path.stat().st_size, file_sha256(path)) == facts
        if os.path.lexists(path) and (path.is_symlink() or not is_same):
            logger.warning("%s was changed since it was prepared: kept as %s", path, set_aside(path).name)
    if MANIFEST in output and (folder / MANIFEST).exists():
        (folder / MANIFEST).replace(folder / UNFINISHED)
    remove_files(folder, made)
    output.remove(tokenizer)
    set_aside(folder / TOKENIZER)  # with what others have put there
    for name in (MANIFEST, UNFINISHED, TOKENIZER, *(f"{part}" for part in (TRAIN, VALIDATION))):
        remove_leftovers(folder, name)
    remove_intermediate(folder)
