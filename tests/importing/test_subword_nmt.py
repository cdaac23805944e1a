"""Pieces of byte-pair encoding, against the algorithm of the paper."""

import json
from pathlib import Path

import pytest
from conftest import error_of
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from vaswani_transformer import VaswaniTokenizer
from vaswani_transformer.importing.fairseq_vocabulary import merges_backend

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
TEXT = (
    "the lower newest widest houses are wider than the newer ones , and the lowest house is the oldest . "
    "die Häuser sind älter als die Straßen , und die älteste Straße ist die breiteste ; oh oooooh aaa aaaa ."
)


def learned(texts: list[str], size: int, version: str) -> str:
    """A file of merges, which `tokenizers` learns."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, end_of_word_suffix="</w>")
    tokenizer.train_from_iterator(texts, trainer)
    lines = [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    if version == "fastBPE":
        return "".join(f"{line} {9999 - number}\n" for number, line in enumerate(lines))
    return "".join(f"{line}\n" for line in ["#version: 0.2", *lines])


class Case:
    """Merges of a version, a dictionary that lacks some pieces, and the backend."""

    def __init__(self, folder: Path, version: str, texts: list[str], size: int):
        self.path = folder / version
        self.path.write_text(learned(texts, size, version), encoding="utf-8")
        lines = self.path.read_text(encoding="utf-8").splitlines()
        self.merges = [line.split(" ") for line in lines if not line.startswith("#")]
        words = sorted({word for text in texts for word in text.split()})
        pieces = dict.fromkeys(piece for word in words for piece in self.pieces(word))
        kept = [piece for number, piece in enumerate(pieces) if number % 7]
        self.ids = {token: number for number, token in enumerate((*SPECIAL, *kept))}
        self.backend = merges_backend(self.path, self.ids)

    def pieces(self, word: str) -> list[str]:
        """The pieces of a word by Algorithm 1 of Sennrich, Haddow and Birch (2016): one merge after the other."""
        symbols = [*word[:-1], word[-1] + "</w>"]
        for left, right, *_ in self.merges:
            place = 0
            while place < len(symbols) - 1:
                if symbols[place] == left and symbols[place + 1] == right:
                    symbols[place : place + 2] = [left + right]
                place += 1
        pieces = "\0".join(symbols).removesuffix("</w>").removesuffix("\0").split("\0")
        return [f"{piece}@@" for piece in pieces[:-1]] + pieces[-1:]

    def encode(self, text: str) -> list[int]:
        return [number if number < len(self.ids) else 3 for number in self.backend.encode(text).ids]


@pytest.fixture(scope="module", params=["0.2", "fastBPE"])
def case(request, tmp_path_factory) -> Case:
    return Case(tmp_path_factory.mktemp("codes"), request.param, [TEXT], 80)


LETTERS = st.text(st.sampled_from("aehnorstwäßo.é☃</>@"), min_size=1, max_size=9)
ANY = st.text(st.characters(blacklist_categories=["Cs", "Cc", "Co"]), max_size=12)


@given(text=st.lists(LETTERS, max_size=6).map(" ".join) | ANY)
@example(text=TEXT)  # in which every merge was made
def test_pieces_are_those_of_the_algorithm(case, text):
    expected = [case.ids.get(piece, 3) for word in text.split() for piece in case.pieces(word)]
    assert case.encode(text) == [*expected, 2]


def test_texts_come_back(case):
    words = [word for word in TEXT.split() if all(piece in case.ids for piece in case.pieces(word))]
    assert len(words) > 10
    assert case.backend.decode(case.backend.encode(" ".join(words)).ids) == " ".join(words)


def test_special_tokens_in_texts_are_text(case):
    tokenizer = VaswaniTokenizer(
        tokenizer_object=case.backend, known_tokens=(len(case.ids),) * 2, eos_token="</s>", unk_token="<unk>"
    )
    ids = tokenizer("the </s> the", add_special_tokens=False)["input_ids"]
    assert 2 not in ids and ids == [case.ids.get(p, 3) for w in ("the", "</s>", "the") for p in case.pieces(w)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("#version: 0.2\na b\nabc\n", ["expected"]),
        ("a b\nc d\n", ["does not begin with '#version: 0.2'"]),  # version 0.1
        ("a b 7\nc d\n", ["not enough values"]),
        (b"\xff\xfe", ["utf-8"]),
    ],
)
def test_files_that_hold_no_merges(tmp_path, content, words):
    path = tmp_path / "codes"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    error = error_of(merges_backend, path, {token: number for number, token in enumerate(SPECIAL)})
    assert str(path) in error and all(word in error for word in words)
