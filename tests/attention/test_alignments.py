"""Word alignments against the attention they are read from; what a trained model's are worth: `test_demo.py`."""

import unicodedata
from itertools import product

import numpy as np
import pytest
import test_attention_weights
from conftest import tiny_model
from sentencepiece_models import trained
from test_attention_weights import TEXT
from tokenizers import Tokenizer, models

from vaswani_transformer import Ensemble, UserError, VaswaniTokenizer, align, attend, pharaoh, train_tokenizer
from vaswani_transformer.attention.alignments import tokens_and_words
from vaswani_transformer.data.words import words_of
from vaswani_transformer.importing.fairseq_vocabulary import with_special_tokens
from vaswani_transformer.importing.sentencepiece import backend

model, tokenizer = test_attention_weights.model, test_attention_weights.tokenizer


def words_of_tokens(tokenizer, text: str) -> list[set[int]]:
    """For each token the word it is a piece of, found by decoding ever longer beginnings; none for the end token."""
    ids = tokenizer(text)["input_ids"]
    words = []
    for number in range(1, len(ids)):
        # A space, and a character that is not whole yet, belong to the word that follows.
        so_far = tokenizer.decode(ids[:number])
        words.append({len(so_far.split()) - (so_far == so_far.rstrip() != "")})
    return [*words, set()]


def largest_sums(weights, of_source: list[set[int]], of_target: list[set[int]]) -> list[tuple[int, int]]:
    """Links by weights `(target, source)` and the words, or letters, that each token has a part in."""
    sums = {}
    for row, column in np.ndindex(*weights.shape):
        for link in product(of_source[column], of_target[row]):
            sums[link] = sums.get(link, 0.0) + float(weights[row, column])
    sources, targets = (range(1 + max(words)) for words in zip(*sums, strict=True))
    return [(max(sources, key=lambda source: round(sums[source, word], 5)), word) for word in targets]


@pytest.mark.parametrize("layer", [-1, 0, 1])
def test_links_are_the_largest_sums_of_attention(model, tokenizer, layer):
    source, target = TEXT[0], TEXT[1]
    weights = attend(model, tokenizer, source, target).encoder_decoder[layer].mean(axis=0)  # (target, source) lengths
    words = [words_of_tokens(tokenizer, text) for text in (source, target)]
    assert len(words[0]) == weights.shape[1] > len(source.split()) + 1
    assert align(model, tokenizer, [source], [target], layer=layer) == [largest_sums(weights, *words)]


def letters_of_tokens(tokenizer, text: str) -> list[set[int]]:
    """For each token the letters that it has a part in, found as above; none for the end token."""
    ids, parts = tokenizer(text)["input_ids"], []
    for number in range(1, len(ids)):
        before, after = (tokenizer.decode(ids[:end]) for end in (number - 1, number))
        letters = len(after.rstrip("\ufffd")) + after.endswith("\ufffd")  # with one that is not whole yet
        parts.append(set(range(len(before.rstrip("\ufffd")), letters)))
    return [*parts, set()]


def test_without_spaces_letters_are_linked():
    source, target = "老黑狗看见一个苹果", "老狗看见黑苹果"
    tokenizer = train_tokenizer([source, target] * 3, vocab_size=280)
    model = tiny_model(seed=1, scale=2.0, vocab_size=len(tokenizer))
    weights = attend(model, tokenizer, source, target).encoder_decoder[-1].mean(axis=0)
    letters = [letters_of_tokens(tokenizer, text) for text in (source, target)]
    assert all(any(len(one) > 1 for one in side) for side in letters)
    assert align(model, tokenizer, [source], [target]) == [largest_sums(weights, *letters)]


def test_every_word_of_a_target_has_one_link_whatever_the_batch(model, tokenizer):
    sources = [TEXT[0], TEXT[2], " an   old dog ", "apple"]
    targets = [TEXT[1], TEXT[1], "中", "der\tnaïve Hund"]
    alone = [align(model, tokenizer, [source], [target])[0] for source, target in zip(sources, targets, strict=True)]
    for links, source, target in zip(alone, sources, targets, strict=True):
        assert [link[1] for link in links] == list(range(len(target.split())))
        assert all(0 <= link[0] < len(words_of(source)) for link in links)
    for tokens in (1, 40, 4096):
        assert align(model, tokenizer, sources, targets, tokens_per_batch=tokens) == alone
    decomposed = [[unicodedata.normalize("NFD", text) for text in side] for side in (sources, targets)]
    assert align(model, tokenizer, *decomposed) == alone


