"""`--precision int8` on a CPU: CTranslate2, converted on first use; and that an exported model needs no torch."""

import shutil
import sys

import exporting_models
import pytest
from exporting_models import PAIRS, SOURCES, exported_translator, save_model, small_tokenizer
from model_folders import change
from translating import run

from vaswani_transformer import Translator, export_model, load_tokenizer
from vaswani_transformer.decoding.fast_tokenizer import FastTokenizer, open_tokenizer
from vaswani_transformer.export.engine import int8_folder, load_for_decoding

pytest.importorskip("ctranslate2")
folder = exporting_models.small_model


@pytest.fixture(autouse=True)
def users_cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vaswani_transformer" / "int8"


@pytest.fixture
def source(tmp_path):
    (tmp_path / "in").write_text("\n".join(SOURCES) + "\n", encoding="utf-8")
    return tmp_path / "in"


def test_a_model_is_converted_once_and_again_when_it_changes(folder, users_cache, tmp_path, monkeypatch):
    model, tokenizer = load_for_decoding(folder, "cpu", "int8")
    assert model.engine.compute_type.startswith("int8") and len(list(users_cache.iterdir())) == 1
    expected = list(Translator(model, tokenizer).translate(SOURCES))
    exported = export_model(folder, tmp_path / "exported", quantization="int8").folder
    assert list(exported_translator(exported).translate(SOURCES)) == expected
    with monkeypatch.context() as patch:
        patch.setattr("vaswani_transformer.export.exporting.export_model", lambda *_, **__: pytest.fail("converted"))
        assert list(exported_translator(folder).translate(SOURCES)) == expected
    other = shutil.copytree(folder, tmp_path / "other")
    change(other, "generation_config.json", num_beams=1)
    assert load_for_decoding(other, "cpu", "int8")[0].generation_config.num_beams == 1
    assert len(list(users_cache.iterdir())) == 2


def test_a_conversion_that_fails_leaves_nothing(folder, users_cache, monkeypatch):
    def stop(folder, output, quantization):
        output.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr("vaswani_transformer.export.exporting.export_model", stop)
    with pytest.raises(KeyboardInterrupt):
        int8_folder(folder)
    assert not list(users_cache.iterdir())


def test_commands_in_int8(folder, source, tmp_path, capsys):
    for command, options in (
        ("translate", ["--input", source, "--output", tmp_path / "out"]),
        ("evaluate", ["--source", source, "--reference", tmp_path / "out"]),
        ("score", ["--source", source, "--target", tmp_path / "out"]),
    ):
        assert run(command, folder, "--precision", "int8", "--device", "cpu", *options) == 0
    expected = exported_translator(folder).translate(SOURCES)
    assert (tmp_path / "out").read_text(encoding="utf-8").split("\n")[:-1] == list(expected)


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({}, ["--glossary", "terms"], "--glossary"),
        ({}, ["--sample", "--seed", "1"], "--sample"),
        ({"attention_window": 3}, [], "attention_window is 3"),
        ({"no_repeat_ngram_size": 2}, [], "no_repeat_ngram_size"),
        ({"decoder_start_token_id": 2}, [], "decoder_start_token_id is 2"),
    ],
    ids=["glossary", "sampling", "layout", "setting", "start"],
)
def test_what_ctranslate2_cannot_follow_is_computed_in_float32(
    tmp_path, monkeypatch, source, changes, options, reason, caplog
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "terms").write_text("dog\tHund\n")
    searching = {name: changes.pop(name) for name in list(changes) if name != "attention_window"}
    folder = save_model(tmp_path / "model", small_tokenizer(), **changes)
    change(folder, "generation_config.json", **searching)
    command = ["translate", folder, "--input", source, "--device", "cpu", "--max-new-tokens", "9", *options]
    assert run(*command, "--output", "float32", "--precision", "float32") == 0
    caplog.clear()
    assert run(*command, "--output", "int8", "--precision", "int8") == 0
    assert (tmp_path / "int8").read_bytes() == (tmp_path / "float32").read_bytes()
    (line,) = [message for message in caplog.messages if "not int8" in message]
    assert line.startswith("computed in float32, not int8: ") and reason in line and "\n" not in line


def test_the_extra_is_named(folder, monkeypatch, fails):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    monkeypatch.delitem(sys.modules, "vaswani_transformer.export.to_ctranslate2", raising=False)
    line = fails("translate", folder, "A dog.", "--precision", "int8", "--device", "cpu")
    assert "pip install 'vaswani_transformer[ctranslate2]'" in line


def test_the_tokenizer_without_transformers_does_the_same(folder):
    ours, theirs = open_tokenizer(folder), load_tokenizer(folder)
    assert isinstance(ours, FastTokenizer) and ours.all_special_ids == theirs.all_special_ids
    texts = [side for pair in PAIRS for side in pair] + ["", " ", "</s> <pad>", "Ünïcödé €.\tx", "a" * 300]
    ids = theirs(texts)["input_ids"]
    assert ours(texts)["input_ids"] == ids and ours(texts[0])["input_ids"] == ids[0]
    plain = {"text_target": texts, "add_special_tokens": False}
    assert ours(**plain) == {"input_ids": theirs(**plain)["input_ids"]}
    for skip in (False, True):
        assert ours.batch_decode(ids, skip_special_tokens=skip) == theirs.batch_decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids[0], skip_special_tokens=skip) == theirs.decode(ids[0], skip_special_tokens=skip)
    assert [*map(ours.convert_ids_to_tokens, range(20))] == theirs.convert_ids_to_tokens(list(range(20)))
