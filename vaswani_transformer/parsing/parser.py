"""A constituency parser (Section 6.3): trees to the text that `train` takes, and a trained model that parses."""

import logging
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import LogitsProcessor

from ..decoding.file_translator import FileTranslator
from ..decoding.streaming import WINDOW_LINES, Window
from ..decoding.translator import Hypothesis, Piece, PreparedWindow, Translator
from ..errors import UserError
from ..files import write_text
from ..recipes.recipe import Recipe, check_recipe
from ..training.run import TrainingResult, check_trainable, train
from ..training.run_folder import CHECKPOINTS, check_output
from .augmentation import Exchange
from .grammar import BracketGrammar, BracketProcessor, least_tokens
from .linearization import (
    ANY_TAG,
    MalformedTreeError,
    delinearize,
    is_tag_among_words,
    linearize,
    repair,
    with_words,
    without_words,
)
from .pictures import tree_svg, tree_text
from .tokenizer import sentence_text, split_words, train_parser_tokenizer, tree_token_ids, word_starts
from .trees import ROOT, Tree, check_words, clean, escape, read_trees

logger = logging.getLogger(__name__)

TEXT = "text"  # folder in that of a run: what its trees were turned into


@dataclass(frozen=True)
class Parse:
    """What a model made of a sentence.

    Args:
        tree: over exactly its words, under one `ROOT`; None for a sentence without words.
        well_formed: whether the model's tokens were that tree, its words too where it writes them; else it is what
            `repair` made of them.
    """

    tree: Tree | None
    well_formed: bool = True


class TreeTranslator(Translator):
    """Sentences, lists of words each, to trees as tokens; constrained, every output is a tree over those words.

    Args:
        model: the parser, or an ensemble, in evaluation mode.
        tokenizer: its tokenizer.
        constrained: rule out what leads away from a tree.
        **options: as of `Translator`.

    Raises:
        UserError: for a tokenizer of a model that is no parser.
    """

    def __init__(self, model, tokenizer, *, constrained: bool = True, **options):
        super().__init__(model, tokenizer, **options)
        ids = tree_token_ids(tokenizer)
        #: Whether words are part of the trees that the model writes.
        self.has_words = any(map(is_tag_among_words, ids))
        self._grammar = BracketGrammar(ids, tokenizer.eos_token_id) if constrained else None
        self._word_starts = word_starts(tokenizer)

    def prepare(self, window: Window) -> PreparedWindow:
        """Tokenise a window whose lines are lists of words; where an error ends it, it keeps those before."""
        found = super().prepare(replace(window, lines=[sentence_text(words) for words in window.lines]))
        found.window = replace(found.window, lines=window.lines[: len(found.window.lines)])
        return found

    def _within_limits(self, number: int, text: str, ids: list[int]) -> list[list[int]]:
        parts = super()._within_limits(number, text, ids)
        limit, words = self._output_limit(len(ids)), self._written_words(ids)
        if self._grammar is not None and limit < (least := least_tokens(words)):
            config, mend = self.model.config, "raise --max-new-tokens"
            if config.position_encoding == "learned" and limit + 1 == config.max_position_embeddings:
                mend = "the model has no more positions, split the sentence"
            raise UserError(
                f"line {number}: a tree over {len(words)} words takes at least {least} tokens and an output may have"
                f" {limit}: {mend}"
            )
        return parts

    def _written_words(self, ids: list[int]) -> list[list[int]]:
        """Tokens that are written for each word of a sentence; none where words are no part of trees."""
        words = split_words(ids, self._word_starts, self.tokenizer.eos_token_id)
        return words if self.has_words else [[] for _ in words]

    def read(self, words: Sequence[str], hypothesis: Hypothesis) -> Parse:
        """What an output says of a sentence."""
        if not words:
            return Parse(None)
        words, tokens = [escape(word) for word in words], hypothesis.text.split()
        if not self.has_words:
            return read_parse(tokens, words)
        plain = without_words(tokens)
        parse = read_parse(plain, words)
        is_whole = parse.well_formed and tokens == with_words(plain, sentence_text(words).split(" "))
        return replace(parse, well_formed=is_whole)

    def _processors(self, pieces: list[Piece]) -> list[LogitsProcessor]:
        if self._grammar is None:
            return super()._processors(pieces)
        words = [self._written_words(piece.ids) for piece in pieces]
        limits = [self._output_limit(len(piece.ids)) for piece in pieces]
        return [*super()._processors(pieces), BracketProcessor(self._grammar, words, limits)]


