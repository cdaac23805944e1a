"""The push of a trained model to the Hugging Face Hub: files, model card, one commit."""

import contextlib
import inspect
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, ModelInfo, SpaceInfo, get_token
from huggingface_hub import errors as errors_of_hub
from huggingface_hub.utils import validate_repo_id

from ..data.tokenization import SIDES, TOKENIZER_FILES, side_of
from ..errors import UserError, items_of, one_line, reading, shortened
from ..evaluation.records import is_weights_file, read_evaluation, weights_sha256
from ..exported import FACTS
from ..loading import load_model
from ..model.configuration_vaswani import VaswaniConfig
from .card_facts import facts_of, is_search_setting, results_of_record
from .model_card import carry_over, may_be_replaced, render_card

logger = logging.getLogger(__name__)

MAIN, CARD, INDEX = "main", "README.md", "model.safetensors.index.json"
# What is published is listed, since the rest of a folder's files may hold anything: entries of a configuration that
# transformers writes by itself, and entries of a tokenizer's with the words that these may hold beside tokens.
_WRITTEN = {"model_type", "architectures", "dtype", "transformers_version", "auto_map", "custom_pipelines"}
_KNOWN = {
    "backend", "tokenizer_class", "sp_model_kwargs", "auto_map", "padding_side", "truncation_side", "known_tokens",
    "clean_up_tokenization_spaces", "split_special_tokens", "add_prefix_space", "model_max_length", "separate_vocabs",
    "do_lower_case", "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token",
    "additional_special_tokens", "extra_special_tokens", "added_tokens_decoder", "tree_tokens", "source_lang",
    "target_lang", "moses", "model_input_names", "tokenizers", "custom", "TokenizersBackend",
    "PreTrainedTokenizerFast", "VaswaniTokenizer", "MarianTokenizer", "AutoTokenizer",
    "tokenization_vaswani.VaswaniTokenizer", "right", "left", "input_ids", "attention_mask", "token_type_ids",
    "content", "lstrip", "normalized", "rstrip", "single_word", "special", "__type", "AddedToken", "languages",
    "aggressive_dash_splits", "escape",
}  # fmt: skip
_LANGUAGE = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]{2,8})*|\d+")  # or the number of an added token
_NO_NEWS = {"is_local", "local_files_only", "name_or_path", "_name_or_path"}  # transformers' notes about this machine
_staging: set[str] = set()  # folders that pushes of this process have written their files to


@dataclass(frozen=True)
class Published:
    """The result of a push, done or plan."""

    repo_id: str  # owner/name
    revision: str  # the branch
    files: dict[str, int]  # sizes in bytes of the files that the push consists of, by name
    card: str  # text of the model card
    url: str | None = None  # page of the repository; None for a dry run
    commit: str | None = None  # of the branch after the push; None for a dry run
    changed: bool = False  # whether there is a new commit; False when the Hub had every file already
    removed: tuple[str, ...] = ()  # weight files of an earlier push that are no longer part of the model
    kind: str = "model"  # or space, of the repository


