"""Models of JoeyNMT's, against what JoeyNMT 2.3.0 itself computed: see `scripts/make_joeynmt_fixture.py`."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from canaries import Runs
from conftest import TESTS, error_of
from import_differences import sentencepiece_model
from imported_models import model_of

from vaswani_transformer import VaswaniForConditionalGeneration
from vaswani_transformer.importing import joeynmt
from vaswani_transformer.importing.source import ImportOptions

FIXTURE = TESTS / "fixtures" / "joeynmt"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def imported():
    return joeynmt.read(FIXTURE, ImportOptions())


@pytest.fixture(scope="module")
def model(imported) -> VaswaniForConditionalGeneration:
    return model_of(imported)


@pytest.fixture
def folder(tmp_path) -> Path:
    shutil.copytree(FIXTURE, tmp_path / "model")
    return tmp_path / "model"


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, rows))
    ids = torch.tensor([row + [1] * (length - len(row)) for row in rows])
    return ids, (ids != 1).long()


def change(folder: Path, setting: str, value: str) -> None:
    """Give a setting of the configuration another value, wherever its last name stands."""
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    text, count = re.subn(rf"(?m)^( *{setting}:).*$", rf"\1 {value}", text)
    assert count
    (folder / "config.yaml").write_text(text, encoding="utf-8")


def test_logits_are_those_of_joeynmt(model):
    source, mask = padded(EXPECTED["source"])
    with torch.no_grad():
        output = model(input_ids=source, attention_mask=mask, decoder_input_ids=torch.tensor(EXPECTED["target"]))
    torch.testing.assert_close(output.logits, torch.tensor(EXPECTED["logits"]), rtol=0, atol=1e-5)


def test_greedy_translations_are_those_of_joeynmt(imported, model):
    source, mask = padded(EXPECTED["source"])
    settings = {**imported.generation, "num_beams": 1, "length_penalty": None, "max_new_tokens": 30}
    output = model.generate(source, attention_mask=mask, max_extra_tokens=None, **settings)
    rows = [[number for number in row[1:] if number != 1] for row in output.tolist()]
    assert rows == EXPECTED["greedy"]
    texts = imported.tokenizer.batch_decode(output, skip_special_tokens=True)
    assert texts == EXPECTED["greedy_texts"]


def test_beam_scores_are_those_of_joeynmt(imported, model):
    """JoeyNMT's beams end otherwise than ours; the score of what they found is the same."""
    source, mask = padded(EXPECTED["source"])
    target, target_mask = padded([[2, *row] for row in EXPECTED["beam"]])
    with torch.no_grad():
        logits = model(input_ids=source, attention_mask=mask, decoder_input_ids=target[:, :-1]).logits
    scores = logits.log_softmax(-1).gather(-1, target[:, 1:, None])[..., 0] * target_mask[:, 1:]
    lengths = target_mask[:, 1:].sum(-1)
    scores = scores.sum(-1) / ((5 + lengths) / 6) ** imported.generation["length_penalty"]
    torch.testing.assert_close(scores, torch.tensor(EXPECTED["beam_scores"]), rtol=0, atol=1e-5)


def test_search_settings_are_kept(folder):
    text = (folder / "config.yaml").read_text()
    more = "testing:\n  repetition_penalty: 2.0\n  no_repeat_ngram_size: 3\n"
    (folder / "config.yaml").write_text(text.replace("testing:\n", more))
    change(folder, "max_output_length", "7")
    kept = joeynmt.read(folder, ImportOptions()).generation
    assert kept | {"repetition_penalty": 2.0, "no_repeat_ngram_size": 3, "max_new_tokens": 7} == kept


def test_ids_are_those_of_joeynmt(imported):
    assert imported.tokenizer(EXPECTED["texts"])["input_ids"] == EXPECTED["source"]
    assert imported.tokenizer(text_target=EXPECTED["target_texts"])["input_ids"] == EXPECTED["target_ids"]


