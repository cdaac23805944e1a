"""Models exported to CTranslate2 and run by it, beside the models: log-probabilities, greedy and beam search."""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import exporting_models
import pytest
import torch
from conftest import ROOT, error_of
from exporting_models import PAIRS, SOURCES, exported_translator, save_model, save_trained_model, small_tokenizer
from model_folders import change, save
from passes import OTHER_TOOLKITS
from test_docs import shell_commands

from vaswani_transformer import Translator, export_model, load_model, score_pairs
from vaswani_transformer.cli.main import main
from vaswani_transformer.decoding.streaming import Window
from vaswani_transformer.errors import UserError
from vaswani_transformer.export.engine import load_exported
from vaswani_transformer.exported import QUANTIZATIONS
from vaswani_transformer.hub.card_facts import known_languages, longest_source

ctranslate2 = pytest.importorskip("ctranslate2")
folder = exporting_models.small_model
GREEDY = {"num_beams": 1}
SIDES = [list(side) for side in zip(*PAIRS[:8], strict=True)]
# Waits for every hypothesis that ends within the limit, of a source that is searched alone or with others of its limit.
WAITING = {"threads": 1, "patience": 200.0}


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture(scope="module")
def exported(tmp_path_factory, folder):
    return export_model(folder, tmp_path_factory.mktemp("exported") / "float32").folder


def assert_same_model(folder, exported, tolerance=1e-4):
    """Log-probabilities of given pairs, and greedy translations."""
    model, tokenizer = load_model(folder, "cpu")
    translator = exported_translator(exported, threads=1, **GREEDY)
    ours, theirs = (score_pairs(one, tokenizer, *SIDES)[0] for one in (model, translator.model))
    assert theirs == pytest.approx(ours, rel=tolerance, abs=tolerance)
    greedy = list(Translator(model, tokenizer, **GREEDY).translate(SOURCES))
    assert list(translator.translate(SOURCES)) == greedy
    assert len(set(greedy)) > 3, "outputs that are all alike would prove little"


@pytest.mark.usefixtures("whole_outputs")
@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False, "layer_norm_eps": 0.05},
        {"d_k": 16, "d_v": 16, "attention_bias": True},
        {"d_model": 25, "d_k": 7, "d_v": 7, "position_encoding": "learned"},
        {"encoder_layers": 1, "decoder_layers": 3, "decoder_start_token_id": 2, "vocab_size": 300},
        {"scale_embedding": False, "share_encoder_decoder_embeddings": False, "activation_function": "gelu"},
        OTHER_TOOLKITS[-1] | {"decoder_vocab_size": None, "position_offset": 2},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_every_option(tmp_path, tokenizer, changes):
    folder = save_model(tmp_path / "model", tokenizer, **changes)
    assert_same_model(folder, export_model(folder, tmp_path / "exported").folder)


@pytest.mark.parametrize(("name", "value"), [("encoder_layers", 0), ("attention_window", 3), ("d_v", 5)])
def test_what_it_does_not_have_is_refused_by_name(tmp_path, tokenizer, name, value):
    folder = save_model(tmp_path / "model", tokenizer, **{name: value})
    with pytest.raises(UserError, match=f"^{name} is {value}, and CTranslate2 has .+ only"):
        export_model(folder, tmp_path / "exported")
    assert not list(tmp_path.glob("*exported*"))


@torch.no_grad()
def all_hypotheses(model, tokenizer, sources, **options):
    """Token ids and score of every hypothesis of the model's own search, each source alone."""
    found = []
    for source in sources:
        inputs = tokenizer([source], return_tensors="pt")
        output = model.generate(
            **inputs, num_return_sequences=4, num_beams=4, return_dict_in_generate=True, output_scores=True, **options
        )
        rows = [row[1:] for row in output.sequences.tolist()]
        rows = [row[: row.index(2) + 1] if 2 in row else [token for token in row if token != 1] for row in rows]
        found.append((rows, output.sequences_scores.tolist()))
    return found


def searched(exported, **options):
    """The outputs of the exported model's own search: token ids and score of each hypothesis."""
    translator = exported_translator(exported, scores=True, **options)
    pieces = translator.prepare(Window(0, 1, SOURCES)).pieces
    rows = dict(translator.model.search_pieces(translator, pieces))
    outputs = [rows[number] for number in range(len(SOURCES))]
    scores = [[each.score for each in ranked] for ranked in translator.as_hypotheses(pieces, outputs)]
    return list(zip(outputs, scores, strict=True))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tokenizer):
    """A model whose outputs end, and what it was exported to."""
    root = tmp_path_factory.mktemp("trained")
    folder = save_trained_model(root / "model", tokenizer)
    return folder, export_model(folder, root / "exported").folder


