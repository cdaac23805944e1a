"""The 200-sentence check of exported models (`scripts/check_export.py`), on a model trained for a minute."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, tiny_recipe

from vaswani_transformer.training.run import train

pytest.importorskip("ctranslate2")
pytest.importorskip("onnxscript")
SCRIPT = ROOT / "scripts" / "check_export.py"


@pytest.mark.slow
def test_two_hundred_sentences(tmp_path, shared_data, cache):
    text = shared_data / "multi30k"
    files = {f"{name}_{side}": f"{file}.{language}.gz" for name, file in (("train", "train"), ("validation", "val"))
             for side, language in (("source", "en"), ("target", "de"))}  # fmt: skip
    sizes = {"vocab_size": 2000, "d_model": 96, "d_ff": 192, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2}
    pace = {"tokens_per_batch": 2000, "tokens_per_device": 2000, "max_steps": 400, "warmup_steps": 100}
    train(tiny_recipe(text, tmp_path / "model", **files, **sizes, **pace, evaluate_every=400))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "model"), "--source", str(text / "test_2016_flickr.en.gz"),
         "--reference", str(text / "test_2016_flickr.de.gz"), "--lines", "200"],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    rows = {(row["engine"], row["search"]): row for row in map(json.loads, done.stdout.splitlines())}
    for engine in ("ctranslate2 float32", "onnxruntime float32"):
        greedy = rows[engine, "greedy"]
        assert greedy["of"] == 200 and greedy["identical"] >= 198 and not greedy["different"]
    beams = rows["ctranslate2 float32", "beam 4"]
    assert beams["identical"] >= 190 and beams["largest score difference where identical"] < 1e-3
    pairs = rows["ctranslate2 float32", "scores of given pairs"]
    assert pairs["of"] == 200 and pairs["largest difference of a sentence's log-probability"] < 1e-3
    assert rows["onnxruntime float32", "given outputs"]["largest difference of a logit"] < 1e-4
    assert rows["ctranslate2 int8", "greedy"]["identical"] >= 100
