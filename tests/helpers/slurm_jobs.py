"""Slurm without Slurm: jobs as they are submitted, done by hand.

A test file takes the fixture by its name: `slurm = slurm_jobs.slurm`.
"""

import os
import re
import stat
from pathlib import Path

import pytest

from vaswani_transformer.files import to_path

OPTIONS = {"partition": "cpu", "time": "01:00:00"}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A command sbatch that keeps the scripts; returns their folder."""
    pytest.importorskip("datatrove")
    jobs, programs = tmp_path / "jobs", tmp_path / "bin"
    jobs.mkdir()
    programs.mkdir()
    script = f'#!/bin/sh\nn=$(ls {jobs} | wc -l)\nfor last; do :; done\ncp "$last" {jobs}/job-$(printf %03d $n)\n'
    (programs / "sbatch").write_text(script + 'echo "$@" >> "$0.log"\necho Submitted batch job $n\n')
    (programs / "scontrol").write_text("#!/bin/sh\necho localhost\n")
    for path in programs.iterdir():
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return jobs


def jobs_of(folder: Path) -> list[tuple[str, int]]:
    """The pickled executor and the number of tasks of each job, in the order in which they were submitted."""
    found = []
    for path in sorted(folder.iterdir()):
        text = path.read_text()
        if launched := re.search(r"launch_pickled_pipeline (\S+)", text):
            found.append((launched[1], int(re.search(r"--array=0-(\d+)", text)[1]) + 1))
    return found


def do(executor: str, task: int) -> None:
    """What a job does for one task."""
    import dill

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_ARRAY_TASK_ID", str(task))
        patch.setenv("SLURM_NODELIST", "localhost")
        dill.loads(to_path(executor).read_bytes()).run()
