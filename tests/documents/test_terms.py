"""Terms that earlier translations have in one way."""

import pytest

from vaswani_transformer.documents.terms import find_terms

SAME = [("Save the layer", "Die Ebene speichern"), ("Delete this layer", "Diese Ebene löschen"), ("Layer", "Ebene")]


def found(pairs) -> dict[str, tuple[str, ...]]:
    return {term.source: term.targets for term in find_terms(pairs)}


def test_what_is_translated_in_one_way_is_a_term():
    [term] = find_terms(SAME)
    assert term == ("layer", ("Ebene",), 3, 3)
    assert found(SAME[:2]) == {} == found([*SAME[:2], SAME[0]])  # two different translations are too few
    assert found([*SAME, ("A layer of paint", "Eine Schicht Farbe")]) == {}


def test_of_terms_in_each_other_the_longer_counts_unless_it_says_the_same():
    spaces = [(f"{verb} the color space", f"Den Farbraum {other}") for verb, other in
              (("Change", "ändern"), ("Reset", "leeren"), ("Convert", "umwandeln"))]  # fmt: skip
    assert found(spaces)["color space"] == ("Den Farbraum",) and "space" not in found(spaces)
    for word in ("layer", "straße"):
        same = [(source.lower().replace("layer", word), target) for source, target in SAME]
        current = [(f"{verb} current {word}", f"{verb} Ebene") for verb in ("Aaaa", "Bbbb", "Cccc")]
        other = [("current size", "Größe"), ("current name", "Name"), ("current font", "Schrift")]
        terms = found([*same, *current, *other])
        assert word in terms and f"current {word}" not in terms


def test_all_forms_of_letters_and_words_without_spaces_count_and_placeholders_and_short_words_do_not():
    pairs = [("Please %s the <b>file</b>", "Bitte %s"), ("%s, please", "%s bitte"), ("please, is it on", "bitte, an")]
    assert found(pairs) == {"please": ("Bitte", "bitte")} or found(pairs) == {"please": ("bitte", "Bitte")}
    pairs = [("Save layer", "レイヤーを保存"), ("layer", "レイヤー"), ("This layer", "このレイヤー")]
    assert found(pairs) == {"layer": ("レイヤー",)}


@pytest.mark.parametrize("number", [3, 30])
def test_a_sentence_that_comes_often_has_no_terms_of_its_own(number):
    pairs = [(f"Your computer slows down {row}", f"Der Rechner wird langsam {row}") for row in range(number)]
    assert found(pairs) == {}