@pytest.mark.usefixtures("whole_outputs")
@pytest.mark.parametrize(
    "options",
    [
        {"length_penalty": 0.6},
        {"length_penalty": -0.5},
        {"length_penalty": 1.5, "max_new_tokens": 15},
        {"length_penalty": 1.0, "length_normalization": "power", "early_stopping": "never"},
    ],
    ids=str,
)
def test_a_search_that_waits_is_the_papers(trained, tokenizer, options):
    """n-best lists of sentences that end by themselves, and of others that are cut at their own limit."""
    folder, exported = trained
    model, _ = load_model(folder, "cpu")
    expected = all_hypotheses(model, tokenizer, SOURCES, **options)
    for number in (1, 4) if options == {"length_penalty": 0.6} else (4,):
        found = searched(exported, tokens_per_batch=1, num_return_sequences=number, **WAITING, **options)
        for (outputs, theirs), (rows, scores) in zip(found, expected, strict=True):
            assert outputs == rows[:number]
            assert theirs == pytest.approx(scores[:number], abs=1e-4)


def test_without_cublas_it_computes_on_the_cpu(monkeypatch, exported, caplog):
    monkeypatch.setattr("ctranslate2.get_cuda_device_count", lambda: 1)
    monkeypatch.setattr("ctypes.CDLL", Mock(side_effect=OSError))
    model, _ = load_exported(exported)
    assert model.engine.device == "cpu" and "finds no cuBLAS 12" in caplog.text


def test_the_least_length_is_the_models(trained, tokenizer):
    folder, exported = trained
    options, model = {"num_beams": 1, "min_new_tokens": 45}, load_model(folder, "cpu")[0]
    outputs = list(exported_translator(exported, **options).translate(SOURCES))
    assert outputs == list(Translator(model, tokenizer, **options).translate(SOURCES))
    assert outputs != list(Translator(model, tokenizer, num_beams=1).translate(SOURCES))


