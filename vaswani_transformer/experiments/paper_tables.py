"""The figures that the paper prints (arXiv 1706.03762v7), read from `paper_tables.yaml`."""

from dataclasses import dataclass
from importlib import resources

import yaml


@dataclass(frozen=True)
class TranslationRow:
    """A row of Table 2: BLEU on newstest2014, training cost in FLOPs; None where the table is empty."""

    model: str
    bleu_de: float | None = None
    bleu_fr: float | None = None
    flops_de: float | None = None
    flops_fr: float | None = None


@dataclass(frozen=True)
class VariationRow:
    """A row of Table 3, on newstest2013: perplexity a word piece, BLEU, millions of parameters where it prints them."""

    group: str
    preset: str
    label: str
    perplexity: float
    bleu: float
    millions: int | None = None


@dataclass(frozen=True)
class ParsingRow:
    """A row of Table 4: F1 on section 23 of the Wall Street Journal."""

    parser: str
    training: str
    f1: float


_TABLES = yaml.safe_load((resources.files(__package__) / "paper_tables.yaml").read_text(encoding="utf-8"))
TABLE2 = tuple(TranslationRow(**row) for row in _TABLES["table2"])
TABLE3 = tuple(VariationRow(**row) for row in _TABLES["table3"])
TABLE4 = tuple(ParsingRow(**row) for row in _TABLES["table4"])
