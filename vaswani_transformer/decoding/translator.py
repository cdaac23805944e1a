"""Text in, text out: a model, or one exported to CTranslate2, that translates sentences in batches of similar length.

Nothing here imports torch: the search is `search.py` for a model, and the exported model's own.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cache, partial, reduce
from typing import Any
from unicodedata import normalize

import regex
from tqdm.auto import tqdm

from ..data.words import ends_a_sentence, has_case, title_case
from ..errors import UserError, reading
from ..model.language_codes_vaswani import LanguageCodes, typed_code
from ..model.sentence_splitting_vaswani import join_translations
from ..model.settings_vaswani import MAX_EXTRA_TOKENS
from .glossary import Glossary, Progress, Terms, Tokens, term_forms
from .scoring import check_length, length_rule, positions, score_ids
from .streaming import WINDOW_LINES, Window, in_windows, split_line

logger = logging.getLogger(__name__)
# Integers without separators, which differ between languages, and rows of emoji, whole or broken.
_COPIED = regex.compile(
    r"(?<!\d|\d[.,'’\s]|\d[万萬億亿만억]\s?)\d{2,}(?!\d|[.,'’\s]\d)"
    r"|(?:[\p{Extended_Pictographic}\p{Emoji_Modifier}\p{Regional_Indicator}\ufffd][\u200d\ufe0f]*)+"
)
_CAPITALISED = r"\p{Lu}[^\p{Lu}\s]*"
_COUNTED = regex.compile(r"(?i)\d\s*(?:(?![\p{Latin}\p{Cyrillic}\p{Greek}])\p{L}|lakh|crore)")  # 35 billion are 350億
_ROUNDS = 4  # times that an output has to end with the same tokens to be cut; a text may repeat a word twice


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a line."""

    text: str
    tokens: int = 0  # |Y|, `</s>` included where it ends with one
    log_probability: float | None = None  # log P(Y|X) under the model in nats; None if not asked for
    score: float | None = None  # what beam search ranks by, from log-probability and tokens; None as above
    repeats: bool = False  # whether the model went on repeating itself; the text has what it repeated once
    words: list[tuple[str, float]] | None = None  # with their probabilities (`word_probabilities`), if asked for
    alignment: str | None = None  # of source and target words, as `0-0 1-2`, if asked for


@dataclass
class Piece:
    """A unit of translation: a line, or a part of a line that is too long."""

    line: int  # index of the line in its window
    ids: list[int]  # tokens of the source, `</s>` included
    prefix: list[int] = field(default_factory=list)  # tokens that the translation has to begin with
    terms: Terms | None = None  # what it has to have by a glossary
    known: str | None = None  # its translation by a memory: nothing is to be searched
    write: Callable[[str], str] = str  # puts its translation into its source's capitals, and corrects what it copied


def _check_room(number: int, what: str, tokens: int, limit: float) -> None:
    """Raise `UserError` if what line `number` needs in its translation leaves no room in an output."""
    if tokens >= limit:
        raise UserError(f"line {number} {what} {tokens} tokens, which leaves no room in an output of at most {limit}")


def _without_garbling(source: str, text: str) -> str:
    """Return a translation with the source's number, or row of emoji, in place of the only one that it garbled.

    Small models do that to long ones. A number counts if most of its digits are there: feet are not metres.
    """
    given, written = set(_COPIED.findall(source)), set(_COPIED.findall(text))
    if len(given - written) == len(written - given) == 1:
        [lacking], [wrong] = given - written, written - given
        is_near = len(lacking) > 2 and " * " not in source  # no coefficient, nor 10 dozen
        is_near &= SequenceMatcher(None, lacking, wrong).ratio() > 0.7
        is_same = lacking.rstrip("0") == wrong.rstrip("0") and _COUNTED.search(source + text)
        if (is_near or not lacking.isdigit()) and lacking.isdigit() == wrong.isdigit() and not is_same:
            return _COPIED.sub(lambda match: lacking if match[0] == wrong else match[0], text)
    return text


