"""What files of any size are translated with: windows, reading ahead, long lines, outputs that can be resumed."""

import json
from dataclasses import replace

import pytest
from children import wait_for
from conftest import error_of
from hypothesis import given
from hypothesis import strategies as st

from vaswani_transformer.data.text_files import with_lines_of
from vaswani_transformer.decoding import streaming
from vaswani_transformer.decoding.file_translator import record
from vaswani_transformer.decoding.output import ResumableOutput, notes_path
from vaswani_transformer.decoding.streaming import in_windows, read_ahead, split_line
from vaswani_transformer.decoding.translator import Hypothesis
from vaswani_transformer.errors import UserError


@given(st.lists(st.text("ab", max_size=9), max_size=30), st.integers(1, 8), st.integers(0, 20), st.booleans())
def test_windows_hold_every_line_once_and_of_long_lines_fewer(lines, size, done, are_long):
    characters = 10 if are_long else 1000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "WINDOW_CHARACTERS", characters)
        windows, rest = list(in_windows(lines, size)), list(in_windows(lines, size, done))
    assert [line for window in windows for line in window.lines] == lines
    assert [window.index for window in windows] == list(range(len(windows)))
    for window in windows:
        assert lines[window.first - 1 : window.first - 1 + len(window.lines)] == window.lines
        assert 1 <= len(window.lines) <= size and sum(map(len, window.lines[:-1])) < characters
        assert window is windows[-1] or len(window.lines) == size or sum(map(len, window.lines)) >= characters
    assert rest == [window for window in windows if window.first + len(window.lines) - 1 > done]


def test_an_error_comes_with_the_lines_before_it():
    def lines():
        yield from "abcde"
        raise UserError("line 6 is bad")

    *whole, last = in_windows(lines(), 2)
    assert [window.lines for window in whole] == [["a", "b"], ["c", "d"]]
    assert last.lines == ["e"] and str(last.error) == "line 6 is bad" and all(window.error is None for window in whole)


def test_reading_ahead_changes_nothing_but_the_time():
    made = []

    def items():
        for number in range(4):
            made.append(number)
            yield number
        raise KeyError("four")

    ahead = read_ahead(items())
    for number in range(4):
        assert next(ahead) == number
        least = min(number + 2, 4)
        wait_for(lambda least=least: len(made) >= least)
        assert made == list(range(least))  # the next one, no more
    with pytest.raises(KeyError, match="four"):
        next(ahead)


def words(text: str) -> int:
    """Tokens of a tokenizer for which every word is one, and every 5 letters beyond; `</s>` is one."""
    return sum(1 + (len(word) - 1) // 5 for word in text.split()) + 1


@given(
    st.lists(st.sampled_from(["a", "dog", "sees,", "him.", "Then", "running;", "x" * 17, "Dr.", "No!"]), min_size=1),
    st.integers(3, 9),
)
def test_pieces_fit_and_lose_nothing(parts, limit):
    text = " ".join(parts)
    pieces = split_line(text, limit, words)
    assert all(words(piece) <= limit for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("A dog runs. It is old.", 6, ["A dog runs.", "It is old."]),  # sentences stay alone though both would fit
        ("A dog runs. No, it is old and so on.", 5, ["A dog runs.", "No,", "it is old and", "so on."]),
        ("one two, three  four,  five", 5, ["one two, three  four,", "five"]),
        ("abcdefghijklmnopqrstuvwxyz", 3, ["abcdefghij", "klmnopqrst", "uvwxyz"]),
        ("天天天天天，天天天天天，天", 3, ["天天天天天，", "天天天天天，天"]),
        ("   ", 3, []),
    ],
)
def test_where_lines_are_split(text, limit, expected):
    assert split_line(text, limit, words) == expected


def test_long_lines_are_split_by_the_rules_of_their_language():
    text = "Er kam am 3. Oktober mit Dr. Weiß. Sie blieb hier."
    for language in ("de", "auto"):
        assert split_line(text, 20, words, language) == ["Er kam am 3. Oktober mit Dr. Weiß.", "Sie blieb hier."]
    assert split_line(text, 20, words)[0] == "Er kam am 3."


def test_an_output_continues_after_its_last_whole_record(tmp_path):
    path, settings = tmp_path / "out", {"--beams": 4}
    output = ResumableOutput(path, settings, lines_per_record=2)
    output.write("1 a\n1 b\n2 a\n2 b\n")
    output.write("3 a\n3")  # killed in the middle
    output.close()
    output = ResumableOutput(path, settings, lines_per_record=2, resume=True)
    assert output.done == 2 and path.read_text() == "1 a\n1 b\n2 a\n2 b\n"
    output.write("3 a\n3 b\n")
    output.finish()
    output.close()
    assert path.read_text() == "1 a\n1 b\n2 a\n2 b\n3 a\n3 b\n" and list(tmp_path.iterdir()) == [path]


def test_outputs_that_cannot_be_resumed(tmp_path):
    path = tmp_path / "out"
    path.write_text("of another program\n")
    assert "has no out.unfinished.json beside it" in error_of(ResumableOutput, path, {}, resume=True)
    assert path.read_text() == "of another program\n"
    ResumableOutput(path, {}).close()  # without --resume it is replaced, as ever
    for notes in ("{", "[" * 10**5, '{"--seed": 1, "--seed": 1}', '{"--seed": "x"}', "{}"):
        notes_path(path).write_text(notes)
        assert "out.unfinished.json" in error_of(ResumableOutput, path, {"--seed": 3}, resume=True)


def test_resuming_what_was_never_started_starts(tmp_path):
    path = tmp_path / "out"
    for before in (None, b""):  # killed before the first byte of the notes
        path.unlink(missing_ok=True)
        notes_path(path).unlink(missing_ok=True)
        if before is not None:
            path.write_bytes(before)
        output = ResumableOutput(path, {"a": 1}, resume=True)
        assert output.done == 0 and json.loads(notes_path(path).read_text()) == {"a": 1}
        output.close()


@pytest.mark.parametrize("number", [1, 3])
def test_prefixes_are_one_a_line(tmp_path, number):
    (tmp_path / "prefixes").write_text("Ein\n\n")
    assert list(with_lines_of(["A", "B"], "in", tmp_path / "prefixes")) == [("A", "Ein"), ("B", "")]
    with pytest.raises(UserError, match=r"prefixes has .* than in, which has 1:|^in has .*prefixes, which has 2:"):
        list(with_lines_of(["A"] * number, "in", tmp_path / "prefixes"))


def test_records():
    two = [Hypothesis("ein\tHund", 3, -1.5, -1.25), Hypothesis("Hund", 2, -3.0, -2.5)]
    assert record(7, two[:1]) == "ein\tHund\n"
    assert record(7, two[:1], scores=True) == "-1.250000\tein Hund\n"
    aligned = [replace(each, alignment=f"0-{number}") for number, each in enumerate(two)]
    assert record(7, aligned, numbered=True) == "7\t-1.250000\tein Hund\t0-0\n7\t-2.500000\tHund\t0-1\n"
    written = json.loads(record(1, [two[0], Hypothesis("x", 2)], as_json=True))
    known = {"text": "ein\tHund", "tokens": 3, "score": -1.25, "log_probability": -1.5}
    assert written == {"line": 1, "hypotheses": [known, {"text": "x", "tokens": 2}]}
