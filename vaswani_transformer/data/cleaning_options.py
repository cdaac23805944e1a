"""Options of `vaswani clean`, which imports them without numpy; `cleaning_rules` follows them."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CleaningRules:
    """Filters of `vaswani clean`, in this order; each text is the help of an option."""

    keep_identical: bool = False
    """keep pairs of two equal sides"""
    max_characters: int = 1000
    """drop pairs with more characters on a side"""
    max_words: int = 200
    """drop pairs with more words on a side"""
    length_ratio: float = 4.0
    """drop pairs whose ratio of lengths is this many robust deviations off what is usual in this text (0: no limit)"""
    test: tuple[str, ...] = ()
    """drop pairs with a side that is a line of these text files, as it is of the recipe's validation text"""
    languages: tuple[str, str] | None = None
    """drop pairs with a side that is surely in another language than its own, such as en de; needs `cleaning`"""
    keep_duplicates: bool = False
    """keep copies of earlier pairs"""
    near_duplicates: float | None = None
    """drop pairs like an earlier one, with this share of their runs of characters in common; needs `cleaning`"""
    near_side: Literal["source", "target", "both"] = "both"
    """what is compared for that"""
