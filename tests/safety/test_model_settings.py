"""Settings of a model's folder: each is followed, without effect, or refused by name; none fetches or runs anything."""

import copy
import json
import shutil
import socket

import model_folders
import pytest
import torch
from conftest import error_of, tiny_model, tiny_recipe
from model_folders import change
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, GenerationConfig, modeling_utils

from vaswani_transformer import Translator, UserError, VaswaniConfig, load_model
from vaswani_transformer.cli.main import main
from vaswani_transformer.errors import reading
from vaswani_transformer.json_and_yaml import read_json
from vaswani_transformer.loading import check_search
from vaswani_transformer.model.generation_vaswani import SETTING_RANGES
from vaswani_transformer.recipes.recipe import check_recipe

saved, folder = model_folders.saved, model_folders.folder


@pytest.fixture
def no_network(monkeypatch):
    tried = []

    def refuse(*arguments, **_):
        tried.append(arguments)
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield tried
    assert not tried


VALUES = [
    *(0, 1, 2, -1, 10**12, 0.0, 0.5, 1.0, -1.0, 1e300, float("nan"), float("inf"), True, False, "x", "static", "never"),
    *([], [5], [[5]], [[5, 6], [7]], [[[5], 2.0]], ["a"], [-1], [999], [5, 1.1], list(range(270)), {}, {"a": 1}, None),
]
WITHOUT_EFFECT = {  # unless a program gives a second model
    *("num_assistant_tokens", "assistant_confidence_threshold", "num_assistant_tokens_schedule"),
    *("assistant_lookbehind", "target_lookbehind"),
}
NAMES = [*vars(GenerationConfig()), "custom_generate", "assistant_model", "unheard_of", "to_dict", "__class__"]


@pytest.fixture(scope="module")
def loaded(saved):
    return load_model(saved, "cpu")


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_works_or_is_refused_by_name(loaded, tmp_path, name):
    model, tokenizer = loaded
    path, worked = tmp_path / "generation_config.json", 0
    before = model.generation_config.to_dict()
    limits = {} if name in ("max_length", "max_new_tokens") else {"max_new_tokens": 2}
    for value in VALUES:
        path.write_text(json.dumps(before | limits | {name: value}))
        searched = copy.copy(model)
        try:
            read_json(path)
            with reading(path):  # as `load_model` does
                searched.generation_config = GenerationConfig.from_pretrained(tmp_path)
                check_search(searched)
        except UserError as error:
            assert (name in str(error) or str(path) in str(error)) and "\n" not in str(error), value
            continue
        worked += 1
        drawn = {"do_sample": True, "num_beams": 1, "temperature": 1.0, "top_k": 50, "top_p": 1.0}
        for search in [{"num_beams": 2}, drawn][worked > 1 :] if worked < 3 else ():
            translator = Translator(searched, tokenizer, num_return_sequences=1, **search)
            if name == "is_assistant":  # an error of transformers at the first sentence
                continue
            assert len(list(translator.translate(["words", "more"]))) == 2, (value, search)
    assert worked < len(VALUES) or name == "transformers_version" or name in WITHOUT_EFFECT


def test_sampling_settings_out_of_range_matter_once_tokens_are_drawn(folder, fails):
    change(folder, "generation_config.json", temperature=0.0, max_new_tokens=2)
    assert main(["translate", str(folder), "words"]) == 0
    assert "temperature" in fails("translate", folder, "words", "--sample", status=1)
    assert main(["translate", str(folder), "words", "--sample", "--temperature", "0.5"]) == 0


@pytest.mark.parametrize("name", ["num_beams", "length_penalty", "max_extra_tokens"])
def test_a_recipe_takes_what_the_model_can_be_loaded_with(folder, name):
    kind, least, most = SETTING_RANGES[name]
    for value, is_right in ((least, True), (most, True), (least - 1, False), (most + 1, False)):
        value = kind(value)
        recipe = tiny_recipe(folder, folder, **{name: value})
        change(folder, "generation_config.json", **{name: value})
        model = tiny_model()
        search = {"num_beams": 2, "max_new_tokens": 1} | ({name: value} if name != "num_beams" else {})
        if is_right:
            check_recipe(recipe)
            load_model(folder, "cpu")
            model.generate(torch.tensor([[5, 2]]), **search)
        else:
            assert name in error_of(check_recipe, recipe) and name in error_of(load_model, folder)
            with pytest.raises(ValueError, match=name):
                model.generate(torch.tensor([[5, 2]]), **{**search, name: value})


KERNEL = "someone/kernel"


@pytest.mark.parametrize(
    "entries",
    [
        {"attn_implementation": KERNEL},
        {"_attn_implementation": KERNEL},
        {"experts_implementation": KERNEL},
        {"use_kernels": True, "kernel_config": {"fc1": f"{KERNEL}:Layer"}},
        {"auto_map": {"AutoConfig": "someone/model--code.Config"}},
        {"custom_generate": "someone/model", "_commit_hash": "a" * 40, "name_or_path": "someone/model"},
        {"transformers_weights": "../other.safetensors"},
        {"to_dict": 5, "num_parameters": 3, "__class__": "x", "attribute_map": {"d_model": "d_ff"}},
        {"use_return_dict": False, "distributed_config": {"tp_size": 2}, "base_model_tp_plan": 5},
    ],
    ids=str,
)
def test_a_configuration_fetches_and_runs_nothing(folder, entries, no_network, monkeypatch, capsys):
    def no_kernel(*arguments, **_):
        pytest.fail("a kernel was asked for")

    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", no_kernel)
    monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda *_, **__: True)
    change(folder, "config.json", **entries)
    capsys.readouterr()
    for model in (load_model(folder, "cpu")[0], AutoModelForSeq2SeqLM.from_pretrained(folder)):
        assert model.config._attn_implementation == "sdpa" and model.config.d_model == 24
    main(["translate", str(folder), "words"])
    assert "[transformers]" not in capsys.readouterr().err


def test_an_implementation_given_as_an_argument_counts(folder, monkeypatch):
    change(folder, "config.json", attn_implementation="flex_attention")
    for auto in (AutoModelForSeq2SeqLM, AutoModel):
        assert auto.from_pretrained(folder, attn_implementation="eager").config._attn_implementation == "eager"
    assert AutoConfig.from_pretrained(folder, attn_implementation="eager")._attn_implementation == "eager"
    assert VaswaniConfig(attn_implementation="eager")._attn_implementation == "eager"
    asked = []
    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", lambda name, **_: asked.append(name))
    AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation=KERNEL)
    assert KERNEL in asked


@pytest.mark.parametrize(
    "entries",
    [
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        {"dtype": "int8"},
        {"dtype": "float8_e4m3fn"},
        {"layer_types": 5},
        {"id2label": 5},
        {"d_model": "24"},
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_used_is_one_line(folder, entries, no_network, fails):
    change(folder, "config.json", **entries)
    fails("translate", folder, "words")


def test_a_key_that_stands_there_twice_is_refused(folder):
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        changed = shutil.copytree(folder, folder.parent / file)
        text = (changed / file).read_text().rstrip().removesuffix("}")
        (changed / file).write_text(text + ', "pad_token_id": 1, "pad_token_id": 1}')
        error = error_of(load_model, changed)
        assert file in error and "pad_token_id" in error


def test_an_adapter_beside_a_model_fetches_nothing(folder, no_network):
    change(folder, "adapter_config.json", peft_type="LORA", base_model_name_or_path="someone/model")
    assert "adapter" in error_of(load_model, folder)
