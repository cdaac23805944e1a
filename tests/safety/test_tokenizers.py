"""Tokenizer files: what could hang, grow without bounds or translate differently is refused when it is loaded."""

import copy
import json
import time

import pytest
import saved_models
from conftest import error_of
from saved_models import TEXTS, change
from tokenizers import Regex, pre_tokenizers

from vaswani_transformer import Translator, UserError, load_model, load_tokenizer, train_tokenizer
from vaswani_transformer.cli.main import main
from vaswani_transformer.parsing.tokenizer import train_parser_tokenizer

saved = saved_models.saved
folder = saved_models.folder


# Time and memory --------------------------------------------------------------------------------------------------

# The patterns of GPT-2, Llama 3, GPT-4o and DeepSeek V3, and our own.
HARMLESS = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
    r"[\p{Han}&&[^\p{L}]]+",
    ".{1,100}",
    " ?[^ ]+",
    " {2,}",
    r"\d+(?:[.,]\d+)*",
    r"\w+(?:[-']\w+)*|\S",
]


@pytest.mark.parametrize("pattern", HARMLESS)
def test_patterns_of_well_known_tokenizers_are_taken(folder, pattern):
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    change(folder, pre_tokenizer={"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel"} | BYTES]})
    load_tokenizer(folder)
    started = time.monotonic()
    for letters in ("a", "1", " ", "'", "ab ", "\n"):
        pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(letters * 3000 + "!")
    assert time.monotonic() - started < 10


BYTES = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}


EXPONENTIAL = ["(a+)+b", "(a|aa)+b", "((?:a+){2,})b", "(?:a{1,2}+)c", "a{1,2}{1,60}c", "(?x)(a+) +c", "(?!(a+)+b)a"]