class Parser:
    """Words in, trees out.

    Args:
        model: a model of `vaswani parse train`, in evaluation mode, or an ensemble of such.
        tokenizer: its tokenizer.
        constrained: let `generate()` write nothing but trees over the sentence's words. Without it, what the model
            writes is repaired where it is no such tree.
        **options: as of `Translator`: `tokens_per_batch`, and options of `generate()` over the model's own generation
            configuration, such as `num_beams`.

    Raises:
        UserError: for a model that is no parser.
    """

    def __init__(self, model, tokenizer, *, constrained: bool = True, **options):
        self.translator = TreeTranslator(model, tokenizer, constrained=constrained, **options)

    def parse(self, sentences: Iterable[Sequence[str]], window: int = WINDOW_LINES, progress=None) -> Iterator[Parse]:
        """The parses of sentences, in their order, as windows of them are ready.

        Args:
            sentences: each its words, brackets escaped (`-LRB-`) or not; without any the parse has no tree.
            window: sentences sorted by length together.
            progress: a bar that moves by one a sentence.

        Raises:
            UserError: as `Translator.hypotheses`, for what no word can be (`check_words`), and where no tree fits into
                the outputs that are allowed, with the number of the sentence; those before it are out by then.
        """
        waiting: deque[Sequence[str]] = deque()

        def lines() -> Iterator[Sequence[str]]:
            for words in checked(sentences):
                waiting.append(words)
                yield words

        for found in self.translator.hypotheses(lines(), window, progress):
            yield self.translator.read(waiting.popleft(), found[0])


def checked(sentences: Iterable[Sequence[str]]) -> Iterator[Sequence[str]]:
    """Sentences one by one, until one has what no word can be (`check_words`)."""
    for number, words in enumerate(sentences, 1):
        check_words(words, f"line {number}")
        yield words


def read_parse(tokens: Sequence[str], words: Sequence[str]) -> Parse:
    """The tree of a linearised output, repaired if it is none over these words."""
    try:
        return Parse(delinearize(tokens, words))
    except MalformedTreeError:
        return Parse(repair(tokens, words), well_formed=False)


def load_trees(path: str | Path, skip_bad: bool = False, **options) -> list[Tree]:
    """The cleaned trees of a file; those without words are left out.

    Args:
        path: brackets, plain or `.gz`; see `read_trees`.
        skip_bad: leave bad trees out instead of stopping at them; both are counted in the log.
        **options: of `read_trees`.

    Raises:
        UserError: as `read_trees`, and where no tree is left.
    """
    skipped: list[str] | None = [] if skip_bad else None
    read = [clean(tree) for tree in read_trees(path, skipped, **options)]
    trees = [tree for tree in read if tree is not None]
    if skipped:
        logger.warning("%s: %s bad tree(s) left out, the first: %s", path, f"{len(skipped):,}", skipped[0])
    if len(trees) < len(read):
        logger.warning("%s: %s tree(s) without words left out", path, f"{len(read) - len(trees):,}")
    if not trees:
        raise UserError(f"{path} holds no trees: give Penn Treebank brackets, such as (ROOT (NP (NN Introduction)))")
    return trees


