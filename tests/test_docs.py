"""The Python examples of README and docs, run as they stand there."""

import ast
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


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_links_of_a_page_are_there(page):
    text = page.read_text(encoding="utf-8")
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link}
    assert not [link for link in links if link and not (page.parent / link).exists()]


def test_the_architecture_names_files_and_definitions_that_are_there():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    found = re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", text)
    assert len(found) > 40
    for name, definition in found:
        paths = [ROOT / name] if (ROOT / name).is_file() else list((ROOT / "vaswani_transformer").rglob(name))
        assert paths, name
        code = "\n".join(path.read_text(encoding="utf-8") for path in paths)
        for part in filter(None, definition.split(".")):
            assert re.search(rf"^\s*(def|class) {part}\b", code, re.M), f"{name}: {part}"


def test_the_promises_of_safety_have_tests_that_are_there():
    rows = [line for line in (ROOT / "docs/safety.md").read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    rows = [row.strip("| ").split(" | ") for row in rows if not row.startswith("| promise |")]
    assert len(rows) > 30
    for promise, _, tests in rows:
        found = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
        assert found and ", ".join(f"`{file}::{test}`" for file, test in found) == tests, promise
        for file, test in found:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, test
