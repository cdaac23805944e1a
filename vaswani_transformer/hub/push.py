"""The push of a trained model to the Hugging Face Hub: files, model card, one commit."""

import contextlib
import inspect
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, ModelInfo, get_token, utils
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..data.tokenization import SIDES, TOKENIZER_FILES, side_of, tokenizer_files
from ..errors import UserError, one_line
from ..evaluation.records import is_weights_file, read_evaluation, tensors_sha256, weights_sha256
from ..loading import load_model
from ..model.configuration_vaswani import VaswaniConfig
from .card_facts import facts_of, is_search_setting, published_record
from .existing_card import carry_over, may_be_replaced, read_file
from .model_card import check_metadata, render_card
from .space import Space, push_space, space_files

logger = logging.getLogger(__name__)

CARD, MAIN, INDEX = "README.md", "main", "model.safetensors.index.json"
# What is published is listed, since the rest of a folder's files may hold anything: entries of a configuration that
# transformers writes by itself, and entries of a tokenizer's with the values that each may have.
_WRITTEN = {"model_type", "architectures", "dtype", "transformers_version", "auto_map", "custom_pipelines"}
_SIDES = ("right", "left")
_TOKENIZER = {
    "backend": ("tokenizers", "custom"),
    "tokenizer_class": (
        "TokenizersBackend",
        "PreTrainedTokenizerFast",
        "VaswaniTokenizer",
        "MarianTokenizer",
        "FSMTTokenizer",
    ),
    "sp_model_kwargs": ({},),
    "auto_map": ({"AutoTokenizer": ["tokenization_vaswani.VaswaniTokenizer", None]},),
    "padding_side": _SIDES,
    "truncation_side": _SIDES,
}
_SWITCHES = {"clean_up_tokenization_spaces", "split_special_tokens", "add_prefix_space", "model_max_length"}
_SWITCHES |= {"separate_vocabs", "do_lower_case"}
_LANGUAGE = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]{2,8})*")
_TOKENS = {f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")}
_TOKENS |= {"additional_special_tokens", "extra_special_tokens"}
_INPUTS = {"input_ids", "attention_mask", "token_type_ids"}
_NO_NEWS = {"is_local", "local_files_only", "name_or_path", "_name_or_path"}  # transformers' notes about this machine
_SIZE = re.compile(r"\s*(\d*\.?\d+) ?[KMGT]B\s*", re.IGNORECASE)
_MOST_SHOWN = 10  # entries of a file that a warning names
# What git refuses as a branch name (see `git check-ref-format`).
_NO_BRANCH = re.compile(r"\A(?:-|@?\Z)|(?:\A|/)(?:\.|/|\Z)|[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|\.lock(?:/|\Z)|\.\Z")
_staging: set[str] = set()  # folders that pushes of this process have written their files to


class HubFailure(OSError):
    """The Hub, or the connection to it, failed: what was asked for was not wrong and may be tried again."""


@dataclass(frozen=True)
class Published:
    """What a push did, or would do."""

    repo_id: str  # owner/name
    revision: str  # the branch
    files: dict[str, int]  # sizes in bytes of the files that the push consists of, by name
    card: str  # text of the model card
    url: str | None = None  # page of the repository; None for a dry run
    commit: str | None = None  # of the branch after the push; None for a dry run
    changed: bool = False  # whether there is a new commit; False when the Hub had every file already
    created: bool = False  # whether the repository was made
    removed: tuple[str, ...] = ()  # weight files of an earlier push that are no longer part of the model
    card_kept: bool = False  # whether a card on the Hub stays, because someone else wrote or edited it
    space: Space | None = None  # that was asked for


def publish(
    model_folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str = MAIN,
    message: str | None = None,
    languages: Sequence[str] = (),
    license: str | None = None,
    datasets: Sequence[str] = (),
    evaluations: Sequence[str | Path] = (),
    card: str | None = None,
    overwrite_card: bool = False,
    max_shard_size: str = "5GB",
    space: bool = False,
    token: str | None = None,
    dry_run: bool = False,
    progress: bool = True,
) -> Published:
    """Put a trained model, its tokenizer and a model card into a repository of the Hub, in one commit.

    The commit comes last: until then the repository is unchanged, so an interrupted push may be repeated. Weight files
    of an earlier push that the model no longer has are removed in the same commit. Licence, languages and datasets of
    an earlier card of ours are kept unless others are given, and its scores as long as the weights are the same.

    Args:
        model_folder: what `vaswani train` or `save_pretrained` wrote.
        repo_id: `owner/name`; created if it does not exist.
        private: create it as a private repository.
        revision: the branch to push to; created if it does not exist.
        message: the commit message.
        languages: ISO 639 codes, source first; by default those that name the columns or files of the recipe.
        license: the Hub's identifier of the weights' licence.
        datasets: names of datasets on the Hub; by default that of the recipe.
        evaluations: files of `vaswani evaluate --json`; all scores on the card come from them.
        card: `"base"`, `"big"`, `"parser"`, or the path of a template; chosen by the model if None.
        overwrite_card: replace a card on the Hub, and files of a Space, that someone else wrote or edited too.
        max_shard_size: of a file of weights, such as `"5GB"` or `"200MB"`.
        space: also put the page of `vaswani serve` for this model into the Space of the same name, in a second commit.
        token: with the right to write; by default that of `hf auth login` or of the variable HF_TOKEN.
        dry_run: prepare and check everything, but send nothing.
        progress: show progress bars of the upload on standard error.

    Raises:
        UserError: for a mistake in the arguments, and for a token that is refused or may not write.
        HubFailure: when the Hub cannot be reached or fails.
    """
    _check_arguments(repo_id, revision, message, max_shard_size)
    languages, datasets, evaluations = map(_as_list, (languages, datasets, evaluations))
    check_metadata(languages, license, datasets)
    token = None if dry_run else _usable_token(token)
    with tempfile.TemporaryDirectory(prefix="vaswani-push-") as folder:
        _staging.add(folder)
        staging = Path(folder)
        before = _stamps(model_folder)
        model, tokenizer = load_model(model_folder, device="cpu")
        model.save_pretrained(staging, max_shard_size=max_shard_size)
        tokenizer.save_pretrained(staging)
        vocabulary = set().union(*(side_of(tokenizer, side).get_vocab() for side in SIDES))
        left_out = _keep_what_may_be_published(staging, vocabulary)
        given = {"languages": languages, "license": license, "datasets": datasets}
        given = {name: value for name, value in given.items() if value}
        records, more = _read_evaluations(model_folder, evaluations)
        facts = replace(facts_of(model, repo_id, model_folder, tensors_sha256(staging)), evaluations=records, **given)
        if _stamps(model_folder) != before:
            raise UserError(f"{model_folder} changed while it was read: push again when nothing writes to it")
        if left_out | more:
            logger.warning("not published, since only known entries are: %s", _in_words(left_out | more))
        is_parser = "tree_tokens" in tokenizer.init_kwargs
        if dry_run:
            text = render_card(facts, card)
            planned_space = Space(space_files(facts, revision, is_parser)) if space else None
            done = Published(repo_id, revision, _add_card(staging, text), text, space=planned_space)
        else:
            with _hub_errors(repo_id, token), _progress_bars(progress):
                api = HfApi(token=token)
                api.whoami()  # raises for a token that is refused
                head = _find_head(api, repo_id, revision)
                existing = (read_file(api, head, CARD) or "") if head is not None else ""
                facts = carry_over(facts, existing, given)
                text = render_card(facts, card)
                _validate_card(text)
                pages = space_files(facts, revision, is_parser) if space else {}
                if pages:
                    _validate_card(pages[CARD], "space")
                kept = bool(existing) and not overwrite_card and not may_be_replaced(existing)
                files = _add_card(staging, text)
                if kept:
                    del files[CARD]
                planned = Published(repo_id, revision, files, text, card_kept=kept)
                done = _push(api, planned, head, staging, private, message or "Upload model with vaswani push")
                if pages:
                    words = message or "Write Space with vaswani push"
                    done = replace(done, space=push_space(api, repo_id, pages, overwrite_card, words))
    if done.card_kept:
        logger.warning("the card on the Hub was written or edited by someone else, so it stays: --overwrite-card")
    elif ModelCard(done.card).data.license is None:
        logger.warning("no licence was given, and the card says so: --license gives one, such as mit")
    return done


def clear_staging() -> None:
    """Remove the files of pushes that are under way, for a process that is about to end without unwinding."""
    for folder in _staging:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    before = utils.are_progress_bars_disabled()
    (utils.enable_progress_bars if shown else utils.disable_progress_bars)()
    try:
        yield
    finally:
        (utils.disable_progress_bars if before else utils.enable_progress_bars)()


def _check_arguments(repo_id: str, revision: str, message: str | None, max_shard_size: str) -> None:
    try:
        utils.validate_repo_id(repo_id)
    except ValueError as error:
        raise UserError(f"{repo_id!r} is no repository name: {one_line(error)}") from error
    if "/" not in repo_id:
        raise UserError(f"{repo_id!r} is no repository name: give owner/name")
    if _NO_BRANCH.search(revision):
        raise UserError(f"revision {revision!r} is no branch name: give one such as main")
    if message is not None and not message.strip():
        raise UserError("the message is empty: give some text, or leave it out")
    size = _SIZE.fullmatch(max_shard_size)
    if size is None or float(size[1]) == 0:
        raise UserError(f"max_shard_size is {max_shard_size!r}: give a number and KB, MB, GB or TB, such as 5GB")


def _as_list(names: str | Path | Sequence) -> list:
    return [names] if isinstance(names, str | Path) else list(names)


def _usable_token(token: str | None) -> str:
    token = token if token is not None else get_token()
    if not token:
        raise UserError("there is no token for the Hub: run `hf auth login`, set HF_TOKEN, or give --token")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UserError("the token holds characters that no token has: copy it again")
    return token


def _stamps(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """What changes when someone writes to a file of a model or run, by its name."""
    read = (".json", ".jsonl", ".yaml", ".safetensors")
    facts = {path.name: path.stat() for path in Path(folder).glob("*") if path.suffix in read and path.is_file()}
    return {name: (fact.st_ino, fact.st_size, fact.st_mtime_ns) for name, fact in facts.items()}


def _is_moses(value: Any) -> bool:
    """Whether this is how a `VaswaniTokenizer` has Moses cut its texts."""
    return isinstance(value, dict) and all(
        isinstance(entry, list) and all(_LANGUAGE.fullmatch(str(language)) for language in entry)
        if name == "languages"
        else name in ("aggressive_dash_splits", "escape", "normalize") and isinstance(entry, bool)
        for name, entry in value.items()
    )


def _keep_what_may_be_published(staging: Path, vocabulary: Collection[str]) -> dict[str, list[str]]:
    """Remove all files and entries that are not listed; returns their names by file, without those that are no news."""

    def is_token(value: Any) -> bool:
        if isinstance(value, list):
            return all(map(is_token, value))
        return str(value.get("content") if isinstance(value, dict) else value) in vocabulary

    def is_added_token(value: Any) -> bool:
        flags = {"lstrip", "normalized", "rstrip", "single_word", "special"}
        return isinstance(value, dict) and all(
            is_token(entry) if name == "content" else name in flags and isinstance(entry, bool)
            for name, entry in value.items()
        )

    def is_known_of_tokenizer(name: str, value: Any) -> bool:
        if name in _TOKENS:
            return value is None or is_token(value)
        if name == "tree_tokens":  # a parser's, which are words in its vocabulary
            return isinstance(value, list) and all(f"Ġ{token}" in vocabulary for token in value)
        if name == "added_tokens_decoder":  # of tokenizers that are not of the library tokenizers
            return isinstance(value, dict) and all(map(is_added_token, value.values()))
        if name in ("source_lang", "target_lang"):
            return value is None or (isinstance(value, str) and _LANGUAGE.fullmatch(value) is not None)
        if name == "langs":
            return isinstance(value, list) and all(_LANGUAGE.fullmatch(str(language)) for language in value)
        if name == "moses":
            return value is None or _is_moses(value)
        if name == "known_tokens":
            return value is None or (isinstance(value, list) and all(type(number) is int for number in value))
        if name == "model_input_names":
            return isinstance(value, list) and set(map(str, value)) <= _INPUTS
        return value in _TOKENIZER.get(name, ()) or (name in _SWITCHES and isinstance(value, bool | int))

    own = VaswaniConfig.__annotations__.keys() | _WRITTEN
    checks: dict[str, Callable[[str, Any], bool]] = {
        "config.json": lambda name, value: name in own,
        "generation_config.json": lambda name, value: (
            name == "transformers_version"
            or (name == "_from_model_config" and isinstance(value, bool))
            or is_search_setting(name, value)
        ),
        "tokenizer_config.json": is_known_of_tokenizer,
    }
    allowed = {INDEX, *tokenizer_files(json.loads((staging / "tokenizer_config.json").read_text(encoding="utf-8")))}
    allowed |= {path.name for path in Path(inspect.getfile(VaswaniConfig)).parent.glob("*_vaswani.py")}
    left_out = {}
    for path in sorted(staging.iterdir()):
        if check := checks.get(path.name):
            values = json.loads(path.read_text(encoding="utf-8"))
            known = {name: value for name, value in values.items() if check(name, value)}
            if unknown := sorted(values.keys() - known.keys() - _NO_NEWS):
                left_out[path.name] = unknown
            if known != values:
                path.write_text(json.dumps(known, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        elif not (path.name in allowed or is_weights_file(path.name)):
            left_out[path.name] = []
            path.unlink() if path.is_file() else shutil.rmtree(path)
    return left_out


def _in_words(names: Mapping[str, Sequence[str]]) -> str:
    """Names of files, and of entries in them, on one line; of many entries the first."""
    words = []
    for file, entries in names.items():
        shown = ", ".join(ascii(name)[1:-1][:50] for name in entries[:_MOST_SHOWN])
        more = f" and {len(entries) - _MOST_SHOWN:,} more" if len(entries) > _MOST_SHOWN else ""
        words.append(f"{shown}{more} of {file}" if entries else file)
    return "; ".join(words)


def _read_evaluations(model_folder: str | Path, paths: Sequence[str | Path]) -> tuple[list[dict], dict[str, list[str]]]:
    """Evaluation records, which must be of the folder's weights and differ in test set or search.

    Also the names of what the files hold besides, by file.
    """
    weights, records, seen, left_out = weights_sha256(model_folder), [], {}, {}
    for path in paths:
        record = read_evaluation(path)
        if record["weights_sha256"] != weights:
            raise UserError(f"{path} is an evaluation of other weights than those in {model_folder}: evaluate these")
        known = published_record(record)
        unknown = record.keys() - known.keys()
        unknown |= record["generation"].keys() - known["generation"].keys()
        if unknown := sorted(unknown - _WRITTEN):
            left_out[str(path)] = unknown
        record = known
        names = ("test_set", "source_sha256", "reference_sha256", "generation")
        key = json.dumps([record.get(name) for name in names], sort_keys=True)
        if key in seen:
            raise UserError(f"{path} and {seen[key]} evaluate the same test set in the same way: give one of them")
        seen[key] = path
        records.append(record)
    return records, left_out


def _add_card(staging: Path, text: str) -> dict[str, int]:
    """Write the card beside the model; returns the sizes of all files by name."""
    (staging / CARD).write_text(text, encoding="utf-8", newline="\n")
    return {path.name: path.stat().st_size for path in sorted(staging.iterdir())}


def _find_head(api: HfApi, repo_id: str, revision: str) -> ModelInfo | None:
    """The commit that a push builds on: the branch's last one, main's for a new branch, None for a new repository."""
    with contextlib.suppress(RepositoryNotFoundError):
        with contextlib.suppress(RevisionNotFoundError):
            return api.model_info(repo_id, revision=revision, files_metadata=True)
        return api.model_info(repo_id, files_metadata=True)
    return None


def _validate_card(text: str, repo_type: str = "model") -> None:
    """The Hub's own check of the front matter, before anything is created there."""
    try:
        ModelCard(text).validate(repo_type=repo_type)
    except ValueError as error:
        reason = str(error)
        with contextlib.suppress(ValueError, LookupError, TypeError):
            reason = "; ".join(each["message"] for each in json.loads(reason)["errors"])
        raise UserError(f"the Hub refuses the card: {' '.join(reason.split())[:300]}") from error


def _push(
    api: HfApi, planned: Published, head: ModelInfo | None, staging: Path, private: bool, message: str
) -> Published:
    """Create repository and branch if they do not exist, upload the files, and commit them last."""
    repo_id, created = planned.repo_id, head is None
    if head is None:
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        head = api.model_info(repo_id, files_metadata=True)
    if private and not head.private:
        raise UserError(
            f"{repo_id} exists and is public: leave --private out, give another name, or make it private on its"
            " settings page"
        )
    if planned.revision != MAIN:
        api.create_branch(repo_id, branch=planned.revision, revision=head.sha, exist_ok=True)
    # `from_pretrained` prefers weights in one file to shards, so those of the other kind have to go, and so have files
    # of a tokenizer of another kind, which would be read with those of this one.
    on_hub = {sibling.rfilename for sibling in head.siblings or []}
    others = (INDEX, *TOKENIZER_FILES)
    removed = sorted(name for name in on_hub - planned.files.keys() if name in others or is_weights_file(name))
    operations = [CommitOperationDelete(path_in_repo=name) for name in removed]
    operations += [CommitOperationAdd(path_in_repo=name, path_or_fileobj=staging / name) for name in planned.files]
    # `upload_folder` knows no exact names to delete and may split a large folder into several commits.
    commit = api.create_commit(
        repo_id, operations, commit_message=message, revision=planned.revision, parent_commit=head.sha
    )
    info = api.model_info(repo_id, revision=commit.oid, files_metadata=True)
    sizes = {sibling.rfilename: sibling.size for sibling in info.siblings or []}
    missing = sorted(name for name, size in planned.files.items() if sizes.get(name) != size)
    if missing:  # the client skips what the repository ignores, silently
        raise UserError(
            f"{repo_id} did not accept {', '.join(missing)}: remove them from its .gitignore and push again"
        )
    url = f"{api.endpoint}/{repo_id}"
    changed = commit.oid != head.sha
    return replace(planned, url=url, commit=commit.oid, changed=changed, created=created, removed=tuple(removed))


@contextlib.contextmanager
def _hub_errors(repo_id: str, token: str) -> Iterator[None]:
    """Turn what `huggingface_hub` raises into one line that never shows the token."""
    try:
        yield
    except (UserError, HubFailure):
        raise
    except (HTTPError, OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        translated = _translate(error, repo_id)
        # Without the chain of errors, which may hold request headers.
        raise type(translated)(str(translated).replace(token, "***")) from None


def _translate(error: Exception, repo_id: str) -> UserError | HubFailure:
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
        return UserError("HF_HUB_OFFLINE is set, so nothing can be pushed: unset it")
    answered = next((cause for cause in causes if isinstance(cause, HfHubHTTPError)), None)
    again = "push again, which is safe to repeat"
    if answered is None:
        in_client = isinstance(error, LookupError | TypeError | AttributeError)
        failure = "the Hub's answer was not understood" if in_client else "the connection to the Hub failed"
        return HubFailure(
            f"{failure} ({type(causes[-1]).__name__}: {one_line(causes[-1], 300) or 'no answer'}); {again}"
        )
    status, message = answered.response.status_code, " ".join((answered.server_message or "").split())[:300]
    message = f" ({message})" if message else ""
    if isinstance(answered, RevisionNotFoundError):
        return UserError(f"{repo_id} has no such branch{message}: give another --revision")
    if status == 401 and not isinstance(answered, RepositoryNotFoundError):
        return UserError(
            f"the Hub does not accept the token{message}: create one with the right to write on its settings page"
        )
    if status in (401, 404):
        return UserError(f"the Hub has no repository {repo_id} that this token may see{message}")
    if status == 403:
        return UserError(f"the token has no right to write to {repo_id}{message}: use one that has, or another owner")
    if status == 412:
        return UserError(f"{repo_id} was changed by someone else meanwhile{message}: push again")
    if status in (408, 429) or status >= 500:
        return HubFailure(f"the Hub failed with status {status}{message}; {again}")
    return UserError(f"the Hub refuses the push with status {status}{message}")