@dataclass(frozen=True)
class TextForm:
    """How trees become text for training.

    Args:
        tags: let the model tag the words too; else every tag is `XX`.
        words: write the words into the tree too (`with_words`).
        augment: train on each tree so many times as it is and so many times with parts exchanged, and on a quarter of
            their short constituents by themselves (`Exchange`, seeded by the recipe); 0: once as it is.
    """

    tags: bool = True
    words: bool = False
    augment: int = 0

    def tokens(self, tree: Tree) -> list[str]:
        """What the model is to write for a tree."""
        tokens = linearize(tree, self.tags)
        return with_words(tokens, sentence_text(tree.words()).split()) if self.words else tokens

    def vocabulary(self, trees: Iterable[Tree]) -> list[str]:
        """All brackets and tags of some trees, in the order of the alphabet."""
        plain = {token for tree in trees for token in linearize(tree, self.tags)}
        return sorted(set(with_words(plain, [])) if self.words else plain)


TAGGED = TextForm()


def training_text(trees: Sequence[Tree], part: str, form: TextForm) -> dict[str, str]:
    """Trees as line-aligned text, the content of each file by its name: `PART.words` and `PART.brackets`.

    Args:
        trees: cleaned trees.
        part: begins the files' names.
        form: what the lines hold.
    """
    sides = {
        "words": [sentence_text(tree.words()) for tree in trees],
        "brackets": [" ".join(form.tokens(tree)) for tree in trees],
    }
    return {f"{part}.{side}": "".join(line + "\n" for line in lines) for side, lines in sides.items()}


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode("utf-8")


# Fields of a recipe that `train_parser` sets from the trees.
OWN_FIELDS = ("train_source", "train_target", "validation_source", "validation_target", "data_dir", "tokenizer")
OTHER_DATA = ("train_data", "validation_data", "validation_split", "prepared")


def parsing_recipe(
    recipe: Recipe, train_trees: Sequence[Tree], dev_trees: Sequence[Tree], form: TextForm = TAGGED
) -> Recipe:
    """A recipe that trains on these trees: their text and a tokenizer are written to `text/` in its output folder.

    What is refused here leaves everything there as it was, and files that hold their text already stay untouched:
    another process of the same training may be reading them.

    Args:
        recipe: model, optimizer and so on; `vocab_size` counts brackets and tags too.
        train_trees: cleaned trees.
        dev_trees: for validation.
        form: how trees become text.

    Raises:
        UserError: for a recipe that names other data, an `augment` below 0, an interrupted training on other trees, and
            as `train_parser_tokenizer`, `check_output` and `check_trainable`.
    """
    for name in (*OWN_FIELDS, *OTHER_DATA):
        if getattr(recipe, name) is not None:
            raise UserError(f"{name} is {getattr(recipe, name)!r}: a parser is trained on --trees, leave it out")
    if form.augment < 0:
        raise UserError(f"--augment is {form.augment}: it must be 0 or more")
    folder = Path(recipe.output) / TEXT
    exchange = Exchange(train_trees, recipe.seed) if form.augment else None
    versions = [tree for _ in range(form.augment) for tree in (*train_trees, *exchange.version())] or train_trees
    versions = [*versions, *exchange.parts(versions)] if exchange else versions
    files = training_text(versions, "train", form) | training_text(dev_trees, "dev", form)
    paths = [*(folder / name for name in files), None, folder / "tokenizer"]
    recipe = replace(recipe, **{name: path and str(path) for name, path in zip(OWN_FIELDS, paths, strict=True)})
    sentences = (sentence_text(tree.words()) for tree in train_trees)
    tokenizer = train_parser_tokenizer(sentences, form.vocabulary(train_trees), recipe.vocab_size)
    with tempfile.TemporaryDirectory() as name:
        tokenizer.save_pretrained(name)
        files |= {f"tokenizer/{file.name}": file.read_text(encoding="utf-8") for file in sorted(Path(name).iterdir())}
    resumed = check_output(recipe) is not None
    changed = {folder / name: text for name, text in files.items() if not _holds(folder / name, text)}
    if resumed and any(path.exists() for path in changed):
        raise UserError(
            f"{recipe.output} holds an interrupted training on other trees, or on another form of them: give the same"
            f" ones to resume it, give another --output, or remove {Path(recipe.output) / CHECKPOINTS} to start anew"
        )
    check_trainable(recipe, tokenizer)
    for path, text in changed.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return recipe


