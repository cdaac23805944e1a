"""The score of a hypothesis by name, in folders and as an option; `test_search` compares what is found by it."""

import json

import pytest
import torch
from conftest import random_ids, tiny_model
from every_output import END, chained_model
from transformers import GenerationConfig

from vaswani_transformer import VaswaniForConditionalGeneration


def test_is_written_with_the_model_and_read_again(tmp_path):
    model = tiny_model(vocab_size=9, scale=1.5)
    model.generation_config.update(num_beams=4, length_penalty=2.0, max_extra_tokens=3)
    model.save_pretrained(tmp_path / "gnmt")
    assert json.loads((tmp_path / "gnmt" / "generation_config.json").read_text())["length_normalization"] == "gnmt"
    model.generation_config.length_normalization = "power"
    model.save_pretrained(tmp_path / "power")
    sources, load = random_ids(8, 6, vocab_size=9), VaswaniForConditionalGeneration.from_pretrained
    outputs = {rule: load(tmp_path / rule).generate(sources) for rule in ("gnmt", "power")}
    assert torch.equal(outputs["power"], model.generate(sources)) and outputs["power"].shape[1] == 1 + 6 + 3
    assert torch.equal(outputs["gnmt"], model.generate(sources, length_normalization="gnmt"))
    assert not torch.equal(outputs["gnmt"], outputs["power"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length_normalization": "wu"}, "length_normalization is 'wu': it must be one of gnmt, power"),
        ({"max_extra_tokens": -1}, "max_extra_tokens is -1: it must be a whole number from 0 to 1,000,000"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(settings, message):
    model = tiny_model(vocab_size=9)
    with pytest.raises(ValueError) as caught:
        model.generate(random_ids(1, 4, vocab_size=9), **settings)
    assert str(caught.value) == message
    with pytest.raises(ValueError, match="it must be"):
        model.generate(random_ids(1, 4, vocab_size=9), generation_config=GenerationConfig(**settings))


def test_early_stopping_true_ends_with_the_first_full_list():
    # For alpha 2 the longest output is the best by far, and the two shortest are the first that end.
    row = [0.01 / 7] * 9
    row[END], row[5] = 0.50, 0.49  # whatever came before
    model, source = chained_model([row] * 9), random_ids(1, 4, vocab_size=9)
    options = {"num_beams": 2, "length_penalty": 2.0, "max_new_tokens": 40}
    lengths = {stop: model.generate(source, early_stopping=stop, **options).shape[1] for stop in (True, False, "never")}
    assert lengths[True] <= 3 and lengths[False] == lengths["never"] == 41
