"""Run transformers' own common tests over our classes, beside the library's Marian, and print how they compare.

    python tests/conformance/run.py [--cache FOLDER]

The tests come from the source distribution of the installed transformers version, which pip fetches once into a cache
folder; they are not part of this project. What they need from outside the source distribution stands in `suite/`.

Exit status: 0; 1 if a test of ours fails, if ours skips what Marian does not, or if fewer tests of ours or of Marian
passed than expected; 2 if the tests cannot be fetched or set up.
"""

import argparse
import contextlib
import importlib.metadata
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache" / "conformance"
COMMON_FILES = (
    "test_modeling_common.py",
    "test_configuration_common.py",
    "test_training_mixin.py",
    "test_tokenizers_backend_mixin.py",
)
# Files that upstream has and the source distribution leaves out: `suite/stand_ins.py` takes the place of each.
LEFT_OUT = ("generation/test_utils.py", "exporters/test_export.py", "utils/test_configuration_utils.py")


@dataclass(frozen=True)
class Suite:
    """Test classes of ours and of Marian, and how many tests of each of both have to pass.

    Fewer mean that a suite was not set up as it should be: Marian's skips say which of ours are to be expected.
    """

    ours: tuple[str, ...]
    marians: tuple[str, ...]
    least: int


SUITES = {
    "model": Suite(("VaswaniModelTest",), ("MarianModelTest",), 95),
    "model, other options": Suite(("VaswaniVariantTest",), ("MarianModelTest",), 95),
    "model, as imported": Suite(("VaswaniImportedTest",), ("MarianModelTest",), 95),
    "configuration": Suite(("VaswaniConfigurationTest",), ("MarianConfigurationTest",), 8),
    "training": Suite(("VaswaniTrainingTest",), (), 1),  # Marian's test does not pass
    "tokenizers backend": Suite(("VaswaniBytePairTest", "VaswaniWordPieceTest"), (), 10),
}
_NORMALIZED = (
    "expects decoded text to be what the normalizer made of it, a leading space included; ours gives the text back"
)
_NO_SPACE = "AssertionError: ' This is the first sentence' != 'This is the first sentence'"
_PIECES = "AssertionError: ' This is the first sentence' != '##T##h##i##s "
_NO_PICKLES = (
    "ValueError: use_safetensors=False asks for pickled weights",
    "weights are read from safetensors only, never pickles",
)
_OWN_MATRIX = (
    "AssertionError: Tensor-likes are not close!",
    "looks the target's tokens up in the source's matrix; untied, the decoder has its own",
)
# Tests that ours fails by design: how the message of the exception that they must fail with begins, and why. Not all
# run everywhere: those of offloading need an accelerator.
BY_DESIGN: dict[str, tuple[str, str]] = {
    "VaswaniModelTest::test_disk_offload_bin": _NO_PICKLES,
    "VaswaniVariantTest::test_disk_offload_bin": _NO_PICKLES,
    "VaswaniImportedTest::test_disk_offload_bin": _NO_PICKLES,
    "VaswaniVariantTest::test_inputs_embeds_matches_input_ids": _OWN_MATRIX,
    "VaswaniImportedTest::test_inputs_embeds_matches_input_ids": _OWN_MATRIX,
    "VaswaniBytePairTest::test_training_new_tokenizer": (_NO_SPACE, _NORMALIZED),
    "VaswaniBytePairTest::test_training_new_tokenizer_with_special_tokens_change": (_NO_SPACE, _NORMALIZED),
    "VaswaniWordPieceTest::test_training_new_tokenizer": (
        _PIECES,
        "`train_new_from_iterator` gives the prefix of continuing pieces to the trainer of BPE only and takes ## here",
    ),
    "VaswaniWordPieceTest::test_training_new_tokenizer_with_special_tokens_change": (_PIECES, "as the test above"),
}


class SetupError(Exception):
    """The tests cannot be fetched or set up: one line that says why and what to do."""


