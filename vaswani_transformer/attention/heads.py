"""Roles of attention heads, by where their attention goes on average: previous token, delimiters, alignment, ..."""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, repeat
from pathlib import Path

import numpy as np

from ..data.text_files import read_lines
from ..data.tokenization import side_of
from ..decoding.translator import Translator
from ..errors import UserError, reading, texts_in
from .alignments import Links, Pair, batches_of_pairs, parts_in_words, strongest_links, tokenized_pairs
from .weights import CONTINUES, KINDS, LIMIT, as_array, attention_of_batch, forming_attention, readable_tokens, visible

NAMED_FROM = 0.5  # a head is named after a measure that reaches this,
OVER_CHANCE = 1.5  # and this many times what even attention over the visible tokens would give
NEARBY = 2  # tokens away at most
_WINDOW = 500  # pairs that are sorted by length together
_SELF = {
    "previous token": "mean weight on the token before, over tokens that have one",
    "next token": "mean weight on the token after, over tokens that have one",
    "same token": "mean weight on the token itself",
    "delimiter": "mean weight on start, end and punctuation, over tokens that are none",
    "nearby": f"mean weight on tokens at most {NEARBY} away",
}
_CROSS = {
    "alignment": "share of target words that look most at the source word they are aligned with, not at another or the"
    " end",
    "delimiter": _SELF["delimiter"],
}
#: What a head of one of `KINDS` may be named after, and how it is measured.
MEASURES = {"encoder": _SELF, "decoder": _SELF, "encoder-decoder": _CROSS}


def delimiters(tokens: Sequence[str]) -> np.ndarray:
    """Return which of `readable_tokens` are delimiters: `<s>`, `</s>`, and those of Unicode's punctuation alone."""
    marks = (token != CONTINUES and all(unicodedata.category(sign)[0] == "P" for sign in token) for token in tokens)
    return np.array([mark or token in ("<s>", "</s>") for mark, token in zip(marks, tokens, strict=True)], bool)


class HeadStatistics:
    """Sums of the measures of all heads of one of `KINDS`, over sentences."""

    def __init__(self, kind: str, layers: int, heads: int, window: int | None = None):
        self.kind, self.shape, self.window = kind, (layers, heads), window
        self._sums = {name: np.zeros(self.shape) for name in MEASURES[kind]}
        self._chances = dict.fromkeys(self._sums, 0.0)
        self._counts = dict.fromkeys(self._sums, 0)

    def _add(self, name: str, values: np.ndarray, chances: np.ndarray) -> None:
        """Add values `(layers, heads, items)` of a measure, and those of even attention, `(items,)`."""
        self._sums[name] += values.sum(axis=-1)
        self._chances[name] += float(chances.sum())
        self._counts[name] += len(chances)

    def add_self_attention(self, weights: np.ndarray, is_delimiter: np.ndarray) -> None:
        """Add a sentence by its `(layers, heads, length, length)` weights, but for tokens that see only themselves."""
        length = weights.shape[-1]
        steps = np.arange(length) - np.arange(length)[:, None]  # key minus query
        visible_keys = visible(self.kind, length, length, self.window)
        seen = visible_keys.sum(axis=1)
        chosen = seen > 1
        patterns = {
            "previous token": (steps == -1, chosen),
            "next token": (steps == 1, chosen),
            "same token": (steps == 0, chosen),
            "nearby": (abs(steps) <= NEARBY, chosen),
            "delimiter": (is_delimiter, chosen & ~is_delimiter),
        }
        for name, (pattern, queries) in patterns.items():
            pattern = pattern * visible_keys
            if name in ("previous token", "next token"):
                queries = queries & pattern.any(axis=1)
            values = (weights * pattern).sum(axis=-1)[..., queries]
            self._add(name, values, (pattern.sum(axis=1) / seen)[queries])

    def add_encoder_decoder(
        self,
        weights: np.ndarray,  # (layers, heads, target_length, source_length)
        source_delimiters: np.ndarray,
        target_delimiters: np.ndarray,
        words: tuple[Sequence[range], Sequence[range]],  # that each source and each target token has a part in
        links: Links,
    ) -> None:
        """Add a sentence pair; target words without a link do not count for "alignment"."""
        values = (weights * source_delimiters).sum(axis=-1)[..., ~target_delimiters]
        self._add("delimiter", values, np.full(values.shape[-1], source_delimiters.mean()))
        source_of, target_of = map(parts_in_words, words)
        strongest = (target_of[:, :-1].T @ weights @ source_of).argmax(axis=-1)  # (layers, heads, target_words)
        sources, targets = source_of.shape[1] - 1, target_of.shape[1] - 1
        linked = np.zeros((targets, sources), bool)
        for source, target in links:
            linked[target, source] = True  # or an IndexError
        linked = np.pad(linked, ((0, 0), (0, 1)))  # no word is linked to the end
        rows = np.flatnonzero(linked.any(axis=1))
        self._add("alignment", linked[rows, strongest[..., rows]], linked[rows].mean(axis=1))

    def chances(self) -> dict[str, float | None]:
        """Return each measure of even attention, by name; None where no token counted."""
        return {name: self._chances[name] / count if count else None for name, count in self._counts.items()}

    def heads(self) -> list[dict]:
        """Return a dict a head: `layer` and `head` from 1, `role`, `measures` by name (None where no token counted)."""
        chances, rows = self.chances(), []
        for layer, head in np.ndindex(*self.shape):
            sums = {name: float(sums[layer, head]) for name, sums in self._sums.items()}
            means = {name: sums[name] / count if count else None for name, count in self._counts.items()}
            rows.append({"layer": layer + 1, "head": head + 1, "role": role(means, chances), "measures": means})
        return rows