def publish(
    model_folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str = MAIN,
    languages: Sequence[str] = (),
    license: str | None = None,
    datasets: Sequence[str] = (),
    evaluations: Sequence[str | Path] = (),
    overwrite_card: bool = False,
    token: str | None = None,
    dry_run: bool = False,
) -> Published:
    """Put a trained model, its tokenizer and a model card into a repository of the Hub, in one commit.

    The commit comes last: until then the repository is unchanged, so an interrupted push may be repeated. Weight files
    of an earlier push that the model no longer has are removed in the same commit. Licence, languages and datasets of
    an earlier card of ours are kept unless others are known.

    Args:
        model_folder: what `vaswani train` or `save_pretrained` wrote.
        repo_id: `owner/name`; created if it does not exist.
        private: create it as a private repository.
        revision: the branch to push to; created if it does not exist.
        languages: ISO 639 codes, source first; by default those that name the columns or files of the recipe.
        license: the Hub's identifier of the weights' licence.
        datasets: names of datasets on the Hub; by default that of the recipe.
        evaluations: files of `vaswani evaluate --json`; all scores on the card come from them.
        overwrite_card: replace a card on the Hub that someone else wrote or edited.
        token: with the right to write; by default that of `hf auth login` or of the variable HF_TOKEN.
        dry_run: prepare and check everything, but send nothing.

    Raises:
        UserError: for a mistake in the arguments, and for a token that is refused or may not write.
        ConnectionError: when the Hub cannot be reached or fails; the push may be repeated.
    """
    languages, datasets, evaluations = (list(items_of(several)) for several in (languages, datasets, evaluations))
    _check_name(repo_id)
    token = None if dry_run else token or get_token()
    with tempfile.TemporaryDirectory(prefix="vaswani-push-") as folder:
        _staging.add(folder)
        staging, api, head, existing = Path(folder), HfApi(token=token), None, None
        model, tokenizer = load_model(model_folder, device="cpu")  # which refuses weights that are not finite
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        vocabulary = set().union(*(side_of(tokenizer, side).get_vocab() for side in SIDES))
        weights, results = weights_sha256(model_folder), []
        for path in evaluations:
            if (record := read_evaluation(path))["weights_sha256"] != weights:
                raise UserError(f"{path} is of other weights than those in {model_folder}: evaluate these")
            results += results_of_record(record, path)
        if dropped := _keep_what_may_be_published(staging, vocabulary):
            names = shortened(ascii(", ".join(dropped))[1:-1], 2000)
            logger.warning("not published, since only known entries are: %s", names)
        with _hub_errors(repo_id, token):
            if not dry_run:
                api.whoami()  # raises for a token that is missing or refused
                head = _find_head(api, repo_id, revision)
                if head and CARD in {sibling.rfilename for sibling in head.siblings or []}:
                    card = api.hf_hub_download(repo_id, CARD, revision=head.sha)
                    existing = Path(card).read_text(encoding="utf-8", errors="replace")
                kind = (getattr(head, "config", None) or {}).get("model_type")
                if kind not in (None, VaswaniConfig.model_type):
                    raise UserError(f"{repo_id} holds a {kind} model: give another name")
        # An option counts most, then what the run says, then the card on the Hub.
        options = {"languages": languages, "license": license, "datasets": datasets, "results": results}
        facts = replace(facts_of(model, repo_id, model_folder), **{name: x for name, x in options.items() if x})
        facts = carry_over(facts, existing or "")
        text = render_card(facts)
        (staging / CARD).write_text(text, encoding="utf-8", newline="\n")
        files = {path.name: path.stat().st_size for path in sorted(staging.iterdir())}
        if existing and not overwrite_card and not may_be_replaced(existing):
            del files[CARD]
            logger.warning("the card on the Hub was written or edited by someone else, so it stays: --overwrite-card")
        elif facts.license is None:
            logger.warning("no licence was given, and the card says so: --license gives one, such as mit")
        plan = Published(repo_id, revision, files, text)
        if dry_run:
            return plan
        with _hub_errors(repo_id, token):
            ModelCard(text).validate(repo_type="model")  # by the Hub's own check, before anything is created there
            return _push(api, plan, head, staging, private)


def publish_site(
    write: Callable[[Path], object], repo_id: str, *, private=False, revision=MAIN, token=None, dry_run=False
) -> Published:
    """Put a site, which `write` makes in a new folder, into a static Space of the Hub, in one commit.

    Other arguments and errors as in `publish`. A Space that holds something else is not changed.
    """
    _check_name(repo_id)
    token = None if dry_run else token or get_token()
    with tempfile.TemporaryDirectory(prefix="vaswani-push-") as folder:
        _staging.add(folder)
        write(site := Path(folder) / "site")
        paths = {path.relative_to(site).as_posix(): path for path in sorted(site.rglob("*")) if path.is_file()}
        files = {name: path.stat().st_size for name, path in paths.items()}
        plan = Published(repo_id, revision, files, paths[CARD].read_text("utf-8"), kind="space")
        if dry_run:
            return plan
        with _hub_errors(repo_id, token):
            api = HfApi(token=token)
            api.whoami()
            head = _find_head(api, repo_id, revision, plan.kind)
            there = {sibling.rfilename for sibling in (head and head.siblings) or []}
            if FACTS not in there and there - {CARD, ".gitattributes"}:
                raise UserError(f"the Space {repo_id} has another program: give another name")
            if {FACTS, CARD} <= there:  # which may have been edited since
                del files[CARD]
            return _push(api, plan, head, site, private)


def _check_name(repo_id: str) -> None:
    if "/" not in repo_id:
        raise UserError(f"{repo_id}: give owner/name")
    with reading(repo_id):
        validate_repo_id(repo_id)


def clear_staging() -> None:
    """Remove the files of pushes that are under way, for a process that is about to end without unwinding."""
    for folder in _staging:
        shutil.rmtree(folder, ignore_errors=True)


def _has_known_texts(value: Any, words: Collection[str]) -> bool:
    """Return whether all texts in a value of JSON, keys too, are among `words`, codes of languages or numbers."""
    if isinstance(value, dict | list):
        parts = (*value, *value.values()) if isinstance(value, dict) else value
        return all(_has_known_texts(part, words) for part in parts)
    return not isinstance(value, str) or value in words or _LANGUAGE.fullmatch(value) is not None


