"""A Hugging Face Space that serves a model of the Hub: the page of `vaswani serve`, and its interfaces.

Spaces run a program of one's own by `sdk: docker` (https://huggingface.co/docs/hub/spaces-sdks-docker): they build the
Dockerfile, run it as user 1000, and show what listens on `app_port`.
"""

import contextlib
import json
import logging
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, ModelInfo, SpaceCardData, SpaceInfo
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from .. import __version__
from ..errors import UserError
from .card_facts import CardFacts

logger = logging.getLogger(__name__)

CARD, PROGRAM, PORT = "README.md", "Dockerfile", 7860  # Spaces' default
MOST_BYTES = 4 << 20  # of a file that is read; ours are far smaller, cards with evaluations of many test sets too
_LONGEST_DESCRIPTION = 60  # characters, by the Hub's rule
_DOCKERFILE = """\
FROM python:3.12-slim
RUN useradd -m -u 1000 user
USER user
ENV PATH=/home/user/.local/bin:$PATH PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /home/user
RUN pip install --no-cache-dir "vaswani_transformer[serve]=={version}"
CMD {command}
"""


@dataclass(frozen=True)
class Space:
    """A Space that was published, or would be."""

    files: dict[str, str]  # texts by name
    url: str | None = None  # its page; None for a dry run
    changed: bool = False  # whether there is a new commit


def space_files(facts: CardFacts, revision: str, is_parser: bool) -> dict[str, str]:
    """Return the texts of a Space's files, by name.

    Args:
        facts: of the model.
        revision: the branch of the model's repository that it serves.
        is_parser: whether the model writes trees.

    Raises:
        UserError: for a model whose two languages are not known.
    """
    if is_parser:
        model, description = "model", "Draws the trees of sentences"
    elif len(facts.languages) == 2:
        source, target = facts.languages
        names = [LANGUAGES.get(code.partition("-")[0], code).title() for code in facts.languages]
        model, description = f"{source}-{target}=model", f"Translates {names[0]} to {names[1]}"
    else:
        known = ", ".join(facts.languages) or "none"
        raise UserError(f"a Space needs two languages, the source first, and known are {known}: give --language twice")
    data = SpaceCardData(
        title=facts.name, emoji="🌍", colorFrom="blue", colorTo="gray", sdk="docker", app_port=PORT,
        short_description=description[:_LONGEST_DESCRIPTION], models=[facts.repo_id], license=facts.license,
    )  # fmt: skip
    link = f"[{facts.repo_id}](https://huggingface.co/{facts.repo_id})"
    # Fetched at each start, with the token of a private model among the Space's secrets.
    fetch = shlex.join(["hf", "download", facts.repo_id, "--revision", revision, "--local-dir", "model"])
    serve = shlex.join(["vaswani", "serve", model, "--host", "0.0.0.0", "--port", str(PORT)])
    return {
        CARD: f"---\n{data.to_yaml()}\n---\n\n{description} with the model {link}, by `vaswani serve`.\n",
        PROGRAM: _DOCKERFILE.format(version=__version__, command=json.dumps(["sh", "-c", f"{fetch} && exec {serve}"])),
    }


def find_head(
    api: HfApi, repo_id: str, revision: str | None = None, repo_type: str = "model"
) -> ModelInfo | SpaceInfo | None:
    """Return the commit that a push builds on: the branch's last one, main's for a new branch, None for a new name."""
    for name in (revision, None):
        with contextlib.suppress(RepositoryNotFoundError, RevisionNotFoundError):
            return api.repo_info(repo_id, revision=name, repo_type=repo_type, files_metadata=True)
    return None


def read_file(api: HfApi, head: ModelInfo, name: str) -> str | None:
    """Return the text of a file of a commit, or None if there is none; one too large to be ours is not fetched."""
    sizes = {sibling.rfilename: sibling.size for sibling in head.siblings or []}
    if name not in sizes:
        return None
    if (sizes[name] or 0) > MOST_BYTES:
        return "(someone else's: ours are never so large)"
    with tempfile.TemporaryDirectory() as folder:
        path = api.hf_hub_download(head.id, name, revision=head.sha, local_dir=folder)
        return Path(path).read_text(encoding="utf-8", errors="replace")


def push_space(api: HfApi, repo_id: str, files: dict[str, str], overwrite: bool) -> Space:
    """Put the files of a Space into its repository, in one commit; a new one is private if its model is.

    A Space that has its program stays as it is: it fetches the model whenever it starts.

    Args:
        api: with a token that may write.
        repo_id: `owner/name` of the Space, and of the model.
        files: of `space_files`.
        overwrite: replace the files of one that is there.
    """
    if (head := find_head(api, repo_id, repo_type="space")) is None:
        private = api.model_info(repo_id).private or None
        api.create_repo(repo_id, repo_type="space", space_sdk="docker", private=private, exist_ok=True)
        head = find_head(api, repo_id, repo_type="space")
    page = f"{api.endpoint}/spaces/{repo_id}"
    if not overwrite and PROGRAM in {sibling.rfilename for sibling in head.siblings or []}:
        logger.warning("the Space of this name is there already, so it stays: --overwrite-card")
        return Space(files, page)
    operations = [CommitOperationAdd(name, text.encode()) for name, text in files.items()]
    options = {"commit_message": "Write Space with vaswani push", "parent_commit": head.sha}
    commit = api.create_commit(repo_id, operations, repo_type="space", **options)
    return Space(files, page, commit.oid != head.sha)
