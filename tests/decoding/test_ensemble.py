"""Ensembles against the mean of the members' distributions, written out, and against every possible output."""

import pytest
import torch
from conftest import error_of, padded_batch, random_ids, tiny_model
from every_output import END, START, VOCABULARY, every_output, peaked_model, without_padding

from vaswani_transformer import Ensemble, Translator, load_ensemble, score_pairs, train_tokenizer

SENTENCES = ["ein kleiner Satz", "noch ein Satz", "Worte"]
WITH_SCORES = {"output_scores": True, "return_dict_in_generate": True}


def members(**changes):
    """Two models of different sizes and one vocabulary."""
    sizes = {"d_model": 36, "d_ff": 20, "encoder_layers": 1, "decoder_layers": 3, "d_k": 5, "d_v": 7}
    return [tiny_model(seed=1, scale=1.5, **changes), tiny_model(seed=2, scale=1.5, **{**sizes, **changes})]


@torch.no_grad()
def common_log_probs(models, source: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `(rows, length, vocab_size)` of the next token by the definition, in double precision."""
    sources = source.expand(len(targets), -1)
    logits = [model(sources, decoder_input_ids=targets, use_cache=False).logits for model in models]
    return torch.stack(logits).double().softmax(dim=-1).mean(dim=0).log()


def test_one_member_samples_as_the_model():
    model = tiny_model(scale=1.5, dtype=torch.float64)
    input_ids, attention_mask = padded_batch((7, 4, 2))
    results = []
    for each in (model, Ensemble([model])):
        torch.manual_seed(0)
        options = {"do_sample": True, "top_k": 5, "max_extra_tokens": 8}
        results.append(each.generate(input_ids, attention_mask=attention_mask, **options))
    assert torch.equal(*results)


class TestSeveralMembers:
    def test_logits_are_the_common_distribution(self):
        models, source = members(), random_ids(5)
        targets = torch.cat((torch.full((3, 1), START), random_ids(3, 6, seed=1)), dim=1)
        logits = Ensemble(models)(source.expand(3, -1), decoder_input_ids=targets).logits
        expected = common_log_probs(models, source, targets)
        torch.testing.assert_close(logits.double().log_softmax(dim=-1), expected, rtol=1e-5, atol=1e-5)
        as_tuple = Ensemble(models)(source.expand(3, -1), decoder_input_ids=targets, return_dict=False)
        assert type(as_tuple) is tuple and torch.equal(as_tuple[0], logits)

    @pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
    def test_beams_find_the_best_of_all_outputs(self, alpha):
        limit, models = 3, [peaked_model(0), peaked_model(3)]
        source = random_ids(4, vocab_size=VOCABULARY)
        best = every_output(Ensemble(models), source[None], alpha, limit)[:4]
        options = {"num_beams": 36, "num_return_sequences": 4, "length_penalty": alpha, "max_new_tokens": limit}
        outputs = Ensemble(models).generate(source[None], **options, **WITH_SCORES)
        found = [tuple(without_padding(row[: limit + 1])[1:]) for row in outputs.sequences]
        assert found == [output for _, output in best]
        assert outputs.sequences_scores.tolist() == pytest.approx([score for score, _ in best], rel=1e-4)

    def test_a_batch_equals_its_rows_alone_whatever_the_cache(self):
        ensemble = Ensemble(members(dtype=torch.float64))
        input_ids, attention_mask = padded_batch((7, 4, 2))
        options = {"num_beams": 3, "length_penalty": 0.6, "max_extra_tokens": 5}
        for cache in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
            together = ensemble.generate(input_ids, attention_mask=attention_mask, **options, **cache)
            for row, length in enumerate((7, 4, 2)):
                alone = ensemble.generate(input_ids[row : row + 1, :length], **options)
                assert torch.equal(together[row, : alone.shape[1]], alone[0])


def test_outputs_end_where_the_positions_of_a_member_do():
    models = [tiny_model(), tiny_model(seed=1, position_encoding="learned", max_position_embeddings=20)]
    for order in (models, models[::-1]):
        assert Ensemble(order).generate(random_ids(1, 4), suppress_tokens=[END]).shape[1] == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 30}, "vocab_size are [29, 30]"),
        ({"decoder_start_token_id": 2}, "decoder_start_token_id are [0, 2]"),
    ],
)
def test_other_vocabularies_are_refused_in_one_line(changes, message):
    line = error_of(Ensemble, [tiny_model(), tiny_model(seed=1, **changes)])
    assert line == f"members of an ensemble must share one vocabulary: their {message}"


def test_other_mistakes_are_refused_in_one_line(tmp_path):
    assert "an ensemble is not saved" in error_of(Ensemble([tiny_model()]).save_pretrained, tmp_path / "ensemble")
    assert not (tmp_path / "ensemble").exists()
    assert Ensemble([tiny_model(eos_token_id=[2, 5]) for _ in range(2)]).config.eos_token_id == [2, 5]


class TestFromFolders:
    @pytest.fixture(scope="class")
    def folders(self, tmp_path_factory):
        root = tmp_path_factory.mktemp("members")
        tokenizer, other = (train_tokenizer(text, vocab_size=270) for text in (SENTENCES, SENTENCES[:1]))
        for number, one in enumerate((tokenizer, tokenizer, other)):
            changes = {"d_model": 24 + 12 * number, "vocab_size": 270, "max_position_embeddings": 96}
            tiny_model(seed=number, scale=1.5, **changes).save_pretrained(root / str(number))
            one.save_pretrained(root / str(number))
        return [root / str(number) for number in range(3)]

    @pytest.mark.usefixtures("whole_outputs")
    def test_translates_and_scores_as_its_definition_does(self, folders):
        ensemble, tokenizer = load_ensemble(folders[:2], "cpu")
        assert isinstance(ensemble, Ensemble) and len(ensemble.members) == 2 and not ensemble.training
        options = {"num_beams": 2, "max_new_tokens": 12}
        inputs = (tokenizer([text], return_tensors="pt") for text in SENTENCES)
        alone = [tokenizer.decode(ensemble.generate(**each, **options)[0], skip_special_tokens=True) for each in inputs]
        translated = list(Translator(ensemble, tokenizer, tokens_per_batch=64, **options).translate(SENTENCES))
        assert translated == [" ".join(text.strip("\r\n").splitlines()) for text in alone]
        losses, counts = score_pairs(ensemble, tokenizer, SENTENCES, SENTENCES[::-1])
        for source, target, loss, count in zip(SENTENCES, SENTENCES[::-1], losses, counts, strict=True):
            ids = tokenizer(target, return_tensors="pt")["input_ids"]
            inputs = ensemble.prepare_decoder_input_ids_from_labels(ids)
            source_ids = tokenizer(source, return_tensors="pt")["input_ids"][0]
            log_probs = common_log_probs(ensemble.members, source_ids, inputs)
            assert count == ids.shape[1]
            assert loss == pytest.approx(-float(log_probs[0].gather(1, ids[0, :, None]).sum()), rel=1e-4)

    def test_other_tokenizers_are_refused_in_one_line(self, folders):
        line = error_of(load_ensemble, [folders[0], folders[2]], "cpu")
        assert line.startswith(f"{folders[0]} and {folders[2]} have different tokenizers: members of an ensemble must")
