"""`vaswani distill`: the text that teachers write for a student, what is kept of it, and resuming in every step."""

import json
import math
import re
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import translating
import yaml
from children import run_on_two_processes
from conftest import TINY_RECIPE
from model_folders import change, write_model
from training_runs import equal, stop_after_step, weights_of

import vaswani_transformer as vt
from vaswani_transformer import distillation
from vaswani_transformer.cli.main import main
from vaswani_transformer.data.recipe_data import data_sources, load_training_pairs
from vaswani_transformer.decoding.file_translator import FileTranslator
from vaswani_transformer.decoding.translator import Translator
from vaswani_transformer.distillation import distill, student_recipe
from vaswani_transformer.errors import UserError
from vaswani_transformer.hub.card_facts import facts_of, read_run
from vaswani_transformer.hub.model_card import render_card
from vaswani_transformer.recipes.recipe import Recipe, load_recipe

pytestmark = pytest.mark.usefixtures("without_pictures")
here = translating.here
LINES, WINDOW = 18, 4  # of the training text, and those that are translated together where it is interrupted


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Two models of one tokenizer, English to German; their outputs are short."""
    folders = [write_model(tmp_path_factory.mktemp("models") / f"teacher-{seed}", seed) for seed in (2, 3)]
    for folder in folders:
        change(folder, "generation_config.json", max_extra_tokens=2, num_beams=3)
        facts = {"toolkit": "Marian", "source": "owner/name", "languages": ["en", "de"]}
        (folder / "import.json").write_text(json.dumps(facts))
    return folders


@pytest.fixture(scope="module")
def student(tmp_path_factory, text):
    """The recipe of a student: some lines of the text, and a blank one."""
    folder = tmp_path_factory.mktemp("recipe")
    for side in ("en", "de"):
        lines = (text / f"train.{side}").read_text().splitlines()[:LINES]
        lines[4] = ""
        (folder / f"short.{side}").write_text("".join(line + "\n" for line in lines))
    values = {name: value for name, value in TINY_RECIPE.items() if name != "vocab_size"}
    values |= {"train_source": str(folder / "short.en"), "train_target": str(folder / "short.de")}
    values |= {"data_dir": str(text), "max_steps": 2, "evaluate_every": 2, "average_checkpoints": 2}
    (folder / "student.yaml").write_text(yaml.safe_dump(values | {"precision": "fp32", "deterministic": True}))
    return folder / "student.yaml"


@pytest.fixture
def made(student, tmp_path, monkeypatch):
    """A function that has a text distilled, without the training, and returns its pairs."""
    monkeypatch.setattr(distillation, "train", lambda recipe, progress: None)

    def make(teachers, name="out", split="train", **teaching):
        recipe = load_recipe(str(student), {"output": str(tmp_path / name), "train_split": split})
        distill(list(map(str, teachers)), recipe, **teaching, progress=False)
        return pairs_of(tmp_path / name)

    return make


def pairs_of(folder, name="distilled") -> list[tuple[str, str]]:
    return list(zip(*((folder / f"{name}.{side}").read_text().splitlines() for side in ("en", "de")), strict=True))


@pytest.mark.parametrize("number", [1, 2], ids=["one", "ensemble"])
def test_the_best_translations_of_one_teacher_or_several(teachers, student, made, tmp_path, number):
    source, ensemble = student.with_name("short.en"), ["--ensemble", teachers[1]] if number == 2 else []
    command = ["translate", teachers[0], "--input", source, "--output", tmp_path / "oracle", "--format", "json"]
    assert translating.run(*command, "--scores", *ensemble) == 0
    found = [json.loads(line)["hypotheses"] for line in (tmp_path / "oracle").read_text().splitlines()]
    best = [(line, one) for line, each in zip(source.read_text().splitlines(), found, strict=True) for one in each[:1]]
    expected = [(line, one["text"]) for line, one in best if one["text"].strip() and not one.get("repeats")]
    assert len(expected) > LINES // 2 and made(teachers[:number]) == expected
    facts = json.loads((tmp_path / "out" / "distillation.json").read_text())
    assert (facts["lines"], facts["pairs"]) == (LINES, len(expected))


def test_outputs_that_are_empty_or_repeat_themselves_are_dropped(teachers, made, tmp_path, monkeypatch):
    def translate(self, prepared, progress=None):
        texts = (["", "round", "right"] * LINES)[: len(prepared.lines)]
        return [[vt.decoding.translator.Hypothesis(text, 3, -3.0, -1.0, repeats=text == "round")] for text in texts]

    monkeypatch.setattr(Translator, "translate_prepared", translate)
    assert [target for _, target in made(teachers[:1])] == ["right"] * (LINES // 3)
    assert len(made(teachers[:1], "cut", "train[:3]")) == 1
    assert len(made(teachers[:1], "text", "train[:3]", text=str(tmp_path / "out" / "distilled.en"))) == LINES // 9


def test_validation_stays_and_a_text_of_lines_needs_no_references(teachers, text, tmp_path):
    table = tmp_path / "table"
    table.mkdir()
    for split in ("train", "validation"):
        (table / f"{split}.tsv").write_text("".join("\t".join(pair) + "\n" for pair in pairs_of(text, split)))
    data = {"train_data": str(table), "validation_split": "validation", "output": str(tmp_path / "out")}
    recipe = student_recipe(str(teachers[0]), Recipe(**data))
    assert next(iter(data_sources(Recipe(**data))[0].stream()))[0] == (text / "train.en").read_text().splitlines()[0]
    one_text = dict.fromkeys(("train_source", "train_target"), str(text / "test.en"))
    lines = Recipe(**vars(recipe) | one_text)
    names = {"train_source": str(text / "train.en"), "train_target": str(text / "train.de")}
    cut = {"train_split": "train[3:]", "validation_split": "train[:3]"}  # of two files of text
    train, validation = load_training_pairs(Recipe(**names, **cut))
    assert [*validation["source"], *train["source"]] == (text / "train.en").read_text().splitlines()
    mono = Recipe(**cut | {"train_split": "train"} | one_text)
    assert len(list(data_sources(mono, one_text=True)[0].stream())) == len((text / "test.en").read_text().splitlines())
    student = student_recipe(str(teachers[0]), Recipe(**names, **cut, output=str(tmp_path)))
    assert (student.validation_source, student.train_split) == (names["train_source"], "train")
    own = student_recipe(str(teachers[0]), replace(student, tokenizer="own"))
    assert (student.tokenizer, own.tokenizer) == (str(teachers[0]), "own")
    source, validation = data_sources(lines, one_text=True)
    assert [pair[0] for pair in source.stream()] == (text / "test.en").read_text().splitlines()
    assert [pair[1] for pair in validation.stream()] == (text / "validation.de").read_text().splitlines()


def test_workers_write_what_one_process_writes(teachers, student, tmp_path, here, monkeypatch, fails):
    monkeypatch.setattr(distillation, "train", lambda recipe, progress: None)
    monkeypatch.setattr(distillation, "FileTranslator", partial(FileTranslator, window=WINDOW))
    command = ["distill", teachers[0], "--student", student, "--quiet", "--output"]
    monkeypatch.setattr("vaswani_transformer.cli.train._print_trained", lambda result: None)
    assert translating.run(*command, tmp_path / "one") == 0
    here.append(3)
    for name, workers in (("workers", ["--workers", "3"]), ("finished by one", [])):
        out = tmp_path / name
        assert "was killed" in fails(*command, out, "--workers", "3")
        assert (out / "translations.jsonl").read_text().count("\n") == 3 * WINDOW
        here.clear()
        assert translating.run(*command, out, *workers) == 0
        here.append(3)
        assert (out / "distilled.de").read_bytes() == (tmp_path / "one" / "distilled.de").read_bytes()
        files = {path.name for path in out.iterdir() if path.name[0] != "."}
        assert files == {"distilled.en", "distilled.de", "distillation.json"}


def test_the_command_resumes_in_every_step(teachers, student, tmp_path, monkeypatch, capsys):
    command = ["distill", *map(str, teachers), "--student", str(student), "--quiet", "--output"]
    assert main([*command, str(tmp_path / "straight")]) == 0
    translate, translated = Translator.translate_prepared, []

    def stopped(self, prepared, progress=None):
        translated.append(prepared.index)
        if translated == [0, 1, 2]:
            raise KeyboardInterrupt
        return translate(self, prepared, progress)

    monkeypatch.setattr(distillation, "FileTranslator", partial(FileTranslator, window=WINDOW))
    monkeypatch.setattr(Translator, "translate_prepared", stopped)
    out = tmp_path / "out"
    assert main([*command, str(out)]) == 130
    assert "To resume, run the same command again" in capsys.readouterr().out
    assert (out / "translations.jsonl").read_text().count("\n") == 2 * WINDOW
    assert not (out / "distillation.json").exists()
    stop_after_step(1, monkeypatch)
    assert main([*command, str(out)]) == 128 + signal.SIGTERM
    assert translated == [0, 1, 2, *range(2, math.ceil(LINES / WINDOW))]
    assert {path.name for path in out.glob("[!.]*.json*")} == {"distillation.json", "training_log.jsonl"}
    monkeypatch.undo()
    nothing_is_translated(monkeypatch)
    assert main([*command, str(out)]) == 0
    assert equal(weights_of(tmp_path / "straight"), weights_of(out))


def nothing_is_translated(monkeypatch):
    monkeypatch.setattr(distillation, "load_for_decoding", lambda *_, **__: pytest.fail("loaded a teacher"))


@pytest.fixture(scope="module")
def finished(teachers, student, tmp_path_factory):
    """The folder of a student."""
    folder = tmp_path_factory.mktemp("finished") / "student"
    assert main(["distill", str(teachers[0]), "--student", str(student), "--output", str(folder), "--quiet"]) == 0
    return folder


def test_the_student_has_the_teachers_tokenizer_and_a_card_that_names_it(teachers, finished):
    model, tokenizer = vt.load_model(finished, device="cpu")
    assert tokenizer.get_vocab() == vt.load_tokenizer(teachers[0]).get_vocab()
    card = render_card(facts_of(model, "me/mine", finished))
    assert re.search(r"\| distilled from \| teacher-2 \|", card)
    assert "| train_source | distilled.en |" in card and "from en to de" in card
    assert str(finished.parent) not in card and not (finished / "translations.jsonl").exists()


def test_a_teacher_of_unknown_languages_leaves_them_to_the_recipe(stranger, student):
    recipe = student_recipe(str(stranger), load_recipe(str(student), {"output": "out"}))
    assert [Path(path).name for path in (recipe.train_source, recipe.train_target)] == ["distilled.en", "distilled.de"]


def test_a_finished_student_is_trained_anew_on_the_same_text(teachers, student, finished, tmp_path, fails, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    command = ["distill", teachers[0], "--student", student, "--output", folder, "--quiet"]
    assert "already holds a model" in fails(*command)
    nothing_is_translated(monkeypatch)
    command += ["--validation-source", "none", "--validation-target", "none", "--validation-size", 2]
    assert main([*map(str, command), "--overwrite", "--encoder-layers", "2", "--validation-bleu", "2"]) == 0
    assert vt.load_model(folder, device="cpu")[0].config.encoder_layers == 2
    verdict = (folder / "verdict.json").read_text()
    assert "validation against the teachers' translations, greedy: BLEU" in verdict
    assert pairs_of(folder) == pairs_of(finished)
    assert "other settings (beams)" in fails(*command, "--overwrite", "--beams", 2)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """A model of another tokenizer."""
    folder = write_model(tmp_path_factory.mktemp("models") / "stranger")
    vt.train_tokenizer(["another text"], vocab_size=300).save_pretrained(folder)
    return folder


def test_bad_input_ends_in_one_line_and_leaves_nothing(teachers, stranger, student, tmp_path, fails):
    (tmp_path / "empty.en").touch()
    out = tmp_path / "out"
    command = ["distill", teachers[0], "--student", student, "--output", out, "--quiet"]
    for words, message in {
        ("distill", *teachers, stranger, *command[2:]): "have different tokenizers: members of an ensemble",
        (*command, "--text", tmp_path / "empty.en"): "empty.en: empty, no pair; give at least one",
        (*command[:3], "small", *command[4:]): "there is no text to train on: give both train_source",
        (*command[:4], "--output", teachers[0], "--overwrite"): f"is where the model {teachers[0]} lies",
        (*command, "--beams", 0): 'Invalid value "0" for --beams. Must be >= 1',
        (*command, "--teacher-precision", "int7"): "precision is 'int7'",
    }.items():
        assert message in fails(*words), words
        assert not out.exists(), words


@pytest.mark.parametrize("name", ["distilled.de", "distillation.json", "translations.jsonl", "config.json"])
def test_a_folder_that_is_not_ours(teachers, student, tmp_path, fails, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("{}\n")
    message = fails("distill", teachers[0], "--student", student, "--output", tmp_path / "out", "--quiet")
    assert str(tmp_path / "out") in message and "--output" in message
    assert (tmp_path / "out" / name).read_text() == "{}\n"


def test_an_unfinished_translation_with_other_settings(teachers, student, tmp_path, fails, monkeypatch):
    monkeypatch.setattr(distillation.DistilledText, "_write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    command = ["distill", teachers[0], "--student", student, "--output", tmp_path / "out", "--quiet"]
    assert main(list(map(str, command))) == 130
    assert "cannot be resumed: beams was None and is 2 now" in fails(*command, "--beams", 2)


def test_an_interrupted_training_on_other_text_is_seen_before_the_work(teachers, student, tmp_path, fails, monkeypatch):
    monkeypatch.setattr(distillation, "check_output", lambda _: tmp_path)
    command = ["distill", teachers[0], "--student", student, "--output", tmp_path / "out", "--quiet"]
    assert "out holds an interrupted training on other text" in fails(*command)


@pytest.mark.slow
def test_two_processes_distil_what_one_does(teachers, student, tmp_path):
    words = ["distill", teachers[0], "--student", student, "--quiet", "--dropout", "0", "--output"]
    assert main([*map(str, words), str(tmp_path / "one")]) == 0
    run_on_two_processes(*words, tmp_path / "two")
    assert pairs_of(tmp_path / "one") == pairs_of(tmp_path / "two")
    torch.testing.assert_close(weights_of(tmp_path / "one"), weights_of(tmp_path / "two"), rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("whole_outputs")  # a model of two steps repeats itself
def test_text_of_the_target_language_is_translated_back_and_learned_too(
    student, text, tmp_path, monkeypatch, fails, caplog
):
    (tmp_path / "mono").mkdir()
    own = (student.parent / "short.de").read_text().split("\n")
    mono = [*(text / "test.de").read_text().splitlines(), *filter(None, own)]
    (tmp_path / "mono" / "mono.de").write_text("".join(f"{line}\n" for line in mono))
    command = ["train", student, "--vocab-size", 300, "--validation-source", "none", "--validation-target", "none"]
    command += ["--validation-size", "auto", "--augmentation", "auto", "--dropout", "auto", "--max-minutes", 9999]
    command += ["--target-text", tmp_path / "mono", "--quiet", "--bleu-tokenizer", "char"]
    command += ["--validation-bleu", 1, "--output"]
    assert main(list(map(str, [*command, tmp_path / "straight"]))) == 0
    assert re.search("reverse model: validation, greedy: BLEU .* learned nothing", caplog.text)
    out = tmp_path / "out"
    few = [1e-3 if word == 9999 else word for word in command]
    few[few.index("--dropout") + 1] = 0.1  # else a trial of the steps refuses it
    assert "give --max-minutes" in fails(*few, out)
    stop_after_step(1, monkeypatch)  # of the reverse model too, that has more minutes now
    statuses, times = [], set()
    for _ in range(3):
        statuses.append(main(list(map(str, [*command, out]))))
        times.add((out / "parallel.de").stat().st_mtime_ns)
    assert len(times) == 1  # by which an unfinished preparation of the text knows it
    assert statuses == [128 + signal.SIGTERM, 128 + signal.SIGTERM, 0]  # in the reverse training, and in the final one
    assert equal(weights_of(tmp_path / "straight"), weights_of(out))
    parallel, held_out, pairs = (pairs_of(out, name) for name in ("parallel", "validation", "back_translated"))
    assert len(held_out) == 1 and len(parallel) == LINES - 1 and not set(held_out) & set(parallel)
    made = [pair for pair in pairs if pair[0].startswith("<BT> ")]
    assert held_out[0][1] in mono and held_out[0][1] not in {target for _, target in made}
    assert made and [target for _, target in made] == [line for line in mono if line in dict(map(reversed, made))]
    assert pairs[len(made) :] == parallel  # once: there is as much of it as of the other
    reverse = load_recipe(str(out / "reverse" / "recipe.yaml"))
    assert reverse.train_source.endswith("/parallel.de") and reverse.train_target.endswith("/parallel.en")
    assert reverse.bleu_tokenizer is reverse.tokenizer is None  # which were for the other language
    assert "from other pairs or with another seed" in fails(*command, out, "--overwrite", "--seed", 1)
    assert (out / "validation.de").read_text() == held_out[0][1] + "\n"
    monkeypatch.setattr(distillation, "_step", lambda *_: 2)  # the minutes may change, but not what is translated
    assert main(list(map(str, [*command, out, "--overwrite", "--max-minutes", 200]))) == 128 + signal.SIGTERM
    assert "distilled from" not in read_run(out)
    (out / "parallel.en").unlink()
    assert "with another seed" in fails(*command, out) and not (out / "parallel.en").exists()


def test_a_text_to_translate_back_is_read_before_the_reverse_model_is_trained(student, tmp_path, fails):
    command = ["train", student, "--output", tmp_path / "out", "--quiet", "--target-text"]
    for name in ("empty", "folders"):
        (tmp_path / name / "inner").mkdir(parents=True)
    (tmp_path / "blank.de").write_text("\n\n")
    (tmp_path / "latin.de").write_bytes(b"sch\xf6n\n")
    (tmp_path / "empty" / "inner").rmdir()
    for name, message in {
        "empty": f"{tmp_path / 'empty'}: empty",
        "folders": f"{tmp_path / 'folders'}: empty",
        "blank.de": "blank.de: empty",
        "latin.de": "latin.de, line 1: byte offset 3",
    }.items():
        assert message in fails(*command, tmp_path / name)
        assert not (tmp_path / "out").exists()


def test_translations_that_teach_nothing_are_made_anew(tmp_path):
    source = SimpleNamespace(where="mono.de", stream=lambda: iter([("a", "")]))
    made = distillation.DistilledText([], Recipe(output=str(tmp_path), train_source="a", train_target="b"), source)
    names = [distillation.TRANSLATIONS, distillation.notes_path(Path(distillation.TRANSLATIONS)).name]
    made.output.note(names)
    for name in names:
        (tmp_path / name).write_text('{"hypotheses": [{"text": " "}]}\n')
    with pytest.raises(UserError, match=r"mono.de can be learned: .* translates for longer"):
        made._write({})
    assert not any((tmp_path / name).exists() for name in names)


def test_few_minutes_take_few_lines_of_text_or_are_refused(tmp_path):
    (tmp_path / "verdict.json").write_text('{"metrics": {"eval_epoch": 12}, "seconds": 60}')
    texts = [SimpleNamespace(stream=lambda lines=lines: ((str(n), "") for n in range(lines))) for lines in (40, 2)]
    (tmp_path / "held").write_text("one\n")
    held_out = {f"validation_{side}": str(tmp_path / "held") for side in ("source", "target")}
    recipe = Recipe(output=str(tmp_path), train_source="a", train_target="b", **held_out)
    made = distillation.DistilledText([], recipe, *texts)

    def step(minutes):
        return distillation._step(replace(recipe, max_minutes=minutes), recipe, made)

    made.step = step(5)  # 60 passes through 2 pairs are 8 through 15: 10 new ones, and theirs 2 or 3 times
    assert made.step == 4 and list(made._sources()) == [str(n) for n in range(0, 40, 4)]
    with pytest.raises(UserError, match=r"in the 1 minutes .* alone 12\.0 times: .* --max-minutes 8 or more"):
        step(1)
    assert (step(30), step(0.75 * 8)) == (1, 3)  # the latter is what the message asks for
    translated = ["<2fr> a. <2fr> b"] * 14  # the tag of a language stays in front
    assert next(made._pairs(translated, 14)) == ("<2fr> <BT> a. b", "0")
    lines = ["L'e\u0301te\u0301.", "autre"]
    (tmp_path / "held").write_text("L'été.\n")
    text = SimpleNamespace(stream=lambda: ((line, "") for line in lines))
    assert list(distillation.DistilledText([], recipe, text, texts[1])._sources()) == ["autre"]
