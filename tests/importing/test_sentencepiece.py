"""SentencePiece models as backends of `tokenizers`: the ids of the package sentencepiece for every text."""

import random

import pytest
from hypothesis import given
from sentencepiece_models import TEXTS, trained

from vaswani_transformer import VaswaniTokenizer
from vaswani_transformer.data.synthetic import generate_corpus
from vaswani_transformer.importing.sentencepiece import Unsupported, backend

sentencepiece = pytest.importorskip("sentencepiece", reason="SentencePiece models are trained by its own package")

SPECIAL = {"eos_token": "</s>", "unk_token": "<unk>"}
KINDS = {
    "unigram": {},
    "unigram, bytes": {"byte_fallback": True, "vocab_size": 500, "character_coverage": 0.98},
    "unigram, no table": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "unigram, no prefix": {"add_dummy_prefix": False},
    "unigram, pieces of several words": {"split_by_whitespace": False},
    "byte pairs": {"model_type": "bpe"},
    "byte pairs, bytes": {"model_type": "bpe", "byte_fallback": True, "vocab_size": 500, "character_coverage": 0.98},
    "byte pairs, no table": {"model_type": "bpe", "normalization_rule_name": "identity"},
}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    pairs = generate_corpus(300, 1, 1).train
    return [text for pair in pairs for text in pair] + ['ein <b> 1 > 2 & 3... (so) "was"', "a_b"]


@pytest.fixture(scope="module")
def both(tmp_path_factory, texts):
    """For each kind of model the package's reader and our tokenizer."""
    made = {}
    for number, (kind, options) in enumerate(KINDS.items()):
        path = trained(tmp_path_factory.mktemp("spm"), texts, str(number), **options)
        reader = sentencepiece.SentencePieceProcessor(model_file=str(path))
        made[kind] = reader, VaswaniTokenizer(tokenizer_object=backend(path), **SPECIAL)
    return made


def assert_same_ids(reader, tokenizer, text: str) -> None:
    """The same ids, or another way to cut the text of the same score.

    SentencePiece adds scores in float32 and `tokenizers` in float64, so that of two ways with the same score ("o", "oo"
    and "oo", "o") either may win.
    """
    expected, ids = reader.encode(text), tokenizer(text)["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    if ids[:-1] != expected:
        scores = [sum(map(reader.get_score, way)) for way in (expected, ids[:-1])]
        assert reader.unk_id() not in ids and scores[0] == pytest.approx(scores[1], rel=1e-6), ascii(text)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_same_ids_for_any_text(both, kind, text):
    assert_same_ids(*both[kind], text)


@pytest.mark.parametrize("kind", KINDS)
def test_same_ids_for_text_of_the_language(both, kind, texts):
    reader, tokenizer = both[kind]
    assert [ids[:-1] for ids in tokenizer(texts)["input_ids"]] == reader.encode(texts)
    known = [text for text in texts if reader.unk_id() not in reader.encode(text)]
    decoded = tokenizer.batch_decode(tokenizer(known)["input_ids"], skip_special_tokens=True)
    assert decoded == [text.strip() for text in reader.decode(reader.encode(known))]


def test_ids_of_a_dictionary(texts, tmp_path):
    """Numbers of the dictionary's own; what it lacks is unknown; what it has besides, no text becomes."""
    path = trained(tmp_path, texts)
    reader = sentencepiece.SentencePieceProcessor(model_file=str(path))
    pieces = [reader.id_to_piece(number) for number in range(3, len(reader))]
    random.Random(0).shuffle(pieces)
    names = ["</s>", "<unk>", *pieces[: len(pieces) * 2 // 3], "▁ein▁Haus", ">>fra<<", "Mann", "<pad>"]
    ids = {name: number for number, name in enumerate(dict.fromkeys(names))}
    ids["<pad>"] += 2  # with a gap
    tokenizer = VaswaniTokenizer(
        tokenizer_object=backend(path, ids, ("</s>", "<unk>", "<pad>")),
        known_tokens=(1 + max(ids.values()),) * 2, pad_token="<pad>", **SPECIAL,
    )  # fmt: skip
    assert len(tokenizer) == 1 + max(ids.values())
    for text in (*texts, "ein Haus", "Mann", "<pad> </s>"):
        numbers = [ids.get(piece, ids["<unk>"]) for piece in reader.encode(text, out_type=str)]
        assert tokenizer(text)["input_ids"] == [*numbers, 0]
        assert tokenizer(f">>fra<< {text}")["input_ids"] == [ids[">>fra<<"], *numbers, 0]
        assert tokenizer(f">>xyz<< {text}")["input_ids"] == [ids["<unk>"], *numbers, 0]
    for text in ("a >>fra<< b", " >>fra<<", ">>>fra<<"):
        numbers = [ids.get(piece, ids["<unk>"]) for piece in reader.encode(text, out_type=str)]
        if text.startswith(">>"):  # the first "<<" ends a code
            numbers = [ids["<unk>"]]
        assert tokenizer(text)["input_ids"] == [*numbers, 0]
    assert tokenizer.decode([ids["Mann"], ids["▁ein▁Haus"], 0], skip_special_tokens=True) == "Mann ein Haus"


def test_what_has_no_counterpart_is_refused(texts, tmp_path):
    (tmp_path / "rules.tsv").write_text("41 42\t43\n")  # a table of one's own, which replaces "AB"
    for fault, options in {
        "table of characters": {"normalization_rule_tsv": str(tmp_path / "rules.tsv")},
        "user-defined": {"user_defined_symbols": ["<sep>"]},
        "at the end of its pieces": {"treat_whitespace_as_suffix": True},
        "neither a unigram model": {"model_type": "char"},
    }.items():
        with pytest.raises(Unsupported, match=fault):
            backend(trained(tmp_path, texts, fault.partition(" ")[0], **options))
