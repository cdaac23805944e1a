"""The Python examples of docs/decoding.md, which follow each other, run as they stand there."""

import re

import pytest
import torch
from conftest import ROOT, tiny_model

from vaswani_transformer import train_tokenizer

PAGE = ROOT / "docs" / "decoding.md"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the examples run: a model lies where the commands of the page leave theirs."""
    text = ["Today my father sees three small birds in the garden.", "Heute sieht mein Vater drei kleine Vögel."]
    tokenizer = train_tokenizer(text, vocab_size=300)
    for seed, (name, layers) in enumerate((("mine", 2), ("small", 1))):
        model = tiny_model(seed, scale=1.5, vocab_size=len(tokenizer), decoder_layers=layers, dtype=torch.float64)
        model.generation_config.update(num_beams=4, length_penalty=0.6)
        model.save_pretrained(tmp_path / "runs" / name)
        tokenizer.save_pretrained(tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_examples_run(folder, capsys):
    section = PAGE.read_text(encoding="utf-8").split("\n## From Python\n")[1].split("\n## ")[0]
    examples = re.findall(r"```python\n(.*?)```", section, re.S)
    assert len(examples) >= 9
    names: dict = {}
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)
    prefix, outputs = (
        names["prefix"],
        names["model"].generate(**names["inputs"], prefix_allowed_tokens_fn=names["allowed"]),
    )
    assert outputs[0, 1 : 1 + len(prefix)].tolist() == prefix
    scores = re.findall(r"^(-\d+\.\d{3})\t", capsys.readouterr().out, re.M)
    assert len(scores) == 8