def test_checkpoints_are_recognised(folder):
    assert joeynmt.is_one(folder)
    (folder / "best.ckpt").rename(folder / "2000.ckpt")
    assert joeynmt.is_one(folder) and joeynmt.read(folder, ImportOptions()).config.d_model == 12
    shutil.copyfile(folder / "2000.ckpt", folder / "3000.ckpt")
    assert "best.ckpt" in error_of(joeynmt.read, folder, ImportOptions())
    assert joeynmt.is_one(folder / "3000.ckpt")
    assert joeynmt.read(folder / "3000.ckpt", ImportOptions()).config.d_model == 12
    (folder / "config.yaml").unlink()
    assert not joeynmt.is_one(folder) and not joeynmt.is_one(FIXTURE / "codes")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("layer_norm", "pre"),
        ("type", "recurrent"),
        ("alpha", "0.5"),
        ("activation", "tanh"),
        ("level", "syllable"),
        ("tokenizer_type", "wordpiece"),
        ("lang_tags", "[<de>, <en>]"),
        ("sep_token", "<sep>"),
        ("num_heads", "many"),
        ("num_heads", "5"),
        ("beam_size", "wide"),
        ("model", "small"),
    ],
)
def test_other_models_are_refused_by_the_setting(folder, setting, value):
    if setting == "alpha":
        change(folder, "dropout", "0.1\n    alpha: 0.5")
    elif setting in ("lang_tags", "sep_token"):
        change(folder, "dataset_type", f"plain\n  special_symbols:\n    {setting}: {value}")
    elif setting == "model":
        text = (folder / "config.yaml").read_text(encoding="utf-8")
        (folder / "config.yaml").write_text(text[: text.index("\nmodel:")] + "\nmodel: small\n", encoding="utf-8")
    else:
        change(folder, setting, value)
    error = error_of(joeynmt.read, folder, ImportOptions())
    assert "config.yaml" in error
    assert {"beam_size": "wide"}.get(setting, setting) in error


def test_one_stack_alone_is_pre_norm(folder):
    """JoeyNMT's default is pre-norm in the encoder's layers and post-norm in the decoder's."""
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    (folder / "config.yaml").write_text(text.replace("    layer_norm: post\n", ""), encoding="utf-8")
    assert "model.encoder.layer_norm: pre" in error_of(joeynmt.read, folder, ImportOptions())


@pytest.mark.parametrize("name", ["src_vocab.txt", "trg_vocab.txt", "codes"])
def test_files_that_are_missing(folder, name):
    (folder / name).unlink()
    assert name in error_of(joeynmt.read, folder, ImportOptions())
    options = {"bpe_codes": FIXTURE / name} if name == "codes" else {}
    options = options or {"vocabularies": (FIXTURE / "src_vocab.txt", FIXTURE / "trg_vocab.txt")}
    assert joeynmt.read(folder, ImportOptions(**options)).config.vocab_size == 55


def test_vocabularies_and_checkpoints_that_do_not_fit(folder):
    with (folder / "src_vocab.txt").open("a", encoding="utf-8") as file:
        file.write("one more\n")
    error = error_of(joeynmt.read, folder, ImportOptions())
    assert "56" in error and "55" in error
    for content in ({"model_state": {}}, {"model_state": {"a": torch.zeros(1)}}, [1]):
        torch.save(content, folder / "best.ckpt")
        assert "best.ckpt" in error_of(joeynmt.read, folder, ImportOptions())


def test_code_in_pickles_does_not_run(folder, capsys):
    content = torch.load(folder / "best.ckpt", weights_only=True)
    torch.save(content | {"stats_state": Runs()}, folder / "best.ckpt")
    error = error_of(joeynmt.read, folder, ImportOptions())
    assert "print" in error and not capsys.readouterr().out


