"""What `import vaswani_transformer` promises."""

import runpy
import sys

import pytest
from conftest import ROOT

import vaswani_transformer


@pytest.mark.parametrize("name", vaswani_transformer.__all__)
def test_public_names_exist_and_are_documented(name):
    assert getattr(vaswani_transformer, name).__doc__


def test_the_documentation_lists_every_public_name():
    listed = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8").splitlines()
    for name in set(vaswani_transformer.__all__) - {"UserError"}:
        module = f"::: {getattr(vaswani_transformer, name).__module__}"
        assert module in listed or f"{module}.{name}" in listed, name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        vaswani_transformer.nothing  # noqa: B018


def test_the_module_and_the_command_are_one_program(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vaswani", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("vaswani_transformer", run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"vaswani_transformer {vaswani_transformer.__version__}\n"
