"""Models exported to ONNX, run by onnxruntime, beside the models themselves: logits at all shapes, greedy search."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, error_of, padded_batch
from exporting_models import PAIRS, SOURCES, imported_tokenizer, save_model, save_trained_model, small_tokenizer
from model_folders import change
from passes import OTHER_TOOLKITS
from tokenizers import Tokenizer, models, processors

from vaswani_transformer import Translator, export_model, load_model, train_tokenizer
from vaswani_transformer.cli.main import main
from vaswani_transformer.export.engine import load_exported
from vaswani_transformer.export.exporting import TRANSFORMERS_JS
from vaswani_transformer.export.one_tokenizer import with_one_tokenizer
from vaswani_transformer.model.tokenization_vaswani import VaswaniTokenizer

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
import onnxruntime

from vaswani_transformer.export.to_onnx import DECODER, ENCODER, QUANTIZED, cache_names, decode_in_parts

pytestmark = pytest.mark.slow  # tracing the model takes a quarter of a minute

SCRIPT = ROOT / "scripts" / "translate_onnx.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two decoder layers with values narrower than keys, so that no two tensors can be mistaken for each other."""
    root = tmp_path_factory.mktemp("model")
    return save_model(root / "model", small_tokenizer(), encoder_layers=1, d_k=7, d_v=6)


@pytest.fixture(scope="module")
def exported(tmp_path_factory, folder):
    return export_model(folder, tmp_path_factory.mktemp("exported") / "onnx", "onnx").folder


def largest_difference(model, exported, lengths, target_length, seed) -> float:
    """Of logits, for a padded batch, the first half of the target at once and the rest token by token."""
    ids, mask = padded_batch(lengths, seed=seed, vocab_size=285)
    inputs = torch.randint(3, 285, (len(lengths), target_length), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        ours = model(input_ids=ids, attention_mask=mask, decoder_input_ids=inputs).logits
    theirs = decode_in_parts(exported, ids.numpy(), mask.numpy(), inputs.numpy())
    return float((ours - torch.from_numpy(theirs)).abs().max())


@pytest.mark.parametrize("lengths", [(1,), (7,), (5, 9, 2), (4, 4, 4, 4), tuple(range(1, 34))], ids=str)
def test_logits_at_every_shape(folder, exported, lengths):
    model, _ = load_model(folder, "cpu")
    for seed, target_length in enumerate((1, 2, 11)):
        assert largest_difference(model, exported, lengths, target_length, seed) < 1e-4


def test_the_graphs_say_what_they_take(exported):
    encoder, decoder = (onnxruntime.InferenceSession(exported / f"{name}.onnx") for name in (ENCODER, DECODER))
    assert b"to_onnx.py" not in (exported / f"{DECODER}.onnx").read_bytes()  # a path of whoever exported
    given = {one.name: one.shape for one in decoder.get_inputs()}
    assert given["input_ids"] == ["batch_size", "target_length"]
    assert given["encoder_attention_mask"] == ["batch_size", "source_length"]
    assert given["encoder_hidden_states"] == ["batch_size", "source_length", 24]
    assert given["past_key_values.1.decoder.key"] == ["batch_size", 3, "past_length", 7]
    assert given["past_key_values.1.encoder.value"] == ["batch_size", 3, "past_source_length", 6]
    assert [one.name for one in decoder.get_outputs()] == ["logits", *cache_names("present", 2), "cross_attentions.1"]
    # Sinusoids end with their table, by an error and not by anything made up.
    with pytest.raises(Exception, match=r"out of data bounds|out of bounds"):
        encoder.run(None, {"input_ids": np.full((1, 101), 5), "attention_mask": np.ones((1, 101), dtype=np.int64)})


@pytest.mark.usefixtures("whole_outputs")
def test_the_script_translates_greedily_without_torch(folder, exported, tmp_path):
    """The documented loop, in a process of its own, on blank lines and a special token too; and what it refuses."""
    lines = [*SOURCES, "", "The </s> sign."]
    model, tokenizer = load_model(folder, "cpu")
    expected = list(Translator(model, tokenizer, num_beams=1).translate(lines))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import translate_onnx\n"
        "translator = translate_onnx.OnnxTranslator(sys.argv[2], threads=1)\n"
        "for line in translator.translate(sys.stdin, batch_size=5): print(line)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(SCRIPT.parent), str(exported)]
    text = "".join(line + "\n" for line in lines).encode()
    done = subprocess.run(command, input=text, capture_output=True, timeout=120, check=True)
    assert done.stdout.decode().split("\n")[:-1] == expected
    assert len(set(expected)) > 3
    other = shutil.copytree(exported, tmp_path / "exported")
    change(other, "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_vaswani.VaswaniTokenizer"]})
    done = subprocess.run([sys.executable, SCRIPT, other], input="", capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith(f"error: the tokenizer of {other} needs more than")


@pytest.mark.parametrize("kind", ["sinusoidal", "learned", "one vocabulary", "two vocabularies", "two of our own"])
def test_transformers_js_translates_as_the_model_does(tmp_path, kind):
    """With TRANSFORMERS_JS the folder in which `npm install @huggingface/transformers@4` was run."""
    if "TRANSFORMERS_JS" not in os.environ or not shutil.which("node"):
        pytest.skip("needs node, and TRANSFORMERS_JS: a folder with npm's @huggingface/transformers")
    tokenizer = small_tokenizer()
    if "vocabular" in kind:
        tokenizer = imported_tokenizer(tmp_path, 1 + (kind == "two vocabularies"))
    if kind == "two of our own":
        target = train_tokenizer([target for _, target in PAIRS], vocab_size=300).backend_tokenizer
        tokenizer = two_sided(tokenizer.backend_tokenizer, target)
    changes = {"position_encoding": kind} if kind == "learned" else {}
    folder = save_trained_model(tmp_path / "model", tokenizer, steps=400, **changes)
    exported = export_model(folder, tmp_path / "exported", TRANSFORMERS_JS).folder
    script = shutil.copy(ROOT / "scripts" / "translate_transformers_js.mjs", os.environ["TRANSFORMERS_JS"])
    sources = [source for source, _ in PAIRS[:100]] + [""]
    outputs = Translator(*load_model(folder, "cpu"), num_beams=1).translate(sources)
    limited = max(map(len, sources))  # an output in circles is cut here, and there at 256 tokens
    pairs = [pair for pair in zip(sources, outputs, strict=True) if len(pair[1]) < limited and pair[1][-1:] in ".?!"]
    command, text = ["node", script, exported, "fp32"], "\n".join(source for source, _ in pairs)
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split("\n")[: len(pairs)] == [output for _, output in pairs] and len(pairs) > 20


def two_sided(source, target=None, **options):
    tokens = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return VaswaniTokenizer(tokenizer_object=source, target_tokenizer_object=target, **tokens, **options)


def test_what_transformers_js_cannot_follow_is_refused(tmp_path):
    moses = two_sided(small_tokenizer().backend_tokenizer, moses={"languages": ["en", "de"]})
    model = save_model(tmp_path / "two", moses)
    assert "reads a tokenizer.json and no more" in error_of(export_model, model, tmp_path / "exported", TRANSFORMERS_JS)


def test_settings_of_the_target_have_its_new_ids(tmp_path):
    model, tokenizer = load_model(save_model(tmp_path / "model", imported_tokenizer(tmp_path, 2)), "cpu")
    old, settings = model.config.eos_token_id, model.generation_config
    settings.update(forced_bos_token_id=7, begin_suppress_tokens=[8], bad_words_ids=[[9], [7, 8]], max_new_tokens=6)
    with_one_tokenizer(model, tokenizer)
    first = model.config.eos_token_id - old
    assert first > 0 and [settings.forced_bos_token_id, *settings.begin_suppress_tokens] == [first + 7, first + 8]
    assert settings.bad_words_ids == [[first + 9], [first + 7, first + 8]] and settings.max_new_tokens == 6


def test_words_of_two_plain_vocabularies_are_joined_by_spaces(tmp_path):
    tokens = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    plain = [Tokenizer(models.WordLevel(tokens | {word: 4, "c": 5})) for word in "ab"]
    for side in plain:
        side.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])
    tokenizer = two_sided(*plain)
    model, tokenizer = load_model(save_model(tmp_path / "model", tokenizer), "cpu")
    assert with_one_tokenizer(model, tokenizer).decode([10, 11, 10]) == "b c b" == tokenizer.decode([4, 5, 4])


