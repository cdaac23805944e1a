"""A report that names every attention head of a model by what it does on the sentences of a file."""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from ..data.batching import PairCollator
from ..data.text_files import read_lines
from ..decoding.streaming import batches_by_length, check_length
from ..decoding.translator import Translator
from ..errors import UserError
from .alignments import Links, align, tokens_and_words
from .heads import (
    BROAD_FROM,
    CROSS_MEASURES,
    MEASURES,
    NAMED_FROM,
    OVER_CHANCE,
    SPREAD,
    HeadStatistics,
    delimiters,
    measures_of,
)
from .weights import KINDS, attention_of_batch, readable_tokens, require_one_model

MOST_TOKENS = 400  # on a side: the weights of a longer pair would fill the memory
_WINDOW = 500  # pairs that are sorted by length together


def name_heads(
    model,
    tokenizer,
    pairs: Iterable[tuple[str, str | None]],
    links: Iterable[Links] | None = None,
    tokens_per_batch: int = 2048,
    progress: Callable[[int], None] | None = None,
    **generate_options,
) -> dict:
    """What each head of a model does on average over sentence pairs.

    Args:
        model: the model; its attention implementation is changed for the time of the call.
        tokenizer: its tokenizer.
        pairs: sources and targets; the model's own translation stands in for a target that is None.
        links: for each pair its word alignment; the model's own (`align`) if not given.
        tokens_per_batch: tokens a side at once, padding counted.
        progress: called with the number of pairs that were just done.
        **generate_options: for translations, over the model's own generation configuration.

    Returns:
        what was read (`pairs`, `source_tokens`, `target_tokens`, `blank` and `long` pairs left out, `alignments`), the
        `rules` that name a head, and `kinds`: for each kind of attention `even`, the measures of even attention, and
        `heads`, as [`HeadStatistics`] gives them, layers and heads counted from 1.

    Raises:
        UserError: for a pair that the model has no positions for, a link to a word that is not there, or no pairs.
    """
    require_one_model(model)
    config = model.config
    layers = {kind: config.encoder_layers if kind == "encoder" else config.decoder_layers for kind in KINDS}
    statistics = {
        kind: HeadStatistics(kind, number, config.num_heads, config.attention_window) for kind, number in layers.items()
    }
    counts = {"pairs": 0, "source_tokens": 0, "target_tokens": 0, "blank": 0, "long": 0}
    counter = _Counter(Translator(model, tokenizer, tokens_per_batch, **generate_options), statistics, counts)
    pairs, given = iter(pairs), None if links is None else iter(links)
    first = 1
    while window := list(islice(pairs, _WINDOW)):
        aligned = None if given is None else list(islice(given, len(window)))
        if aligned is not None and len(aligned) < len(window):
            raise UserError(f"there are alignments of {first - 1 + len(aligned)} pairs only: give one for each pair")
        counter.add(first, window, aligned)
        first += len(window)
        if progress is not None:
            progress(len(window))
    if not counts["pairs"]:
        raise UserError("there is no pair to look at: give a file with sentences that are neither blank nor too long")
    return {
        **counts,
        "alignments": "the model's own, of its last layer" if links is None else "given",
        "rules": {"named_from": NAMED_FROM, "over_chance": OVER_CHANCE, "broad_from": BROAD_FROM},
        "kinds": {kind: {"even": one.chances(), "heads": one.heads()} for kind, one in statistics.items()},
    }


def read_links(path: str | Path) -> Iterator[Links]:
    """Word alignments of a file, a line a pair: `0-0 1-2`, source word - target word, counted from 0.

    Raises:
        UserError: for a line that is something else, with its number.
    """
    for number, line in enumerate(read_lines(Path(path)), 1):
        links = [re.fullmatch(r"(\d+)-(\d+)", link) for link in line.split()]
        if None in links:
            raise UserError(f"{path}, line {number}: {line[:40]!r} is no alignment; write links such as 0-0 1-2")
        yield [(int(link[1]), int(link[2])) for link in links]


