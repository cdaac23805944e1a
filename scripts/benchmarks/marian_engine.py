"""Marian itself as a contestant: it translates in a Python of its own (`pip install pymarian==1.12.42`).

In int8 it reads a file that its own converter makes.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

MAX_TOKENS, SENTENCES_PER_BATCH = 300, 32

_SERVER = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # Marian prints there too
import _pymarian
translators = {}
for line in sys.stdin:
    options, lines, changed = json.loads(line)
    if options not in translators:
        translators[options] = _pymarian.Translator(options)
    print(json.dumps(translators[options].translate(lines, **changed)), file=answers, flush=True)
"""
_COMMAND = "import _pymarian, sys; sys.exit(_pymarian.main(sys.argv[1:]))"


class MarianEngine:
    """Marian, in a process of the Python that has pymarian."""

    def __init__(self, python: str, model: Path, vocabulary: Path, threads: int = 1, alpha: float = 1.0):
        self.python, self.model, self.vocabulary, self.threads, self.alpha = python, model, vocabulary, threads, alpha
        # Threads are Marian's own workers; each must not start others.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self.environment = kept | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.server = subprocess.Popen(
            [python, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, encoding="utf-8", env=self.environment,
        )  # fmt: skip

    def _command(self, *arguments: str) -> str:
        done = subprocess.run(
            [self.python, "-c", _COMMAND, *arguments], capture_output=True, text=True, env=self.environment
        )
        if done.returncode:
            raise RuntimeError(f"Marian failed: {done.stderr[-2000:]}")
        return done.stdout

    def int8(self, folder: Path, kind: str = "intgemm8") -> "MarianEngine":
        """The same model with 8-bit matrix products of a kind that Marian knows, converted into `folder`."""
        path = folder / f"{kind}.bin"
        self._command("convert", "--from", str(self.model), "--to", str(path), "--gemm-type", kind)
        return MarianEngine(self.python, path, self.vocabulary, self.threads, self.alpha)

    def translate(self, lines: list[str], beams: int, **changed) -> list[str]:
        """One translation a line. `changed` are options of Marian in place of those below, such as `mini_batch=8`."""
        options = (
            f"--models {self.model} --vocabs {self.vocabulary} {self.vocabulary}"
            f" --normalize {self.alpha} --max-length 1000 --mini-batch {SENTENCES_PER_BATCH}"
            f" --maxi-batch 100 --maxi-batch-sort src --cpu-threads {self.threads} --workspace 512 --quiet"
        )
        changed = {name.replace("_", "-"): value for name, value in {"beam_size": beams, **changed}.items()}
        self.server.stdin.write(json.dumps([options, lines, changed]) + "\n")
        self.server.stdin.flush()
        if not (answer := self.server.stdout.readline()):
            raise RuntimeError(f"Marian ended with status {self.server.wait()}")
        return json.loads(answer)

    def score(self, sources: list[str], targets: list[str]) -> list[float]:
        """Log-probability of each target given its source, the end token counted."""
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / name for name in ("source", "target")]
            for path, lines in zip(paths, (sources, targets), strict=True):
                path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            vocabularies = [str(self.vocabulary)] * 2
            output = self._command(
                "score", "--model", str(self.model), "--vocabs", *vocabularies, "--train-sets", *map(str, paths),
                "--cpu-threads", "1", "--workspace", "512", "--mini-batch", "16", "--max-length", "1000", "--quiet",
            )  # fmt: skip
        return [float(line) for line in output.split()]

    def close(self) -> None:
        """End the process."""
        self.server.stdin.close()
        self.server.wait()
