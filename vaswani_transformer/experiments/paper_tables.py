"""The figures that the paper prints (arXiv 1706.03762v7), read from `paper_tables.yaml`."""

from importlib import resources

import yaml


class Row(dict):
    """A row of one of the paper's tables; an attribute is None where it prints no figure."""

    __getattr__ = dict.get


_TABLES = yaml.safe_load((resources.files(__package__) / "paper_tables.yaml").read_text(encoding="utf-8"))
TABLE2, TABLE3, TABLE4 = (list(map(Row, _TABLES[name])) for name in ("table2", "table3", "table4"))
