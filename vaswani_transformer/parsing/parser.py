"""A constituency parser (Section 6.3): training on trees as text, and parsing with the trained model."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import tee
from pathlib import Path

from transformers import LogitsProcessor

from ..data.text_files import read_lines
from ..decoding.file_translator import FileTranslator
from ..decoding.streaming import WINDOW_LINES, Window
from ..decoding.translator import Hypothesis, Piece, Translator
from ..distributed import joined_processes
from ..errors import UserError
from ..output_folder import OutputFolder, locked_together
from ..recipes.recipe import Recipe
from ..training.run import check_trainable, join_process_group
from ..training.run_folder import check_output
from .augmentation import Exchange
from .grammar import BracketGrammar, BracketProcessor
from .linearization import TAG_END, delinearize, linearize, with_words, without_words
from .tokenizer import SPACE, sentence_text, train_parser_tokenizer, tree_token_ids
from .trees import WORD, Tree, checked, clean, escape, parse_trees

logger = logging.getLogger(__name__)

TEXT = "text"  # folder of the training text and tokenizer within that of a run


@dataclass(frozen=True)
class Parse:
    """The tree of a sentence, over exactly its words and under one `ROOT`; None for a sentence without words.

    `well_formed`: whether the model's output was that tree, and its words where it writes them; otherwise it was
    repaired (`delinearize`).
    """

    tree: Tree | None
    well_formed: bool = True


class Parser(Translator):
    """Parses sentences: words in, trees out.

    Args:
        model: a model of `vaswani parse train` in evaluation mode, or an ensemble of such models.
        tokenizer: its tokenizer.
        constrained: restrict decoding to trees over the sentence's words; without it, other outputs are repaired.
        **options: as in `Translator`: `tokens_per_batch`, and options of `generate()` in place of the model's own
            generation configuration, such as `num_beams`.

    Raises:
        UserError: for a model that is not a parser.
    """

    def __init__(self, model, tokenizer, *, constrained: bool = True, **options):
        super().__init__(model, tokenizer, **options)
        ids = tree_token_ids(tokenizer)
        self.has_words = any(token[-1] == TAG_END and token[0] not in "()" for token in ids)  # in its trees
        self._grammar = BracketGrammar(ids, tokenizer.eos_token_id) if constrained else None
        # A sentence has as many words as such tokens.
        self._word_starts = {number for token, number in tokenizer.get_vocab().items() if token.startswith(SPACE)}

    def parse(self, sentences: Iterable[Sequence[str]], window: int = WINDOW_LINES, progress=None) -> Iterator[Parse]:
        """Yield the parses of sentences, in their order; `window` and `progress` as in `Translator.hypotheses`.

        Sentences are lists of words, with brackets escaped (`-LRB-`) or not; an empty list has no tree.

        Raises:
            UserError: as `Translator.hypotheses` and `checked`, and for a sentence whose smallest tree is longer
                than an output may be; with the number of the sentence, after the parses of those before it.
        """
        lines, again = tee(checked(sentences))
        for hypotheses in self.hypotheses(lines, window, progress):
            yield self.read(next(again), hypotheses[0])

    def prepare(self, window: Window) -> Window:
        """Tokenise a window whose lines are lists of words; an error leaves the lines before it."""
        prepared = super().prepare(replace(window, lines=[sentence_text(words) for words in window.lines]))
        return replace(prepared, lines=window.lines[: len(prepared.lines)])

    def _simplified(self, source: str) -> tuple[str, int, Callable[[str, str], str]]:
        return source, 1, lambda _, text: text  # a tree is for all words as they are

    def _within_limits(self, number: int, code: str, text: str, ids: list[int]) -> tuple[list[str], list[list[int]]]:
        parts = super()._within_limits(number, code, text, ids)
        limit, words = self.output_limit(len(ids)), self._written_words(ids)
        least = sum(map(len, words)) + len(words) + 1  # a tag for each word and its tokens, and `</s>`
        if self._grammar is not None and limit < least:
            problem = f"a tree over {len(words)} words takes at least {least} tokens and an output may have {limit}"
            raise UserError(f"line {number}: {problem}: raise --max-new-tokens, or split the sentence")
        return parts

    def _written_words(self, ids: list[int]) -> list[list[int]]:
        """Return the token ids to write for each word of a sentence, none where words are not part of trees."""
        words: list[list[int]] = []
        for token in ids:
            if token in self._word_starts:
                words.append([token])
            elif token != self.tokenizer.eos_token_id:
                words[-1].append(token)
        return words if self.has_words else [[] for _ in words]

    def read(self, words: Sequence[str], hypothesis: Hypothesis) -> Parse:
        """Return the parse of a sentence from the model's output."""
        if not words:
            return Parse(None)
        words, tokens = [escape(word) for word in words], hypothesis.text.split()
        tree = delinearize(without_words(tokens) if self.has_words else tokens, words)
        expected = linearize(tree)
        if self.has_words:
            expected = with_words(expected, sentence_text(words).split(" "))
        return Parse(tree, well_formed=tokens == expected)

    def logits_processors(self, pieces: list[Piece]) -> list[LogitsProcessor]:
        """Return those of `Translator`, and the grammar of trees over the words of each piece."""
        processors = super().logits_processors(pieces)
        if self._grammar is not None:
            words = [self._written_words(piece.ids) for piece in pieces]
            limits = [self.output_limit(len(piece.ids)) for piece in pieces]
            processors.append(BracketProcessor(self._grammar, words, limits))
        return processors


