"""Changes to text, compared with OpusTrainer's modifiers."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vaswani_transformer.data.augmentation import CHANGES, changed
from vaswani_transformer.data.synthetic import generate_corpus

PAIRS = generate_corpus(300, 10, 10).train


def change(kind, source, target="", seed=0):
    return changed(kind, source, target, random.Random(seed))


@pytest.mark.parametrize(
    ("kind", "pair", "expected"),
    [
        ("upper", ("It's 3rd.", "die Straße"), ("IT'S 3RD.", "DIE STRASSE")),
        ("upper", (">>deu<< a b", "c"), (">>deu<< A B", "C")),  # the code of a language stays
        ("title", ("the dog's  (old) 3rd McX.", "ein über-Hund"), ("The Dog's  (Old) 3rd McX.", "Ein Über-Hund")),
        ("lower", ("The EU", "Die EU"), ("the eu", "Die EU")),
        ("punctuation", ("Who?", "谁？"), ("Who", "谁")),
        ("punctuation", ("He left .", "Er ging!"), ("He left", "Er ging")),
        ("punctuation", ("Well...", "Nun."), ("Well...", "Nun.")),
        ("punctuation", ("No, etc", "Nein."), ("No, etc", "Nein.")),
        ("fragments", ("A man, old", "Ein Mann, alt"), ("A man", "Ein Mann")),
        (
            "fragments",
            ("A man, so very old", "Ein sehr alter Mann, ja"),
            ("A man, so very old", "Ein sehr alter Mann, ja"),
        ),
        ("fragments", ("1,000 men", "1.000 Männer"), ("1,000 men", "1.000 Männer")),
        ("typos", ("a bc 123", "x"), ("a bc 123", "x")),
        ("repeat", ("A b.", "C."), ("A b. A b.", "C. C.")),
    ],
)
def test_worked_cases(kind, pair, expected):
    assert change(kind, *pair) == expected


@given(st.text(st.characters(codec="utf-8")), st.text(), st.sampled_from(sorted(CHANGES)), st.integers(0, 9))
def test_any_text_can_be_changed_always_in_the_same_way(source, target, kind, seed):
    assert change(kind, source, target, seed) == change(kind, source, target, seed)


@given(st.sampled_from(PAIRS), st.integers(0, 1000))
def test_a_typing_error_is_one_edit_of_letters_and_insertions_are_the_same_on_both_sides(pair, seed):
    source, target = change("typos", *pair, seed)
    same = len([*zip(*(reversed(text) for text in (source, pair[0])), strict=False)])
    prefix = next((at for at in range(same) if source[at] != pair[0][at]), same)
    suffix = next((at for at in range(same - prefix) if source[-1 - at] != pair[0][-1 - at]), same - prefix)
    assert target == pair[1] and 0 < len(source) - prefix - suffix + 1 <= 3 and abs(len(source) - len(pair[0])) <= 1
    for kind in ("emoji", "numbers"):
        added = [new.replace(old, "") for new, old in zip(change(kind, *pair, seed), pair, strict=True)]
        assert added[0] == added[1] and added[0].strip() and not added[0].strip().isalpha()


@pytest.mark.parametrize(("name", "kind"), [("surface.UpperCase", "upper"), ("surface.TitleCase", "title"),
                                            ("punctuation.RemoveEndPunctuation", "punctuation")])  # fmt: skip
def test_as_opustrainer_does(name, kind):
    """Ours also begins words behind brackets and quotes with a capital, keeps spaces, and leaves commas at an end.

    Its typing errors are up to nine a sentence, spaces among them; its noise is whole lines without the sentence.
    """
    pytest.importorskip("opustrainer")
    module, _, modifier = name.partition(".")
    modifiers = pytest.importorskip(f"opustrainer.modifiers.{module}")
    lines = [*map("\t".join, PAIRS), "Well...\tNun.", "is it?\tist es?", "a b\tc d.", "a  .\tb .", "gut!?\tgut!"]
    theirs = list(getattr(modifiers, f"{modifier}Modifier")(1.0)(lines))
    ours = ["\t".join(change(kind, *line.split("\t"))) for line in lines]
    differing = [line for line, one, other in zip(lines, ours, theirs, strict=True) if one.split() != other.split()]
    assert differing == []
