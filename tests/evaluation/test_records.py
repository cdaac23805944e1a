"""Records of evaluations: what they hold, which files are refused, and the hashes of weights."""

import json
import os

import pytest
from conftest import error_of

from vaswani_transformer.evaluation.records import evaluation_record, name_of_test_set, read_evaluation, weights_sha256

RECORD = {"test_set": "t", "weights_sha256": "ab" * 32, "generation": {"num_beams": 4}, "command": "vaswani evaluate"}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "5", b"\xff", json.dumps(RECORD | {"generation": None})]
    + [json.dumps({key: value for key, value in RECORD.items() if key != name}) for name in RECORD],
)
def test_files_that_are_no_evaluation(tmp_path, text):
    path = tmp_path / "scores.json"
    path.write_text(json.dumps(RECORD))
    assert read_evaluation(path) == RECORD
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert "scores.json" in error_of(read_evaluation, path)


def test_a_record_names_files_and_weights_but_no_folder(tmp_path):
    for name, text in (("a.en", "x\n"), ("a.de", "y\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    options = {"--beams": 2, "--length-penalty": None}
    record = evaluation_record(tmp_path, tmp_path / "a.en", tmp_path / "a.de", {"num_beams": 2, "x": None}, options)
    # echo x | sha256sum
    assert record["source_sha256"] == "73cb3858a687a8494ca3323053016282f3dad39d42cf62ca4e79dda2aac7d9ac"
    assert record["test_set"] == "a" and record["generation"] == {"num_beams": 2}
    assert record["command"] == f"vaswani evaluate {tmp_path.name} --source a.en --reference a.de --beams 2"
    assert str(tmp_path) not in json.dumps(record)
    assert record["versions"].keys() >= {"python", "vaswani_transformer", "torch", "transformers", "sacrebleu"}


def test_of_a_pipe_no_hash_is_recorded(tmp_path):
    os.mkfifo(tmp_path / "a.en")
    (tmp_path / "a.de").touch()
    record = evaluation_record(tmp_path, tmp_path / "a.en", tmp_path / "a.de", {}, {})
    assert record["source_file"] == "a.en" and "source_sha256" not in record and "reference_sha256" in record


def test_the_hash_of_weights_depends_on_every_shard_and_on_no_other_file(tmp_path):
    assert weights_sha256(tmp_path) is None
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
    before = weights_sha256(tmp_path)
    (tmp_path / "optimizer.safetensors").write_bytes(b"")
    assert weights_sha256(tmp_path) == before
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"changed")
    assert weights_sha256(tmp_path) != before


def test_names_of_test_sets():
    assert name_of_test_set("data/test_2016_flickr.en.gz", "other/test_2016_flickr.de.gz") == "test_2016_flickr"
    assert name_of_test_set("src.txt", "ref.txt") == "src.txt / ref.txt"
    assert name_of_test_set("source", "source") == "source"
