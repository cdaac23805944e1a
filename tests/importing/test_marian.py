"""Models that Marian trained (`scripts/make_marian_fixture.py`): its own scores; and files that are damaged."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import TESTS, error_of
from imported_models import model_of

from vaswani_transformer import import_model, load_model
from vaswani_transformer.cli.main import main
from vaswani_transformer.importing import marian
from vaswani_transformer.importing.sentencepiece import read_model
from vaswani_transformer.importing.source import Imported
from vaswani_transformer.marian_format import CONFIG

FIXTURES = TESTS / "fixtures" / "marian"


def read(source: Path, *vocabularies: Path) -> Imported:
    return marian.read(source, vocabularies=vocabularies)


def target_ids(tokenizer, pair: dict) -> list[int]:
    """Of a target that is a text, or pieces."""
    if "normalized" not in pair:
        return tokenizer(text_target=pair["target"]).input_ids
    side = tokenizer.side("target") if hasattr(tokenizer, "side") else tokenizer
    return [*side.convert_tokens_to_ids(pair["target"].split()), tokenizer.eos_token_id]


@torch.no_grad()
def log_probabilities(model, tokenizer, source: str, target: list[int]) -> torch.Tensor:
    """Of each token of a target, `(length,)`."""
    encoded, labels = tokenizer(source, return_tensors="pt"), torch.tensor([target])
    logits = model(input_ids=encoded.input_ids, attention_mask=encoded.attention_mask, labels=labels).logits
    return logits.log_softmax(-1).gather(-1, labels[..., None])[0, :, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["relu-two", "swish-all", "gelu-tied", "src-spm", "new-learned"])
def test_marian_itself_gives_the_same_scores(name, dtype):
    imported = read(FIXTURES / name)
    model = model_of(imported, dtype)
    scores = json.loads((FIXTURES / name / "scores.json").read_text(encoding="utf-8"))
    for pair in scores["forced"] + scores["n_best"]:
        ids = target_ids(imported.tokenizer, pair)
        words = torch.tensor(pair["words"], dtype=dtype)
        # Marian cuts off long ones.
        ours = log_probabilities(model, imported.tokenizer, pair["source"], ids)[: len(words)]
        assert (ours - words).abs().max() < 1e-5, pair  # of which 5e-6 may be Marian's rounding
        if "normalized" not in pair:
            assert len(ours) == len(ids) and abs(float(ours.sum()) - pair["sum"]) < 1e-5


@pytest.mark.parametrize("name", ["swish-all", "new-learned"])
def test_the_search_finds_what_marian_finds(name):
    """Its settings are those of decoder.yml, but for the beam of 2 in the recorded lists."""
    imported = read(FIXTURES / name)
    rule = {"length_normalization": "power", "length_penalty": pytest.approx(0.6)}
    assert imported.generation == {"suppress_tokens": [1], "num_beams": 3, **rule}
    model = model_of(imported)
    model.generation_config.update(**imported.generation)
    best = json.loads((FIXTURES / name / "scores.json").read_text(encoding="utf-8"))["n_best"][::2]
    equal = 0
    for pair in best:
        encoded = dict(imported.tokenizer(pair["source"], return_tensors="pt"))
        encoded |= {"return_dict_in_generate": True, "output_scores": True}
        found = model.generate(**encoded, num_beams=2, early_stopping="never")
        ids = target_ids(imported.tokenizer, pair)
        if found.sequences[0, 1 : 1 + len(ids)].tolist() == ids:
            equal += 1
            assert float(found.sequences_scores[0]) == pytest.approx(pair["normalized"], abs=1e-5)
    assert equal >= len(best) - 1, (equal, len(best))


def changed(folder: Path, name: str = "relu-two", options: dict | None = None, arrays: dict | None = None) -> Path:
    """A copy of a model with other options (None: left out) and arrays (likewise)."""
    shutil.copytree(FIXTURES / name, folder)
    path = folder / "model.npz"
    content = dict(np.load(path))
    settings = yaml.safe_load(content[CONFIG].tobytes().rstrip(b"\0")) | (options or {})
    text = yaml.safe_dump({name: value for name, value in settings.items() if value is not None})
    content[CONFIG] = np.frombuffer(text.encode() + bytes(300), dtype=np.int8)
    content |= arrays or {}
    np.savez(path, **{name: array for name, array in content.items() if array is not None})
    return path


REFUSED = {
    "type": "multi-transformer",
    "transformer-decoder-autoreg": "rnn",
    "transformer-ffn-activation": "tanh",
    "transformer-postprocess": "da",
    "transformer-attention-mask": "alibi",
    "right-left": True,
    "lemma-dim-emb": 8,
    "input-types": ["sequence", "class"],
}


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_without_counterpart_is_refused_by_its_name(tmp_path, option):
    line = error_of(read, changed(tmp_path / "model", options={option: REFUSED[option]}))
    assert f"has {option} {REFUSED[option]!r}, which has no counterpart here: only" in line


@pytest.mark.parametrize(
    "options",
    [
        {"transformer-train-position-embeddings": True, "guided-alignment": "file", "label-smoothing": 0.1},
        {"transformer-decoder-dim-ffn": 20, "transformer-decoder-ffn-depth": 2, "transformer-postprocess": "and"},
    ],
    ids=["without effect on this type", "the same in other words"],
)
def test_options_that_change_nothing(tmp_path, options):
    ours, same = read(FIXTURES / "relu-two"), read(changed(tmp_path / "model", options=options))
    assert same.config == ours.config and same.weights.keys() == ours.weights.keys()
    assert all(torch.equal(ours.weights[name], same.weights[name]) for name in ours.weights)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dim-emb": None}, "model.npz: there is no entry 'dim-emb'"),
        ({"transformer-heads": 3}, "model.npz: d_model 16 is not a multiple of num_heads 3"),
        ({"dim-vocabs": [5]}, "has dim-vocabs [5]"),
        ({"dim-vocabs": [10**12, 10**12]}, "has dim-vocabs [1000000000000"),
        ({"enc-depth": 10**12}, "encoder_layers is 1000000000000"),
        ({"type": ["transformer"]}, "has type ['transformer']"),
    ],
)
def test_sizes_that_are_none(tmp_path, options, words):
    assert words in error_of(read, changed(tmp_path / "model", options=options))


def test_parameters_that_do_not_fit_are_named(tmp_path):
    arrays = {"decoder_l1_ffn_b1": None, "decoder_l1_ffn_QuantMultA": np.ones(1, dtype=np.float32)}
    line = error_of(import_model, changed(tmp_path / "a", arrays=arrays), tmp_path / "out")
    assert "model.decoder.layers.0.fc1.bias" in line and "decoder_l1_ffn_QuantMultA" in line
    for number, (shape, ours) in enumerate({(5, 16): "[16, 5]", (): "[]", (2, 2, 2): "[2, 2, 2]"}.items()):
        arrays = {"decoder_l1_ffn_W1": np.zeros(shape, dtype=np.float32)}
        line = error_of(import_model, changed(tmp_path / str(number), arrays=arrays), tmp_path / "out")
        assert "size mismatch for model.decoder.layers.0.fc1.weight" in line and ours in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["swish-all", "gelu-tied", "src-spm"])  # three kinds of tokenizers
def test_the_imported_folder_scores_as_marian(tmp_path, name):
    assert main(["import", str(FIXTURES / name), "--output", str(tmp_path / "out")]) == 0
    model, tokenizer = load_model(tmp_path / "out", "cpu")
    for pair in json.loads((FIXTURES / name / "scores.json").read_text(encoding="utf-8"))["forced"]:
        ours = log_probabilities(model, tokenizer, pair["source"], target_ids(tokenizer, pair))
        assert float(ours.sum()) == pytest.approx(pair["sum"], abs=1e-5)


def test_damaged_files(tmp_path):
    path = tmp_path / "model.npz"
    arrays = dict(np.load(FIXTURES / "relu-two" / "model.npz"))
    np.savez(path, **arrays, pickled=np.array([{}], dtype=object))
    assert "Object arrays cannot be loaded when allow_pickle=False" in error_of(read, path)
    np.savez_compressed(path, **arrays)
    assert "is compressed" in error_of(read, path)
    np.savez(path, **{**arrays, "decoder_l1_ffn_W1": np.zeros((16, 20), dtype=np.int8)})
    assert "holds 'decoder_l1_ffn_W1', packed or quantised" in error_of(read, path)
    np.savez(path, **{**arrays, CONFIG: np.frombuffer(b"type: [transformer\0", dtype=np.int8)})
    assert "while parsing" in error_of(read, path)
    del arrays[CONFIG]
    np.savez(path, **arrays)
    assert f"there is no entry '{CONFIG}'" in error_of(read, path)
    assert "No such file" in error_of(read, tmp_path / "nothing.npz")


def test_what_is_a_model_of_marian(tmp_path):
    assert marian.matches(FIXTURES / "relu-two") and marian.matches(FIXTURES / "relu-two" / "model.npz")
    (tmp_path / "model.npz.optimizer.npz").touch()
    assert not marian.matches(tmp_path) and not marian.matches(tmp_path / "config.json")
    for name in ("model1.npz", "model2.npz"):
        shutil.copy(FIXTURES / "relu-two" / "model.npz", tmp_path / name)
    assert "holds 2 models (model1.npz, model2.npz): give" in error_of(read, tmp_path)


def test_an_archive_of_opus_mt(tmp_path, caplog):
    """One .yml file for both sides, SentencePiece models beside it, several models of which decoder.yml names one."""
    spm = FIXTURES / "src-spm" / "joint.spm"
    model, vocabulary = "opus.spm32k-spm32k.transformer.model1.npz.best-perplexity.npz", "opus.spm32k-spm32k.vocab.yml"
    for name in (model, "older.npz"):
        shutil.copy(FIXTURES / "src-spm" / "model.npz", tmp_path / name)
    for name in ("source.spm", "target.spm"):
        shutil.copy(spm, tmp_path / name)
    lines = [f"{json.dumps(piece.piece)}: {number}\n" for number, piece in enumerate(read_model(spm).pieces)]
    (tmp_path / vocabulary).write_text("".join(reversed(lines)), encoding="utf-8")
    settings = f"relative-paths: true\nmodels:\n  - {model}\nvocabs:\n  - /far/away/{vocabulary}\n  - {vocabulary}\n"
    (tmp_path / "decoder.yml").write_text(settings + "beam-size: 6\nnormalize: 1\nallow-unk: true\n")
    (tmp_path / "LICENSE").write_text("Attribution 4.0 International\n")
    ours, opus = read(FIXTURES / "src-spm"), read(tmp_path)
    assert opus.generation == {"num_beams": 6, "length_normalization": "power", "length_penalty": 1.0}
    assert opus.facts.license == "cc-by-4.0" and opus.facts.source == model and "v1.12.42" in opus.facts.notes[0]
    text = "mukamu  di ba LEDE zß gidax"
    for sides in ({"text": text}, {"text_target": text}):
        assert opus.tokenizer(**sides).input_ids == ours.tokenizer(**sides).input_ids
    assert opus.tokenizer.decode(opus.tokenizer("ba lede").input_ids, skip_special_tokens=True) == "ba lede"
    (tmp_path / "decoder.yml").write_text(settings + "beam-size: 1\nword-penalty: 0.7\n")
    assert read(tmp_path).generation["word-penalty"] == 0.7  # for the notes: our search has no such setting
    assert "length_penalty" not in read(tmp_path).generation  # which transformers would not save without beams
    (tmp_path / "decoder.yml").unlink()
    assert f"holds 2 models (older.npz, {model}): give" in error_of(read, tmp_path)
    line = error_of(read, tmp_path / model)
    assert "are not beside it (no decoder.yml names one or two): give --vocabulary FILE" in line
    assert read(tmp_path / model, tmp_path / vocabulary).tokenizer(text).input_ids == ours.tokenizer(text).input_ids
    (tmp_path / "source.spm").rename(tmp_path / "another")
    assert not caplog.text and read(tmp_path / model, tmp_path / vocabulary)
    assert "holds parts of words: with no source.spm beside it, give text cut into them" in caplog.text


def test_sentencepiece_models_that_cannot_be_followed(tmp_path):
    shutil.copytree(FIXTURES / "src-spm", tmp_path / "model")
    (tmp_path / "model" / "joint.spm").write_bytes(b"")
    assert "joint.spm lacks </s>, <unk> or ids" in error_of(read, tmp_path / "model")


def test_words_of_a_vocabulary(tmp_path):
    """As Marian reads them: a scalar is a text, ids beyond the matrix are unknown, the first of two entries counts."""
    path = changed(tmp_path / "model", "swish-all")
    size = read(path).config.vocab_size - 1
    lines = ["</s>: 0", "<unk>: 1", "null: 2", "1.50: 3", '"ye\\u00e9 s": 4', "yes: 5", "~: 6", "yes: 7"]
    # Characters that other readers of YAML refuse, or end lines at.
    words = [f"x{chr(code)}{chr(code)}y" for code in (0, 1, 0x1F, 0x7F, 0x80, 0x85, 0x9F, 0x2028, 0x2029, 0xFFFE)]
    lines += ["'\""[id % 2] + word + "'\""[id % 2] + f": {id}" for id, word in enumerate(words, 8)]
    lines += [f"{words[5]}z: 18", '"\\x85\\u2028": 19', f"beyond: {size}"]
    (tmp_path / "words.yml").write_text("\n".join(lines), encoding="utf-8")
    imported = read(path, tmp_path / "words.yml")
    assert imported.tokenizer(" ".join([*words, f"{words[5]}z", "\x85\u2028"])).input_ids == [*range(8, 20), 0]
    tokenizer = imported.tokenizer
    assert tokenizer("null  1.50 yes ~ beyond other").input_ids == [2, 3, 5, 6, 1, 1, 0]
    assert (tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token_id) == ("</s>", "<unk>", size)
    assert imported.config.decoder_start_token_id == imported.config.pad_token_id == size
    assert tokenizer.decode([2, 5, 0], skip_special_tokens=True) == "null yes"


def test_vocabularies_that_do_not_fit(tmp_path):
    path = changed(tmp_path / "model")
    source, target = (path.parent / name for name in ("source.yml", "target.yml"))
    assert read(path, source, target).tokenizer("mukamu").input_ids == read(path).tokenizer("mukamu").input_ids
    assert "give --vocabulary FILE, or --vocabulary SOURCE TARGET" in error_of(read, path, source, source, target)
    other = tmp_path / "other.yml"
    for content, words in {
        "a: 0\nb: 1\n<unk>: 2": "lacks </s>, <unk> or ids of the model's",
        "- a": "other.yml: ",
        "a: 1\n'b": "other.yml: while scanning a quoted scalar",
        "": "other.yml: ",
        "a: 99": "lacks </s>, <unk> or ids of the model's",
    }.items():
        other.write_text(content)
        assert words in error_of(read, path, other, target), content
    other.write_text("<unk>: 0\n</s>: 1")
    with pytest.raises(ValueError, match="eos_token '</s>' is number 1 of the source's vocabulary and 0 of the"):
        read(path, other, target)
    target.unlink()
    assert "model.npz are not beside it (target.yml): give --vocabulary FILE" in error_of(read, path)
    line = error_of(read, FIXTURES / "swish-all", FIXTURES / "src-spm" / "joint.spm")
    assert "lacks </s>, <unk> or ids of the model's 119: give the model's own vocabulary" in line