def train_parser(
    recipe: Recipe,
    train_trees: Sequence[Tree],
    dev_trees: Sequence[Tree],
    form: TextForm = TAGGED,
    progress: bool = True,
) -> TrainingResult:
    """Train a parser; an interrupted training goes on when it is called again with the same trees and recipe.

    Args and Raises as of `parsing_recipe` and `train`.
    """
    check_recipe(recipe)
    return train(parsing_recipe(recipe, train_trees, dev_trees, form), progress)


@dataclass(frozen=True)
class Baselines:
    """Two trees that need no parser, from what is most frequent in some trees; words get their most frequent tag.

    Args:
        top: most frequent label directly under `ROOT`.
        inner: most frequent label of all others that span more than one word and end where the sentence ends.
        tags: most frequent tag of each word.
        tag: most frequent tag of all.
    """

    top: str
    inner: str
    tags: dict[str, str]
    tag: str

    @classmethod
    def of(cls, trees: Iterable[Tree]) -> "Baselines":
        """Counted in cleaned trees; of equally frequent ones the first in the alphabet."""
        top, inner, tags, words = Counter(), Counter(), Counter(), {}
        for tree in trees:
            for leaf in tree.leaves():
                tags[leaf.label] += 1
                words.setdefault(leaf.word, Counter())[leaf.label] += 1
            node, is_top = tree.children[-1], True
            while node.word is None:
                if is_top or sum(1 for _ in node.leaves()) > 1:
                    (top if is_top else inner)[node.label] += 1
                node, is_top = node.children[-1], False

        def first(counts: Counter, default: str) -> str:
            return min(counts, key=lambda name: (-counts[name], name)) if counts else default

        best = first(top, "S")
        return cls(best, first(inner, best), {word: first(counts, ANY_TAG) for word, counts in words.items()},
                   first(tags, ANY_TAG))  # fmt: skip

    def _leaves(self, words: Sequence[str]) -> list[Tree]:
        return [Tree(self.tags.get(word, self.tag), word=word) for word in words]

    def most_frequent_label(self, words: Sequence[str]) -> Tree:
        """One constituent over all words, labelled `top`."""
        return Tree(ROOT, (Tree(self.top, tuple(self._leaves(words))),))

    def right_branching(self, words: Sequence[str]) -> Tree:
        """Each word beside all that follows it: `top` over the sentence, `inner` over what is left of it each time."""
        leaves = self._leaves(words)
        node = leaves[-1]
        for place in range(len(leaves) - 2, -1, -1):
            node = Tree(self.inner if place else self.top, (leaves[place], node))
        return Tree(ROOT, (node if node.word is None else Tree(self.top, (node,)),))


class FileParser(FileTranslator):
    """Parses sentences, lists of words each, into an output: a tree a line, for a sentence without words a blank one.

    Args:
        parser: does the work.
        drawn: write trees drawn with lines, and a blank line after each, in place of brackets.
        pictures: folder that gets a picture of each tree, `NUMBER.svg`.
        window: sentences that are sorted by length together, and written together.

    Attributes:
        repaired: outputs of the model that were no trees over their words.
    """

    doing = "parsing"

    def __init__(self, parser: Parser, drawn: bool = False, pictures: Path | None = None, window: int = WINDOW_LINES):
        super().__init__(parser.translator, window=window)
        self.drawn, self.pictures, self.repaired = drawn, pictures, 0

    def _format(self, window: Window, hypotheses: list[list[Hypothesis]]) -> list[str]:
        records = []
        for number, (words, ranked) in enumerate(zip(window.lines, hypotheses, strict=True), window.first):
            parse = self.translator.read(words, ranked[0])
            self.repaired += not parse.well_formed
            if parse.tree is None:
                records.append("\n")
                continue
            if self.pictures is not None:
                write_text(self.pictures / f"{number:05}.svg", tree_svg(parse.tree))
            records.append((tree_text(parse.tree) + "\n" if self.drawn else str(parse.tree)) + "\n")
        return records
