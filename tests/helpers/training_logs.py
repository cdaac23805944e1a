"""What a training logged, without what depends on the clock or on the steps since a resume."""

import json
from pathlib import Path

CLOCKS = ("seconds", "_runtime", "_per_second", "_preparation_time")
MEANS = ("loss", "padding")  # since the last line or the start


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]


def without_clocks(folder: Path) -> list[dict]:
    return [
        {key: value for key, value in entry.items() if not key.endswith(CLOCKS) and key not in MEANS}
        for entry in log_of(folder)
    ]
