"""Translating with a memory: exact matches as they are, near ones shown to a model that was trained so."""

import asyncio
import json

import pytest
import translating
from model_folders import PAIRS
from translating import OPTIONS, run

from vaswani_transformer import Translator, load_model
from vaswani_transformer.data.memory import Memory
from vaswani_transformer.decoding.glossary import Glossary
from vaswani_transformer.decoding.streaming import Window

model, source = translating.model, translating.source
MEMORY = [("A dog.", "Es ist\tein Hund."), ("the small red house over there", "das kleine rote Haus dort")]
NEAR, NEW, SHORT = "the small red house over here", PAIRS[0][0], {"num_beams": 2, "max_new_tokens": 6}
SHOWN = f"{NEAR} <TM> {MEMORY[1][1]}"


@pytest.fixture
def loaded(model):
    """A model that is marked as trained with matches, and its tokenizer."""
    loaded, tokenizer = load_model(model, "cpu")
    loaded.generation_config.fuzzy_matches = True
    return loaded, tokenizer


def test_an_exact_match_is_taken_and_a_near_one_is_shown(loaded):
    lines = [NEW, " A  dog. ", "", NEAR, ("A dog.", "Ein"), NEW]
    translator = Translator(*loaded, memory=Memory(MEMORY), scores=True, num_return_sequences=2, **SHORT)
    plain = Translator(*loaded, scores=True, num_return_sequences=2, **SHORT)
    answers, expected = list(translator.hypotheses(lines, 4)), texts_of(plain.hypotheses(lines, 4))
    assert [(each.text, each.score) for each in answers[1]] == [(MEMORY[0][1], None)] * 2
    answers = texts_of(answers)
    assert answers[3:4] == texts_of(plain.hypotheses([SHOWN])) != expected[3:4]
    assert answers[4:5] == texts_of(plain.hypotheses([("A dog. <TM> " + MEMORY[0][1], "Ein")]))
    assert [answers[row] for row in (0, 2, 5)] == [expected[row] for row in (0, 2, 5)]
    translator = Translator(*loaded, memory=Memory(MEMORY), glossary=Glossary({"dog": ["Kater"]}), **SHORT)
    assert [piece.known for piece in translator.prepare(Window(0, 1, ["A dog."])).pieces] == [None]


def texts_of(answers) -> list[list[str]]:
    """Without scores, whose last digits depend on the batch."""
    return [[each.text for each in ranked] for ranked in answers]


def test_a_match_for_which_there_is_no_room_is_not_shown(loaded):
    tokens = len(loaded[1](SHOWN)["input_ids"])
    for most, line in ((tokens, SHOWN), (tokens - 1, NEAR)):
        translator = Translator(*loaded, memory=Memory(MEMORY), max_source_tokens=most, **SHORT)
        assert list(translator.translate([NEAR])) == list(Translator(*loaded, **SHORT).translate([line]))


def test_the_server_answers_with_what_it_knows(loaded, model, fails):
    pytest.importorskip("fastapi")
    from vaswani_transformer.serving.engine import Engine

    async def ask(engine):
        pieces = engine.tokenize([(line, "") for line in ("A dog.", NEAR, NEW)])
        return [each async for each in engine.translate(pieces, tuple(SHORT.items()))]

    engine = Engine(*loaded, memory=Memory(MEMORY))
    answers = {number: ranked[0].text for number, ranked in asyncio.run(ask(engine))}
    engine.close()
    translator = Translator(*loaded, memory=Memory(MEMORY), **SHORT)
    assert answers == dict(enumerate(translator.translate(["A dog.", NEAR, NEW])))
    line = fails("serve", f"en-de={model}", f"de-en={model}", "--memory", "memory.tsv")
    assert "several models and --memory cannot be combined" in line


