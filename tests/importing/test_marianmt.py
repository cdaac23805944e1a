"""Folders of MarianMTModel: compared with transformers' own class, with its positions and with Marian's."""

import json
import shutil

import pytest
import torch
from conftest import error_of
from import_differences import compare, marian_positions, marianmt, separate_marianmt
from model_folders import change, pickle_weights
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vaswani_transformer import import_model, pipeline
from vaswani_transformer.cli.main import main
from vaswani_transformer.importing.marianmt import read


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder as transformers writes it."""
    return marianmt(tmp_path_factory.mktemp("original") / "source", torch.float32).source


@pytest.fixture
def folder(original, tmp_path):
    """A copy of it, to be changed."""
    return shutil.copytree(original, tmp_path / "source")


@pytest.mark.parametrize("format", [marianmt, separate_marianmt, marian_positions])
def test_logits_and_searches_are_those_of_the_original(format, tmp_path):
    result = compare(format(tmp_path / "source", torch.float64), tmp_path / "out", sentences=8)
    assert result["difference"] < 1e-12 < 1 < result["largest"]
    assert result["greedy"] == result["beam"] == 8 and result["beam_different"] > 4


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_function": "relu"},
        {"activation_function": "gelu", "scale_embedding": False},
        {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False, "decoder_vocab_size": 61},
        {"d_model": 20, "encoder_layers": 1, "decoder_layers": 3},
    ],
    ids=str,
)
def test_other_settings(changes, tmp_path):
    result = compare(marianmt(tmp_path / "source", torch.float64, **changes), tmp_path / "out", 4, searches={})
    assert result["difference"] < 1e-12


def test_pickled_weights_of_an_older_folder(folder, tmp_path):
    """With every tied name and the tables of positions, and the search settings in config.json."""
    import_model(folder, tmp_path / "expected")
    weights = load_file(folder / "model.safetensors")
    shared = weights.pop("model.shared.weight")
    for name in ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"):
        weights[f"{name}.weight"] = shared
    weights |= {f"model.{stack}.embed_positions.weight": torch.zeros(64, 32) for stack in ("encoder", "decoder")}
    pickle_weights(folder, lambda _: weights)
    (folder / "generation_config.json").unlink()
    change(folder, "config.json", num_beams=4, max_length=20, bad_words_ids=[[60]], renormalize_logits=True)
    import_model(folder, tmp_path / "out")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("expected", "out"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    settings = [json.loads((tmp_path / name / "generation_config.json").read_text()) for name in ("expected", "out")]
    kept = ("num_beams", "max_length", "bad_words_ids", "forced_eos_token_id", "length_normalization")
    assert not settings[1].get("renormalize_logits"), "glossaries and joining searches lack it, and nothing needs it"
    assert [settings[0][name] for name in kept] == [settings[1][name] for name in kept] == [4, 20, [[60]], 0, "power"]


@pytest.mark.parametrize("name", ["model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"])
def test_a_tied_matrix_may_be_stored_under_any_of_its_names(name, tmp_path):
    """As by `Accelerator.save_model`, which keeps one of them."""
    compared = marianmt(tmp_path / "source", torch.float32)
    weights = load_file(path := compared.source / "model.safetensors")
    [matrix] = [weights.pop(key) for key in list(weights) if "shared" in key or "embed_tokens" in key]
    save_file(weights | {f"{name}.weight": matrix}, path, metadata={"format": "pt"})
    assert compare(compared, tmp_path / "out", 4, searches={})["difference"] < 1e-4


@pytest.mark.parametrize("left", [None, "training_args.bin", "trainer_state.json"])
@pytest.mark.parametrize("positions", [None, "marian", "transformers"])
def test_positions_are_marians_unless_transformers_trained_it(folder, left, positions):
    if left:
        (folder / left).write_text("{}")
    imported = read(folder, positions=positions)
    marian = (positions or ("transformers" if left else "marian")) == "marian"
    assert imported.config.position_encoding == ("sinusoidal-tensor2tensor" if marian else "sinusoidal-halves")
    assert (imported.weights["lm_head.bias"][60] == -1e4) == marian
    start = "Marian's own" if marian else "those that transformers"
    assert imported.facts.notes[0].startswith(f"Positions are {start}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "gelu_new"}, "source: Field 'activation_function' expected one of"),
        ({"decoder_attention_heads": 2}, "decoder_attention_heads in {config} is 2: only models with as many"),
        ({"decoder_ffn_dim": 30}, "decoder_ffn_dim in {config} is 30: only models with as many"),
        ({"d_model": "wide"}, "config.json: Field 'd_model' expected int"),
        ({"vocab_size": 62}, "size mismatch for model.shared.weight"),
        ({"encoder_layers": 3}, 'Missing key(s) in state_dict: "model.encoder.layers.2'),
    ],
    ids=str,
)
def test_what_cannot_be_imported(folder, tmp_path, changes, message):
    change(folder, "config.json", **changes)
    assert message.replace("{config}", f"{folder}/config.json") in error_of(import_model, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_licence_languages_and_source(folder, tmp_path):
    (folder / "README.md").write_text("---\nlicense: apache-2.0\nlanguage:\n- en\n- fr\n---\nA model.\n")
    change(folder, "config.json", _name_or_path="/tmp/Helsinki-NLP/opus-mt-fr-en")
    facts = import_model(folder, tmp_path / "out").facts
    assert (facts.toolkit, facts.license, facts.languages) == ("Marian", "apache-2.0", ("fr", "en"))
    assert facts.source == "https://huggingface.co/Helsinki-NLP/opus-mt-fr-en"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "license: apache-2.0" in card and "It was trained to translate from fr to en." in card
    assert "trained by Marian and imported from https\\://huggingface.co/Helsinki-NLP/opus-mt-fr-en by" in card


def test_an_imported_model_at_work(folder, tmp_path, capsys):
    """Through the command in int8, through transformers' classes, the pipeline, and a picture of attention."""
    output = tmp_path / "out"
    assert main(["import", str(folder), "--output", str(output)]) == 0
    text = "a b c d e f"
    capsys.readouterr()
    assert main(["translate", str(output), "--beams", "2", text]) == 0
    translated = capsys.readouterr().out.strip()
    assert main(["translate", str(output), "--precision", "int8", "--max-new-tokens", "8", text]) == 0
    assert capsys.readouterr().out.strip()
    model = AutoModelForSeq2SeqLM.from_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(output)
    outputs = model.generate(**tokenizer([text], return_tensors="pt"), num_beams=2)
    [whole] = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    assert {*whole.split(translated)} == {""}  # of what goes round to its limit, the command keeps one round
    assert pipeline("translation", model=str(output))(text, num_beams=2)[0]["translation_text"] == whole
    labels = tokenizer(text_target=["b c"], return_tensors="pt").input_ids
    assert labels[0, -1] == 0 and model(**tokenizer([text], return_tensors="pt"), labels=labels).loss > 0
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert main(["attention", str(output), text, "--output", str(tmp_path / "one.png")]) == 0