def test_int8_is_near(tmp_path):
    folder = save_model(tmp_path / "model", small_tokenizer(), scale=0.5)  # large weights make much of small errors
    exported, _, _, difference = export_model(folder, tmp_path / "exported", TRANSFORMERS_JS)
    assert 1e-4 < difference < 0.3  # of what is loaded
    exact = largest_difference(load_model(folder, "cpu")[0], exported, (5, 9, 2), 9, seed=0)
    for name in (ENCODER, DECODER):
        (exported / f"{name}{QUANTIZED}.onnx").replace(exported / f"{name}.onnx")
    assert exact < 1e-4 < largest_difference(load_model(folder, "cpu")[0], exported, (5, 9, 2), 9, seed=0) < 0.3


@pytest.mark.parametrize(
    "changes",
    [
        {"position_encoding": "learned", "attention_bias": True, "d_model": 25, "d_k": 4, "d_v": 9},
        {"tie_word_embeddings": False, "num_heads": 1, "d_k": 24, "d_v": 24},
        {"encoder_layers": 0, "decoder_layers": 1},
        {"attention_window": 3},
        {"decoder_start_token_id": 2, "vocab_size": 300, "layer_norm_eps": 0.05},
        OTHER_TOOLKITS[-1] | {"decoder_vocab_size": None, "position_offset": 2},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_every_option(tmp_path, changes):
    folder = save_model(tmp_path / "model", small_tokenizer(), **changes)
    exported = export_model(folder, tmp_path / "exported", "onnx").folder
    model, _ = load_model(folder, "cpu")
    for lengths in ((1,), (5, 9, 2)):
        assert largest_difference(model, exported, lengths, 9, seed=0) < 1e-4


def test_the_command(tmp_path, folder, capsys, fails):
    assert main(["export", str(folder), "--format", "onnx", "--output", str(tmp_path / "exported")]) == 0
    done = capsys.readouterr()
    assert "logits differ from the model's by at most" in done.out
    assert done.err.strip().splitlines() == [f"exporting {folder} to onnx"], "the exporter's remarks stay away"
    refused = f"{tmp_path / 'exported'} holds a model exported to onnx: export it with --format ctranslate2"
    assert error_of(load_exported, tmp_path / "exported") == refused
    fails("translate", tmp_path / "exported", "A dog.")
