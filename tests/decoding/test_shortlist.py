"""Shortlists of target words: searches against transformers' loop, lexicons against closed forms, files, commands."""

import shutil
from collections import defaultdict

import pytest
import torch
import translating
from conftest import error_of, padded_batch, tiny_model
from model_folders import PAIRS
from passes import OTHER_TOOLKITS
from safetensors.torch import save_file
from transformers import ForcedEOSTokenLogitsProcessor, MinNewTokensLengthLogitsProcessor, SuppressTokensLogitsProcessor
from translating import LINES, run

from vaswani_transformer import load_model, train_tokenizer
from vaswani_transformer.decoding.cpu_inference import prepare_for_inference
from vaswani_transformer.decoding.output import ResumableOutput
from vaswani_transformer.decoding.shortlist import (
    SHORTLIST,
    Shortlist,
    learn_lexicon,
    read_lexicon,
    read_shortlist,
    sample_pairs,
)
from vaswani_transformer.errors import UserError

repetition_free, model = translating.model, translating.papers_model
source, fails = translating.source, translating.fails
TOKENS = torch.tensor([4, 5, 7, 12, 13, 14, 19, 20, 28])  # the end, 2, is not among them
IDS, MASK = padded_batch((7, 3, 9, 1))


def only(tokens):
    """A processor that lets a model choose among these tokens, with probabilities that sum to 1."""

    def process(input_ids, scores):
        return torch.full_like(scores, -torch.inf).index_copy(1, tokens, scores[:, tokens].log_softmax(dim=-1))

    return process


RULES = {"min_new_tokens": 4, "suppress_tokens": [7, 9], "forced_eos_token_id": 2}
RULES_AS_PROCESSORS = [
    MinNewTokensLengthLogitsProcessor(1, 4, 2),
    SuppressTokensLogitsProcessor([7, 9]),
    ForcedEOSTokenLogitsProcessor(10, 2),
]


@pytest.mark.parametrize("beams", [{}, {"num_beams": 3, "num_return_sequences": 2}, {"num_beams": 4}], ids=str)
@pytest.mark.parametrize("has_rules", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"tie_word_embeddings": False}, OTHER_TOOLKITS[-1]], ids=str)
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_a_search_looks_at_the_shortlist_alone(precision, sizes, has_rules, beams):
    options = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 9, **beams}
    rules = RULES if has_rules else {}
    whole = prepare_for_inference(tiny_model(scale=2.0, **sizes), precision)
    allowed = torch.cat((TOKENS, torch.tensor([2]))).sort().values
    processors = [only(allowed), *(RULES_AS_PROCESSORS if has_rules else [])]
    expected = whole.generate(**options, logits_processor=processors)  # by transformers' loop
    short = prepare_for_inference(tiny_model(scale=2.0, **sizes), precision, lambda ids: TOKENS)
    found = short.generate(**options, **rules)
    assert torch.equal(found, expected)
    assert not torch.equal(found, whole.generate(**options, **rules))


@pytest.mark.parametrize(
    "options",
    [{"return_dict_in_generate": True}, {"num_beams": 2, "repetition_penalty": 1.5}, {"encoder_outputs": True}],
    ids=str,
)
def test_the_whole_vocabulary_where_scores_other_rules_or_an_encoding_ask_for_it(options):
    model = tiny_model(scale=2.0)
    options = {"input_ids": IDS, "attention_mask": MASK} | options
    if options.pop("encoder_outputs", False):
        options["encoder_outputs"] = model.get_encoder()(options.pop("input_ids"), MASK)
    expected = prepare_for_inference(model).generate(**options)
    shortlist = Shortlist(torch.full((29, 1), 5, dtype=torch.int32), TOKENS.int(), 29)
    assert shortlist(IDS) is not None
    found = prepare_for_inference(tiny_model(scale=2.0), None, shortlist).generate(**options)
    assert torch.equal(*(getattr(output, "sequences", output) for output in (found, expected)))


def test_rows_of_an_int8_layer_are_those_of_the_whole_one():
    states, model = torch.randn(6, 24), prepare_for_inference(tiny_model(), "int8", lambda ids: TOKENS)
    assert torch.equal(model.lm_head.limited_to(TOKENS)(states), model.lm_head(states)[:, TOKENS])


def by_definition(pairs, rounds=5):
    """IBM Model 1 as in Koehn, "Statistical Machine Translation" (2010), Figure 4.3."""
    likely = defaultdict(lambda: 1.0)
    for _ in range(rounds):
        counts, totals = defaultdict(float), defaultdict(float)
        for source, target in pairs:
            for word in target:
                norm = sum(likely[other, word] for other in source)
                for other in source:
                    counts[other, word] += likely[other, word] / norm
                    totals[other] += likely[other, word] / norm
        likely = defaultdict(float, {pair: count / totals[pair[0]] for pair, count in counts.items()})
    return likely


def test_a_lexicon_is_that_of_ibm_model_1():
    generator = torch.Generator().manual_seed(0)
    sides = [[torch.randint(9, (length,), generator=generator).tolist() for length in (3 + n % 4, 2 + n % 3)]
             for n in range(12)]  # fmt: skip
    expected = by_definition(sides)
    source, target, probability = learn_lexicon(list(map(tuple, sides)))
    found = dict(zip(zip(source.tolist(), target.tolist(), strict=True), probability.tolist(), strict=True))
    assert found == pytest.approx({pair: value for pair, value in expected.items() if value > 1e-6}, rel=1e-4)


