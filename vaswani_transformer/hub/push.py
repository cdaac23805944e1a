"""A trained model on its way to the Hugging Face Hub: files, model card, one commit."""

import contextlib
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,  # the base of all errors of the HTTP client that huggingface_hub uses
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.serialization._base import parse_size_to_int  # what `save_pretrained` reads sizes with
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    validate_repo_id,
)

from ..errors import UserError
from ..evaluation.records import is_weights_file, read_evaluation, tensors_sha256, weights_sha256
from ..loading import load_model
from .card_facts import CardFacts, facts_of
from .existing_card import carry_over, may_be_replaced
from .model_card import check_metadata, render_card

logger = logging.getLogger(__name__)

CARD, MAIN, INDEX = "README.md", "main", "model.safetensors.index.json"
# What git takes for no branch name (see `git check-ref-format`).
_NO_BRANCH = re.compile(r"\A(?:-|@?\Z)|(?:\A|/)(?:\.|/|\Z)|[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|\.lock(?:/|\Z)|\.\Z")
_staging: set[str] = set()  # folders of pushes under way


class HubFailure(OSError):
    """The Hub, or the way there, failed; what was asked for was not wrong and may be tried again."""


@dataclass(frozen=True)
class Published:
    """What went where.

    Args:
        repo_id: `owner/name`.
        revision: the branch.
        url: page of the repository; None for a dry run.
        commit: the branch's commit after the push; None for a dry run.
        changed: whether there is a new commit; False when the Hub had every file already.
        created: whether the repository was made.
        files: sizes in bytes of what the model consists of, by name.
        removed: weight files of an earlier push that are no longer part of the model.
        card: text of the model card.
        card_kept: whether a card on the Hub was left as it is, because someone else wrote or edited it.
    """

    repo_id: str
    revision: str
    files: dict[str, int]
    card: str
    url: str | None = None
    commit: str | None = None
    changed: bool = False
    created: bool = False
    removed: tuple[str, ...] = ()
    card_kept: bool = False


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
    token: str | None = None,
    dry_run: bool = False,
    progress: bool = True,
) -> Published:
    """Put a trained model, its tokenizer and a model card into a repository of the Hub, in one commit.

    The commit comes last: until then the repository is as it was, so an interrupted push may be repeated. Weight files
    of an earlier push that the model no longer has are removed in the same commit. Of an earlier card of ours stay
    licence, languages and datasets, unless others are given, and the scores of the same weights.

    Args:
        model_folder: what `vaswani train` or `save_pretrained` wrote.
        repo_id: `owner/name`; made if it is not there.
        private: make it private.
        revision: the branch to push to; made if it is not there.
        message: of the commit.
        languages: codes (ISO 639), source first; from the training recipe if it tells.
        license: the Hub's identifier of the weights' licence.
        datasets: names of datasets on the Hub; from the training recipe if it tells.
        evaluations: files of `vaswani evaluate --json`; every figure of the card comes from them.
        card: `"base"`, `"big"`, `"parser"`, or a template; chosen by the model if None.
        overwrite_card: replace a card on the Hub that someone else wrote or edited too.
        max_shard_size: the weights are split into files of this size at most, such as `"5GB"` or `"200MB"`.
        token: with the right to write; the one that `hf auth login` or the variable HF_TOKEN holds if None.
        dry_run: prepare and check everything, and send nothing.
        progress: show bars of the upload on standard error.

    Raises:
        UserError: for a mistake in what was given, a token that is refused or may not write.
        HubFailure: when the Hub cannot be reached or fails.
    """
    _check_arguments(repo_id, revision, message, max_shard_size)
    languages, datasets, evaluations = map(_listed, (languages, datasets, evaluations))
    check_metadata(languages, license, datasets)
    token = None if dry_run else _usable_token(token)
    with _staging_folder() as staging:
        facts = _stage(model_folder, staging, repo_id, max_shard_size)
        records = _read_evaluations(model_folder, evaluations)
        facts = replace(
            facts,
            evaluations=records,
            languages=list(languages) or facts.languages,
            license=license,
            datasets=list(datasets) or facts.datasets,
        )
        given = [
            name for name, value in (("languages", languages), ("license", license), ("datasets", datasets)) if value
        ]
        text = render_card(facts, card)
        _write_card(staging, text)
        files = {path.name: path.stat().st_size for path in sorted(staging.iterdir())}
        planned = Published(repo_id, revision, files, text)
        done = planned

        def update(earlier: str) -> str:
            nonlocal facts
            facts = carry_over(facts, earlier, given)
            return render_card(facts, card)

        if not dry_run:
            with _hub_errors(repo_id, token), _progress_bars(progress):
                done = _Push(HfApi(token=token), planned, staging, update).run(private, message, overwrite_card)
    if facts.license is None and not done.card_kept:
        logger.warning("no licence was given, and the card says so: --license gives one, such as mit")
    if done.card_kept:
        logger.warning("the card on the Hub was written or edited by someone else, so it stays: --overwrite-card")
    return done


