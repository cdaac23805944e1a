"""The score of a hypothesis by name: the paper's rule, and transformers' own against transformers itself."""

import json

import pytest
import torch
from conftest import padded_batch, random_ids, tiny_model
from every_output import memoryless_model
from transformers import GenerationConfig
from transformers.generation import GenerationMixin

from vaswani_transformer import VaswaniForConditionalGeneration
from vaswani_transformer.model.generation_vaswani import VaswaniGenerationMixin


class StockSearch(VaswaniForConditionalGeneration):
    """Our model with nothing but transformers' own generation."""


for name in vars(VaswaniGenerationMixin):
    if hasattr(GenerationMixin, name) and not name.startswith("__"):
        setattr(StockSearch, name, GenerationMixin.__dict__[name])


def stock(model):
    twin = StockSearch(model.config)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("alpha", [-1.0, 0.0, 0.6, 2.0])
def test_power_is_transformers_own_search(alpha, early_stopping):
    options = {"num_beams": 4, "num_return_sequences": 3, "length_penalty": alpha, "early_stopping": early_stopping}
    options |= {"max_new_tokens": 9, "return_dict_in_generate": True}
    model = tiny_model(vocab_size=9, scale=1.5)
    input_ids, attention_mask = padded_batch((7, 4, 2), vocab_size=9)
    theirs = stock(model).generate(input_ids, attention_mask=attention_mask, output_scores=True, **options)
    for more in ({}, {"output_scores": True}):  # by either of our searches
        more |= options | {"length_normalization": "power"}
        ours = model.generate(input_ids, attention_mask=attention_mask, **more)
        assert torch.equal(ours.sequences, theirs.sequences)
        assert torch.equal(ours.sequences_scores, theirs.sequences_scores)


def test_is_written_with_the_model_and_read_again(tmp_path):
    model = tiny_model(vocab_size=9, scale=1.5)
    model.generation_config.update(num_beams=4, length_penalty=2.0, max_new_tokens=9)
    model.save_pretrained(tmp_path / "gnmt")
    saved = json.loads((tmp_path / "gnmt" / "generation_config.json").read_text())
    assert saved["length_normalization"] == "gnmt"
    model.generation_config.length_normalization = "power"
    model.save_pretrained(tmp_path / "power")
    sources = random_ids(8, 6, vocab_size=9)
    outputs = {
        rule: VaswaniForConditionalGeneration.from_pretrained(tmp_path / rule).generate(sources)
        for rule in ("gnmt", "power")
    }
    assert torch.equal(outputs["power"], model.generate(sources))
    assert torch.equal(outputs["gnmt"], model.generate(sources, length_normalization="gnmt"))
    assert not torch.equal(outputs["gnmt"], outputs["power"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length_normalization": "wu"}, "length_normalization is 'wu': it must be one of gnmt, power"),
        ({"max_extra_tokens": -1}, "max_extra_tokens is -1: it must be a whole number from 0 to 1,000,000"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(settings, message, tmp_path):
    model = tiny_model(vocab_size=9)
    with pytest.raises(ValueError) as caught:
        model.generate(random_ids(1, 4, vocab_size=9), **settings)
    assert str(caught.value) == message
    with pytest.raises(ValueError, match="it must be"):
        model.generate(random_ids(1, 4, vocab_size=9), generation_config=GenerationConfig(**settings))


def test_early_stopping_true_ends_with_the_first_full_list():
    # For alpha 2 the longest output is the best by far, and the two shortest are the first that end.
    model, source = memoryless_model(0.50, 0.49), random_ids(1, 4, vocab_size=9)
    options = {"num_beams": 2, "length_penalty": 2.0, "max_new_tokens": 40}
    lengths = {stop: model.generate(source, early_stopping=stop, **options).shape[1] for stop in (True, False, "never")}
    assert lengths[True] <= 3 and lengths[False] == lengths["never"] == 41