def test_what_a_shortlist_holds(model):
    config, tokenizer = (one.config if hasattr(one, "config") else one for one in load_model(model, "cpu"))
    lexicon = torch.tensor([7, 7, 8]), torch.tensor([30, 31, 40]), torch.tensor([0.9, 0.1, 0.3])
    shortlist = Shortlist.of(lexicon, tokenizer, config)
    shortlist.frequent = torch.tensor([2], dtype=torch.int32)
    pad = config.pad_token_id
    assert shortlist(torch.tensor([[7, 8], [7, pad]])).tolist() == sorted({2, 7, 8, 30, 31, 40, *_of(shortlist, pad)})
    assert shortlist(torch.tensor([[7, 9]])) is None  # 9 is unknown
    assert shortlist(torch.tensor([[-100, 7]])) is None


def _of(shortlist, token):
    return shortlist.translations[token].tolist()


def test_so_many_pairs_are_drawn(monkeypatch):
    monkeypatch.setattr("vaswani_transformer.decoding.shortlist._PAIRS", 50)
    drawn = sample_pairs((str(number), " " if number % 2 else "x") for number in range(4000))
    numbers = [int(source) for source, _ in drawn]
    assert len(set(numbers)) == 50 and not any(number % 2 for number in numbers)
    assert 1300 < sum(numbers) / 50 < 2700  # uniform: 2000 +- 160


def test_the_commands(model, source, tmp_path, fails, capsys):
    folder, sides = tmp_path / "model", {"--source": tmp_path / "en", "--target": tmp_path / "de"}
    shutil.copytree(model, folder)
    for path, texts in zip(sides.values(), zip(*PAIRS, strict=True), strict=True):
        path.write_text("\n".join(texts) + "\n")
    assert "vaswani shortlist" in fails("translate", folder, "a sentence", "--shortlist")
    assert "or of --lexicon" in fails("shortlist", folder, "--source", sides["--source"])
    assert run("shortlist", folder, *(part for pair in sides.items() for part in pair)) == 0
    assert str(folder / SHORTLIST) in capsys.readouterr().out
    found, options = {}, ["--beams", 2, "--max-new-tokens", 8]
    for name, more in {"without": [], "with": ["--shortlist"]}.items():
        path = tmp_path / name
        assert run("translate", folder, "--input", source, "--output", path, *options, *more) == 0
        found[name] = path.read_text().splitlines()
    # All words of so small a vocabulary are in the shortlist.
    assert found["with"] == found["without"] and len(found["with"]) == len(LINES)
    assert "--ensemble" in fails("translate", folder, "--input", source, "--shortlist", "--ensemble", model)
    command = ["translate", folder, "--input", source, "--output", tmp_path / "cut off", *options, "--shortlist"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResumableOutput, "finish", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(*command) == 130
    for path in sides.values():
        path.write_text(path.read_text()[: path.read_text().index("\n") + 1])
    assert run("shortlist", folder, *(part for pair in sides.items() for part in pair)) == 0
    assert "--shortlist has changed" in fails(*command, "--resume")


def test_a_lexicon_of_marian_is_read(model, tmp_path, fails):
    tokenizer, path = load_model(model, "cpu")[1], tmp_path / "lex.s2t"
    first, second = tokenizer.convert_ids_to_tokens([10, 11])
    path.write_text(f"{first} {second} 0.75\nNULL {first} 0.5\n{second} {first} 0.25\n")
    source, target, probability = read_lexicon(path, tokenizer)
    assert (source.tolist(), target.tolist(), probability.tolist()) == ([11, 10], [10, 11], [0.75, 0.25])
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    assert run("shortlist", folder, "--lexicon", path) == 0
    config = load_model(folder, "cpu")[0].config
    assert {10, 11} <= set(read_shortlist(folder, config, tokenizer)(torch.tensor([[10]])).tolist())
    path.write_text(f"{first} {second} 0.75\n{first} {second}\n")
    assert "line 2" in error_of(read_lexicon, path, tokenizer)
    path.write_text("NULL NULL 0.75\n")
    assert "no pair of tokens" in error_of(read_lexicon, path, tokenizer)


@pytest.mark.parametrize(
    "change",
    [{"translations": torch.zeros(28, 2, dtype=torch.int32)}, {"translations": torch.full((29, 2), 29).int()},
     {"translations": torch.zeros(29, 2)}, {"frequent": torch.tensor([-1]).int()}, {"frequent": torch.zeros(0).int()}],
    ids=["of another vocabulary", "an id beyond it", "no ids", "an id below 0", "empty"],
)  # fmt: skip
def test_a_damaged_file_is_refused(tmp_path, change):
    tensors = {"translations": torch.zeros(29, 2, dtype=torch.int32), "frequent": torch.tensor([3]).int()}
    config, tokenizer = tiny_model().config, train_tokenizer(["a dog"], vocab_size=280)
    Shortlist(*tensors.values(), 29).write(tmp_path, tokenizer)
    assert read_shortlist(tmp_path, config, tokenizer)(IDS).tolist() == [0, 3]
    with pytest.raises(UserError, match="no shortlist for this model"):
        read_shortlist(tmp_path, config, train_tokenizer(["a cat"], vocab_size=280))
    Shortlist(*(tensors | change).values(), 29).write(tmp_path, tokenizer)
    with pytest.raises(UserError, match="no shortlist for this model"):
        read_shortlist(tmp_path, config, tokenizer)
    save_file(tensors, tmp_path / SHORTLIST)  # by someone else
    with pytest.raises(UserError, match="no shortlist for this model"):
        read_shortlist(tmp_path, config, tokenizer)
    (tmp_path / SHORTLIST).write_bytes(b"text")
    with pytest.raises(UserError, match="no shortlist for this model"):
        read_shortlist(tmp_path, config, tokenizer)
