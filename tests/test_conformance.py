"""The runner of transformers' common tests (`conformance/run.py`) as a gate: what must not pass does not."""

import importlib.util
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

RUNNER = Path(__file__).with_name("conformance") / "run.py"


@pytest.fixture(scope="module")
def runner():
    spec = importlib.util.spec_from_file_location("conformance_run", RUNNER)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def good(runner):
    """Outcomes as they should be: as many passes as expected, the same tests for Marian, failures as foreseen."""
    recorder = runner.Recorder()
    for suite, (ours, marians) in runner.SUITES.items():
        for number in range(runner.LEAST_PASSED[suite]):
            for test_class in ours[:1] + marians[:1]:
                recorder.outcomes[f"{test_class}::test_{number}"] = "passed"
    for name, (message, _) in runner.BY_DESIGN.items():
        recorder.outcomes[name], recorder.reasons[name] = "failed", [f"{message}\nand more"]
    return recorder


class TestFaults:
    def test_none_where_all_is_well(self, runner, good):
        assert runner.find_faults(good) == []

    @pytest.mark.parametrize(
        ("name", "outcome", "fault"),
        [
            ("VaswaniModelTest::test_0", "failed", "test_0 failed: AssertionError: 1 != 2"),
            ("VaswaniVariantTest::test_0", "failed", "test_0 failed: AssertionError: 1 != 2"),
            ("VaswaniTrainingTest::test_0", "failed", "test_0 failed: AssertionError: 1 != 2"),
            ("VaswaniModelTest::test_1", "skipped", "no like test of Marian"),
            ("VaswaniModelTest::test_that_marian_lacks", "skipped", "no like test of Marian"),
            ("VaswaniConfigurationTest::test_that_marian_lacks", "skipped", "no like test of Marian"),
            ("VaswaniBytePairTest::test_0", "skipped", "no like test of Marian"),
            ("VaswaniWordPieceTest::test_more", "skipped", "no like test of Marian"),
        ],
    )
    def test_a_failure_or_a_skip_that_marian_does_not_have(self, runner, good, name, outcome, fault):
        good.outcomes[name], good.reasons[name] = outcome, ["AssertionError: 1 != 2\nthere"]
        assert any(fault in line for line in runner.find_faults(good))

    def test_a_skip_that_marian_has_too_is_none(self, runner, good):
        for name in ("VaswaniModelTest::test_more", "VaswaniVariantTest::test_more", "MarianModelTest::test_more"):
            good.outcomes[name], good.reasons[name] = "skipped", ["no such thing"]
        assert runner.find_faults(good) == []

    def test_more_skipped_parts_than_marian_has(self, runner, good):
        good.skipped_parts["VaswaniModelTest::test_0"] = ["not for this class"]
        assert any("not for this class" in line for line in runner.find_faults(good))
        good.skipped_parts["MarianModelTest::test_0"] = ["not for this class"]
        assert runner.find_faults(good) == []
        good.skipped_parts["VaswaniBytePairTest::test_0"] = ["not this text"]  # Marian has no such suite
        assert any("not this text" in line for line in runner.find_faults(good))

    @pytest.mark.parametrize("suite", ["model", "configuration", "training", "tokenizers backend"])
    def test_too_few_tests(self, runner, good, suite):
        del good.outcomes[f"{runner.SUITES[suite][0][0]}::test_0"]
        assert any(line.startswith(f"{suite}: ") for line in runner.find_faults(good))

    @pytest.mark.parametrize("suite", ["model", "configuration", "training"])
    def test_no_test_of_marian(self, runner, good, suite):
        [marian] = runner.SUITES[suite][1]
        good.outcomes = {name: outcome for name, outcome in good.outcomes.items() if name.split("::")[0] != marian}
        assert any(line.startswith(f"{suite}: no test ran for Marian") for line in runner.find_faults(good))

    @pytest.mark.parametrize("suite", ["model", "configuration"])
    def test_skips_that_marian_shares_because_it_was_not_set_up(self, runner, good, suite):
        [ours], [marian] = runner.SUITES[suite]
        classes = (ours, marian) if suite == "configuration" else (ours, marian, "VaswaniVariantTest")
        for name in ("test_skipped_0", "test_skipped_1"):
            for test_class in classes:
                good.outcomes[f"{test_class}::{name}"] = "skipped"
        assert runner.find_faults(good) == []
        for number in range(runner.LEAST_MARIAN_PASSED[suite] - 1, runner.LEAST_PASSED[suite]):
            good.outcomes[f"{marian}::test_{number}"] = "skipped"
        assert any("tests passed for Marian" in line for line in runner.find_faults(good))

    @pytest.mark.parametrize("message", ["MemoryError", "AssertionError: 1 != 2", ""])
    def test_a_foreseen_failure_of_another_kind(self, runner, good, message):
        for name in runner.BY_DESIGN:
            foreseen = good.reasons[name]
            for messages in ([message], [*foreseen, message]):
                good.reasons[name] = messages
                assert any(line.startswith(f"{name} failed") for line in runner.find_faults(good))
            good.reasons[name] = foreseen

    def test_a_foreseen_failure_that_passes(self, runner, good):
        name = next(iter(runner.BY_DESIGN))
        good.outcomes[name] = "passed"
        assert any("take it off the list" in line for line in runner.find_faults(good))


