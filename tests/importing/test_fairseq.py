"""Checkpoints of fairseq's, against transformers' FSMT, whose weights are those of fairseq under other names."""

import argparse
import functools
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import error_of, padded_batch, random_ids
from import_differences import main, sentencepiece_model
from imported_models import model_of
from transformers import FSMTConfig, FSMTForConditionalGeneration

from vaswani_transformer import VaswaniTokenizer
from vaswani_transformer.decoding.scoring import token_texts
from vaswani_transformer.importing import fairseq

WORDS = ["the", "dog", "un@@", "like@@", "ly", "a@@", "b", "c@@", "é"]
SIZES = len(WORDS) + 4, len(WORDS) + 7
OPTIONS = {"arch": "transformer_iwslt_de_en", "source_lang": "de", "target_lang": "en", "activation_fn": "relu"}
OPTIONS |= {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "dropout": 0.3}
OPTIONS |= {"encoder_normalize_before": False, "decoder_normalize_before": False}
OPTIONS |= {"share_decoder_input_output_embed": True, "share_all_embeddings": False}
OPTIONS |= {"max_source_positions": 1024, "max_target_positions": 1024}


def fsmt(ties=True, **changes) -> FSMTForConditionalGeneration:
    torch.manual_seed(5)
    sizes = {"src_vocab_size": SIZES[0], "tgt_vocab_size": SIZES[1], "d_model": 24}
    sizes |= {"encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
    sizes |= {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "activation_function": "relu"}
    config = FSMTConfig(**{"langs": ["de", "en"], "dropout": 0.0, "init_std": 0.3, **sizes, **changes})
    model = FSMTForConditionalGeneration(config).eval()
    if ties:
        model.model.decoder.output_projection.weight = model.model.decoder.embed_tokens.weight
    return model


def fairseq_state(model: FSMTForConditionalGeneration) -> dict[str, torch.Tensor]:
    """The parameters as fairseq writes them: `convert_fsmt_original_pytorch_checkpoint_to_pytorch.py` backwards."""
    named = model.state_dict().items()
    state = {name.removeprefix("model."): tensor.clone() for name, tensor in named if "embed_positions" not in name}
    for stack in ("encoder", "decoder"):
        state[f"{stack}.version"] = torch.tensor([3.0])
        state[f"{stack}.embed_positions._float_tensor"] = torch.zeros(1)
    return state


@functools.cache
def some_state() -> dict[str, torch.Tensor]:
    return fairseq_state(fsmt())


def packed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters as fairseq wrote them in 2018: three projections in one, norms by number."""
    names = {
        "encoder": {"self_attn_layer_norm": 0, "final_layer_norm": 1},
        "decoder": {"self_attn_layer_norm": 0, "encoder_attn_layer_norm": 1, "final_layer_norm": 2},
    }
    old = {}
    for name, tensor in state.items():
        if ".q_proj." in name:
            parts = [state[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            old[name.replace(".q_proj.", ".in_proj_")] = torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            for norm, number in names[name.partition(".")[0]].items():
                name = name.replace(f".{norm}.", f".layer_norms.{number}.")
            old[name] = tensor
    return old


def write(folder: Path, state, options=OPTIONS, words=(WORDS, [*WORDS, "x", "y", "z"]), **entries) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "model.pt"
    torch.save({"args": argparse.Namespace(**options), "model": state, "extra_state": {"epoch": 3}} | entries, path)
    for language, entries in zip(("de", "en"), words, strict=True):
        text = "".join(f"{word} {99 - number}\n" for number, word in enumerate(entries))
        (folder / f"dict.{language}.txt").write_text(text, encoding="utf-8")
    (folder / "bpecodes").write_text("#version: 0.2\nu n\nl y</w>\nl i\nli k\nlik e\nt h\nth e</w>\nd o\ndo g</w>\n")
    return path


def assert_same(model, reference, sizes=SIZES) -> None:
    """The same logits of sources of several lengths, and of targets from the end token on."""
    source, mask = padded_batch((11, 9, 6, 3, 1), seed=3, vocab_size=sizes[0])
    target = random_ids(5, 8, seed=4, vocab_size=sizes[1])
    target[:, 0] = 2
    with torch.no_grad():
        logits = model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
        expected = reference(input_ids=source, attention_mask=mask, decoder_input_ids=target, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", [dict, packed])
def test_logits_are_those_of_fsmt(tmp_path, form):
    reference = fsmt()
    imported = fairseq.read(write(tmp_path, form(fairseq_state(reference))).parent)
    assert_same(model_of(imported), reference)
    assert imported.config.dropout == 0.3 and imported.facts.languages == ("de", "en")


def test_searches_are_those_of_fsmt_in_the_table_of_differences(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["import_differences.py", "--only", "fairseq", "--sentences", "3"])
    main()
    header, _, row = capsys.readouterr().out.splitlines()
    assert header.count("|") == row.count("|") and row.endswith("| 3 of 3 | 3 of 3 |")


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"activation_function": "gelu"}, {"activation_fn": "gelu"}),
        ({"scale_embedding": False}, {"no_scale_embedding": True}),
        ({"activation_function": "silu"}, {"activation_fn": "swish"}),
        ({"ties": False}, {"share_decoder_input_output_embed": False}),
        ({}, {"encoder_learned_pos": True, "decoder_learned_pos": True}),
        ({"src_vocab_size": SIZES[1]}, {"share_all_embeddings": True}),
    ],
    ids=["gelu", "not scaled", "swish", "three matrices", "learned positions", "one matrix"],
)
def test_options_of_fairseq(tmp_path, changes, options):
    reference = fsmt(**changes)
    shares, learns = ("share_all_embeddings" in options, "encoder_learned_pos" in options)
    if shares:
        reference.model.encoder.embed_tokens.weight.data = reference.model.decoder.embed_tokens.weight.data
    state = fairseq_state(reference)
    if learns:  # FSMT computes its table, which has fairseq's rows; here it gets the learned one
        for stack, rows in (("encoder", 50), ("decoder", 40)):
            table = torch.randn(rows, 24)
            table[1] = 0
            getattr(reference.model, stack).embed_positions.weight.data = table
            state[f"{stack}.embed_positions.weight"] = table
    words = ([*WORDS, "x", "y", "z"],) * 2 if shares else (WORDS, [*WORDS, "x", "y", "z"])
    imported = fairseq.read(write(tmp_path, state, OPTIONS | options, words))
    assert_same(model_of(imported), reference, (reference.config.src_vocab_size, SIZES[1]))
    assert imported.config.shares_embeddings == shares
    assert not learns or imported.config.max_position_embeddings == 38  # rows 0 and 1 have no position


def test_options_of_newer_checkpoints(tmp_path):
    reference = fsmt()
    groups = {
        name: {key.removeprefix(f"{name}_"): value for key, value in OPTIONS.items() if key.startswith(f"{name}_")}
        for name in ("encoder", "decoder")
    }
    flat = {key: value for key, value in OPTIONS.items() if not key.startswith(("encoder_", "decoder_"))}
    task = {"_name": "translation", "source_lang": "de", "target_lang": "en"}
    for model in ({"_name": "transformer", **flat, **groups}, argparse.Namespace(**OPTIONS)):
        path = write(tmp_path, fairseq_state(reference), args=None, cfg={"model": model, "task": task, "bpe": None})
        imported = fairseq.read(path)
        assert_same(model_of(imported), reference)
        assert imported.facts.languages == ("de", "en")
    for name, codes in (("deu", ("deu", "en")), ("src", ())):
        shutil.copy(tmp_path / "dict.de.txt", tmp_path / f"dict.{name}.txt")
        cfg = {"model": argparse.Namespace(**OPTIONS | {"source_lang": name}), "task": task, "bpe": None}
        assert fairseq.read(write(tmp_path, fairseq_state(reference), args=None, cfg=cfg)).facts.languages == codes


def test_pieces_are_those_of_the_dictionaries(tmp_path):
    tokenizer = fairseq.read(write(tmp_path, some_state())).tokenizer
    # "unlikely" is un@@ like@@ ly; "ab" a@@ b; of "aé" the é stands for itself; q is in no piece.
    assert tokenizer("unlikely ab the é q")["input_ids"] == [6, 7, 8, 9, 10, 4, 12, 3, 2]
    assert tokenizer(text_target="dog z zc")["input_ids"] == [5, 15, 3, 3, 2]
    assert tokenizer.decode([6, 7, 8, 15, 2], skip_special_tokens=True) == "unlikely z"
    assert token_texts(tokenizer, [[6, 7, 8, 15]]) == [["un", "like", "ly ", "z "]]


def test_texts_are_tokenised_by_moses_where_the_dictionary_was(tmp_path):
    sacremoses = pytest.importorskip("sacremoses")
    words = ["well", "@-@", "known", "dog", "&apos;s", "&quot;", ",", "Hund", "."]
    state = fairseq_state(fsmt(tgt_vocab_size=SIZES[0]))
    english = {**OPTIONS, "source_lang": "complex", "target_lang": "en"}
    path = write(tmp_path, state, english, (words, words))
    (tmp_path / "bpecodes").unlink()
    (tmp_path / "dict.de.txt").rename(tmp_path / "dict.complex.txt")
    tokenizer = fairseq.read(path).tokenizer
    assert tokenizer.moses["languages"] == ["en", "en"]  # as words of a user's own are not published
    text = 'known dog\'s, "well-known" Hund.'
    # As fairseq's data/encoders/moses_tokenizer.py calls it.
    pieces = sacremoses.MosesTokenizer("en").tokenize(text, aggressive_dash_splits=True)
    ids = [*(4 + words.index(piece) for piece in pieces), 2]
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for loaded in (tokenizer, VaswaniTokenizer.from_pretrained(tmp_path / "tokenizer")):
        assert loaded(text)["input_ids"] == loaded(text_target=text)["input_ids"] == ids
        assert loaded.decode(ids, skip_special_tokens=True) == text
        assert loaded.batch_decode([ids, ids[4:]], skip_special_tokens=True)[0] == text
    words = ["well-known", "hund", "dog", "&apos;s", *"abcde"]  # Moses without -a, and a dictionary without capitals
    path = write(tmp_path, state, english | {"source_lang": "en"}, (words, words))
    (tmp_path / "bpecodes").unlink()
    assert fairseq.read(path).tokenizer("Well-known dog's Hund")["input_ids"] == [4, 6, 7, 5, 2]
    path = write(tmp_path, state, english | {"source_lang": "de"}, (words, words))
    (tmp_path / "bpecodes").unlink()
    assert fairseq.read(path).tokenizer.moses["languages"] == ["de", "en"]


def test_sentencepiece(tmp_path):
    words = ["▁", "a", "b", "▁ab", "c", "x", "y", "z", "q"]
    path = write(tmp_path, fairseq_state(fsmt(tgt_vocab_size=SIZES[0])), words=(words, words))
    (tmp_path / "bpecodes").unlink()
    assert "--bpe-codes" in error_of(fairseq.read, path)
    model = sentencepiece_model(["▁", "a", "b", "▁ab", "c", "d"])
    (tmp_path / "sentencepiece.bpe.model").write_bytes(model)
    (tmp_path / "other.model").write_bytes(model)
    for codes in (None, tmp_path / "other.model"):
        tokenizer = fairseq.read(path, bpe_codes=codes).tokenizer
        assert tokenizer("ab abab acd")["input_ids"] == [7, 7, 5, 6, 4, 5, 8, 3, 2]
        assert tokenizer.decode([7, 7, 5, 6, 2], skip_special_tokens=True) == "ab abab"


def test_checkpoints_are_recognised(tmp_path):
    assert fairseq.matches(write(tmp_path, some_state())) and fairseq.matches(tmp_path)
    torch.save(fsmt().state_dict(), tmp_path / "pytorch_model.bin")
    torch.save({"model": fsmt().state_dict(), "args": {}}, tmp_path / "other.pt")
    assert not fairseq.matches(tmp_path / "pytorch_model.bin") and not fairseq.matches(tmp_path / "other.pt")
    assert not fairseq.matches(tmp_path / "dict.de.txt") and not fairseq.matches(tmp_path / "nothing.pt")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("encoder_normalize_before", True),
        ("adaptive_softmax_cutoff", "10,20"),
        ("decoder_attention_heads", 4),
        ("activation_fn", "tanh"),
        ("arch", "lightconv_wmt_en_de"),
        ("arch", "transformer_lm"),
        ("bpe", "gpt2"),
        ("decoder_langtok", True),
    ],
)
def test_other_models_are_refused_by_the_option(tmp_path, option, value):
    path = write(tmp_path, some_state(), {**OPTIONS, option: value})
    error = error_of(fairseq.read, path)
    assert str(path) in error and option in error and str(value) in error


def test_dictionaries_that_do_not_fit(tmp_path):
    path = write(tmp_path, some_state())
    dictionary = tmp_path / "dict.en.txt"
    lines = dictionary.read_text(encoding="utf-8").splitlines(keepends=True)
    for changed, said in (([], "has 15 entries"), (["\x00\x01\n"], "line 3"), ([lines[0]], "line 3")):
        dictionary.write_text("".join([*lines[:2], *changed, *lines[3:]]), encoding="utf-8")
        assert said in error_of(fairseq.read, path)
    assert "--vocabulary" in error_of(fairseq.read, path, vocabularies=(dictionary,) * 3)
    dictionary.unlink()
    assert "dict.en.txt" in error_of(fairseq.read, path)
