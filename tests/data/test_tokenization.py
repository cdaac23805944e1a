import json
import sys
import unicodedata
from collections import defaultdict
from types import SimpleNamespace

import pytest
from conftest import error_of
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from vaswani_transformer.data.synthetic import generate_corpus
from vaswani_transformer.data.tokenization import (
    SPECIAL_TOKENS,
    check_tokenizer_matches,
    load_tokenizer,
    train_tokenizer,
)

VOCAB_SIZE = {"bpe": 420, "wordpiece": 700}
MIN_VOCAB_SIZE = {"bpe": 260, "wordpiece": 516}
KINDS = pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
UNICODE_TEXTS = ["", " leading", "trailing  ", "\t\ttabs\tand\nnewlines\r\n\n", "MiXeD CASING İstanbul ß ẞ ǅ"]
UNICODE_TEXTS += ["do not , he 's , we 're", "e\u0301 é n\u0303 ñ q\u0307\u0323 q\u0323\u0307"]
UNICODE_TEXTS += ["👩‍👩‍👧‍👦 🇩🇪 👍🏽 ☕\ufe0f", "日本語のテキスト 中文 한국어 ไทย עברית العربية"]
UNICODE_TEXTS += ["## ##a a##b ###", "‿ ‿a a‿b ‿‿", "▁ Ġ Ċ Ġa ĠĠ Ã¤ Ń", "<s> <pad> </s> <unk>"]
UNICODE_TEXTS += ["a</s>b <pad><pad> </s>", "\u00a0nbsp\u2009thin\u3000wide\u200bzero\u2028line\u2029"]
UNICODE_TEXTS += ["\ufeffbom \ufffd \U0010ffff \ue000", "x" * 3000, "漢" * 1000, " " * 500]


