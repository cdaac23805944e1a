"""Models of JoeyNMT's, against what JoeyNMT 2.3.0 itself computed: see `scripts/make_joeynmt_fixture.py`."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import TESTS, error_of

from vaswani_transformer import VaswaniForConditionalGeneration
from vaswani_transformer.importing import joeynmt
from vaswani_transformer.importing.source import ImportOptions

FIXTURE = TESTS / "fixtures" / "joeynmt"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def imported():
    return joeynmt.read(FIXTURE, ImportOptions())


@pytest.fixture(scope="module")
def model(imported) -> VaswaniForConditionalGeneration:
    return loaded(imported)


def loaded(imported) -> VaswaniForConditionalGeneration:
    model = VaswaniForConditionalGeneration(imported.config).eval()
    keys = model.load_state_dict(imported.weights, strict=False)
    assert not keys.unexpected_keys
    assert set(keys.missing_keys) <= {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    model.tie_weights()
    return model


@pytest.fixture
def folder(tmp_path) -> Path:
    shutil.copytree(FIXTURE, tmp_path / "model")
    return tmp_path / "model"


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, rows))
    ids = torch.tensor([row + [1] * (length - len(row)) for row in rows])
    return ids, (ids != 1).long()


def change(folder: Path, setting: str, value: str) -> None:
    """Give a setting of the configuration another value, wherever its last name stands."""
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    text, count = re.subn(rf"(?m)^( *{setting}:).*$", rf"\1 {value}", text)
    assert count
    (folder / "config.yaml").write_text(text, encoding="utf-8")


def test_logits_are_those_of_joeynmt(model):
    source, mask = padded(EXPECTED["source"])
    with torch.no_grad():
        output = model(input_ids=source, attention_mask=mask, decoder_input_ids=torch.tensor(EXPECTED["target"]))
    torch.testing.assert_close(output.logits, torch.tensor(EXPECTED["logits"]), rtol=0, atol=1e-5)


def test_greedy_translations_are_those_of_joeynmt(imported, model):
    source, mask = padded(EXPECTED["source"])
    settings = {**imported.generation, "num_beams": 1, "length_penalty": None, "max_new_tokens": 30}
    output = model.generate(source, attention_mask=mask, max_extra_tokens=None, **settings)
    rows = [[number for number in row[1:] if number != 1] for row in output.tolist()]
    assert rows == EXPECTED["greedy"]
    texts = imported.tokenizer.batch_decode(output, skip_special_tokens=True)
    assert texts == EXPECTED["greedy_texts"]


def test_beam_scores_are_those_of_joeynmt(imported, model):
    """JoeyNMT's beams end otherwise than ours; the score of what they found is the same."""
    source, mask = padded(EXPECTED["source"])
    target, target_mask = padded([[2, *row] for row in EXPECTED["beam"]])
    with torch.no_grad():
        logits = model(input_ids=source, attention_mask=mask, decoder_input_ids=target[:, :-1]).logits
    logits[..., imported.generation["suppress_tokens"]] = logits[..., imported.generation["suppress_tokens"]]
    scores = logits.log_softmax(-1).gather(-1, target[:, 1:, None])[..., 0] * target_mask[:, 1:]
    lengths = target_mask[:, 1:].sum(-1)
    scores = scores.sum(-1) / ((5 + lengths) / 6) ** imported.generation["length_penalty"]
    torch.testing.assert_close(scores, torch.tensor(EXPECTED["beam_scores"]), rtol=0, atol=1e-5)


def test_ids_are_those_of_joeynmt(imported):
    assert imported.tokenizer(EXPECTED["texts"])["input_ids"] == EXPECTED["source"]
    assert imported.tokenizer(text_target=EXPECTED["target_texts"])["input_ids"] == EXPECTED["target_ids"]
