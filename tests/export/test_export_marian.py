"""Models exported to Marian: back to the very arrays they came from, and the paper's own with the same scores."""

import itertools
import os
import subprocess
from pathlib import Path

import imported_models
import numpy as np
import pytest
import torch
import yaml
from conftest import TESTS, error_of, tiny_model
from exporting_models import SOURCES, save_model, small_tokenizer

from vaswani_transformer import export_model, load_model
from vaswani_transformer.cli.main import main
from vaswani_transformer.export.exporting import set_positions
from vaswani_transformer.export.to_marian import write
from vaswani_transformer.importing import marian
from vaswani_transformer.marian_format import CONFIG

FIXTURES = TESTS / "fixtures" / "marian"
#: A Python with the package pymarian, whose Marian then scores what was exported.
PYTHON = os.environ.get("MARIAN_PYTHON")
#: The paper's models, and what comes from other toolkits; Marian's own layout last.
MODELS = {
    "the paper's": {},
    "learned positions": {
        "position_encoding": "learned", "activation_function": "silu", "tie_word_embeddings": False,
        "attention_bias": True, "output_bias": True, "max_position_embeddings": 80, "scale": 1.0,
    },
    "last norms": {
        "position_encoding": "sinusoidal-halves", "position_offset": 2, "activation_function": "gelu",
        "scale_embedding": False, "share_encoder_decoder_embeddings": False, "add_final_layer_norm": True,
    },
    "Marian's": {"position_encoding": "sinusoidal-tensor2tensor", "layer_norm_eps": 1e-6},
}  # fmt: skip


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    return dict(np.load(path))


def model_of(source: Path, *vocabularies: Path):
    imported = marian.read(source, vocabularies=vocabularies)
    model = imported_models.model_of(imported)
    model.generation_config.update(**imported.generation)
    return model, imported.tokenizer


@pytest.fixture(scope="module", params=MODELS)
def exported(request, tmp_path_factory):
    """A model folder, and what it was exported to."""
    root = tmp_path_factory.mktemp("model")
    folder = save_model(root / "model", small_tokenizer(), **MODELS[request.param])
    if request.param == "Marian's":  # whose decoder starts from zeros
        model, _ = load_model(folder, "cpu")
        model.model.shared.weight.data[model.config.decoder_start_token_id] = 0
        model.save_pretrained(folder)
    return folder, export_model(folder, root / "marian", "marian").folder


@pytest.mark.parametrize("name", ["relu-two", "swish-all", "gelu-tied", "src-spm", "new-learned"])
def test_what_marian_trained_becomes_the_same_file_again(tmp_path, name):
    """Every array to the bit, so that Marian's recorded scores are those of the export as well."""
    model, tokenizer = model_of(FIXTURES / name)
    set_positions(model)
    write(model, tokenizer, tmp_path)
    theirs, ours = (arrays_of(folder / "model.npz") for folder in (FIXTURES / name, tmp_path))
    names = theirs.keys()
    if name == "src-spm":  # gets a bias of zeros
        names = names | {"decoder_ff_logit_out_b"}
        theirs["decoder_ff_logit_out_b"] = np.zeros((1, len(theirs["Wemb"])), dtype=np.float32)
    assert ours.keys() == names
    for key in names - {CONFIG}:
        assert ours[key].dtype == theirs[key].dtype and np.array_equal(ours[key], theirs[key]), key
    options = [yaml.safe_load(arrays[CONFIG].tobytes().rstrip(b"\0")) for arrays in (ours, theirs)]
    assert {key for key in options[0] if options[0][key] != options[1].get(key)} <= {"version"}
    settings = yaml.safe_load((tmp_path / "decoder.yml").read_text())
    assert settings["beam-size"] == 3 and settings["normalize"] == pytest.approx(0.6) and not settings["allow-unk"]
    again, tokenizer_again = model_of(tmp_path / "model.npz")
    for text in ("mukamu di ba", "bobuma </s> <unk> x"):
        if name != "src-spm":  # whose words are given by the .spm file, not by the .yml file
            assert tokenizer_again(text).input_ids == tokenizer(text).input_ids
    assert again.config.to_dict() == model.config.to_dict()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_scores_as_the_model(exported):
    folder, output = exported
    model, tokenizer = load_model(folder, "cpu")
    theirs, splitter = model_of(output / "model.npz")
    expected_type = "transformer" if model.config.position_encoding == "sinusoidal-tensor2tensor" else "transformer-new"
    assert yaml.safe_load(arrays_of(output / "model.npz")[CONFIG].tobytes().rstrip(b"\0"))["type"] == expected_type
    for source, target in itertools.pairwise(SOURCES):
        ids, labels = (tokenizer(text).input_ids for text in (source, target))
        tokens = [" ".join(tokenizer.convert_ids_to_tokens(one[:-1])) for one in (ids, labels)]
        assert [splitter(text).input_ids for text in tokens] == [ids, labels]
        given = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
        with torch.no_grad():
            expected, logits = (one(**given).logits[..., : len(tokenizer)] for one in (model, theirs))
        assert (logits - expected).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="MARIAN_PYTHON names no Python with pymarian, by which Marian is run")
