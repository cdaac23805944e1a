"""A saved model in the hands of a user who has transformers and torch, and not this package."""

import hashlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, tiny_model
from passes import OTHER_TOOLKITS
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.dynamic_module_utils import get_relative_import_files

from vaswani_transformer import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer, train_tokenizer

SENTENCES = ["a small sentence", "words", "another sentence of more words, some of them long"]
MODEL = ROOT / "vaswani_transformer" / "model"


def results(folder, **options):
    """A model, its tokenizer, and what they compute for these sentences."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    inputs = tokenizer(SENTENCES, return_tensors="pt", padding=True)
    with torch.no_grad():
        logits = model(**inputs, decoder_input_ids=inputs["input_ids"]).logits
    outputs = model.generate(**inputs)
    computed = {"logits": hashlib.sha256(logits.numpy().tobytes()).hexdigest(), "generated": outputs.tolist()}
    return model, tokenizer, computed | {"texts": tokenizer.batch_decode(outputs, skip_special_tokens=True)}


# What such a user does, besides; `BLOCK` is "1" where the package is installed and has to be hidden.
USER = r"""
import hashlib, importlib.util, json, os, sys
if os.environ.get("BLOCK") == "1":
    sys.modules["vaswani_transformer"] = None  # importing it fails as if it were not there
else:
    assert importlib.util.find_spec("vaswani_transformer") is None, "the package is installed here"

import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

torch.set_num_threads(1)
SENTENCES = json.loads(sys.argv[1])


def everything(folder):
    model, tokenizer, found = results(folder, trust_remote_code=True)
    assert "transformers_modules" in type(model).__module__
    found["base model"] = type(AutoModel.from_pretrained(folder, trust_remote_code=True)).__name__
    found["config"] = AutoConfig.from_pretrained(folder, trust_remote_code=True).to_diff_dict()["model_type"]
    translator = pipeline("translation", model=folder, trust_remote_code=True)
    found["pipeline"] = [row["translation_text"] for row in translator(SENTENCES, batch_size=len(SENTENCES))]
    try:
        AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:
        found["without trust"] = str(error)
    model.save_pretrained(folder + "_again")
    tokenizer.save_pretrained(folder + "_again")
    found["saved again"] = results(folder + "_again", trust_remote_code=True)[2]
    return found


print("RESULT" + json.dumps({folder: everything(folder) for folder in sys.argv[2:]}))
"""


def model_folder(folder: Path, two_sides: bool = False, **changes) -> Path:
    tokenizer = train_tokenizer(SENTENCES, vocab_size=270)
    if two_sides:  # as of an imported model
        backends = dict.fromkeys(("tokenizer_object", "target_tokenizer_object"), tokenizer.backend_tokenizer)
        names = {name: getattr(tokenizer, name) for name in ("bos_token", "pad_token", "eos_token", "unk_token")}
        tokenizer = VaswaniTokenizer(**backends, **names)
    # float64, so that no rounding decides between hypotheses; positions for the longest output.
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 96, **changes}
    tiny_model(seed=0, scale=2.0, dtype=torch.float64, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def check_as_a_user(python: str, folders: list[Path], tmp_path: Path, block: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
    environment |= {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "BLOCK": str(int(block))}
    command = [python, "-c", inspect.getsource(results) + USER, json.dumps(SENTENCES), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    of_user = json.loads(done.stdout.rpartition("RESULT")[2])
    for folder in folders:
        check(of_user[str(folder)], folder)


def check(found: dict, folder: Path) -> None:
    *_, reference = results(folder)  # by the installed package
    assert len(set(reference["texts"])) > 1  # outputs that depend on their inputs
    for name, value in reference.items():
        assert found[name] == value == found["saved again"][name], name
    assert found["pipeline"] == reference["texts"]
    assert found["base model"] == "VaswaniModel" and found["config"] == "vaswani"
    assert "trust_remote_code=True" in found["without trust"]


def test_folders_work_without_the_package(tmp_path):
    changes = {"position_encoding": "learned", "tie_word_embeddings": False, "d_k": 5, "d_v": 7, "attention_bias": True}
    variant = model_folder(tmp_path / "every_variant", **changes)
    changes = OTHER_TOOLKITS[-1] | {"decoder_vocab_size": None, "decoder_start_token_id": 1}
    imported = model_folder(tmp_path / "imported", two_sides=True, **changes)
    check_as_a_user(sys.executable, [variant, imported], tmp_path, block=True)


@pytest.mark.slow
def test_a_folder_works_in_an_environment_that_has_transformers_and_torch_alone(tmp_path):
    folder = model_folder(tmp_path / "model")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "clean")], check=True)
    python = str(tmp_path / "clean" / "bin" / "python")
    constraints = str(ROOT / "constraints.txt")
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints, "torch", "transformers"]
    subprocess.run(install, check=True, timeout=1500)
    installed = subprocess.run([python, "-I", "-m", "pip", "list"], check=True, capture_output=True, text=True).stdout
    assert not {"vaswani_transformer", "accelerate", "datasets", "evaluate"} & set(installed.split())
    check_as_a_user(python, [folder], tmp_path, block=False)


def test_all_files_that_travel_are_found_by_transformers(tmp_path):
    of_model, of_tokenizer = (
        {Path(path).name for path in get_relative_import_files(MODEL / name)} | {name}
        for name in ("modeling_vaswani.py", "tokenization_vaswani.py")  # the latter by a tokenizer with two sides
    )
    assert of_model | of_tokenizer == {path.name for path in MODEL.glob("*_vaswani.py")}
    folder = model_folder(tmp_path / "model")
    assert of_model == {path.name for path in folder.glob("*.py")}
    for path in (MODEL / name for name in of_model):
        assert (folder / path.name).read_bytes() == path.read_bytes()


class Mine(VaswaniForConditionalGeneration):
    """A class derived by a user."""


@pytest.mark.parametrize("make", [lambda model: model.get_encoder(), lambda model: Mine(model.config)])
def test_what_is_saved_without_code_names_none(make, tmp_path):
    model = tiny_model()
    model.config.custom_pipelines = {}  # as of a loaded model, whose configuration its parts share
    make(model).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "custom_pipelines" not in config and "custom_pipelines" in vars(model.config)
    for reference in config.get("auto_map", {}).values():
        assert (tmp_path / f"{reference.partition('.')[0]}.py").is_file()


def test_a_model_from_a_repository_is_saved_with_its_own_code(tmp_path):
    # Loaded from the Hub, a configuration names its code as "owner/name--modeling_vaswani.VaswaniModel".
    model = tiny_model()
    model.config.auto_map = {"AutoModelForSeq2SeqLM": "owner/name--modeling_vaswani.VaswaniForConditionalGeneration"}
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert not [reference for reference in config["auto_map"].values() if "--" in reference]
    assert VaswaniConfig.from_pretrained(tmp_path).auto_map == config["auto_map"]