def test_blank_sides_have_no_links(model, tokenizer):
    assert align(model, tokenizer, ["", "the dog", " "], ["der", "", "\t"]) == [[], [], []]
    mixed = align(model, tokenizer, ["", TEXT[0]], ["der", TEXT[1]])
    assert mixed == [[], align(model, tokenizer, [TEXT[0]], [TEXT[1]])[0]]


def test_of_an_ensemble_is_from_the_mean_of_its_members(model, tokenizer):
    other = tiny_model(seed=2, scale=2.0, vocab_size=len(tokenizer), d_model=36)
    pair = TEXT[0], TEXT[1]
    twice = align(Ensemble([model, model]), tokenizer, [pair[0]], [pair[1]])
    assert twice == align(model, tokenizer, [pair[0]], [pair[1]])
    means = [attend(one, tokenizer, *pair).encoder_decoder[-1].mean(axis=0) for one in (model, other)]
    expected = largest_sums(sum(means) / 2, *(words_of_tokens(tokenizer, text) for text in pair))
    assert align(Ensemble([model, other]), tokenizer, [pair[0]], [pair[1]]) == [expected]


def test_mistakes_are_one_line(model, tokenizer):
    with pytest.raises(ValueError, match="shorter"):
        align(model, tokenizer, ["a", "b"], ["a"])
    short = tiny_model(vocab_size=len(tokenizer), position_encoding="learned", max_position_embeddings=8)
    with pytest.raises(UserError, match=r"^line 3 has .* tokens and at most 8 are taken"):
        align(short, tokenizer, ["a", "", TEXT[0]], ["a", "", "a"])
    with pytest.raises(IndexError):
        align(model, tokenizer, ["a"], ["a"], layer=3)


def test_texts_that_are_rewritten_have_the_ids_of_the_model_and_words_of_their_own(tmp_path):
    """Marks, which SentencePiece takes for graphemes where `tokenizers` does not, with spaces between words or none."""
    texts = ["यह एक छोटा कुत्ता है", "ผมชื่อสมชาย ครับ", "မြန်မာ ဘာသာ", "السَّلامُ عَلَيْكُم", "the dog"]
    pieces = backend(trained(tmp_path, texts * 20, vocab_size=120))
    tokenizer = VaswaniTokenizer(tokenizer_object=pieces, eos_token="</s>", unk_token="<unk>").side("source")
    for text, (ids, words) in zip(texts, tokens_and_words(tokenizer, texts), strict=True):
        assert ids == tokenizer(text)["input_ids"] and tokenizer.unk_token_id not in ids
        tokens = tokenizer.convert_ids_to_tokens(ids)
        for number, word in enumerate(words_of(text)):
            assert word in "".join(token for token, own in zip(tokens, words, strict=True) if number in own)


def test_words_that_rules_make_are_refused():
    ids = {token: number for number, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "Hello", ",", "world"])}
    tokenizer = VaswaniTokenizer(
        tokenizer_object=with_special_tokens(Tokenizer(models.WordLevel(ids, "<unk>")), ids),
        eos_token="</s>", unk_token="<unk>", moses={"languages": ["en", "en"]},
    ).side("source")  # fmt: skip
    assert tokens_and_words(tokenizer, ["Hello world"]) == [([4, 6, 2], [range(1), range(1, 2), range(0)])]
    with pytest.raises(UserError, match="'Hello, world': the tokenizer cuts this into other words"):
        tokens_and_words(tokenizer, ["Hello, world"])


def test_pharaoh_format():
    assert pharaoh([(0, 0), (2, 1), (1, 2), (10, 3)]) == "0-0 1-2 2-1 10-3"
    assert pharaoh([]) == ""
