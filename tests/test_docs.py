"""The pages: their Python examples and commands run, links lead somewhere, figures come from result files."""

import ast
import re
import runpy
import shlex

import pytest
import reference_pages
import torch
from conftest import ROOT, tiny_model

from vaswani_transformer import train_tokenizer
from vaswani_transformer.cli.main import make_app

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def shell_commands(page) -> list[str]:
    """The shell commands of a page's blocks and tables, in order, each once."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"```(?:sh|bash|console)\n(.*?)```|^\|[^|\n]*\| `(vaswani [^`]+ [^`]+)` \|$", text, re.S | re.M)
    lines = [line for block, cell in found for line in (block or cell).replace("\\\n", " ").splitlines()]
    return list(dict.fromkeys(re.sub(r"(^|\s+)#.*", "", line).removeprefix("$ ") for line in lines if line[:1] != "#"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the examples run: models lie where the demo and the commands of the pages leave theirs."""
    text = ["Today my father sees three small birds in the garden.", "Heute sieht mein Vater drei kleine Vögel."]
    tokenizer = train_tokenizer(text, vocab_size=300)
    sizes = {"runs/mine": {}, "models/mine": {}, "demo_output/model": {}, "runs/small": {"decoder_layers": 1}}
    for seed, (name, changes) in enumerate(sizes.items()):
        model = tiny_model(seed, scale=1.5, vocab_size=len(tokenizer), dtype=torch.float64, **changes)
        model.generation_config.update(num_beams=4, length_penalty=0.6)
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)


@EVERY_PAGE
def test_examples_run_by_themselves(page, folder):
    for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
        if not re.search(r"runs/parser|exported/|model\.pt|torch\.nn", code):  # run by tests of those rooms
            exec(compile(code, str(page), "exec"), {})


@EVERY_PAGE
def test_commands_are_understood(page):
    app = make_app()
    for line in shell_commands(page):
        if call := re.search(r"\b(?:vaswani|-m vaswani_transformer) (.*)", line):
            words = shlex.split(re.sub(r"\s+[|>].*", "", call[1]))
            command, *_ = app.parse_args(words, exit_on_error=False, print_error=False)
            assert callable(command)


@EVERY_PAGE
def test_files_and_links_of_a_page_are_there(page):
    text = page.read_text(encoding="utf-8")
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link}
    assert not [link for link in links if link and not (page.parent / link).exists()]
    if "of that commit" not in text.lower():
        scripts = set(re.findall(r"\bscripts/[\w/]+\.(?:py|yaml)", text))
        assert not [script for script in scripts if not (ROOT / script).is_file()]


@pytest.mark.parametrize("name", ["architecture", "paper"])
def test_files_and_definitions_that_a_page_names_are_there(name):
    text = (ROOT / f"docs/explanation/{name}.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", text)
    assert len(named) > 15
    for name, definition in named:
        paths = [ROOT / name] if (ROOT / name).is_file() else list((ROOT / "vaswani_transformer").rglob(name))
        paths += list((ROOT / "tests").glob(name))
        assert paths, name
        code = "\n".join(path.read_text(encoding="utf-8") for path in paths)
        for part in filter(None, definition.split(".")):
            assert re.search(rf"^\s*(def|class) {part}\b", code, re.M), f"{name}: {part}"


def test_the_generated_pages_print_what_help_prints_and_no_tag_of_html(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    pages = reference_pages.commands(), reference_pages.recipe()
    assert not re.findall(r"<\S*", re.sub(r"`[^`]*`", "", "\n".join(pages)))
    for name, text in re.findall(r"^#+ vaswani ([\w ]+)\n(.*?)(?=^#+ vaswani|\Z)", pages[0], re.M | re.S):
        make_app().help_print(name.split())
        options = [set(re.findall(r"(?<![\w-])--\w[\w-]*", shown)) for shown in (text, capsys.readouterr().out)]
        assert options[0] == options[1] - {"--help", "--version"}, name


def test_the_promises_have_tests_that_are_there():
    text = (ROOT / "docs/explanation/safety.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "::" in line]
    assert len(rows) == 15
    for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", "\n".join(rows)):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, test


def test_the_page_of_measurements_is_that_of_the_result_files():
    page = runpy.run_path(str(ROOT / "scripts/benchmarks/results_page.py"))["page"]
    assert (ROOT / "docs/measurements.md").read_text(encoding="utf-8") == page()