def role(measures: dict[str, float | None], chances: dict[str, float | None]) -> str:
    """Return the name of a head: the largest measure that reaches `NAMED_FROM` and `OVER_CHANCE` times its chance.

    "nearby" counts where no narrower measure does; a head that nothing names is "mixed". `chances` are the measures of
    even attention.
    """
    reached = {
        name: value
        for name, value in measures.items()
        if value is not None and value >= max(NAMED_FROM, OVER_CHANCE * (chances[name] or 0))
    }
    return max(reached, key=lambda name: (name != "nearby", reached[name]), default="mixed")


def name_heads(
    model,
    tokenizer,
    pairs: Iterable[tuple[str, str | None]],
    links: Iterable[Links] | None = None,
    tokens_per_batch: int = 2048,
    **generate_options,
) -> dict:
    """Return what each head of a model does on average over sentence pairs.

    Args:
        model: the model, in evaluation mode; other threads may use it meanwhile.
        tokenizer: its tokenizer.
        pairs: sources and targets; a target that is None is the model's own translation.
        links: for each pair its word alignment; the model's own (`align`) if not given.
        tokens_per_batch: tokens a side at once, padding counted.
        **generate_options: for translations, over the model's own generation configuration.

    Returns:
        counts (`pairs`, `source_tokens`, `target_tokens`, and `blank` and `long` pairs left out), `alignments`, and
        `kinds`: for each kind of attention `even`, the measures of even attention, and `heads`, as [`HeadStatistics`]
        gives them, layers and heads counted from 1.

    Raises:
        UserError: for a pair that the model has no positions for, a link to a word out of range, or no pairs.
    """
    config = model.config
    layers = {kind: config.encoder_layers if kind == "encoder" else config.decoder_layers for kind in KINDS}
    statistics = {
        kind: HeadStatistics(kind, number, config.num_heads, config.attention_window) for kind, number in layers.items()
    }
    counts = {"pairs": 0, "source_tokens": 0, "target_tokens": 0, "blank": 0, "long": 0}
    translator, reader = Translator(model, tokenizer, tokens_per_batch, **generate_options), forming_attention(model)
    aligned = zip(pairs, repeat(None)) if links is None else zip(pairs, links, strict=True)
    first = 1
    while window := list(islice(aligned, _WINDOW)):
        texts, alignments = zip(*window, strict=True)
        with reading("pairs are of a source and a target"):
            sources = [source.strip() for source in texts_in((pair[0] for pair in texts), "source", first)]
        missing = [source for source, (_, target) in zip(sources, texts, strict=True) if target is None]
        outputs = translator.translate(missing) if missing else iter(())
        targets = [next(outputs) if target is None else target for _, target in texts]
        targets = [target.strip() for target in texts_in(targets, "target", first)]
        tokenized = tokenized_pairs(config, tokenizer, sources, targets, first)
        counted = [pair for pair in tokenized if pair.length <= LIMIT]
        for batch_pairs, batch in batches_of_pairs(reader, counted, tokens_per_batch):
            weights = {kind: as_array(layers) for kind, layers in attention_of_batch(reader, batch).items()}
            for row, pair in enumerate(batch_pairs):
                with reading(f"line {first + pair.index}"):
                    _add_pair(config, tokenizer, pair, alignments[pair.index], weights, row, statistics)
        counts["blank"] += len(window) - len(tokenized)
        counts["long"] += len(tokenized) - len(counted)
        counts["pairs"] += len(counted)
        counts["source_tokens"] += sum(len(pair.source_ids) for pair in counted)
        counts["target_tokens"] += sum(len(pair.target_ids) for pair in counted)
        first += len(window)
    if not counts["pairs"]:
        raise UserError("there is no pair to look at: give sentences that are neither blank nor too long")
    return {
        **counts,
        "alignments": "the model's own, of its last layer" if links is None else "given",
        "kinds": {kind: {"even": sums.chances(), "heads": sums.heads()} for kind, sums in statistics.items()},
    }