def _keep_what_may_be_published(staging: Path, vocabulary: Collection[str]) -> list[str]:
    """Remove all files and entries that are not listed; returns their names, without those of no interest."""
    words = {*vocabulary, *_KNOWN} | {token.removeprefix("Ġ") for token in vocabulary}  # as `tree_tokens` has them
    checks = {
        "config.json": lambda name, _: name in VaswaniConfig.__annotations__.keys() | _WRITTEN,
        "generation_config.json": lambda name, x: name == "transformers_version" or is_search_setting(name, x),
        "tokenizer_config.json": lambda name, value: name in _KNOWN and _has_known_texts(value, words),
    }
    allowed = {path.name for path in Path(inspect.getfile(VaswaniConfig)).parent.glob("*_vaswani.py")}
    allowed |= {INDEX, *TOKENIZER_FILES}
    dropped = []
    for path in sorted(staging.iterdir()):
        if check := checks.get(path.name):
            values = json.loads(path.read_text(encoding="utf-8"))
            known = {name: value for name, value in values.items() if check(name, value)}
            dropped += [f"{name} of {path.name}" for name in sorted(values.keys() - known.keys() - _NO_NEWS)]
            path.write_text(json.dumps(known, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        elif not (path.name in allowed or is_weights_file(path.name)):
            dropped.append(path.name)
            path.unlink() if path.is_file() else shutil.rmtree(path)
    return dropped


def _find_head(api: HfApi, repo_id: str, revision: str | None = None, kind="model") -> ModelInfo | SpaceInfo | None:
    """Return the commit that a push builds on: the branch's last one, main's for a new branch, None for a new name."""
    for name in (revision, None):
        with contextlib.suppress(errors_of_hub.RepositoryNotFoundError, errors_of_hub.RevisionNotFoundError):
            return api.repo_info(repo_id, repo_type=kind, revision=name, files_metadata=True)
    return None


def _push(api: HfApi, plan: Published, head: ModelInfo | SpaceInfo | None, staging: Path, private: bool) -> Published:
    """Create repository and branch if they do not exist, upload the files, and commit them last."""
    repo_id, revision, kind = plan.repo_id, plan.revision, plan.kind
    if head is None:
        sdk = "static" if kind == "space" else None
        api.create_repo(repo_id, repo_type=kind, space_sdk=sdk, private=private or None, exist_ok=True)
        head = _find_head(api, repo_id, kind=kind)
    if private and not head.private:
        raise UserError(f"{repo_id} exists and is public: leave --private out, or make it private on its settings page")
    if revision != MAIN:
        api.create_branch(repo_id, repo_type=kind, branch=revision, revision=head.sha, exist_ok=True)
    # `from_pretrained` prefers weights in one file to shards, so those of the other kind have to go, and so have files
    # of a tokenizer of another kind, which would be read with those of this one.
    on_hub = {sibling.rfilename for sibling in head.siblings or []}
    others = (name for name in on_hub - plan.files.keys() if name in (INDEX, *TOKENIZER_FILES) or is_weights_file(name))
    removed = tuple(sorted(others))
    operations = [*map(CommitOperationDelete, removed)]
    operations += [CommitOperationAdd(name, staging / name) for name in plan.files]
    # `upload_folder` makes several commits of a large folder where hf_xet is installed.
    options = {"commit_message": f"Upload {kind} with vaswani push", "revision": revision, "parent_commit": head.sha}
    commit = api.create_commit(repo_id, operations, repo_type=kind, **options)
    info = _find_head(api, repo_id, commit.oid, kind)
    sizes = {sibling.rfilename: sibling.size for sibling in info.siblings or []}
    if missing := sorted(name for name, size in plan.files.items() if sizes.get(name) != size):
        # The client skips what the repository ignores, silently.
        raise UserError(f"{repo_id} did not accept {', '.join(missing)}: remove them from its .gitignore")
    url = f"{api.endpoint}/{'spaces/' if kind == 'space' else ''}{repo_id}"
    return replace(plan, url=url, commit=commit.oid, changed=commit.oid != head.sha, removed=removed)


@contextlib.contextmanager
def _hub_errors(repo_id: str, token: str | None) -> Iterator[None]:
    """Turn what `huggingface_hub` raises into one line that never shows the token: a mistake, or the Hub's failure."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause, of_user = error, (errors_of_hub.OfflineModeIsEnabled, errors_of_hub.LocalTokenNotFoundError)
        while cause.__cause__ is not None and not isinstance(cause, (errors_of_hub.HfHubHTTPError, *of_user)):
            cause = cause.__cause__
        words = one_line(cause, 300) or type(cause).__name__
        words = re.sub(r"hf_\w+", "***", words.replace(token or "hf_", "***"))
        status = cause.response.status_code if isinstance(cause, errors_of_hub.HfHubHTTPError) else 0
        is_of_card = type(cause) is ValueError
        # The chain of errors may hold request headers.
        if isinstance(cause, of_user) or is_of_card or (400 <= status < 500 and status not in (408, 429)):
            raise UserError(f"the Hub refuses the push to {repo_id}: {words}") from None
        raise ConnectionError(f"the Hub failed ({words}); push again, which is safe to repeat") from None
