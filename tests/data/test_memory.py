"""The translation memory: exact matches, near ones beside a comparison with all, and what is trained and read of it."""

import pytest
from conftest import error_of, tiny_recipe
from hypothesis import given
from hypothesis import strategies as st
from pair_files import in_memory

from vaswani_transformer.data import memory
from vaswani_transformer.data.augmentation import changed
from vaswani_transformer.data.memory import Memory, read_memory
from vaswani_transformer.data.prepare import prepare
from vaswani_transformer.data.recipe_data import _with_matches, load_training_pairs
from vaswani_transformer.training.initial_model import new_model
from vaswani_transformer.training.run import make_tokenizer

TEXTS = st.lists(st.sampled_from(["a", "b", "c", "d", "ee", "ff", "gg", "里", ",", "."]), max_size=9).map(" ".join)
PO = [("", ""), ("a dog", "Köter"), ("a cat", "Katze")]
ENTRIES = st.lists(st.tuples(TEXTS, st.sampled_from("xyz")), max_size=25)


def similarity(first: list[str], second: list[str]) -> float:
    """By the recurrence of the edit distance."""
    row = list(range(len(second) + 1))
    for number, one in enumerate(first, 1):
        before, row = row, [number]
        for column, other in enumerate(second, 1):
            row.append(min(before[column] + 1, row[-1] + 1, before[column - 1] + (one != other)))
    return 1 - row[-1] / max(len(first), len(second), 1)


@given(ENTRIES, TEXTS, st.sampled_from([0.5, 0.6, 0.7, 1.0]), st.booleans(), st.sampled_from([1, 30]))
def test_near_entries_are_those_of_a_comparison_with_all(pairs, source, least, others, number):
    entries = {text: (place, target) for place, (text, target) in enumerate(pairs) if text}  # the latest of each
    shares = {text: similarity(text.split(), source.split()) for text in entries}
    expected = [text for text, share in shares.items() if share >= least - 1e-9 and not (others and text == source)]
    expected.sort(key=lambda text: (-shares[text], -entries[text][0]))
    [near] = Memory(pairs).near([source], least, number, others)
    assert [match[1:] for match in near] == [(text, entries[text][1]) for text in expected[:number]]
    assert [match[0] for match in near] == pytest.approx([shares[text] for text in expected[:number]])
    assert Memory(pairs).exact(source) == entries.get(source, (0, None))[1]


def test_of_many_entries_with_the_same_words_those_with_most_are_compared(monkeypatch):
    monkeypatch.setattr(memory, "_MOST_COMPARED", 3)
    pairs = [(f"the house {word} {other}", word) for word in "abcdefgh" for other in "stuvwxyz"]
    assert next(Memory(pairs).near(["the house e v !"]))[0] == (0.8, "the house e v", "e")


def test_an_exact_match_is_the_same_but_for_white_space_and_forms_of_characters():
    pairs = [("Cafe\u0301  now\n", " one "), ("a b", "old"), (" ", "blank"), ("blank", ""), ("a  b", "new")]
    assert [*map(Memory(pairs).exact, ["Caf\u00e9 now", "a b", "A b", "a", "blank", ""])] == ["one", "new", *[None] * 4]
    assert Memory([]).exact("a") is None and next(Memory([]).near(["a"])) == []


def test_matches_are_of_the_same_language():
    texts = [("<2fr> the dog runs", "F"), ("<2de> the dog runs", "D"), ("<2fr> the cat runs", "G"), ("<2fr> stop", "S")]
    assert _with_matches(in_memory(texts))["source"][4:] == ["<2fr> the dog runs <TM> G", "<2fr> the cat runs <TM> F"]


def test_each_pair_with_a_near_one_is_trained_on_with_and_without_its_translation(tmp_path):
    words = ["the small dog runs", "the small cat runs", "the small cat runs", "two birds", "one small cat sleeps now"]
    for name, pairs in (("train", words), ("validation", ["the small dog sleeps"])):
        in_memory([(text, text.upper()) for text in pairs]).to_parquet(tmp_path / f"{name}.parquet")
    data = {"train_data": "train.parquet", "validation_data": "validation.parquet", "fuzzy_matches": True}
    recipe = tiny_recipe(tmp_path, **data, **dict.fromkeys(["train_source", "train_target"]))
    recipe.validation_source = recipe.validation_target = None
    train, validation = load_training_pairs(recipe)
    beside = {0: 1, 1: 0, 2: 0}  # by the recurrence; the last has no more than 2 of 5 words of another
    for row, text in enumerate(words):
        [*near] = (similarity(text.split(), other.split()) for other in words if other != text)
        assert (max(near) >= 0.5) == (row in beside)
    matches = [f"{words[row]} <TM> {words[other].upper()}" for row, other in beside.items()]
    assert train["source"] == [*words, *matches] and validation["source"] == ["the small dog sleeps"]
    assert train["target"] == [*map(str.upper, words), *(words[row].upper() for row in beside)]
    assert new_model(recipe, make_tokenizer(recipe, train)).generation_config.fuzzy_matches
    assert changed("upper", "a <TM> b", "c", None) == ("A <TM> b", "C")
    assert prepare(recipe, tmp_path / "prepared", progress=False)["parts"]["train"]["counts"]["read"] == len(train)


def test_memories_are_files_of_pairs_of_which_the_last_counts(tmp_path):
    unit = '<tu><tuv xml:lang="en"><seg>a dog</seg></tuv><tuv xml:lang="de"><seg>Hund</seg></tuv></tu>'
    (tmp_path / "a.tmx").write_text(f"<tmx><body>{unit}</body></tmx>")
    (tmp_path / "b.po").write_text("".join(f'msgid "{x}"\nmsgstr "{y}"\n\n' for x, y in PO), "utf-8")
    (tmp_path / "c.tsv").write_text("a dog\tein Hund\n")
    files = [str(tmp_path / name) for name in ("a.tmx", "b.po", "c.tsv")]
    known = [read_memory(files[: end + 1], ["en", "de"]).exact("a dog") for end in range(3)]
    assert known == ["Hund", "Köter", "ein Hund"] and read_memory(files, ["en", "de"]).exact("a cat") == "Katze"
    assert "no unit has segments in both 'en' and 'fr'" in error_of(read_memory, files, ["en", "fr"])
    for name in ("none", "none.tsv"):  # which the Hub is not asked for
        assert error_of(read_memory, [name]).endswith(f"/{name}: No such file or directory")


def test_an_entry_of_a_catalogue_is_known_in_its_context_only(tmp_path):
    texts = [("menu", "File", "Datei"), ("tool", "File", "Feile"), ("menu", "Edit", "Bearbeiten"), ("", "Quit", "Ende")]
    text = "".join(f'msgctxt "{c}"\nmsgid "{s}"\nmsgstr "{t}"\n\n' for c, s, t in texts)
    (tmp_path / "de.po").write_text(text.replace('msgctxt ""\n', ""), encoding="utf-8")
    for known in (read_memory([str(tmp_path / path)]) for path in ("", "*.po", "de.po")):
        expected = {"menu": "Datei", "tool": "Feile", "": None, None: "Feile"}
        assert expected == {context: known.exact("File", context) for context in expected}
    assert known.exact("Edit", "window") == "Bearbeiten"  # of a context that it knows nothing of
    assert known.exact("Edit", "tool") is None and known.exact(" Quit ", "") == "Ende" == known.exact("Quit")
