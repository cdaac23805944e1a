"""The runner of transformers' common tests (`conformance/run.py`) as a gate: what must not pass does not."""

import pytest
from conformance import run as runner


@pytest.fixture
def good():
    """Outcomes as they should be: as many passes as expected, the same tests for Marian, failures by design."""
    recorder = runner.Recorder()
    for suite in runner.SUITES.values():
        for number in range(suite.least):
            for test_class in suite.ours[:1] + suite.marians[:1]:
                recorder.outcomes[f"{test_class}::test_{number}"] = "passed"
    for name, (message, _) in runner.BY_DESIGN.items():
        recorder.outcomes[name], recorder.reasons[name] = "failed", [f"{message}\nand more"]
    return recorder


@pytest.mark.parametrize(
    ("name", "outcome", "fault"),
    [
        ("VaswaniModelTest::test_0", "failed", "test_0 failed: AssertionError: 1 != 2"),
        ("VaswaniVariantTest::test_0", "failed", "test_0 failed: AssertionError: 1 != 2"),
        ("VaswaniModelTest::test_1", "skipped", "and no test of Marian"),
        ("VaswaniModelTest::test_that_marian_lacks", "skipped", "and no test of Marian"),
        ("VaswaniBytePairTest::test_0", "skipped", "and no test of Marian"),
    ],
)
def test_a_failure_or_a_skip_that_marian_does_not_have(good, name, outcome, fault):
    assert runner.find_faults(good) == []
    good.outcomes[name], good.reasons[name] = outcome, ["AssertionError: 1 != 2\nthere"]
    assert any(fault in line for line in runner.find_faults(good))


@pytest.mark.parametrize("suite", ["model", "configuration", "training", "tokenizers backend"])
def test_too_few_tests_of_ours_or_of_marian_pass(good, suite):
    """Those that are not there, and skips that Marian shares because it was not set up."""
    for whose, classes in (("ours", runner.SUITES[suite].ours), ("Marian", runner.SUITES[suite].marians)):
        for name in classes[:1]:
            good.outcomes[f"{name}::test_0"] = "skipped"
            assert any(line.startswith(suite) and f"passed for {whose}" in line for line in runner.find_faults(good))
            good.outcomes[f"{name}::test_0"] = "passed"


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


def test_the_recorder_notes_what_pytest_reports(tmp_path):
    (tmp_path / "cases.py").write_text(CASES)
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
    assert recorder.reasons["Cases::test_bad"] == ["AssertionError: no"]  # and not the source line
    assert recorder.reason("Broken::test_any") == "OSError: no folder"
    assert recorder.reason("Cases::test_skip") == "not here"
    assert recorder.skipped_parts == {"Cases::test_a_part_is_skipped": ["not this one"]}
