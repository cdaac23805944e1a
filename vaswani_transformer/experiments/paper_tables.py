"""The figures that the paper prints (arXiv 1706.03762v7), read from `paper_tables.yaml`."""

from dataclasses import dataclass
from importlib import resources

import yaml


@dataclass(frozen=True)
class Row:
    """A row of one of the paper's tables; None where it prints no figure."""

    model: str = ""  # or parser
    group: str = ""  # of rows of Table 3
    preset: str = ""
    label: str = ""
    training: str = ""  # of a parser: on what
    bleu_de: float | None = None  # Table 2, on newstest2014
    bleu_fr: float | None = None
    flops_de: float | None = None  # training cost
    flops_fr: float | None = None
    perplexity: float | None = None  # Table 3, on newstest2013: a word piece
    bleu: float | None = None
    millions: int | None = None  # of parameters
    f1: float | None = None  # Table 4, on section 23 of the Wall Street Journal


_TABLES = yaml.safe_load((resources.files(__package__) / "paper_tables.yaml").read_text(encoding="utf-8"))
TABLE2, TABLE3, TABLE4 = ([Row(**row) for row in _TABLES[name]] for name in ("table2", "table3", "table4"))