@dataclass
class Recorder:
    """A plugin of pytest: the outcome of every test by its name, and why it was skipped or failed."""

    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, list[str]] = field(default_factory=dict)
    skipped_parts: dict[str, list[str]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def pytest_collectreport(self, report):
        if report.failed:
            self.broken.append(f"{report.nodeid}: {str(report.longrepr).strip().splitlines()[-1]}")

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.split("::", 1)[1]
        # A part of a test (`subTest`) reports under the name of its test. One that fails fails the whole; with parts
        # skipped a test still passes, as it does upstream.
        part = type(report).__name__ == "SubtestReport"
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)  # without the source lines that pytest shows
            self.outcomes[name] = "failed"
            self.reasons.setdefault(name, []).append(crash.message if crash else str(report.longrepr))
        elif part and report.skipped:
            self.skipped_parts.setdefault(name, []).append(str(report.longrepr[-1]).removeprefix("Skipped: "))
        elif part or self.outcomes.get(name) == "failed":
            return
        elif report.skipped:
            self.outcomes[name] = "skipped"
            self.reasons[name] = [str(report.longrepr[-1]).removeprefix("Skipped: ")]
        elif report.when == "call":
            self.outcomes.setdefault(name, "passed")

    def reason(self, name: str) -> str:
        """Why a test was skipped or failed, in one line."""
        lines = "\n".join(self.reasons.get(name, [])).strip().splitlines() or ["unknown"]
        return " ".join(lines[0].split())

    def of(self, classes: tuple[str, ...]) -> dict[str, str]:
        """Outcomes of the tests of these classes."""
        return {name: outcome for name, outcome in self.outcomes.items() if name.split("::")[0] in classes}


def find_sources(version: str, cache: Path) -> Path:
    """The source distribution of transformers in the cache, fetched with pip where it is not there yet."""
    archive = cache / f"transformers-{version}.tar.gz"
    if archive.is_file():
        return archive
    cache.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", ":all:", f"transformers=={version}"]
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        done = subprocess.run([*command, "--dest", folder], capture_output=True, text=True)
        for path in Path(folder).glob("transformers-*.tar.gz"):
            return path.replace(archive)
    raise SetupError(
        f"pip could not fetch the source distribution of transformers {version} ({done.stderr.strip()[-300:]}): run"
        f" this once with a network, or put the file of the package index at {archive}"
    )


def assemble(archive: Path, folder: Path) -> None:
    """Lay out a package `tests` in `folder`: the common tests, our testers beside them, what upstream leaves out."""
    tests = folder / "tests"
    tests.mkdir()
    try:
        with tarfile.open(archive) as sources:
            for name in COMMON_FILES:
                member = sources.extractfile(f"{archive.name.removesuffix('.tar.gz')}/tests/{name}")
                (tests / name).write_bytes(member.read())
    except KeyError as error:
        raise SetupError(f"{error}: transformers has moved it, this runner must follow") from error
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise SetupError(f"{archive} cannot be read ({error}): delete it and run this again") from error
    for path in HERE.joinpath("suite").glob("*.py"):
        shutil.copy(path, tests)
    (tests / "__init__.py").touch()
    for name in LEFT_OUT:
        target = tests / name
        target.parent.mkdir()
        shutil.copy(HERE / "suite" / "stand_ins.py", target)
        (target.parent / "__init__.py").touch()
    (folder / "pytest.ini").write_text("[pytest]\n")


