"""`pipeline()`: what it loads, what it refuses, and folders that bring the pipeline along."""

import json
import re
import shutil
import sys
from contextlib import nullcontext

import model_folders
import pipeline_models
import pytest
import torch
import transformers
from conftest import error_of
from model_folders import save
from pipeline_models import SHORT, TEXTS, TRANSLATION, by_hand, texts_by_hand
from transformers import AutoModelForSeq2SeqLM, GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import vaswani_transformer
from vaswani_transformer import TranslationPipeline, pipeline
from vaswani_transformer.model.pipeline_vaswani import CUSTOM_PIPELINES

model, tokenizer, folder = pipeline_models.model, pipeline_models.tokenizer, model_folders.folder


@pytest.fixture(scope="module")
def saved(model, tokenizer, tmp_path_factory):
    return save(tmp_path_factory.mktemp("saved"), model, tokenizer)


@pytest.fixture(scope="module")
def expected(model, tokenizer):
    return [{TRANSLATION: text} for text in texts_by_hand(model, tokenizer)]


class TestFactory:
    def test_folders_with_the_tokenizer_in_them(self, expected, saved):
        loaded = AutoModelForSeq2SeqLM.from_pretrained(saved)
        assert pipeline("translation", loaded, device=-1)(TEXTS, **SHORT) == expected
        assert pipeline("translation", loaded, tokenizer=str(saved))(TEXTS, **SHORT) == expected
        for trust in (None, False):  # models of this package need none
            translator = pipeline("translation", model=saved, device="cpu", trust_remote_code=trust)
            assert type(translator.model) is vaswani_transformer.VaswaniForConditionalGeneration
            assert translator(TEXTS, **SHORT) == expected

    def test_dtype_and_device(self, tokenizer, saved):
        for dtype in ({"dtype": "bfloat16"}, {"dtype": torch.bfloat16}, {"torch_dtype": torch.bfloat16}):
            translator = pipeline("translation", model=saved, device="cpu", **dtype)
            assert translator.model.dtype == translator.dtype == torch.bfloat16
            model = AutoModelForSeq2SeqLM.from_pretrained(saved, dtype=torch.bfloat16)
            assert translator(TEXTS[0], **SHORT)[0][TRANSLATION] == by_hand(model, tokenizer, TEXTS[0])[0]
        has_accelerator = torch.accelerator.is_available()
        for device in (torch.device("cpu"), -1, *(() if has_accelerator else (0, None))):  # the CPU, as in transformers
            translator = pipeline("translation", model=saved, device=device)
            assert translator.device == translator.model.device == torch.device("cpu")
        mapped = pipeline("translation", model=saved, device_map="cpu")
        assert mapped.device.type == "cpu" and mapped("red", **SHORT)

    def test_mistakes_end_in_one_line(self, model, tokenizer, saved, tmp_path):
        gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=8, n_layer=1, n_head=1, n_positions=40))
        save(tmp_path / "gpt2", gpt2, tokenizer)
        sizes = {"d_model": 8, "d_kv": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1}
        t5 = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), decoder_start_token_id=1, **sizes))
        save(tmp_path / "t5", t5, tokenizer)
        model.save_pretrained(tmp_path / "bare")
        shutil.copytree(saved, tmp_path / "no weights")
        (tmp_path / "no weights" / "model.safetensors").unlink()
        cases = [
            ({"task": "summarization", "model": saved}, "'summarization'"),
            ({}, "tokenizer "),
            ({"model": model}, "tokenizer "),
            ({"model": tmp_path / "gpt2"}, "gpt2"),
            ({"model": tmp_path / "t5"}, "t5: this pipeline takes models of type 'vaswani', not 't5'"),
            ({"model": t5, "tokenizer": tokenizer, "task": "text2text-generation"}, "not 't5'"),
            ({"model": tmp_path / "bare"}, "tokenizer .*bare"),
            ({"model": tmp_path / "no weights"}, "no weights"),
            ({"model": str(tmp_path / "nothing")}, "nothing"),
            ({"model": saved, "device": "nowhere"}, "nowhere"),
            ({"model": saved, "dtype": "float99"}, "float99"),
            ({"model": saved, "model_kwargs": {"attn_implementation": "no_such"}}, "no_such"),
            ({"model": saved, "tokenizer": "not/here", "local_files_only": True}, "tokenizer not/here"),
        ]
        for options, message in cases:
            assert re.search(message, error_of(pipeline, **{"task": "translation", **options}))

    @pytest.mark.parametrize(
        ("file", "task"), [("config.json", "translation"), ("config.json", None), ("tokenizer_config.json", None)]
    )
    def test_no_code_runs_and_nobody_is_asked(self, folder, tmp_path, monkeypatch, file, task):
        asked = []
        monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "y")
        (folder / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
        settings = json.loads((folder / file).read_text())
        if file == "config.json":
            settings |= {"model_type": "unheard_of", "auto_map": {"AutoConfig": "planted.C"}}
        else:
            settings |= {"tokenizer_class": "Planted", "auto_map": {"AutoTokenizer": [None, "planted.C"]}}
        (folder / file).write_text(json.dumps(settings))
        # transformers takes our own class for a tokenizer whose class it does not know.
        is_config = file == "config.json"
        with pytest.raises(ValueError, match=r"trust_remote_code=True") if is_config else nullcontext():
            pipeline(task, model=folder, device="cpu")
        assert not asked and not (tmp_path / "ran").exists()


class TestOnTheHub:
    """A folder that brings the pipeline along, in the hands of `transformers.pipeline`."""

    @pytest.fixture(autouse=True)
    def code_cache(self, tmp_path, monkeypatch):
        """Code from folders is copied to, and imported from, a place of the test's own."""
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "code"))
        monkeypatch.syspath_prepend(str(tmp_path / "code"))
        yield
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
            del sys.modules[name]

    def test_its_code_runs_where_it_is_trusted(self, expected, folder, tmp_path):
        trace = tmp_path / "trace"
        with (folder / "pipeline_vaswani.py").open("a", encoding="utf-8") as code:
            code.write(f"\nimport pathlib\npathlib.Path({str(trace)!r}).touch()\n")
        for options in ({}, {"task": "translation"}, {"task": "translation", "trust_remote_code": False}):
            with pytest.raises(ValueError, match="trust_remote_code=True"):
                transformers.pipeline(model=str(folder), **options)
        assert not trace.exists()
        for task in ("translation", None):
            translator = transformers.pipeline(task, model=str(folder), trust_remote_code=True, device="cpu")
            assert type(translator).__module__.startswith("transformers_modules.")
            assert translator(TEXTS, **SHORT) == expected
        assert trace.exists()
        trace.unlink()
        ours = pipeline(model=folder, device="cpu")  # takes the code from the package
        assert type(ours) is TranslationPipeline and not trace.exists()

    def test_save_pretrained_of_a_pipeline_brings_it_along(self, saved, expected, tmp_path):
        translator = pipeline(model=saved, device="cpu")
        for name in ("first", "second"):  # the second time from code that came with a folder
            translator.save_pretrained(tmp_path / name)
            assert json.loads((tmp_path / name / "config.json").read_text())["custom_pipelines"] == CUSTOM_PIPELINES
            folder = str(tmp_path / name)
            translator = transformers.pipeline("translation", model=folder, trust_remote_code=True, device="cpu")
            assert translator(TEXTS, **SHORT) == expected
