"""What a word is, with spaces and without them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vaswani_transformer.data.words import is_part, word_places, words_at, words_of

LETTERS = "ab1_é'-.,(\u0301中文にカー๑ไท\u0e35่「」。！ \n\u3000"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A well-known dog's (big) tail, 3.5 m.", "A well-known dog's (big) tail, 3.5 m."),
        ("नमस्ते दुनिया می\u200cروم", "नमस्ते दुनिया می\u200cروم"),
        ("한국어는 띄어쓰기를 합니다.", "한국어는 띄어쓰기를 합니다."),
        ("两只狗在玩。", "两 只 狗 在 玩。"),
        ("他说：「你好！」", "他 说： 「你 好！」"),
        ("“你好”，我说", "“你 好”， 我 说"),
        ("我有2只iPhone（新）吗？", "我 有 2 只 iPhone （新） 吗？"),
        ("コーヒーが好き", "コー ヒー が 好 き"),
        ("สวัสดี 2024", "ส วั ส ดี 2024"),
        ("naïve 中文 words", "naïve 中 文 words"),
        ("𠀋が", "𠀋 が"),
        ("", ""),
    ],
)
def test_words(text, expected):
    assert words_of(text) == expected.split()


@given(st.text("ab1é'-.,(\u0301\"…— \n\u3000", max_size=20))
def test_with_spaces_a_word_is_what_stands_between_them(text):
    assert words_of(text) == text.split()


@given(st.text(LETTERS, max_size=20))
def test_words_are_all_of_a_text_but_its_spaces(text):
    assert "".join(words_of(text)) == "".join(text.split())
    assert all(before[1] <= behind[0] for before, behind in pairwise(word_places(text)))
    # Each word by itself is one, whatever stands around it, and no letter without spaces has another beside it.
    assert all(len(words_of(word)) == 1 for word in words_of(text))
    assert all(sum(letter in "中文にカไท" for letter in word) <= 1 for word in words_of(text))


@given(st.text(LETTERS, min_size=1, max_size=20), st.data())
def test_the_words_of_parts(text, data):
    end = data.draw(st.integers(0, len(text)))
    start = data.draw(st.integers(0, end))
    [found] = words_at(text, [(start, end)])
    expected, behind = set(), 0
    for number, (_, last) in enumerate(word_places(text)):
        if max(start, behind) < min(end, last):  # a word, and the white space before it
            expected.add(number)
        behind = last
    assert set(found) == expected


def test_parts_of_words():
    assert is_part("doghouse", 0, 3) and is_part("doghouse", 3, 8) and not is_part("dog-house", 0, 3)
    assert not is_part("电脑桌", 0, 2) and not is_part("新iPhone吗", 1, 7) and is_part("新iPhone吗", 1, 3)
    assert is_part("ที่", 0, 1) and is_part("コーヒー", 0, 1) and not is_part("コーヒー", 0, 2)  # a letter and its marks
    assert is_part("می\u200cروم", 0, 2) and is_part("क्\u200dष", 3, 4)  # joined


@pytest.mark.timeout(20)
def test_texts_that_are_made_to_be_slow():
    for part in ("(", "「", "中", "(中", "a", "ー", ".中(", "中。"):
        text = part * 100_000
        assert sum(end - start for start, end in word_places(text)) == len(text)