def run_tests(folder: Path) -> Recorder:
    """Run the suite laid out in `folder`, in this process; what the tests print is kept back."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here needs the network, and without one each try would wait
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    recorder = Recorder()
    files = [str(folder / "tests" / f"{name}.py") for name in ("vaswani_model", "marian_model", "vaswani_tokenizer")]
    options = ["-q", "-c", str(folder / "pytest.ini"), "--rootdir", str(folder), "-p", "no:cacheprovider"]
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*options, "-p", "no:warnings", *files], plugins=[recorder])
    if recorder.broken:
        raise SetupError(f"the tests cannot be imported: {'; '.join(recorder.broken)}")
    return recorder


def is_by_design(recorder: Recorder, name: str) -> bool:
    """Whether a test failed, and every part of it that did, with the message in `BY_DESIGN`."""
    messages = recorder.reasons.get(name)
    return bool(messages) and name in BY_DESIGN and all(message.startswith(BY_DESIGN[name][0]) for message in messages)


def extra_skips(recorder: Recorder) -> dict[str, str]:
    """Tests that ours skips, wholly or in more parts, and Marian runs or does not have: the reason that ours gives."""
    extra = {}
    for suite in SUITES.values():
        marian = {name.split("::")[1]: name for name in recorder.of(suite.marians)}
        for name, outcome in recorder.of(suite.ours).items():
            other = marian.get(name.split("::")[1], "")
            if recorder.outcomes.get(other) == "skipped":
                continue
            parts, other_parts = (recorder.skipped_parts.get(test, []) for test in (name, other))
            if outcome == "skipped":
                extra[name] = recorder.reason(name)
            elif len(parts) > len(other_parts):
                extra[name] = parts[-1]
    return extra


def find_faults(recorder: Recorder) -> list[str]:
    """One line for everything that must not be."""
    faults = []
    for title, suite in SUITES.items():
        outcomes, marians = recorder.of(suite.ours), recorder.of(suite.marians)
        for name, outcome in outcomes.items():
            if outcome == "failed" and not is_by_design(recorder, name):
                faults.append(f"{name} failed: {recorder.reason(name)}")
            elif outcome == "passed" and name in BY_DESIGN:
                faults.append(f"{name} passed: remove it from BY_DESIGN")
        for whose, results in [("ours", outcomes)] + [("Marian", marians)] * bool(suite.marians):
            passed = Counter(results.values())["passed"]
            if passed < suite.least:
                faults.append(f"{title}: {passed} tests passed for {whose}, at least {suite.least} were expected to")
        missing = {name.split("::")[1] for name in marians} - {name.split("::")[1] for name in outcomes}
        faults += [f"{title}: {name} ran for Marian and not for ours" for name in sorted(missing)]
    faults += [f"{name} is skipped ({reason}), and no test of Marian" for name, reason in extra_skips(recorder).items()]
    return faults


def describe(outcomes: dict[str, str], recorder: Recorder) -> str:
    """Passed, failed and skipped in words."""
    counts = Counter(outcomes.values())
    design = sum(outcome == "failed" and is_by_design(recorder, name) for name, outcome in outcomes.items())
    text = f"{counts['passed']} passed, {counts['failed'] - design} failed, {counts['skipped']} skipped"
    return text + (f", {design} fail by design" if design else "")


def make_table(recorder: Recorder) -> list[str]:
    """The outcome of every suite in Markdown, and what fails by design."""
    lines = ["| suite | vaswani_transformer | Marian |", "|---|---|---|"]
    for title, suite in SUITES.items():
        marian = describe(recorder.of(suite.marians), recorder) if suite.marians else "has none"
        lines.append(f"| {title} | {describe(recorder.of(suite.ours), recorder)} | {marian} |")
    failed = [name for name in sorted(BY_DESIGN) if recorder.outcomes.get(name) == "failed"]
    return [*lines, "", "Fail by design:", "", *(f"- {name}: {BY_DESIGN[name][1]}" for name in failed)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="FOLDER", help=f"default: {CACHE}")
    options = parser.parse_args(arguments)
    version = importlib.metadata.version("transformers")
    try:
        archive = find_sources(version, options.cache)
        with tempfile.TemporaryDirectory() as folder:
            assemble(archive, Path(folder))
            recorder = run_tests(Path(folder))
    except SetupError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print("\n".join([f"Common tests of transformers {version}", "", *make_table(recorder)]))
    faults = find_faults(recorder)
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