def test_marian_gives_the_same_scores(exported):
    folder, output = exported
    model, tokenizer = load_model(folder, "cpu")
    pairs = list(itertools.pairwise(SOURCES))
    for name, side in zip(("in", "out"), zip(*pairs, strict=True), strict=True):
        lines = [" ".join(tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids[:-1])) for text in side]
        (output / name).write_text("\n".join(lines) + "\n")
    limit = yaml.safe_load((output / "decoder.yml").read_text()).get("max-length", 1000)
    command = f"score -m model.npz -v vocab.yml vocab.yml -t in out --word-scores --max-length {limit}"
    scored = [line.partition("WordScores= ")[2].split() for line in run_marian(command, output)]
    for scores, (source, target) in zip(scored, pairs, strict=True):
        ids, labels = (torch.tensor([tokenizer(text).input_ids]) for text in (source, target))
        with torch.no_grad():
            logits = model(input_ids=ids, labels=labels).logits
        expected = logits.log_softmax(-1).gather(-1, labels[..., None])[0, :, 0].tolist()
        assert [float(score) for score in scores] == pytest.approx(expected, abs=1.5e-5)  # printed with 5 decimals
    greedy = run_marian("decode -c decoder.yml --beam-size 1 -i in --max-length-factor 1", output)
    for line, (source, _) in zip(greedy, pairs, strict=True):
        ids = tokenizer.convert_tokens_to_ids(line.split(" "))
        encoded = tokenizer(source, return_tensors="pt")
        assert model.generate(**encoded, num_beams=1, max_new_tokens=len(ids))[0, 1:].tolist()[: len(ids)] == ids


def run_marian(arguments: str, folder: Path) -> list[str]:
    code = "import sys, _pymarian; sys.exit(_pymarian.main(sys.argv[1:]))"
    command = [PYTHON, "-c", code, *arguments.split(), "--cpu-threads", "1", "--quiet"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_names_of_tokens_are_what_yaml_makes_of_them(exported):
    """Also signs that end a line in YAML, or that a library in C++ could not read."""
    folder, output = exported
    _, tokenizer = load_model(folder, "cpu")
    words = yaml.safe_load((output / "vocab.yml").read_text(encoding="utf-8"))
    assert words == tokenizer.get_vocab() and words["</s>"] == 2 and words["<unk>"] == 3


class TwoVocabularies:
    """As MarianTokenizer has them."""

    unk_token_id = 2

    def __init__(self, name: str = "source"):
        self.name = name

    def side(self, name: str) -> "TwoVocabularies":
        return TwoVocabularies(name)

    def get_vocab(self) -> dict[str, int]:
        if self.name == "source":
            return {"<eos>": 0, "\ufff5a\ufff6\ufff2": 1, "<unk>": 2, "beyond": 99}
        return {"<eos>": 0, "b": 1, "<unk>": 2, "U\u2028\x85 €": 3}


def test_two_vocabularies_of_a_tokenizer_of_transformers(tmp_path):
    sizes = {"share_encoder_decoder_embeddings": False, "max_position_embeddings": 9}
    ids = {"eos_token_id": 0, "decoder_start_token_id": 0, "bos_token_id": 0, "pad_token_id": 2}
    model = tiny_model(vocab_size=3, decoder_vocab_size=4, **sizes, **ids)
    set_positions(model)
    write(model, TwoVocabularies(), tmp_path)
    words = [yaml.safe_load((tmp_path / f"{side}.yml").read_text()) for side in ("source", "target")]
    assert words == [{"</s>": 0, "a<": 1, "<unk>": 2}, {"</s>": 0, "b": 1, "<unk>": 2, "U\u2028\x85 €": 3}]
    theirs, _ = model_of(tmp_path / "model.npz")
    with torch.no_grad():
        ours = model(input_ids=torch.tensor([[1, 0]]), decoder_input_ids=torch.tensor([[0, 3, 1]])).logits
        again = theirs(input_ids=torch.tensor([[1, 0]]), decoder_input_ids=torch.tensor([[4, 3, 1]])).logits
    assert (ours - again[..., :4]).abs().max() < 1e-5


def test_the_command(tmp_path, capsys):
    folder = save_model(tmp_path / "model", small_tokenizer())
    arguments = ["export", str(folder), "--format", "marian", "--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert f"use it with: marian-decoder -c {tmp_path}/out/decoder.yml, on tokens of the folder's vocab" in printed
    files = {path.name for path in (tmp_path / "out").iterdir()} - {".vaswani.json"}
    assert files >= {"model.npz", "decoder.yml", "vocab.yml", "tokenizer.json", "export.json"}
    settings = yaml.safe_load((tmp_path / "out" / "decoder.yml").read_text())
    assert settings["vocabs"] == ["vocab.yml", "vocab.yml"] and settings["max-length"] == 100
    assert settings["max-length-factor"] == 3
    arrays = arrays_of(tmp_path / "out" / "model.npz")
    assert len(arrays["TransformerBatchDecoder->decoder->positionEmbedding->embeddings"]) == 100
    assert main([*arguments, "--overwrite"]) == 0
    line = error_of(export_model, folder, tmp_path / "int8", "marian", "int8")
    assert line == "quantization is 'int8': weights exported to marian are float32"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d_k": 7}, "d_k is 7: `type: transformer-new` of Marian has 8.0, so this model cannot be exported to it"),
        ({"attention_window": 5}, "attention_window is 5: `type: transformer-new` of Marian has None"),
        ({"layer_norm_eps": 1e-6}, "layer_norm_eps is 1e-06: `type: transformer-new` of Marian has 1e-05"),
    ],
)
def test_what_marian_does_not_have_is_refused_by_its_name(tmp_path, changes, words):
    assert words in error_of(write, tiny_model(**changes), None, tmp_path)
    assert not list(tmp_path.iterdir())
