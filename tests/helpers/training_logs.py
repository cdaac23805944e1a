"""What a training logged, without what depends on the clock."""

import json
from pathlib import Path

CLOCKS = ("seconds", "_runtime", "_per_second", "_preparation_time")


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]


def without_clocks(folder: Path) -> list[dict]:
    return [{key: value for key, value in entry.items() if not key.endswith(CLOCKS)} for entry in log_of(folder)]
