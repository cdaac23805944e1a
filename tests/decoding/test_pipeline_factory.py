"""`pipeline()`: what it loads, what it refuses, and folders that bring the pipeline along."""

import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pipeline_models
import pytest
import torch
import transformers
from pipeline_models import SHORT, TEXTS, TRANSLATION, build, by_hand, texts_by_hand, tiny_gpt2
from transformers import AutoModelForSeq2SeqLM

import vaswani_transformer
from vaswani_transformer import TranslationPipeline, UserError, pipeline
from vaswani_transformer.model import copying_vaswani, language_codes_vaswani, pipeline_vaswani
from vaswani_transformer.model import sentence_splitting_vaswani as sentences_vaswani
from vaswani_transformer.model.pipeline_vaswani import CUSTOM_PIPELINES

tokenizer = pipeline_models.tokenizer
marian = pipeline_models.marian
marian_folder = pipeline_models.marian_folder


@pytest.fixture(scope="module")
def saved_vaswani(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vaswani")
    build("vaswani", len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def vaswani_folder(saved_vaswani, tmp_path):
    """A model folder of the test's own, to damage."""
    return Path(shutil.copytree(saved_vaswani, tmp_path / "vaswani"))


class TestFactory:
    def test_folders_with_the_tokenizer_in_them(self, marian, tokenizer, marian_folder):
        expected = [{TRANSLATION: text} for text in texts_by_hand(marian, tokenizer)]
        assert pipeline("translation", model=marian_folder, device="cpu")(TEXTS, **SHORT) == expected
        loaded = AutoModelForSeq2SeqLM.from_pretrained(marian_folder)
        assert pipeline("translation", loaded, device=-1)(TEXTS, **SHORT) == expected
        assert pipeline("translation", loaded, tokenizer=str(marian_folder))(TEXTS, **SHORT) == expected

    def test_models_of_this_package_need_no_trust(self, tokenizer, saved_vaswani):
        model = AutoModelForSeq2SeqLM.from_pretrained(saved_vaswani)
        expected = [{TRANSLATION: text} for text in texts_by_hand(model, tokenizer)]
        for trust in (None, False):
            translator = pipeline("translation", model=saved_vaswani, device="cpu", trust_remote_code=trust)
            assert type(translator.model) is vaswani_transformer.VaswaniForConditionalGeneration
            assert translator(TEXTS, **SHORT) == expected

    def test_dtype_and_device(self, tokenizer, marian_folder):
        for dtype in ("bfloat16", torch.bfloat16):
            translator = pipeline("translation", model=marian_folder, device="cpu", dtype=dtype)
            assert translator.model.dtype == translator.dtype == torch.bfloat16
            model = AutoModelForSeq2SeqLM.from_pretrained(marian_folder, dtype=torch.bfloat16)
            assert translator(TEXTS[0], **SHORT)[0][TRANSLATION] == by_hand(model, tokenizer, TEXTS[0])[0]
        translator = pipeline("translation", model=marian_folder, device=torch.device("cpu"))
        assert translator.device == translator.model.device == torch.device("cpu")
        for number in (-1, 0, None):  # without an accelerator the CPU, as in transformers
            assert pipeline("translation", model=marian_folder, device=number).device == translator.model.device or (
                torch.accelerator.is_available()
            )
        mapped = pipeline("translation", model=marian_folder, device_map="cpu")
        assert mapped.device.type == "cpu" and mapped("red", **SHORT)

    def test_other_tasks_are_transformers_own(self, tokenizer):
        generator = pipeline("text-generation", model=tiny_gpt2(len(tokenizer)), tokenizer=tokenizer, device="cpu")
        assert type(generator) is transformers.TextGenerationPipeline
        with pytest.raises(KeyError, match="no-such-task"):
            pipeline("no-such-task", model=tiny_gpt2(len(tokenizer)), tokenizer=tokenizer)

    def test_mistakes_end_in_one_line(self, tokenizer, marian, marian_folder, tmp_path):
        tiny_gpt2(len(tokenizer)).save_pretrained(tmp_path / "gpt2")
        tokenizer.save_pretrained(tmp_path / "gpt2")
        marian.save_pretrained(tmp_path / "bare")
        shutil.copytree(marian_folder, tmp_path / "no weights")
        (tmp_path / "no weights" / "model.safetensors").unlink()
        cases = [
            ({}, "tokenizer "),
            ({"model": marian}, "tokenizer "),
            ({"model": tmp_path / "gpt2"}, "gpt2"),
            ({"model": tmp_path / "bare"}, "tokenizer .*bare"),
            ({"model": tmp_path / "no weights"}, "no weights"),
            ({"model": str(tmp_path / "nothing")}, "nothing"),
            ({"model": marian_folder, "device": "nowhere"}, "nowhere"),
            ({"model": marian_folder, "dtype": "float99"}, "float99"),
            ({"model": marian_folder, "model_kwargs": {"attn_implementation": "no_such"}}, "no_such"),
            ({"model": marian_folder, "tokenizer": "not/here", "local_files_only": True}, "tokenizer not/here"),
        ]
        for options, message in cases:
            with pytest.raises(UserError, match=message) as error:
                pipeline("translation", **options)
            assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("file", "task"), [("config.json", "translation"), ("config.json", None), ("tokenizer_config.json", None)]
    )
    def test_no_code_runs_and_nobody_is_asked(self, vaswani_folder, tmp_path, monkeypatch, file, task):
        asked = []
        monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "y")
        (vaswani_folder / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
        settings = json.loads((vaswani_folder / file).read_text())
        if file == "config.json":
            settings |= {"model_type": "unheard_of", "auto_map": {"AutoConfig": "planted.C"}}
        else:
            settings |= {"tokenizer_class": "Planted", "auto_map": {"AutoTokenizer": [None, "planted.C"]}}
        (vaswani_folder / file).write_text(json.dumps(settings))
        # transformers takes our own class for a tokenizer whose class it does not know.
        is_config = file == "config.json"
        with pytest.raises(ValueError, match=r"trust_remote_code=True") if is_config else nullcontext():
            pipeline(task, model=vaswani_folder, device="cpu")
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

    def test_any_model_can_carry_it(self, marian, tokenizer, marian_folder, tmp_path):
        folder, trace = tmp_path / "carrier", tmp_path / "trace"
        shutil.copytree(marian_folder, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "custom_pipelines": CUSTOM_PIPELINES}))
        for needed in (sentences_vaswani, copying_vaswani, language_codes_vaswani):
            shutil.copy(needed.__file__, folder)
        code = Path(pipeline_vaswani.__file__).read_text(encoding="utf-8")
        (folder / "pipeline_vaswani.py").write_text(
            code + f"\nimport pathlib\npathlib.Path({str(trace)!r}).touch()\n", encoding="utf-8"
        )
        for options in ({}, {"task": "translation"}, {"task": "translation", "trust_remote_code": False}):
            with pytest.raises(ValueError, match="trust_remote_code=True"):
                transformers.pipeline(model=str(folder), **options)
        assert not trace.exists()
        expected = [{TRANSLATION: text} for text in texts_by_hand(marian, tokenizer)]
        for task in ("translation", None):
            translator = transformers.pipeline(task, model=str(folder), trust_remote_code=True, device="cpu")
            assert type(translator).__module__.startswith("transformers_modules.")
            assert translator(TEXTS, **SHORT) == expected
        assert trace.exists()
        trace.unlink()
        ours = pipeline(model=folder, device="cpu")  # takes the code from the package
        assert type(ours) is TranslationPipeline and not trace.exists()

    def test_save_pretrained_of_a_pipeline_brings_it_along(self, tokenizer, tmp_path):
        model = build("marian", len(tokenizer))
        expected = [{TRANSLATION: text} for text in texts_by_hand(model, tokenizer)]
        translator = TranslationPipeline(model, tokenizer, device="cpu")
        for name in ("first", "second"):  # the second time from code that came with a folder
            translator.save_pretrained(tmp_path / name)
            assert json.loads((tmp_path / name / "config.json").read_text())["custom_pipelines"] == CUSTOM_PIPELINES
            folder = str(tmp_path / name)
            translator = transformers.pipeline("translation", model=folder, trust_remote_code=True, device="cpu")
            assert translator(TEXTS, **SHORT) == expected