def test_the_command_takes_exact_matches_of_a_model_that_knows_no_others(model, tmp_path, capsys, caplog):
    (tmp_path / "memory.tsv").write_text("A dog.\tEs ist ein Hund.\nthe small red house over there\tdas Haus\n")
    (tmp_path / "in").write_text(f"A dog.\n{NEAR}\n")
    command = ["translate", model, "--input", tmp_path / "in", *OPTIONS]
    assert run(*command) == 0
    plain = capsys.readouterr().out.splitlines()
    command += ["--memory", tmp_path / "memory.tsv"]
    assert run(*command) == 0
    assert capsys.readouterr().out.splitlines() == ["Es ist ein Hund.", plain[1]]
    assert caplog.text.count("only exact matches of the memory are used") == 1
    assert run(*command, "--nbest", "2", "--confidence") == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["1", "1", "2", "2"] and {row[1] for row in rows[:2]} == {"nan"}
    assert run(*command, "--format", "json", "--scores") == 0
    [first, _] = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["hypotheses"] == [{"text": "Es ist ein Hund.", "tokens": 0}]
    (tmp_path / "in.html").write_text("<p>A <b>dog</b>.</p>")
    assert run("translate", model, "--format", "html", "--input", tmp_path / "in.html", *command[-2:]) == 0
    assert "Hund" in capsys.readouterr().out


def test_a_tag_that_the_vocabulary_does_not_have_stays_beside_a_memory(model, tmp_path, capsys):
    (tmp_path / "memory.tsv").write_text("A dog.\tEin Hund.\n")
    outputs, tag = [], ["--target-language", "<2fr>"]
    for more in ([], tag, [*tag, "--memory", tmp_path / "memory.tsv"]):
        assert run("translate", model, "The dog sees a cat.", "--max-new-tokens", "12", *more) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] != outputs[1] == outputs[2]


def test_a_memory_is_read_in_the_language_of_the_option(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vaswani_transformer.hub.card_facts.known_languages", lambda _: ["en", "fr", "es"])
    unit = "".join(f'<tuv xml:lang="{name}"><seg>{name.upper()}</seg></tuv>' for name in ("en", "fr", "es"))
    (memory := tmp_path / "a.tmx").write_text(f'<tmx version="1.4"><header/><body><tu>{unit}</tu></body></tmx>')
    for tag in (">>spa<<", "<2es>"):
        assert run("translate", model, "EN", "--memory", memory, "--target-language", tag) == 0
        assert capsys.readouterr().out == "ES\n"
        monkeypatch.setattr("vaswani_transformer.hub.card_facts.known_languages", lambda _: ["en", "roa"])
    monkeypatch.delattr("babel.core.get_global", raising=False)  # as without the extras that bring it
    assert run("translate", model, "EN", "--memory", memory, "--target-language", "es") == 0
    assert capsys.readouterr().out == "ES\n"


def test_a_memory_is_a_file_that_an_output_depends_on(model, tmp_path, fails):
    memory, output = tmp_path / "memory.tsv", tmp_path / "out"
    memory.write_text("A dog.\tEin Hund.\n")
    (tmp_path / "in").write_text("A dog.\n")
    command = ["translate", model, "--input", tmp_path / "in", "--output", output, "--memory", memory]
    assert "out is the same file as --memory" in fails(*command, output)
    assert "none.tsv" in fails("translate", model, "a", "--memory", tmp_path / "none.tsv")
    memory.write_text("A dog.\n")
    assert f"{memory}, line 1" in fails("translate", model, "a", "--memory", memory)
    memory.write_text("A dog.\tEin Hund.\n")
    for name in (tmp_path / "*.tsv", memory):
        assert run(*command[:-1], name) == 0 and output.read_text() == "Ein Hund.\n"
    (tmp_path / "in").write_text("A dog.\n" + "a cat " * 20)
    command += ["--window", "1", "--max-source-tokens", "9", "--long-lines", "refuse"]
    assert "line 2 has" in fails(*command) and output.read_text() == "Ein Hund.\n"
    assert "line 2 has" in fails(*command, "--resume", "--tokens-per-batch", 99)  # which changes no output
    memory.write_text("A dog.\tDer Hund.\n")
    assert "cannot be resumed: --memory was" in fails(*command, "--resume")