@pytest.mark.parametrize(
    ("tied_embeddings", "tied_softmax", "matrices"),
    [(True, True, 1), (False, True, 2), (True, False, 2), (False, False, 3)],
)
def test_ties(folder, tied_embeddings, tied_softmax, matrices):
    change(folder, "tied_embeddings", str(tied_embeddings).lower())
    change(folder, "tied_softmax", str(tied_softmax).lower())
    shutil.copyfile(folder / "src_vocab.txt", folder / "trg_vocab.txt")
    content = torch.load(folder / "best.ckpt", weights_only=True)
    state = content["model_state"]
    if tied_embeddings:
        state["trg_embed.lut.weight"] = state["src_embed.lut.weight"]
    state["trg_embed.lut.weight"] = state["trg_embed.lut.weight"][:55]
    state["decoder.output_layer.weight"] = (
        state["trg_embed.lut.weight"] if tied_softmax else state["decoder.output_layer.weight"][:55]
    )
    torch.save(content, folder / "best.ckpt")
    imported = joeynmt.read(folder, ImportOptions())
    model = model_of(imported)
    names = ("src_embed.lut.weight", "trg_embed.lut.weight", "decoder.output_layer.weight")
    ours = (model.model.encoder.embed_tokens, model.model.decoder.embed_tokens, model.lm_head)
    assert all(torch.equal(state[name], module.weight) for name, module in zip(names, ours, strict=True))
    assert len({id(module.weight) for module in ours}) == matrices


@pytest.mark.parametrize("level", ["word", "char"])
def test_words_and_letters(folder, level):
    change(folder, "level", level)
    change(folder, "lowercase", "true")
    entries = ["<unk>", "<pad>", "<s>", "</s>", "a", "▁", "cat", "c", "t"]
    for side, size in (("src", 55), ("trg", 65)):
        names = [*entries, *(f"entry{number}" for number in range(size - len(entries)))]
        (folder / f"{side}_vocab.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    tokenizer = joeynmt.read(folder, ImportOptions()).tokenizer
    ids = {"word": [4, 6, 0, 3], "char": [4, 5, 7, 4, 8, 5, 0, 4, 3]}[level]
    assert tokenizer("A cat Ãa")["input_ids"] == ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == {"word": "a cat", "char": "a cat a"}[level]


def test_sentencepiece(folder):
    """JoeyNMT lets SentencePiece use the pieces of its vocabulary alone, and single letters."""
    (folder / "spm.model").write_bytes(sentencepiece_model(["▁", "a", "b", "ab", "▁ab", "▁a", "c"]))
    change(folder, "tokenizer_type", "sentencepiece")
    change(folder, "codes", "/elsewhere/spm.model\n      model_file: /elsewhere/spm.model")
    entries = ["<unk>", "<pad>", "<s>", "</s>", "▁", "a", "b", "▁ab"]
    for side, size in (("src", 55), ("trg", 65)):
        names = [*entries, *(f"entry{number}" for number in range(size - len(entries)))]
        (folder / f"{side}_vocab.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    tokenizer = joeynmt.read(folder, ImportOptions()).tokenizer
    assert tokenizer("ab abab acé")["input_ids"] == [7, 7, 5, 6, 4, 5, 0, 0, 3]
    assert tokenizer.decode([7, 7, 5, 6, 4, 5, 3], skip_special_tokens=True) == "ab abab a"
    (folder / "spm.model").unlink()
    assert "spm.model" in error_of(joeynmt.read, folder, ImportOptions())


def test_texts_are_tokenised_by_moses(folder):
    sacremoses = pytest.importorskip("sacremoses")
    change(folder, "pretokenizer", "moses")
    change(folder, "lowercase", "true\n    normalize: true")
    tokenizer = joeynmt.read(folder, ImportOptions()).tokenizer
    # As JoeyNMT's BasicTokenizer.pre_process does it; the quotation marks are not those of the tokens that follow.
    text = sacremoses.MosesTokenizer("en").tokenize(
        "The dog's house , the “old” garden.".translate({0x201C: '"', 0x201D: '"'}).replace(" ,", ","), return_str=True
    )
    plain = joeynmt.read(FIXTURE, ImportOptions()).tokenizer
    assert tokenizer("The  dog’s house , the “old” garden.")["input_ids"] == plain(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text_target="das Haus .")["input_ids"], skip_special_tokens=True) == "das haus."
    change(folder, "level", "bpe")
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    (folder / "config.yaml").write_text(text[::-1].replace("sesom", "enon", 1)[::-1], encoding="utf-8")
    assert "both sides" in error_of(joeynmt.read, folder, ImportOptions())