def load_trees(path: str | Path) -> list[Tree]:
    """Return the cleaned trees of a file in brackets, plain or `.gz`, without those that have no words.

    Raises:
        UserError: for a file that cannot be read, as `parse_trees`, and where no tree is left.
    """
    cleaned = [clean(tree) for tree in parse_trees(read_lines(Path(path)), str(path))]
    trees = [tree for tree in cleaned if tree is not None]
    if len(trees) < len(cleaned):
        logger.warning("%s: %s tree(s) without words left out", path, f"{len(cleaned) - len(trees):,}")
    if not trees:
        raise UserError(f"{path} holds no trees: give Penn Treebank brackets, such as (ROOT (NP (NN Introduction)))")
    return trees


@dataclass(frozen=True)
class TextForm:
    """The form in which trees become text for training."""

    tags: bool = True  # write part-of-speech tags; otherwise every tag is `XX`
    words: bool = False  # write the words into the tree, too (`with_words`)
    # Train this many times on each tree and this many times on versions of it with parts exchanged, and on a quarter of
    # their short constituents by themselves (`Exchange`, seeded by the recipe); 0: once on each tree.
    augment: int = 0

    def tokens(self, tree: Tree) -> list[str]:
        """Return the output that the model is trained to write for a tree."""
        tokens = linearize(tree, self.tags)
        return with_words(tokens, sentence_text(tree.words()).split()) if self.words else tokens

    def vocabulary(self, trees: Iterable[Tree]) -> list[str]:
        """Return all brackets and tags of some trees, sorted."""
        plain = {token for tree in trees for token in linearize(tree, self.tags)}
        return sorted(set(with_words(plain, [])) if self.words else plain)


# Fields of a recipe that are set from the trees.
OWN_FIELDS = ("train_source", "train_target", "validation_source", "validation_target", "data_dir", "tokenizer")
OTHER_DATA = ("train_data", "validation_data", "validation_split", "prepared", "from_model", "augmentation")


def parsing_recipe(recipe: Recipe, train_trees: Sequence[Tree], dev_trees: Sequence[Tree], form: TextForm) -> Recipe:
    """Return a recipe for training on these trees; writes their text and a tokenizer to `text/` in its output folder.

    Of processes that were launched together the first one writes, then the first of each other machine, where the
    folder is not shared. Trees are cleaned; `vocab_size` includes brackets and tags. An interrupted training on other
    trees gets the new text, too: it refuses to resume on that, and resumes when it has the earlier one again.

    Raises:
        UserError: for a recipe that names other data, files of the user's in the places of ours, and as
            `train_parser_tokenizer`, `check_output` and `check_trainable`.
    """
    for name in (*OWN_FIELDS, *OTHER_DATA):
        if getattr(recipe, name) is not None:
            raise UserError(f"{name} is {getattr(recipe, name)!r}: a parser is trained on --trees, leave it out")
    folder, versions = Path(recipe.output) / TEXT, train_trees
    if form.augment:
        exchange = Exchange(train_trees, recipe.seed)
        versions = [tree for _ in range(form.augment) for tree in (*train_trees, *exchange.version())]
        versions += exchange.parts(versions)
    files = {}
    for part, trees in (("train", versions), ("dev", dev_trees)):
        files[f"{part}.words"] = "".join(sentence_text(tree.words()) + "\n" for tree in trees)
        files[f"{part}.brackets"] = "".join(" ".join(form.tokens(tree)) + "\n" for tree in trees)
    paths = [*(folder / name for name in files), None, folder / "tokenizer"]
    recipe = replace(recipe, **{name: path and str(path) for name, path in zip(OWN_FIELDS, paths, strict=True)})
    sentences = (sentence_text(tree.words()) for tree in train_trees)
    tokenizer = train_parser_tokenizer(sentences, form.vocabulary(train_trees), recipe.vocab_size)
    join_process_group(recipe)
    with joined_processes() as processes, processes.first_process_first():
        if processes.is_first_of_machine:
            check_trainable(recipe, tokenizer)
            with locked_together(recipe.output):
                check_output(recipe)
                output = OutputFolder(recipe.output)
                for name, text in files.items():
                    output.write_text(f"{TEXT}/{name}", text)
                with output.placing(f"{TEXT}/tokenizer") as staging:
                    tokenizer.save_pretrained(staging)
    return recipe


class FileParser(FileTranslator):
    """Parses lines, words separated by spaces, into a file: a tree on each line, a blank line for no words.

    `repaired` counts the outputs that were not trees over their words.
    """

    doing, repaired = "parsing", 0

    def run(self, lines: Iterable[str], *arguments, **options) -> None:
        """Parse all lines with a `Parser`; arguments and errors as in `FileTranslator.run`."""
        super().run(checked(map(WORD.findall, lines)), *arguments, **options)

    def _format(self, window: Window, hypotheses: list[list[Hypothesis]]) -> list[str]:
        parses = list(map(self.translator.read, window.lines, (ranked[0] for ranked in hypotheses)))
        self.repaired += sum(not parse.well_formed for parse in parses)
        return [f"{'' if parse.tree is None else parse.tree}\n" for parse in parses]
