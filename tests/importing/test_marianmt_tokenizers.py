"""Tokenizers of MarianMT folders: the ids of transformers' own class, on both sides."""

import json
import pickle
import sys
from pathlib import Path

import pytest
from hypothesis import given
from sentencepiece_models import TEXTS, trained
from transformers import AutoTokenizer, MarianTokenizer

from vaswani_transformer import UserError, VaswaniTokenizer
from vaswani_transformer.data.synthetic import generate_corpus
from vaswani_transformer.importing.marianmt import marian_tokenizer


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    return generate_corpus(300, 1, 1).train


def marian_folder(folder: Path, pairs, separate: bool = False, codes: tuple[str, ...] = (), **options) -> Path:
    """What a MarianMT folder holds of its tokenizer."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="MarianTokenizer needs it")
    folder.mkdir()
    sides = []
    for name, texts in zip(("source", "target"), zip(*pairs, strict=True), strict=True):
        trained(folder, texts, name, **options).rename(folder / f"{name}.spm")
        reader = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{name}.spm"))
        sides.append([reader.id_to_piece(number) for number in range(3, len(reader))][:-7])  # some are unknown
    sides = sides if separate else [sides[0] + sides[1]]
    last = max(map(len, sides)) + len(codes) + 2
    for name, pieces in zip(("vocab.json", "target_vocab.json"), sides, strict=False):
        names = dict.fromkeys(["</s>", "<unk>", *codes, *pieces])
        ids = {piece: number for number, piece in enumerate(names)} | {"<pad>": last}
        (folder / name).write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    config = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": separate, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def marian_reference(folder: Path):
    return MarianTokenizer.from_pretrained(folder, split_special_tokens=True)


@pytest.fixture(scope="module", params=["one dictionary", "two dictionaries", "byte pairs", "language codes"])
def marian(request, pairs, tmp_path_factory):
    options = {
        "one dictionary": {},
        "two dictionaries": {"separate": True, "codes": (">>fra<<", ">>deu<<")},
        "byte pairs": {"model_type": "bpe", "separate": True},
        "language codes": {"codes": (">>fra<<", ">>deu<<")},
    }[request.param]
    folder = marian_folder(tmp_path_factory.mktemp("marian") / "folder", pairs, **options)
    return marian_reference(folder), marian_tokenizer(folder)


def test_same_ids_as_marian(marian, pairs):
    reference, tokenizer = marian
    assert type(tokenizer) is VaswaniTokenizer
    for side, texts in zip(("text", "text_target"), zip(*pairs, strict=True), strict=True):
        texts = [*texts, "a >>fra<< b", "</s>", ""]
        if ">>fra<<" in tokenizer.get_vocab():  # `MarianTokenizer` takes any such beginning for a code
            texts += [">>fra<< Haus", ">>xyz<< Haus", ">>fra<<"]
        assert tokenizer(**{side: texts})["input_ids"] == reference(**{side: texts})["input_ids"]
    assert tokenizer.model_max_length == 512
    assert tokenizer.supported_language_codes == sorted(key for key in reference.get_vocab() if key.startswith(">>"))
    ids = tokenizer(text_target=[text for _, text in pairs])["input_ids"]
    decoded = [each.batch_decode(ids, skip_special_tokens=True) for each in (tokenizer, reference)]
    assert decoded[0] == decoded[1]


@given(text=TEXTS)
def test_same_ids_as_marian_for_any_text(marian, text):
    reference, tokenizer = marian
    for side in ("text", "text_target"):
        ids, expected = (each(**{side: text})["input_ids"] for each in (tokenizer, reference))
        assert ids == expected or sorted(ids) == sorted(expected)  # the order of pieces of a tie


def test_a_model_that_tokenizers_cannot_follow_keeps_its_class(pairs, tmp_path):
    folder = marian_folder(tmp_path / "folder", pairs, user_defined_symbols=["<sep>"], separate=True)
    reference, tokenizer = marian_reference(folder), marian_tokenizer(folder)
    assert type(tokenizer).__name__ == "MarianTokenizer"
    sources, targets = map(list, zip(*pairs[:20], ("the dog", "der Hund"), strict=True))
    expected, labels = reference(sources)["input_ids"], reference(text_target=targets)["input_ids"]
    assert tokenizer(sources)["input_ids"] == tokenizer.side("source")(sources)["input_ids"] == expected
    assert tokenizer(text_target=targets)["input_ids"] == tokenizer.side("target")(targets)["input_ids"] == labels
    assert tokenizer(sources, text_target=targets)["labels"] == labels
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert type(loaded) is type(reference)
    for copy in (pickle.loads(pickle.dumps(tokenizer)), loaded):
        assert copy(sources)["input_ids"] == expected
    decoded = [each.batch_decode(labels, skip_special_tokens=True) for each in (tokenizer, reference)]
    assert decoded[0] == decoded[1]


def test_tokens_that_were_added_are_refused(pairs, tmp_path):
    original = marian_reference(marian_folder(tmp_path / "folder", pairs))
    original.save_pretrained(tmp_path / "as it is")
    assert type(marian_tokenizer(tmp_path / "as it is")) is VaswaniTokenizer
    original.add_tokens(["<2de>"])
    original.save_pretrained(tmp_path / "added")
    with pytest.raises(UserError, match=r"added to its tokenizer \(<2de>\), which are not kept"):
        marian_tokenizer(tmp_path / "added")


def test_without_sentencepiece_a_model_that_tokenizers_cannot_follow_is_refused(pairs, tmp_path, monkeypatch):
    folder = marian_folder(tmp_path / "folder", pairs, user_defined_symbols=["<sep>"])
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UserError, match=r"package sentencepiece: pip install 'vaswani_transformer\[sentencepiece\]'"):
        marian_tokenizer(folder)