def _write_card(staging: Path, text: str) -> None:
    (staging / CARD).write_text(text, encoding="utf-8", newline="\n")


@contextlib.contextmanager
def _staging_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="vaswani-push-") as folder:
        _staging.add(folder)
        try:
            yield Path(folder)
        finally:
            _staging.discard(folder)


@contextlib.contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    before = are_progress_bars_disabled()
    (enable_progress_bars if shown else disable_progress_bars)()
    try:
        yield
    finally:
        (disable_progress_bars if before else enable_progress_bars)()


def clear_staging() -> None:
    """Remove the copies of pushes that are under way, for a process that is about to end without unwinding."""
    for folder in _staging:
        shutil.rmtree(folder, ignore_errors=True)


def _check_arguments(repo_id: str, revision: str, message: str | None, max_shard_size: str) -> None:
    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise UserError(f"{repo_id!r} is no repository name: {' '.join(str(error).split())}") from error
    if repo_id.count("/") != 1:
        raise UserError(f"{repo_id!r} is no repository name: give owner/name")
    if _NO_BRANCH.search(revision):
        raise UserError(f"revision {revision!r} is no branch name: give one such as main")
    if message is not None and not message.strip():
        raise UserError("the message is empty: give some text, or leave it out")
    try:
        size = parse_size_to_int(max_shard_size)
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise UserError(
            f"max_shard_size is {max_shard_size!r}: give a number and KB, MB, GB or TB, such as 5GB or 200MB"
        )


def _listed(names: str | Path | Sequence) -> list:
    """One name given alone as a list of it."""
    return [names] if isinstance(names, str | Path) else list(names)


def _read_evaluations(model_folder: str | Path, paths: Sequence[str | Path]) -> list[dict]:
    """Evaluation records, which must be of these weights; none may be there twice."""
    records, weights, seen = [], weights_sha256(model_folder), {}
    for path in paths:
        record = read_evaluation(path)
        if record["weights_sha256"] != weights:
            raise UserError(f"{path} is an evaluation of other weights than those in {model_folder}: evaluate these")
        names = ("test_set", "source_sha256", "reference_sha256", "generation")
        same = json.dumps([record.get(name) for name in names], sort_keys=True)
        if same in seen:
            raise UserError(f"{path} and {seen[same]} evaluate the same test set in the same way: give one of them")
        seen[same] = path
        records.append(record)
    return records