@pytest.mark.parametrize("place", ["normalizer", "pre_tokenizer"])
@pytest.mark.parametrize("pattern", EXPONENTIAL)
def test_a_pattern_that_backtracks_ends_in_one_line(folder, capfd, place, pattern):
    rule = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False, "content": "x"}
    if place == "normalizer":
        change(folder, normalizer={"type": "Replace"} | rule)
    else:
        byte_level = {"type": "ByteLevel"} | BYTES
        change(folder, pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Split"} | rule, byte_level]})
    started = time.monotonic()
    assert main(["translate", str(folder), "a" * 10_000 + "!"]) == 1
    error = capfd.readouterr().err
    assert time.monotonic() - started < 10  # Oniguruma gives up after ten million ways, in Rust, with lines of its own
    assert error.splitlines()[-1].startswith("error: the tokenizer failed on a text (") and "Traceback" not in error


def replacements(number, content="aa"):
    return [{"type": "Replace", "pattern": {"String": "a"}, "content": content}] * number


@pytest.mark.parametrize("place", ["normalizer", "decoder"])
@pytest.mark.parametrize(("number", "content"), [(40, "aa"), (4, "a" * 50), (1, "a" * 10**6)])
def test_replacements_that_multiply_are_refused(folder, place, number, content):
    change(folder, **{place: {"type": "Sequence", f"{place}s": replacements(number, content)}})
    assert "replacements" in error_of(load_model, folder)
    with pytest.raises(UserError):
        change(folder, **{place: [[{"String": "a"}, content]] * number})  # a form without names
        load_model(folder)


def test_a_piece_without_end_is_refused(folder):
    """It would be a crash: `tokenizers` takes its tree down by recursion."""
    pieces = [["<unk>", 0.0], ["a" * 1_000_000, -1.0]]
    change(folder, model={"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False})
    assert "a piece of more than 10,000 characters" in error_of(load_tokenizer, folder)


def test_a_few_replacements_are_taken(folder):
    quotes = [{"type": "Replace", "pattern": {"String": one}, "content": "..."} for one in "…‥⋯"]
    change(folder, normalizer={"type": "Sequence", "normalizers": [*quotes, {"type": "Prepend", "prepend": " "}]})
    assert load_tokenizer(folder).decode(load_tokenizer(folder)("so…").input_ids, skip_special_tokens=True) == "so..."


# The end of a text ------------------------------------------------------------------------------------------------


def test_a_tokenizer_that_ends_no_text_is_refused(folder, capsys):
    change(folder, post_processor=None)
    assert main(["translate", str(folder), "words"]) == 2
    assert "end token '</s>'" in capsys.readouterr().err


def test_languages_beside_the_end_token_are_taken(folder):
    for before, after in (("<unk>", ()), (None, ("<unk>",))):
        names = [*filter(None, [before]), "A", "</s>", *after]
        ids = {"<unk>": 3, "</s>": 2}
        parts = [
            {"Sequence": {"id": "A", "type_id": 0}} if name == "A" else {"SpecialToken": {"id": name, "type_id": 0}}
            for name in names
        ]
        special = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in names if name != "A"}
        change(
            folder,
            post_processor={"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": special},
        )
        load_model(folder, "cpu")


def test_a_template_of_thousands_of_tokens_is_refused(folder):
    template = json.loads((folder / "tokenizer.json").read_text())["post_processor"]
    change(folder, post_processor=template | {"single": template["single"] * 1000})
    assert "4,000 tokens" in error_of(load_model, folder)


def test_our_tokenizers_are_taken(tmp_path):
    for kind, size in (("bpe", 270), ("wordpiece", 520)):
        train_tokenizer(TEXTS, kind=kind, vocab_size=size).save_pretrained(tmp_path / kind)
        load_tokenizer(tmp_path / kind)
    train_parser_tokenizer(TEXTS, ["(S", ")S", "NN"], 300).save_pretrained(tmp_path / "trees")
    load_tokenizer(tmp_path / "trees")


# Values -----------------------------------------------------------------------------------------------------------

WRONG = ["x", 5, -1, 1.5, True, None, [], ["x"], [5], {}, {"a": 1}]
ENTRIES = [
    *(
        "model_max_length",
        "bos_token",
        "pad_token",
        "unk_token",
        "padding_side",
        "model_input_names",
        "tokenizer_class",
    ),
    *(
        "split_special_tokens",
        "added_tokens_decoder",
        "extra_special_tokens",
        "auto_map",
        "tokenizer_file",
        "gguf_file",
    ),
    *("fast_tokenizer_files", "init_inputs", "tokenizer_object", "_tokenizer", "backend_tokenizer", "__class__"),
]


@pytest.mark.parametrize("name", ENTRIES)
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
        if name != "split_special_tokens":
            assert tokenizer(TEXTS).input_ids == right, value
        tokenizer.save_pretrained(folder.parent / "again")


def test_a_length_that_is_no_number_is_one_line(folder, capsys):
    change(folder, "tokenizer_config.json", model_max_length="x")
    assert main(["translate", str(folder), "words"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "tokenizer" in error


@pytest.mark.parametrize("file", ["special_tokens_map.json", "added_tokens.json"])
def test_wrong_values_in_the_other_files(folder, file):
    for value in WRONG[::2]:
        for content in (value, {"bos_token": value}, {"zz": value}):
            (folder / file).write_text(json.dumps(content))
            try:
                model, tokenizer = load_model(folder, "cpu")
            except UserError as error:
                assert "\n" not in str(error)
            else:
                list(Translator(model, tokenizer, max_new_tokens=1).translate(["words"]))


@pytest.mark.parametrize("part", ["version", "truncation", "padding", "added_tokens", "model", "post_processor"])
def test_parts_of_a_wrong_kind(folder, part):
    before = json.loads((folder / "tokenizer.json").read_text())
    for value in WRONG:
        (folder / "tokenizer.json").write_text(json.dumps(before | {part: value}))
        try:
            load_tokenizer(folder)
        except UserError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("number", [300, 4 * 10**9])
def test_ids_beyond_the_model_are_refused(folder, number):
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = copy.deepcopy(content)
    vocabulary["model"]["vocab"]["zzz"] = number
    added = content | {
        "added_tokens": [*content["added_tokens"], content["added_tokens"][0] | {"id": number, "content": "zz"}]
    }
    for changed in (vocabulary, added):
        (folder / "tokenizer.json").write_text(json.dumps(changed))
        assert "vocabulary size" in error_of(load_model, folder)


@pytest.mark.parametrize("content", [b"\x00\x01\x02", b"{}", b"[" * 10**5, b"", b'{"a": 1, "a": 2}', b"\xff"])
def test_files_of_another_kind_are_one_line(folder, capsys, content):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes(content)
    assert main(["translate", str(folder), "words"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