def _upper(text: str) -> str:
    if regex.search(r"\p{Georgian}", text):  # of which few fonts have capitals
        return text
    if regex.search(r"\p{Greek}", text):  # of which capitals have no accents
        text = normalize("NFC", regex.sub(r"(?<=\p{Greek}\p{M}*)\u0301", "", normalize("NFD", text)))
    return (text.replace("i", "İ") if len({*"ığş"} & {*text}) > 1 else text).upper()  # as Turkish has it


class Translator:
    """Text in, text out.

    Several threads may use one translator, in which each gets what it would alone, but not while one of them samples:
    the random numbers of a process are shared.

    Args:
        model: the model, an ensemble, or an exported model, in evaluation mode.
        tokenizer: its tokenizer.
        tokens_per_batch: source tokens translated at once, padding counted.
        max_source_tokens: longest source in tokens, `</s>` included; by default what learned positions allow.
        split_long: split a longer line into sentences, clauses or words and join their translations; else refuse it.
            A line that is one sentence several times is split too: its translations are alike then.
        scores: also compute scores, by one more pass through the decoder for each translation.
        glossary: terms that translations have to have wherever their sources have them.
        memory: exact matches are taken, without scores, near ones shown to a model trained with `fuzzy_matches`.
        seed: for sampling: each window's random state is made of it and the window's number; torch's own stays.
        source_language: code of the sources' language, for the splitting of long lines.
        target_language: of a model with several, named by a code before each text that has none (`LanguageCodes`).
        **generate_options: for `generate()`, over the model's own generation configuration.
    """

    def __init__(
        self,
        model,
        tokenizer,
        tokens_per_batch: int = 2048,
        *,
        max_source_tokens: int | None = None,
        split_long: bool = False,
        scores: bool = False,
        glossary: Glossary | None = None,
        memory: "Memory | None" = None,  # noqa: F821 (which takes time to import)
        seed: int | None = None,
        source_language: str = "en",
        target_language: str | None = None,
        **generate_options,
    ):
        if getattr(model, "training", False):  # as it is after `Trainer.train()`
            from ..model.copying_vaswani import copy_sharing_weights

            model = copy_sharing_weights(model)
        getattr(model, "_unset_trainer_defaults", bool)()
        self.model, self.tokenizer, self.tokens_per_batch = model, tokenizer, tokens_per_batch
        self.max_source_tokens, self.split_long, self.scores, self.seed = max_source_tokens, split_long, scores, seed
        self.glossary, self.memory, self.source_language = glossary, memory, source_language
        self.is_exact = True  # whether exact matches of the memory are taken
        self.is_repaired = False  # whether numbers are copied where they are garbled: not in tasks such as sums
        self.generate_options = {name: value for name, value in generate_options.items() if value is not None}
        if memory is not None and not self.setting("fuzzy_matches"):
            logger.warning("only exact matches of the memory are used: the model was trained without --fuzzy-matches")
        # `prepare` may run in another thread than decoding, and tokenizers are not made for two at once.
        self._own_tokenizer = copy.deepcopy(tokenizer)
        self._tokens = cache(partial(Tokens.of, self._own_tokenizer))  # which copies share
        with reading("the target language"):
            self.codes = LanguageCodes(self._own_tokenizer, target_language)

    def setting(self, name: str, default=None):
        """Return an option of the search: as given, else the model's own, else the default."""
        value = self.generate_options.get(name, getattr(self.model.generation_config, name, None))
        return default if value is None else value

    def prepare(self, window: Window, glossary: Glossary | None = None) -> Window:
        """Tokenise a window whose lines are strings, or pairs of a source and the prefix of its translation.

        `glossary` is for this window, in place of the translator's own. What is returned has a `Piece` or several for
        each line that is not blank; its lines are those before the error, if it has one.
        """
        glossary, forms = glossary or self.glossary, cache(partial(term_forms, self._own_tokenizer))
        pairs = [(line, "") if isinstance(line, str) else line for line in window.lines]
        with reading("each line is a text, or a pair of a source and the prefix of its translation"):
            sources = {line: source.strip() for line, (source, _) in enumerate(pairs) if source.strip()}
        ids = self._own_tokenizer(list(map(self.codes.coded, sources.values())))["input_ids"] if sources else []
        pieces, split = [], []
        for (line, source), source_ids in zip(sources.items(), ids, strict=True):
            number = window.first + line
            try:
                with reading(f"line {number}"):
                    code, source = self.codes.split(source)
                coded = "" if code.strip() == self.codes.default.strip() else code  # a memory is of this language
                is_free = not (pairs[line][1].strip() or (glossary and glossary.of(source)))
                exact = self.memory.exact if is_free and self.memory and self.is_exact else lambda _: None
                if known := exact(code + source) or exact(coded + source):  # or has codes in its sources
                    pieces.append(Piece(line, source_ids, known=known))
                    continue
                text, times, write = self._simplified(source) if is_free else (source, 1, lambda _, text: text)
                source_ids = source_ids if text == source else self._own_tokenizer(code + text)["input_ids"]
                texts, parts = self._within_limits(number, code, text, source_ids)
                prefix = self._prefix_ids(number, pairs[line][1], len(parts[0]))
                terms = self._terms(number, texts, glossary, forms) if glossary and not is_free else [None] * len(parts)
            except UserError as error:  # the lines before it are still translated
                window = replace(window, lines=window.lines[:line], error=error)
                break
            if len(parts) > 1:
                split.append(number)
            elif self.memory and self.setting("fuzzy_matches"):
                parts = [self._with_match(coded + text, source_ids)]
            rows = zip(texts, parts, [prefix, *([] for _ in parts[1:])], terms, strict=True)
            some = [Piece(line, *part, write=partial(write, part_text)) for part_text, *part in rows]
            pieces += some * times
        return replace(window, pieces=pieces, split=split)

    def _simplified(self, source: str) -> tuple[str, int, Callable[[str, str], str]]:
        """Return what is translated of a source, how often it is there, and how its translation is written.

        Capitals are made small where that takes fewer tokens: a vocabulary of ordinary text knows few words in them.
        """
        times, period = 1, f"{source} {source} ".find(f"{source} ", 1)
        # Not "bye bye", nor letters or sounds between spaces.
        if self.split_long and (ends_a_sentence(source) or len(source[:period]) > 3 * source[:period].count(" ") > 6):
            source, times = source[: period - 1], (len(source) + 1) // period
        count = lambda text: len(self._own_tokenizer(text)["input_ids"])  # noqa: E731
        # In title case "NATO" and "GitHub" stay.
        words = r"\S+" if source.isupper() else rf"(?<!\S)[^\w\s]*{_CAPITALISED}(?:-{_CAPITALISED})*(?!\S)"
        small = regex.sub(words, lambda word: word[0].lower(), source, pos=1)
        is_title = not regex.search(r"(?<!\S)[^\w\s]*\p{Ll}", source)
        is_title &= source.count(" ") > 6 and source != small  # fewer are often names or menus
        case = str
        is_cased = has_case(source) and not regex.search(r"\p{Lu}\p{Lo}|\p{Lo}\p{Lu}", source)  # HTML和CSS
        # In Turkish and Azerbaijani the small letter of I is no i.
        is_cased &= regex.split("[-_]", self.source_language)[0] not in ("tr", "tur", "az", "aze")
        if (source.isupper() or is_title) and is_cased and count(small) < count(source):
            source, case = small, _upper if source.isupper() else title_case

        def write(part: str, text: str) -> str:
            text = _without_garbling(part, text) if self.is_repaired else text
            tag, text = typed_code(text)  # of a model that writes several languages
            return tag + case(text)

        return source, times, write

    def _within_limits(self, number: int, code: str, text: str, ids: list[int]) -> tuple[list[str], list[list[int]]]:
        """Return the text and the tokens, the code's before it, in one part, or in several if they are too many."""
        limit = min(positions(self.model.config), self.max_source_tokens or math.inf)
        if not self.split_long:
            check_length(self.model.config, number, len(ids), limit)
        if len(ids) <= limit:
            return [text], [ids]
        count = lambda part: len(self._own_tokenizer(code + part)["input_ids"])  # noqa: E731
        parts = split_line(text, limit, count, self.source_language)
        return parts, self._own_tokenizer([code + part for part in parts])["input_ids"]

    def near(self, sources: Iterable[str]) -> Iterator[list[tuple[float, str, str]]]:
        """Yield the memory's nearest entry for each source, which it has as it is or with the language's code."""
        for forms in ({source: None, self.codes.coded(source): None} for source in sources):
            yield next(filter(None, self.memory.near(forms)), [])

    def _with_match(self, source: str, ids: list[int]) -> list[int]:
        """Return the tokens of a source and of its nearest match's target; its own, if there is none or no room."""
        [matches] = self.near([source])
        texts = [self.codes.coded(f"{source} {self.memory.TAG} {target}") for _, _, target in matches]
        [joined] = self._own_tokenizer(texts)["input_ids"] if texts else [ids]
        return joined if len(joined) <= min(positions(self.model.config), self.max_source_tokens or math.inf) else ids

    def _prefix_ids(self, number: int, text: str, source_length: int) -> list[int]:
        """Return the tokens of the prefix of line `number`."""
        if not text.strip():
            return []
        ids = self._own_tokenizer(text_target=text.strip(), add_special_tokens=False)["input_ids"]
        if getattr(self._own_tokenizer, "unk_token_id", None) in ids:
            raise UserError(f"line {number}: the vocabulary cannot write the prefix {text.strip()!r:.100}")
        _check_room(number, "of the prefixes has", len(ids), self.output_limit(source_length))
        return ids

    def output_limit(self, source_length: int) -> int:
        """Return the most tokens of the output for a source of `source_length` tokens (Section 6.1)."""
        limit = self.setting("max_new_tokens")
        if limit is None and (max_length := self.setting("max_length")) is not None:
            limit = max_length - 1  # the decoder's start token counts there
        if limit is None:
            limit = source_length + self.setting("max_extra_tokens", MAX_EXTRA_TOKENS)
        return min(limit, positions(self.model.config) - 1)

    def _terms(self, number: int, texts: list, glossary: Glossary, encode: Callable) -> list[Terms | None]:
        """Return the terms that the translation of each part of line `number` has to have."""
        forms = [list(map(encode, glossary.of(text).values())) for text in texts]
        terms = [Terms(part_forms, self._tokens()) if part_forms else None for part_forms in forms]
        for part in filter(None, terms):
            _check_room(number, "has terms of", part.lacks(Progress()), positions(self.model.config) - 1)
        return terms

    def logits_processors(self, pieces: list[Piece]) -> list:
        """Return constraints on the outputs of these pieces; they come before the processors among the options."""
        if not any(piece.prefix for piece in pieces):
            return []
        from .search import ForcedPrefixes

        return [ForcedPrefixes([piece.prefix for piece in pieces])]

    @property
    def end_ids(self) -> set[int]:
        """Return the tokens that end an output."""
        ends = self.setting("eos_token_id", [])
        return {ends} if isinstance(ends, int) else set(ends)

    def as_hypotheses(self, pieces: list[Piece], outputs: list[list[list[int]]]) -> list[list[Hypothesis]]:
        """Return the hypotheses of each piece, best first, from the token ids of a search, without the start token."""
        if not pieces:
            return []
        number, flat = len(outputs[0]), [ids for rows in outputs for ids in rows]
        repeated = [piece for piece in pieces for _ in range(number)]
        kept = [self._without_repetition(ids, piece) for piece, ids in zip(repeated, flat, strict=True)]
        texts = self.tokenizer.batch_decode(kept, skip_special_tokens=True)
        texts = [piece.write(text) for piece, text in zip(repeated, texts, strict=True)]
        columns = zip(texts, kept, flat, strict=True)
        hypotheses = [Hypothesis(text, len(cut), repeats=len(cut) < len(ids)) for text, cut, ids in columns]
        if self.scores:
            rows = score_ids(self.model, [piece.ids for piece in repeated], kept, self.tokens_per_batch)
            hypotheses = [self._scored(*pair) for pair in zip(hypotheses, map(math.fsum, rows), strict=True)]
        rows = [hypotheses[start : start + number] for start in range(0, len(hypotheses), number)]
        if self.scores and self.setting("do_sample"):  # a search has ranked them
            rows = [sorted(row, key=lambda each: -each.score) for row in rows]
        return rows

    def _without_repetition(self, whole: list[int], piece: Piece) -> list[int]:
        """Return an output, without the rounds after the first where it goes round in a circle to its limit.

        It stays whole where a term would be lost, which may reach across two rounds.
        """
        is_cut = self.setting("forced_eos_token_id") is not None and len(whole) >= self.output_limit(len(piece.ids))
        ids, terms = whole[:-1] if is_cut else whole, piece.terms
        if ids and ids[-1] not in self.end_ids:
            for period in range(1, len(ids) // _ROUNDS + 1):
                start = len(ids) - _ROUNDS * period
                if ids[start:-period] == ids[start + period :]:
                    while start and ids[start - 1] == ids[start - 1 + period]:
                        start -= 1
                    kept = ids[: start + period]
                    return whole if terms and terms.lacks(reduce(terms.after, kept, Progress())) else kept
        return whole

    def _scored(self, hypothesis: Hypothesis, log_probability: float) -> Hypothesis:
        rule = length_rule(self.model.generation_config, self.generate_options)
        return replace(hypothesis, log_probability=log_probability, score=rule(log_probability, hypothesis.tokens))

    def translate_prepared(self, window: Window, progress: Any = None) -> list[list[Hypothesis]]:
        """Return the hypotheses of each line of a window of `prepare`, best first; of a blank line they are empty."""
        pieces = list({id(each): each for each in window.pieces if each.known is None}.values())  # repeated ones once
        lines = [[] for _ in window.lines]
        last_pieces = set({piece.line: index for index, piece in enumerate(pieces)}.values())  # of each line
        progress = progress if progress is not None else tqdm(disable=True)
        progress.update(len(lines) - len(last_pieces))
        outputs: dict[int, list[list[int]]] = {}
        if hasattr(self.model, "search_pieces"):  # an exported model
            searched = self.model.search_pieces(self, pieces)
        else:
            from .search import search_pieces

            searched = search_pieces(self, pieces, window.index)
        for number, ids in searched:
            outputs[number] = ids
            progress.update(number in last_pieces)
        found = self.as_hypotheses(pieces, [outputs[number] for number in range(len(pieces))])
        hypotheses = {id(piece): ranked for piece, ranked in zip(pieces, found, strict=True)}
        for piece in window.pieces:
            same = [Hypothesis(piece.known)] * self.setting("num_return_sequences", 1)
            lines[piece.line].append(hypotheses.get(id(piece), same))
        return [self._joined(parts) for parts in lines]

    def _joined(self, parts: list[list[Hypothesis]]) -> list[Hypothesis]:
        """Return a line's hypotheses from those of its pieces: the first ones together, the second ones, and so on."""
        if not parts:
            empty = Hypothesis("", 0, 0.0, 0.0) if self.scores else Hypothesis("")
            return [empty] * self.setting("num_return_sequences", 1)
        joined = []
        for ranked in zip(*parts, strict=True):
            # splitlines(): one line out for one line in, whatever the model has written.
            text = join_translations(" ".join(part.text.splitlines()) for part in ranked)
            repeats = any(part.repeats for part in ranked)
            whole = Hypothesis(text, sum(part.tokens for part in ranked), repeats=repeats)
            if self.scores and ranked[0].log_probability is not None:
                whole = self._scored(whole, math.fsum(part.log_probability for part in ranked))
            joined.append(whole)
        return joined

    def hypotheses(
        self, sentences: Iterable[str | tuple[str, str]], window: int = WINDOW_LINES, progress: Any = None
    ) -> Iterator[list[Hypothesis]]:
        """Yield the hypotheses of each sentence, best first, in the order of the sentences, as windows are ready.

        Args:
            sentences: one source each, or a pair of a source and the prefix of its translation.
            window: number of sentences that are read and sorted by length together.
            progress: a progress bar that moves by one for each sentence.

        Raises:
            UserError: for a sentence that is too long, unless such are split; after the hypotheses of those before it.
        """
        for prepared in map(self.prepare, in_windows(sentences, window)):
            yield from self.translate_prepared(prepared, progress)
            prepared.check()

    def translate(
        self, sentences: Iterable[str | tuple[str, str]], window: int = WINDOW_LINES, progress: Any = None
    ) -> Iterator[str]:
        """Yield the best of the `hypotheses` of each sentence, empty for a blank one; Args and Raises are theirs."""
        for hypotheses in self.hypotheses(sentences, window, progress):
            yield hypotheses[0].text