class _Counter:
    """Windows of pairs through the model, their weights into the statistics."""

    def __init__(self, translator: Translator, statistics: dict[str, HeadStatistics], counts: dict[str, int]):
        self.translator, self.model, self.tokenizer = translator, translator.model, translator.tokenizer
        self.tokens = translator.tokens_per_batch
        self.statistics, self.counts = statistics, counts

    def add(self, first: int, window: list[tuple[str, str | None]], links: list[Links] | None) -> None:
        """Take in pairs, the first of which is the line of that number."""
        sources, targets = [pair[0].strip() for pair in window], [pair[1] for pair in window]
        missing = [place for place, target in enumerate(targets) if target is None and sources[place]]
        translations = self.translator.translate([sources[place] for place in missing])
        for place, text in zip(missing, translations, strict=True):
            targets[place] = text
        targets = [(target or "").strip() for target in targets]
        filled = [place for place in range(len(window)) if sources[place] and targets[place]]
        self.counts["blank"] += len(window) - len(filled)
        if not filled:
            return
        sides = [tokens_and_words(self.tokenizer, [texts[place] for place in filled]) for texts in (sources, targets)]
        lengths = [max(len(ids) for ids, _ in pair) for pair in zip(*sides, strict=True)]
        for place, length in zip(filled, lengths, strict=True):
            check_length(self.model.config, first + place, length)
        kept = [row for row, length in enumerate(lengths) if length <= MOST_TOKENS]
        self.counts["long"] += len(filled) - len(kept)
        if not kept:
            return
        texts = [[side[filled[row]] for row in kept] for side in (sources, targets)]
        own = [links[filled[row]] for row in kept] if links is not None else align(self.model, self.tokenizer, *texts)
        for rows in batches_by_length([lengths[row] for row in kept], self.tokens):
            chosen = [kept[row] for row in rows]
            pairs = [tuple(side[row] for side in sides) for row in chosen]
            numbers = [first + filled[row] for row in chosen]
            self._add_batch(pairs, [own[row] for row in rows], numbers)

    def _add_batch(self, pairs: list[tuple], links: list[Links], numbers: list[int]) -> None:
        """Pairs of sides, each its token ids and the words they belong to."""
        collator = PairCollator(self.model.config.pad_token_id)
        batch = collator([{"input_ids": source[0], "labels": target[0]} for source, target in pairs])
        weights = attention_of_batch(self.model, {name: tensor.to(self.model.device) for name, tensor in batch.items()})
        start = self.model.config.decoder_start_token_id
        for row, (source, target) in enumerate(pairs):
            words = source[1], target[1]
            for link in links[row]:
                if any(not 0 <= word <= max(side) for word, side in zip(link, words, strict=True)):
                    raise UserError(
                        f"line {numbers[row]} of the alignments links {link[0]}-{link[1]} and the pair has"
                        f" {max(words[0]) + 1} and {max(words[1]) + 1} words, counted from 0"
                    )
            n, m = len(source[0]), len(target[0])
            tokens = [source[0], [start, *target[0][:-1]], target[0]]
            ends = [delimiters(readable_tokens(self.tokenizer, ids)) for ids in tokens]
            self.statistics["encoder"].add_self_attention(weights["encoder"][:, row, :, :n, :n], ends[0])
            self.statistics["decoder"].add_self_attention(weights["decoder"][:, row, :, :m, :m], ends[1])
            self.statistics["encoder-decoder"].add_encoder_decoder(
                weights["encoder-decoder"][:, row, :, :m, :n], ends[0], ends[2], words, links[row]
            )
            self.counts["pairs"] += 1
            self.counts["source_tokens"] += n
            self.counts["target_tokens"] += m


def heads_as_markdown(report: dict) -> str:
    """The report of `name_heads` as tables, a row a head, with the rules below."""
    read = (
        f"{report['pairs']:,} pairs, {report['source_tokens']:,} source and {report['target_tokens']:,} target tokens"
    )
    left = [f"{report[name]:,} {name}" for name in ("blank", "long") if report[name]]
    lines = [f"# What the heads do\n\n{read}{'; left out: ' + ' and '.join(left) if left else ''}.\n"]
    for kind, told in report["kinds"].items():
        names = measures_of(kind)
        lines += [f"## {KINDS[kind][0].upper()}{KINDS[kind][1:]}\n", _row("layer", "head", "what it does", *names)]
        lines.append(_row(*["---"] * (3 + len(names))))
        for head in told["heads"]:
            numbers = (_number(head["measures"][name]) for name in names)
            lines.append(_row(str(head["layer"]), str(head["head"]), f"**{head['role']}**", *numbers))
        lines.append(_row("", "", "even attention", *(_number(told["even"][name]) for name in names)) + "\n")
    rules = report["rules"]
    lines.append(
        f"A head is named after the largest measure that is {rules['named_from']} or more and {rules['over_chance']}"
        " times what even attention gives; nearby only where no narrower one is; broad from an entropy of"
        f" {rules['broad_from']}; else it is mixed. Layers and heads count from 1. Alignments:"
        f" {report['alignments']}.\n"
    )
    lines += [f"- {name}: {text}" for name, text in (MEASURES | CROSS_MEASURES | SPREAD).items() if name != "delimiter"]
    lines.append(f"- delimiter: {MEASURES['delimiter']}")
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


__all__ = ["heads_as_markdown", "name_heads", "read_links"]