def _stage(model_folder: str | Path, staging: Path, repo_id: str, max_shard_size: str) -> CardFacts:
    """Write what will be pushed, but for the card; returns the facts that the model itself tells."""
    model, tokenizer = load_model(model_folder, device="cpu")
    model.save_pretrained(staging, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(staging)
    return facts_of(model, repo_id, model_folder, tensors_sha256(staging))


def _usable_token(token: str | None) -> str:
    """The token to use; its text appears in no message."""
    token = token if token is not None else get_token()
    if not token:
        raise UserError("there is no token for the Hub: run `hf auth login`, set HF_TOKEN, or give --token")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UserError("the token holds characters that no token has: copy it anew")
    return token


class _Push:
    """Talks to the Hub: checks first, the upload next, the commit last."""

    def __init__(self, api: HfApi, planned: Published, staging: Path, update: Callable[[str], str]):
        self.api, self.planned, self.staging, self.update = api, planned, staging, update
        self.repo_id, self.revision = planned.repo_id, planned.revision

    def run(self, private: bool, message: str | None, overwrite_card: bool) -> Published:
        """Everything, in the order in which the least is done before a refusal."""
        self.api.whoami()  # a token that is refused
        self._validate_card()
        created = self._ensure_repository(private)
        before = self.api.model_info(self.repo_id, revision=self.revision, files_metadata=True)
        on_hub = {sibling.rfilename for sibling in before.siblings or []}
        earlier = self._card(before.sha) if CARD in on_hub else ""
        keep = bool(earlier) and not overwrite_card and not may_be_replaced(earlier)
        if not keep:
            self._update_card(earlier)
        files = {name: size for name, size in self.planned.files.items() if not (keep and name == CARD)}
        # Weights in one file would be loaded in place of those in several, and the other way round.
        removed = sorted(name for name in on_hub - files.keys() if name == INDEX or is_weights_file(name))
        operations = [CommitOperationDelete(path_in_repo=name) for name in removed]
        operations += [CommitOperationAdd(path_in_repo=name, path_or_fileobj=self.staging / name) for name in files]
        # `upload_folder` may spread files over several commits: in between, weights would be missing.
        commit = self.api.create_commit(
            self.repo_id,
            operations,
            commit_message=message or "Upload model with vaswani push",
            revision=self.revision,
            parent_commit=before.sha,
        )
        self._check_arrival(commit.oid, files)
        return replace(
            self.planned,
            files=files,
            url=f"{self.api.endpoint}/{self.repo_id}",
            commit=commit.oid,
            changed=commit.oid != before.sha,
            created=created,
            removed=tuple(removed),
            card_kept=keep,
        )

    def _validate_card(self) -> None:
        """The Hub's own check of the front matter, before anything is made there."""
        try:
            ModelCard(self.planned.card).validate()
        except ValueError as error:
            if isinstance(error, json.JSONDecodeError):
                raise
            raise UserError(f"the Hub refuses the card: {_flat(str(error))}") from error

    def _ensure_repository(self, private: bool) -> bool:
        """Make repository and branch where they are missing; returns whether the repository was."""
        try:
            info, created = self.api.model_info(self.repo_id), False
        except RepositoryNotFoundError:
            self.api.create_repo(self.repo_id, private=private or None, exist_ok=True)
            info, created = self.api.model_info(self.repo_id), True
        if private and not info.private:
            raise UserError(
                f"{self.repo_id} is there and public: leave --private out, give another name, or make it private on"
                " its settings page"
            )
        if self.revision != MAIN:
            self.api.create_branch(self.repo_id, branch=self.revision, exist_ok=True)
        return created

    def _card(self, commit: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = self.api.hf_hub_download(self.repo_id, CARD, revision=commit, local_dir=folder)
            return Path(path).read_text(encoding="utf-8", errors="replace")

    def _update_card(self, earlier: str) -> None:
        """Write the card anew with what stays of the one on the Hub."""
        text = self.update(earlier)
        if text != self.planned.card:
            _write_card(self.staging, text)
            sizes = self.planned.files | {CARD: (self.staging / CARD).stat().st_size}
            self.planned = replace(self.planned, card=text, files=sizes)
            self._validate_card()

    def _check_arrival(self, commit: str, files: dict[str, int]) -> None:
        """Compare what the commit holds with what was sent: a .gitignore of the repository drops files silently."""
        info = self.api.model_info(self.repo_id, revision=commit, files_metadata=True)
        sizes = {sibling.rfilename: sibling.size for sibling in info.siblings or []}
        missing = sorted(name for name, size in files.items() if sizes.get(name) != size)
        if missing:
            raise UserError(
                f"{self.repo_id} has not taken {', '.join(missing)}: take them out of its .gitignore and push again"
            )


def _flat(text: str) -> str:
    """One line of a server's answer, of JSON only the messages."""
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        answer = json.loads(text)
        messages = [error["message"] for error in answer.get("errors", [])] or [answer["error"]]
        text = "; ".join(map(str, messages))
    return " ".join(text.split())[:300]


def _causes(error: BaseException) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


@contextlib.contextmanager
def _hub_errors(repo_id: str, token: str) -> Iterator[None]:
    """Turn what the client raises into one line that never shows the token."""
    try:
        yield
    except (UserError, HubFailure):
        raise
    except (HTTPError, OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        translated = _translate(error, repo_id)
        message = str(translated).replace(token, "***")
        # The chain below is cut: it may hold request headers.
        raise type(translated)(message) from None


def _translate(error: Exception, repo_id: str) -> UserError | HubFailure:
    """A failure of the client in our terms."""
    again = "push again, which is safe to repeat"
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in _causes(error)):
        return UserError("HF_HUB_OFFLINE is set, so nothing can be pushed: unset it")
    answered = next((cause for cause in _causes(error) if isinstance(cause, HfHubHTTPError)), None)
    if answered is None and isinstance(error, LookupError | TypeError | AttributeError):  # in the client's own code
        return HubFailure(f"the Hub's answer was not understood ({type(error).__name__}: {_flat(str(error))}); {again}")
    if answered is None:
        cause = list(_causes(error))[-1]
        return HubFailure(
            f"the connection to the Hub failed ({type(cause).__name__}: {_flat(str(cause)) or 'no answer'}); {again}"
        )
    status, said = answered.response.status_code, _flat(answered.server_message or "")
    said = f" ({said})" if said else ""
    if isinstance(answered, RevisionNotFoundError):
        return UserError(f"{repo_id} has no such branch{said}: give another --revision")
    if status == 401 and not isinstance(answered, RepositoryNotFoundError):
        return UserError(
            f"the Hub does not accept the token{said}: make one with the right to write on its settings page"
        )
    if status in (401, 404):
        return UserError(f"the Hub knows no repository {repo_id} that this token may see{said}")
    if status == 403:
        return UserError(f"the token has no right to write to {repo_id}{said}: use one with it, or another owner")
    if status == 412:
        return UserError(f"{repo_id} was changed by someone else meanwhile{said}: push again")
    if status in (408, 429) or status >= 500:
        return HubFailure(f"the Hub failed with status {status}{said}; {again}")
    return UserError(f"the Hub refuses the push with status {status}{said}")
