"""The Python examples of README and docs, run as they stand there."""

import re

import pytest
import torch
from conftest import ROOT, tiny_model

from vaswani_transformer import train_tokenizer


def run_examples(page: str, part: str = "", end: str = "", together: bool = True) -> dict:
    """Run the examples of a page, or from a text in it to another, in one namespace or each in its own."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = text[text.index(part) : text.index(end) if end else None]
    codes = re.findall(r"```python\n(.*?)```", text, re.S)
    assert codes
    names: dict = {}
    for code in codes:
        names = names if together else {}
        exec(compile(code, page, "exec"), names)
    return names


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the examples run: models lie where the demo and the commands of the pages leave theirs."""
    text = ["Today my father sees three small birds in the garden.", "Heute sieht mein Vater drei kleine Vögel."]
    tokenizer = train_tokenizer(text, vocab_size=300)
    sizes = {"runs/mine": {}, "demo_output/model": {}, "runs/small": {"decoder_layers": 1}}
    sizes["runs/multi30k"] = {"encoder_layers": 3, "decoder_layers": 3, "num_heads": 4, "d_k": 6, "d_v": 6}
    for seed, (name, changes) in enumerate(sizes.items()):
        model = tiny_model(seed, scale=1.5, vocab_size=len(tokenizer), dtype=torch.float64, **changes)
        model.generation_config.update(num_beams=4, length_penalty=0.6)
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", ["README.md", "docs/usage.md"])
def test_examples_run_by_themselves(page, folder):
    run_examples(page, together=False)


def test_examples_of_decoding_run_one_after_the_other(folder, capsys):
    names = run_examples("docs/decoding.md", "## From Python", "## From the command line")
    outputs = names["model"].generate(**names["inputs"], prefix_allowed_tokens_fn=names["allowed"])
    assert outputs[0, 1 : 1 + len(names["prefix"])].tolist() == names["prefix"]
    assert len(re.findall(r"^(-\d+\.\d{3})\t", capsys.readouterr().out, re.M)) == 8


def test_examples_of_scoring(folder):
    names = run_examples("docs/decoding.md", "### Scoring given translations", "## Export")
    assert "".join(names["pair"].tokens) == " Zwei Hunde.</s>"


def test_examples_of_attention_run_one_after_the_other(folder):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    names = run_examples("docs/attention.md")
    assert names["text"].startswith("# What the heads do")
