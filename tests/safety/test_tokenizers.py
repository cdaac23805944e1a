"""Tokenizer files: a wrong value is one line or has no effect; what would translate differently is refused."""

import copy
import json
import time

import model_folders
import pytest
from conftest import error_of
from model_folders import TEXTS, change

from vaswani_transformer import Translator, UserError, load_model, load_tokenizer
from vaswani_transformer.cli.main import main

saved, folder = model_folders.saved, model_folders.folder


@pytest.mark.parametrize("place", ["normalizer", "pre_tokenizer"])
@pytest.mark.parametrize("pattern", ["(a+)+b", "(?!(a+)+b)a"])
def test_a_pattern_that_backtracks_ends_in_one_line(folder, capfd, place, pattern):
    rule = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False, "content": "x"}
    if place == "normalizer":
        change(folder, normalizer={"type": "Replace"} | rule)
    else:
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        change(folder, pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Split"} | rule, byte_level]})
    started = time.monotonic()
    assert main(["translate", str(folder), "a" * 10_000 + "!"]) == 1
    error = capfd.readouterr().err
    assert time.monotonic() - started < 10  # Oniguruma gives up after ten million ways, in Rust, with lines of its own
    assert error.splitlines()[-1].startswith("error: the tokenizer failed on a text (") and "Traceback" not in error


def test_a_tokenizer_that_ends_no_text_is_refused(folder, fails):
    change(folder, post_processor=None)
    assert "end token '</s>'" in fails("translate", folder, "words")


WRONG = ["x", 5, -1, 1.5, True, None, [], ["x"], [5], {}, {"a": 1}]


@pytest.mark.parametrize(
    "name",
    [
        "model_max_length", "bos_token", "padding_side", "model_input_names", "tokenizer_class", "added_tokens_decoder",
        "extra_special_tokens", "auto_map", "tokenizer_file", "fast_tokenizer_files", "__class__",
    ],
)  # fmt: skip
def test_wrong_values_are_refused_or_have_no_effect(folder, name):
    before = json.loads((folder / "tokenizer_config.json").read_text())
    right = load_tokenizer(folder)(TEXTS).input_ids
    for value in WRONG:
        (folder / "tokenizer_config.json").write_text(json.dumps(before | {name: value}))
        try:
            tokenizer = load_tokenizer(folder)
        except UserError as error:
            assert "\n" not in str(error)
            continue
        assert tokenizer(TEXTS).input_ids == right, value


@pytest.mark.parametrize("file", ["special_tokens_map.json", "added_tokens.json"])
def test_wrong_values_in_the_other_files(folder, file):
    for value in WRONG[::3]:
        for content in (value, {"bos_token": value}, {"zz": value}):
            (folder / file).write_text(json.dumps(content))
            try:
                model, tokenizer = load_model(folder, "cpu")
            except UserError as error:
                assert "\n" not in str(error)
            else:
                list(Translator(model, tokenizer, max_new_tokens=1).translate(["words"]))


@pytest.mark.parametrize("number", [300, 4 * 10**9])
def test_ids_beyond_the_model_are_refused(folder, number):
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = copy.deepcopy(content)
    vocabulary["model"]["vocab"]["zzz"] = number
    tokens = [*content["added_tokens"], content["added_tokens"][0] | {"id": number, "content": "zz"}]
    for changed in (vocabulary, content | {"added_tokens": tokens}):
        (folder / "tokenizer.json").write_text(json.dumps(changed))
        assert "vocabulary size" in error_of(load_model, folder)