class TestRecorder:
    CASES = """
import unittest
class Cases(unittest.TestCase):
    def test_good(self): pass
    def test_bad(self): self.fail("no")
    def test_skip(self): self.skipTest("not here")
    def test_a_part_is_bad(self):
        for number in range(3):
            with self.subTest(number):
                self.assertNotEqual(number, 1)
    def test_a_part_is_skipped(self):
        for number in range(3):
            with self.subTest(number):
                if number == 1:
                    self.skipTest("not this one")
class Broken(unittest.TestCase):
    def setUp(self): raise OSError("no folder")
    def test_any(self): pass
"""

    def test_takes_down_what_pytest_reports(self, runner, tmp_path):
        (tmp_path / "cases.py").write_text(self.CASES)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        recorder = runner.Recorder()
        options = ["-q", "-c", str(tmp_path / "pytest.ini"), "-p", "no:cacheprovider"]
        pytest.main([*options, str(tmp_path / "cases.py")], plugins=[recorder])
        assert recorder.outcomes == {
            "Cases::test_good": "passed",
            "Cases::test_bad": "failed",
            "Cases::test_skip": "skipped",
            "Cases::test_a_part_is_bad": "failed",
            "Cases::test_a_part_is_skipped": "passed",
            "Broken::test_any": "failed",
        }
        assert recorder.reason("Cases::test_bad") == "AssertionError: no"
        assert recorder.reasons["Cases::test_bad"] == ["AssertionError: no"]  # and not the source line
        assert recorder.reason("Broken::test_any") == "OSError: no folder"
        assert recorder.reason("Cases::test_a_part_is_bad") == "AssertionError: 1 == 1"
        assert recorder.reason("Cases::test_skip") == "not here"
        assert recorder.skipped_parts == {"Cases::test_a_part_is_skipped": ["not this one"]}


class TestSources:
    def fail(self, *arguments, **environment) -> str:
        command = [sys.executable, str(RUNNER), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "", **environment})
        assert done.returncode == 2 and not done.stdout
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")
        return done.stderr

    def test_without_a_network(self, tmp_path):
        error = self.fail("--cache", str(tmp_path / "cache"), PIP_NO_INDEX="1", PIP_CONFIG_FILE="/dev/null")
        assert str(tmp_path / "cache") in error and "network" in error

    @pytest.mark.parametrize(("content", "message"), [(b"junk", "cannot be read"), (None, "has no tests/")])
    def test_a_file_that_is_damaged_or_lacks_the_tests(self, runner, tmp_path, content, message):
        version = runner.importlib.metadata.version("transformers")
        archive = tmp_path / f"transformers-{version}.tar.gz"
        if content is None:
            with tarfile.open(archive, "w:gz") as file:
                file.addfile(tarfile.TarInfo(f"transformers-{version}/setup.py"), io.BytesIO(b""))
        else:
            archive.write_bytes(content)
        assert message in self.fail("--cache", str(tmp_path))


def test_pytest_over_our_tests_leaves_the_suite_alone():
    names = [path.name for path in RUNNER.parent.rglob("*.py")]
    assert len(names) > 5 and not any(name.startswith("test_") or name.endswith("_test.py") for name in names)