def read_links(path: str | Path) -> Iterator[Links]:
    """Yield word alignments of a file, a line a pair: `0-0 1-2`, source word - target word, counted from 0.

    Raises:
        UserError: for a line that is something else, with its number.
    """
    for number, line in enumerate(read_lines(Path(path)), 1):
        with reading(f"{path}, line {number}"):
            links = [(int(source), int(target)) for source, target in (link.split("-") for link in line.split())]
        yield links


def _add_pair(
    config, tokenizer, pair: Pair, links: Links | None, weights: dict[str, np.ndarray], row: int, statistics: dict
) -> None:
    """Add one row of a batch's weights to the statistics of each kind."""
    n, m = len(pair.source_ids), len(pair.target_ids)
    read = [config.decoder_start_token_id, *pair.target_ids[:-1]]  # by the decoder
    source_ends, read_ends, target_ends = (
        delimiters(readable_tokens(side_of(tokenizer, side), ids))
        for side, ids in zip(("source", "target", "target"), (pair.source_ids, read, pair.target_ids), strict=True)
    )
    words = pair.source_words, pair.target_words
    cross = weights["encoder-decoder"][:, row, :, :m, :n]
    links = strongest_links(cross[-1].mean(axis=0), *words) if links is None else links
    statistics["encoder"].add_self_attention(weights["encoder"][:, row, :, :n, :n], source_ends)
    statistics["decoder"].add_self_attention(weights["decoder"][:, row, :, :m, :m], read_ends)
    statistics["encoder-decoder"].add_encoder_decoder(cross, source_ends, target_ends, words, links)


def heads_as_markdown(report: dict) -> str:
    """Return the report of `name_heads` as Markdown: a table a kind of attention with a row a head, and the rules."""
    read = "{pairs:,} pairs, {source_tokens:,} source and {target_tokens:,} target tokens".format_map(report)
    left = [f"{report[name]:,} {name}" for name in ("blank", "long") if report[name]]
    lines = [f"# What the heads do\n\n{read}{'; left out: ' + ' and '.join(left) if left else ''}.\n"]
    for kind, results in report["kinds"].items():
        names = MEASURES[kind]
        rows = [["layer", "head", "what it does", *names], ["---"] * (3 + len(names))]
        for head in results["heads"]:
            numbers = (_number(head["measures"][name]) for name in names)
            rows.append([str(head["layer"]), str(head["head"]), f"**{head['role']}**", *numbers])
        rows.append(["", "", "even attention", *(_number(results["even"][name]) for name in names)])
        lines += [f"## {KINDS[kind].capitalize()}\n", *(f"| {' | '.join(row)} |" for row in rows), ""]
    lines.append(
        f"A head is named after the largest measure that is {NAMED_FROM} or more and {OVER_CHANCE} times what even"
        " attention gives; nearby only where no narrower one is; else it is mixed. Layers and heads count from 1."
        f" Alignments: {report['alignments']}.\n"
    )
    return "\n".join(lines + [f"- {name}: {text}" for name, text in (_SELF | _CROSS).items()]) + "\n"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