def sentences():
    """A few hundred English and German sentences."""
    return [side for pair in generate_corpus(200, 10, 10).train for side in pair]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saved tokenizers of both kinds, each next to the configuration of a model that transformers does not know."""
    result = {}
    for kind, size in VOCAB_SIZE.items():
        result[kind] = tmp_path_factory.mktemp(kind)
        train_tokenizer(sentences(), kind=kind, vocab_size=size).save_pretrained(result[kind])
        (result[kind] / "config.json").write_text(json.dumps({"model_type": "vaswani"}), encoding="utf-8")
    return result


@pytest.fixture(scope="module")
def tokenizers(folders):
    return {kind: AutoTokenizer.from_pretrained(folder) for kind, folder in folders.items()}


def round_trip(tokenizer, text):
    return tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True)


def nfc(text):
    return unicodedata.normalize("NFC", text)


@pytest.fixture(scope="module")
def words_of_scripts():
    """Words with marks and joiners by script: the first word of the names of its characters."""
    kinds = defaultdict(lambda: defaultdict(list))
    for character in map(chr, range(sys.maxunicode)):
        kinds[unicodedata.category(character)[0]][unicodedata.name(character, "").partition(" ")[0]].append(character)
    letters, marks = kinds["L"] | {"COMBINING": ["x", "q"]}, kinds["M"]
    words = {script: (letters[script][0], marks[script][-1], letters[script][-1]) for script in letters & marks.keys()}
    return {script: f"{a}{mark}{b}{mark}{b}\u200d{a}\u200c{b}" for script, (a, mark, b) in words.items()}


@KINDS
def test_words_of_all_scripts_are_not_cut_at_their_marks(kind, words_of_scripts):
    assert len(words_of_scripts) > 80 and {"DEVANAGARI", "THAI", "HEBREW", "COMBINING"} <= words_of_scripts.keys()
    tokenizer = train_tokenizer([f"{word} 7 {word}" for word in words_of_scripts.values()] * 3, kind=kind)
    tokens = {script: tokenizer.tokenize(word) for script, word in words_of_scripts.items()}
    assert not {script: own for script, own in tokens.items() if len(own) > 1}
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(" 👩\u200d🔧 ❤\ufe0f\u200d🔥 1\ufe0f\u20e3")
    assert len(words) == 3  # marks and joiners of signs stay with these


@KINDS
@pytest.mark.parametrize("text", ["Ça, l'été à Łódź", "Tiếng Việt rất đẹp", "한국어 ガギグ、パ", "ਸ਼ੇਰ क़लम", "שָׁלוֹם"])
def test_decomposed_texts_have_the_ids_of_composed_ones_and_offsets_of_their_own(tokenizers, kind, text):
    forms = [unicodedata.normalize(form, text) for form in ("NFC", "NFD")]
    read = [tokenizers[kind](form, return_offsets_mapping=True) for form in forms]
    assert read[0]["input_ids"] == read[1]["input_ids"]
    starts = [
        [nfc(form[:start]) for start, _ in own["offset_mapping"][:-1]] for form, own in zip(forms, read, strict=True)
    ]
    assert starts[0] == starts[1]


AWKWARD = st.sampled_from([*SPECIAL_TOKENS, " ", "\n", "##", "‿", "a", "Ein", ".", "'s", "ß", "é"])


@KINDS
@settings(max_examples=400)
@given(text=st.one_of(st.text(), st.lists(AWKWARD).map("".join)))
def test_round_trip_of_any_text_and_of_awkward_mixtures(tokenizers, kind, text):
    assert round_trip(tokenizers[kind], text) == nfc(text)


@KINDS
@pytest.mark.parametrize("text", UNICODE_TEXTS, ids=range(len(UNICODE_TEXTS)))
def test_round_trip_of_unicode_texts(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == nfc(text)
    assert ids[-1] == tokenizer.eos_token_id
    assert not set(ids[:-1]) & set(tokenizer.all_special_ids)  # nothing unknown, and "</s>" in a text is text


@KINDS
def test_special_tokens_have_their_ids_and_only_the_end_is_appended(tokenizers, kind):
    tokenizer = tokenizers[kind]
    assert SPECIAL_TOKENS == ("<s>", "<pad>", "</s>", "<unk>")
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
    named = [tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert named == sorted(tokenizer.all_special_ids) == sorted(tokenizer.added_tokens_decoder) == [0, 1, 2, 3]

    bare = tokenizer("Ein Hund", add_special_tokens=False).input_ids
    other = tokenizer("A man", add_special_tokens=False).input_ids
    assert bare and other and not {0, 1, 2, 3} & {*bare, *other}
    assert tokenizer("Ein Hund").input_ids == [*bare, 2]
    assert tokenizer("Ein Hund", "A man").input_ids == [*bare, 2, *other, 2]
    assert tokenizer("").input_ids == [2]


@KINDS
def test_special_tokens_in_the_training_text_are_text(kind):
    texts = ["a</s>b <pad> <s> <unk>"] * 50
    assert len(train_tokenizer(texts, kind=kind, vocab_size=1)) == MIN_VOCAB_SIZE[kind]  # the bytes
    tokenizer = train_tokenizer(texts, kind=kind, vocab_size=MIN_VOCAB_SIZE[kind] + 30)
    assert all(round_trip(tokenizer, text) == nfc(text) for text in [texts[0], *UNICODE_TEXTS])
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]


@KINDS
def test_long_word_takes_little_time(tokenizers, kind):
    text = "abcdefghij" * 5000  # minutes where the search for word pieces is not bounded
    assert round_trip(tokenizers[kind], text) == text


@KINDS
def test_training_is_deterministic(folders, tmp_path, kind):
    # The hash maps of `tokenizers` are seeded anew for each training, so one process shows differences too.
    train_tokenizer(sentences(), kind=kind, vocab_size=VOCAB_SIZE[kind]).save_pretrained(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(names)
    for name in names:
        assert (tmp_path / name).read_bytes() == (folders[kind] / name).read_bytes()


@KINDS
def test_partial_sequences_decode_to_a_beginning_of_the_text(tokenizers, kind):
    tokenizer, text = tokenizers[kind], "Zwei Kinder sehen 3 Hunde ."
    ids = tokenizer(text, add_special_tokens=False).input_ids
    prefixes = [tokenizer.decode(ids[:count], skip_special_tokens=True) for count in range(len(ids) + 1)]
    assert prefixes[0] == "" and prefixes[-1] == text
    assert all(text.startswith(prefix) for prefix in prefixes)
    # A sequence that was cut inside a character is shown with the replacement character, not with an error.
    assert "\ufffd" in tokenizer.decode(tokenizer("漢", add_special_tokens=False).input_ids[:-1])


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_a_vocabulary_of_no_text_is_refused(texts):
    assert "no text" in error_of(train_tokenizer, texts)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "No such file or directory"),
        ({}, "the tokenizer in"),
        ({"tokenizer.json": "\n{", "tokenizer_config.json": "{}"}, "the tokenizer in"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "{\n"}, "tokenizer_config.json: "),
    ],
)
def test_load_tokenizer_mistakes(tmp_path, files, message):
    folder = tmp_path / "folder"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(content, encoding="utf-8")
    line = error_of(load_tokenizer, folder)
    assert message in line and "folder" in line


def test_check_tokenizer_matches(tokenizers):
    right = {"vocab_size": 420, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    check_tokenizer_matches(tokenizers["bpe"], SimpleNamespace(**right))
    check_tokenizer_matches(tokenizers["bpe"], SimpleNamespace(**{**right, "vocab_size": 424}))
    for wrong, message in [
        ({"vocab_size": 419}, "vocabulary size of the source 420 in the tokenizer, 419 in the model"),
        ({"pad_token_id": 0}, "pad_token_id 1 in the tokenizer, 0 in the model"),
        ({"eos_token_id": 1}, "eos_token_id 2 in the tokenizer, 1 in the model"),
        ({"bos_token_id": None}, "bos_token_id 0 in the tokenizer, None in the model"),
    ]:
        line = error_of(check_tokenizer_matches, tokenizers["bpe"], SimpleNamespace(**{**right, **wrong}))
        assert message in line.partition("tokenizer does not match the model")[2]