@pytest.mark.parametrize("limit", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_the_search_settings_of_imported_models_are_followed(tmp_path, trained, tokenizer, limit):
    """OPUS-MT's and Marian's: tokens that never come, and an end token that comes at the limit."""
    folder, exported = trained
    model, _ = load_model(folder, "cpu")
    plain = [rows[0] for rows, _ in all_hypotheses(model, tokenizer, SOURCES)]
    settings = {"suppress_tokens": [plain[0][1]], "bad_words_ids": [[1], plain[1][1:3]], "forced_eos_token_id": 2}
    settings["max_length"] = limit
    changed = shutil.copytree(exported, tmp_path / "changed")
    change(changed, "generation_config.json", **settings)
    model.generation_config.update(**settings, max_extra_tokens=None)
    # CTranslate2 gives the probability of these tokens to the others; transformers does so if it is asked.
    expected = all_hypotheses(model, tokenizer, SOURCES, renormalize_logits=True)
    assert [rows[0] for rows, _ in expected] != plain
    found = searched(changed, num_return_sequences=4, **WAITING)
    assert [outputs for outputs, _ in found] == [rows for rows, _ in expected]  # in the order of their scores


def test_the_quick_search_is_at_most_worse(trained):
    quick, proven = searched(trained[1], threads=1), searched(trained[1], tokens_per_batch=1, **WAITING)
    pairs = list(zip(quick, proven, strict=True))
    assert all(scores[0] <= most[0] + 1e-5 for (_, scores), (_, most) in pairs)
    assert sum(outputs[0] == best[0] for (outputs, _), (best, _) in pairs) >= len(SOURCES) - 1


def test_neither_batch_nor_order_matters(trained):
    exported = trained[1]
    alone = [next(exported_translator(exported, threads=1).translate([one])) for one in SOURCES]
    for tokens in (20, 5000):
        translator = exported_translator(exported, threads=1, tokens_per_batch=tokens)
        assert list(translator.translate(SOURCES)) == alone
        assert list(translator.translate(SOURCES[::-1])) == alone[::-1]


def test_the_table_of_positions_is_the_limit(tmp_path, tokenizer):
    """Beyond the table, also of sinusoids, a source is refused and an output ends."""
    long = "dog " * 130
    for rows in (30, 400):
        folder = save_model(tmp_path / f"model-{rows}", tokenizer, max_position_embeddings=rows)
        exported = export_model(folder, tmp_path / str(rows)).folder
        translator = exported_translator(exported, threads=1, **GREEDY)
        if rows == 30:
            with pytest.raises(UserError, match=r"line 2 has \d+ tokens and at most 30 are taken"):
                list(translator.translate(["A dog.", long]))
            [hypothesis] = next(exported_translator(exported, max_new_tokens=1000, **GREEDY).hypotheses(["A dog."]))
            assert hypothesis.tokens <= 30
        else:
            model, _ = load_model(folder, "cpu")
            assert list(translator.translate([long])) == list(Translator(model, tokenizer, **GREEDY).translate([long]))


@pytest.fixture(scope="module")
def without_overflow(tmp_path_factory, folder):
    """A model folder with random weights, every second column of each matrix zero.

    A processor without VNNI adds two products of 8 bits in 16 bits, and cuts off what goes beyond: how far int8 is from
    the model then depends on the processor. Where one of the two products is zero, it is the same on all of them.
    """
    model, tokenizer = load_model(folder, "cpu")
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data[:, 1::2] = 0
    return save(tmp_path_factory.mktemp("model") / "model", model, tokenizer)


def difference_of_pairs(folder, exported, precision=None) -> float:
    """Of the mean log-probability of a token, the largest of some pairs."""
    ours, counts = score_pairs(*load_model(folder, "cpu"), *SIDES)
    theirs, _ = score_pairs(*load_exported(exported, "cpu", precision), *SIDES)
    return max(abs(one - other) / count for one, other, count in zip(ours, theirs, counts, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("quantization", QUANTIZATIONS[1:])
def test_every_quantization(tmp_path, folder, exported, without_overflow, quantization):
    """The weights as they are stored, for any model, and the arithmetic of this processor where none overflows."""
    stored = export_model(folder, tmp_path / "stored", quantization=quantization).folder
    sizes = [(path / "model.bin").stat().st_size for path in (stored, exported)]
    assert sizes[0] < 0.7 * sizes[1]
    assert difference_of_pairs(folder, stored, "float32") < 0.1
    done = export_model(without_overflow, tmp_path / "exported", quantization=quantization)
    assert 0 < done.difference < 0.5  # a quarter of a bit and more would be a fault, and quantisation that is none too
    assert difference_of_pairs(without_overflow, done.folder) < 0.1


def test_javascript_is_told_that_spaces_stay(tmp_path, folder):
    """Of a tokenizer of one's own, whose settings may lack it: transformers.js then takes them away."""
    source = shutil.copytree(folder, tmp_path / "model")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    own = {name: settings[name] for name in ("eos_token", "pad_token", "unk_token") if name in settings}
    own["tokenizer_class"] = "PreTrainedTokenizerFast"
    (source / "tokenizer_config.json").write_text(json.dumps(own))
    exported = export_model(source, tmp_path / "exported").folder
    assert json.loads((exported / "tokenizer_config.json").read_text())["clean_up_tokenization_spaces"] is False


def test_ctranslate2s_own_converter_knows_our_models(tmp_path, folder):
    import vaswani_transformer.export.to_ctranslate2  # noqa: F401

    ctranslate2.converters.TransformersConverter(str(folder)).convert(str(tmp_path / "exported"))
    translator = ctranslate2.Translator(str(tmp_path / "exported"))
    model, tokenizer = load_model(folder, "cpu")
    ids = tokenizer("A small dog.")["input_ids"]
    output = translator.translate_batch([tokenizer.convert_ids_to_tokens(ids)], beam_size=1, max_decoding_length=9)
    expected = model.generate(input_ids=torch.tensor([ids]), num_beams=1, max_new_tokens=9)[0, 1:].tolist()
    expected = [token for token in expected if token not in (1, 2)]
    assert tokenizer.convert_tokens_to_ids(output[0].hypotheses[0]) == expected


def test_the_command_and_what_it_leaves_alone(tmp_path, folder, fails, capsys):
    output = tmp_path / "a new" / "exported"
    words = ["--quantization", "int8", "--languages", "en", "de"]
    (folder / "recipe.yaml").write_text("max_length: 70\nsource_column: fr\ntarget_column: en\n")
    assert known_languages(export_model(folder, tmp_path / "from Python").folder) == ["fr", "en"]
    shutil.rmtree(tmp_path / "from Python")
    assert main(["export", str(folder), "--output", str(output), *words]) == 0
    (folder / "recipe.yaml").unlink()
    assert known_languages(output) == ["en", "de"] and longest_source(output) == 70
    printed = capsys.readouterr().out
    assert "int8" in (output / "export.json").read_text() and "MB, 100 positions" in printed and "VNNI" in printed
    assert shlex.split(printed.split("use it with: ")[1].splitlines()[0])[-2:] == ["translate", str(output)]
    before = (output / "model.bin").read_bytes()
    assert "is not empty" in fails("export", folder, "--output", output)
    assert (output / "model.bin").read_bytes() == before
    assert main(["export", str(folder), "--output", str(output), "--overwrite"]) == 0
    assert (output / "model.bin").read_bytes() != before and "VNNI" not in capsys.readouterr().out
    assert "it holds something else" in fails("export", folder, "--output", folder, "--overwrite")
    assert load_model(folder)
    assert sorted(path.name for path in tmp_path.rglob("*.bin")) == ["model.bin"]


def test_an_export_that_differs_is_not_kept(tmp_path, folder, monkeypatch):
    def without_positions(self, spec, module):
        spec.encodings = torch.zeros(100, 24)

    name = "vaswani_transformer.export.to_ctranslate2.VaswaniLoader.set_position_encodings"
    monkeypatch.setattr(name, without_positions)
    assert "differ from the model's by" in error_of(export_model, folder, tmp_path / "exported")
    assert not list(tmp_path.iterdir())


def test_bad_exports_and_settings(tmp_path, folder, exported):
    model = shutil.copytree(folder, tmp_path / "model")
    change(model, "generation_config.json", no_repeat_ngram_size=3)
    assert "no_repeat_ngram_size in generation_config.json is 3" in error_of(export_model, model, tmp_path / "none")
    assert "export.json: No such file" in error_of(load_exported, folder)
    assert "none/export.json: No such file" in error_of(load_exported, tmp_path / "none")
    assert "Invalid compute type: nonsense" in error_of(exported_translator, exported, compute_type="nonsense")
    assert "unsupported device gpu" in error_of(exported_translator, exported, device="gpu")
    for options, message in (
        ({"num_beams": 0}, "num_beams is 0: it must be"),
        ({"num_beams": 200}, "half as many beams as"),
        ({"num_beams": 2, "num_return_sequences": 3}, "can be 1 to num_beams"),
        ({"do_sample": True}, "do_sample is True"),
        ({"num_baems": 5}, "num_baems is 5, which .* does not follow"),
        ({"length_normalization": "mine"}, "length_normalization is 'mine'"),
    ):
        with pytest.raises(UserError, match=message):
            list(exported_translator(exported, threads=1, **options).translate(["A dog."]))


@pytest.mark.parametrize("option", ["--sample", "--alignments", "--ensemble"])
def test_what_the_commands_cannot_do_with_an_exported_model(folder, exported, option, fails):
    line = fails("translate", exported, "A dog.", option, *([folder] if option == "--ensemble" else []))
    assert option in line and "an exported model" in line


def test_the_record_of_an_exported_models_scores(tmp_path, exported, capsys):
    """Of its own weights, so that they are not taken for the scores of the model."""
    for name, side in (("a.en", 0), ("a.de", 1)):
        (tmp_path / name).write_text("\n".join(pair[side] for pair in PAIRS[:3]) + "\n", encoding="utf-8")
    files = ["--source", str(tmp_path / "a.en"), "--reference", str(tmp_path / "a.de"), "--json", str(tmp_path / "x")]
    assert main(["evaluate", str(exported), *files, "--beams", "3", "--device", "cpu"]) == 0
    record = json.loads((tmp_path / "x").read_text())
    assert record["weights_sha256"] == hashlib.sha256((exported / "model.bin").read_bytes()).hexdigest()
    assert record["generation"].items() >= {"num_beams": 3, "length_penalty": 0.6, "max_extra_tokens": 5}.items()
    assert record["command"] == "vaswani evaluate float32 --source a.en --reference a.de --beams 3"


@pytest.mark.slow
def test_the_program_in_cpp(tmp_path):
    """As documented; with CTRANSLATE2_SOURCE a folder of CTranslate2's source, of the version that is installed."""
    source, header = os.environ.get("CTRANSLATE2_SOURCE"), Path("/usr/include/sentencepiece_processor.h")
    if not (source and shutil.which("g++") and header.exists()):
        pytest.skip("needs g++, libsentencepiece-dev, and CTRANSLATE2_SOURCE: a folder of CTranslate2's source")
    folder = save_trained_model(tmp_path / "model", exporting_models.imported_tokenizer(tmp_path), steps=300)
    translator = exported_translator(export_model(folder, tmp_path / "exported").folder, **GREEDY)
    sources = [source for source, _ in PAIRS[:60]]
    pairs = [pair for pair in zip(sources, translator.translate(sources), strict=True) if pair[1][-1:] in ".?!"]
    for name, path in (("CTranslate2", source), ("scripts", ROOT / "scripts")):
        (tmp_path / name).symlink_to(path)
    build = [line for line in shell_commands(ROOT / "docs/how-to/export.md") if re.match(r"libraries=|g\+\+", line)]
    command = ["bash", "-c", "; ".join([*build, "./translate exported source.spm target.spm 1"])]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    text = "".join(f"{source}\n" for source, _ in pairs)
    done = subprocess.run(command, cwd=tmp_path, env=environment, input=text, capture_output=True, text=True)
    assert done.stdout.splitlines() == [output for _, output in pairs] and len(pairs) > 20, done.stderr
