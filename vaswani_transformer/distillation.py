"""Sequence-level knowledge distillation: a student is trained on what its teachers translate.

The method, with its sections, is that of Kim and Rush, 2016, Sequence-Level Knowledge Distillation (arXiv 1606.07947).
In place of a sum over all translations, the student's loss takes the one that the teacher's beam search finds (Section
3.2; 5 beams there), or the one of the beam that is nearest to the reference (3.3, interpolation; 35 beams).
"""

import hashlib
import json
import logging
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from sacrebleu.metrics import BLEU

from .data.parallel_text import PairSource
from .data.recipe_data import data_sources, split_to_validate_on
from .data.text_files import file_stamp
from .data.tokenization import load_tokenizer, tokenizer_sha256
from .decoding.file_translator import FileTranslator, Layout
from .decoding.output import ResumableOutput, notes_path
from .decoding.parts import parts_folder, write_in_parts
from .decoding.translator import Translator
from .distributed import joined_processes
from .errors import UserError
from .evaluation.records import model_sha256
from .hardware import check_workers
from .hub.card_facts import known_languages
from .json_and_yaml import parse_json, read_json
from .loading import check_folder
from .model.settings_vaswani import broken_range
from .output_folder import OutputFolder, locked_together
from .recipes.recipe import Recipe, check_paths
from .training.initial_model import read_model_of
from .training.run import TrainingResult, check_trainable, join_process_group, train
from .training.run_folder import DISTILLATION, check_is_elsewhere, check_output

logger = logging.getLogger(__name__)

DISTILLED = "distilled"  # files distilled.en and distilled.de, or whatever the languages are
TRANSLATIONS = "translations.jsonl"  # until these are written: what the teachers found, a line of JSON for each source
SOURCES = "sources.txt"  # and what several workers translate
_BLEU = BLEU(effective_order=True)  # smoothed, as sacreBLEU advises for sentences


@dataclass(frozen=True)
class Teaching:
    """How teachers translate, and what of it a student learns."""

    beams: int | None = None  # as the first teacher was saved, if none
    sample: bool = False  # draw a translation from the teachers' distribution in place of a search
    interpolate: bool = False  # of the beam take the translation nearest to the reference, by sentence BLEU
    keep: float = 1.0  # the share of translations that is kept: those of the most log-probability a token
    precision: str | None = None  # what the teachers were loaded in

    def check(self, text: str | None) -> None:
        """Raise `UserError` for values out of range and for those that exclude each other."""
        if self.beams is not None and (rule := broken_range("num_beams", self.beams)):
            raise UserError(f"--beams is {self.beams}: it must be {rule}")
        if not 0 < self.keep <= 1:
            raise UserError(f"--keep is {self.keep}: it must be a share above 0 and at most 1")
        if self.sample and (self.interpolate or self.beams is not None):
            other = "--interpolate" if self.interpolate else "--beams"
            raise UserError(f"{other} is for a beam search and --sample draws instead: leave one of them out")
        if self.interpolate and text is not None:
            raise UserError(
                "--interpolate compares with references and --text has none: leave one of them out, or give sources and"
                " references as --train-source and --train-target"
            )

    def search(self, own_beams: int) -> dict[str, Any]:
        """Options of `generate()` for a teacher that was saved with so many beams."""
        if self.sample:
            return {"do_sample": True, "num_beams": 1, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        beams = self.beams or own_beams
        if self.interpolate and beams == 1:
            raise UserError("--interpolate chooses from a beam and the beam size is 1: give more --beams")
        return {"do_sample": False, "num_beams": beams, "num_return_sequences": beams if self.interpolate else 1}


def distill(
    teachers: Sequence[str],
    recipe: Recipe,
    load_teachers: Callable[[], tuple[Any, Any]],
    teaching: Teaching = Teaching(),
    text: str | None = None,
    progress: bool = True,
    workers: int = 1,
) -> TrainingResult:
    """Have a text translated, unless it is in the output folder already, and train a student on the translations.

    The folder becomes that of the student, with the text that it was trained on. Of processes that were launched
    together the first one translates. After an interruption the same call resumes.

    Args:
        teachers: a model folder, or several, which translate together.
        recipe: of the student. Its training sources are what is translated, its validation data stays as it is.
        load_teachers: loads them as one model or ensemble, with its tokenizer, if something is left to translate; for
            several workers a function that can be pickled.
        teaching: how they translate, and what is kept of it.
        text: a file, or a pattern, whose lines are translated instead; relative to the recipe's `data_dir`.
        progress: whether to show progress bars on standard error.
        workers: processes of this machine that translate, each with the teachers loaded, and on its own GPU if there
            are any; what they write is what one writes.

    Raises:
        UserError: for teachers that are no models or of different tokenizers, a student with another tokenizer, a text
            without lines, a folder that holds something else, and as `train`.
        TrainingStopped: as `train`.
    """
    check_paths(recipe)
    check_workers("--workers", workers)
    teaching.check(text)
    for teacher in teachers:
        check_folder(teacher)
        check_is_elsewhere(recipe.output, teacher)
    student = student_recipe(teachers[0], recipe)
    source = text_source(recipe if text is None else replace(student, train_source=text, train_target=text))
    made = DistilledText(teachers, student, teaching, source)
    join_process_group(student)
    with locked_together(student.output):
        with joined_processes() as processes:
            processes.share("distilled text", lambda: made.make(load_teachers, progress, workers))
        return train(student, progress)


def text_source(recipe: Recipe) -> PairSource:
    """The pairs whose sources are translated."""
    if not (recipe.train_source or recipe.train_target or recipe.train_data):
        raise UserError("there is no text to translate: give --text FILE, or a student's recipe with training data")
    return data_sources(recipe)[0].downloaded()


def student_recipe(teacher: str, recipe: Recipe) -> Recipe:
    """The recipe of a student: it is trained on the distilled text, with the teacher's tokenizer.

    Raises:
        UserError: for a recipe that has another tokenizer, its own or that of the model it starts from.
    """
    own = recipe.tokenizer_folder
    if own is not None and tokenizer_sha256(load_tokenizer(own)) != tokenizer_sha256(load_tokenizer(teacher)):
        raise UserError(
            f"the student's recipe takes the tokenizer of {own} and the teacher {teacher} has another one, which its"
            " students share: leave it out"
        )
    folder = Path(recipe.output) if recipe.data_dir is None else Path(recipe.output).absolute()
    source, target = (str(folder / f"{DISTILLED}.{language}") for language in languages_of_model(teacher))
    changes = {"train_source": source, "train_target": target, "train_data": None, "train_split": "train"}
    if recipe.validation_split and not (recipe.validation_source or recipe.validation_target):
        changes["validation_data"] = recipe.validation_data or split_to_validate_on(recipe)
    if own is None:
        changes["tokenizer"] = str(teacher)
    return replace(recipe, prepared=None, **changes)


def languages_of_model(folder: str) -> tuple[str, str]:
    """The codes of a model's languages, source first; `source` and `target` where they are not known."""
    codes = known_languages(folder)
    return tuple(codes) if len(codes) == len(set(codes)) == 2 else ("source", "target")


@dataclass(frozen=True)
class DistilledText:
    """The text that a student is trained on, in its output folder."""

    teachers: Sequence[str]  # folders
    recipe: Recipe  # of the student, as `student_recipe` makes it
    teaching: Teaching
    source: PairSource

    @cached_property
    def output(self) -> OutputFolder:
        """The student's folder."""
        return OutputFolder(self.recipe.output)

    @cached_property
    def names(self) -> list[str]:
        """Names of the files of sources and targets."""
        return [Path(path).name for path in (self.recipe.train_source, self.recipe.train_target)]

    @property
    def translations(self) -> Path:
        """Where translations lie until all are there."""
        return self.output.path / TRANSLATIONS

    def make(self, load_teachers: Callable[[], tuple[Any, Any]], progress: bool = True, workers: int = 1) -> None:
        """Write the files, and `distillation.json` last, unless they are there.

        Raises:
            UserError: as `distill`, and for text in the folder that was distilled otherwise.
        """
        recipe = self.recipe
        check_output(recipe)  # mistakes that the training would find are found before hours are spent
        if recipe.from_model is None:
            check_trainable(recipe, load_tokenizer(recipe.tokenizer))
        else:
            read_model_of(recipe.from_model)
        lines, digest = self._scan()
        settings = {"teachers": [model_sha256(teacher) for teacher in self.teachers], "text": digest}
        settings |= asdict(self.teaching) | {"max_length": recipe.max_length}
        settings["seed"] = recipe.seed if self.teaching.sample else None
        if not self._is_made(settings):
            self.output.check([DISTILLATION, SOURCES, *self.names])
            self._translate(load_teachers, settings, lines, progress, workers)
            self._write(settings)
        if notes_path(self.translations).exists():  # removed last: a removal that is cut off is repeated
            self.output.remove([SOURCES])
            self.translations.unlink(missing_ok=True)
            notes_path(self.translations).unlink()

    def _scan(self) -> tuple[int, str]:
        """Number of pairs and a hash of them."""
        digest = hashlib.sha256()
        for number, pair in enumerate(self.source.stream(), 1):  # noqa: B007 - it raises where there are none
            digest.update(json.dumps(pair).encode())
        return number, digest.hexdigest()

    def _is_made(self, settings: dict[str, Any]) -> bool:
        """Whether the text is there; what was made with other settings is refused."""
        try:
            facts = read_json(self.output.shown / DISTILLATION, "remove it to have the text translated again")
        except FileNotFoundError:
            return False
        earlier = facts.get("settings")
        if earlier != settings:
            earlier = earlier if isinstance(earlier, dict) else {}
            changed = ", ".join(name for name, value in settings.items() if earlier.get(name) != value)
            raise UserError(
                f"{self.output.shown} holds text that was distilled with other settings ({changed}): give the same"
                " ones, or another --output"
            )
        return True

    def _translate(
        self,
        load_teachers: Callable[[], tuple[Any, Any]],
        settings: dict[str, Any],
        lines: int,
        progress: bool,
        workers: int,
    ) -> None:
        """Translate what is not translated yet."""
        make = partial(self._file_translator, load_teachers, settings["seed"])
        files = make()  # here too where workers translate: what is wrong with the teachers is known at once
        self.output.note()
        with closing(ResumableOutput(self.translations, settings, resume=True)) as output:
            if workers == 1 and not parts_folder(self.translations).is_dir():
                files.run(self._sources(), output, output.done, lines, progress=progress)
                return
            kind, window, path = type(files), files.window, self.output.path / SOURCES
            del files  # of which each worker loads its own
            if SOURCES not in self.output or not path.is_file():
                with self.output.staging() as staging:
                    with (staging / SOURCES).open("w", encoding="utf-8") as file:
                        file.writelines(f"{line}\n" for line in self._sources())
                    self.output.place(staging, last=SOURCES)
            sources = ((path, file_stamp(path)),)
            write_in_parts(output, kind, make, sources, window, 1, workers, progress=progress)

    def _sources(self) -> Iterator[str]:
        """Each source as one line."""
        return (" ".join(source.splitlines()) for source, _ in self.source.stream())

    def _file_translator(self, load_teachers: Callable[[], tuple[Any, Any]], seed: int | None) -> FileTranslator:
        model, tokenizer = load_teachers()
        translator = Translator(
            model,
            tokenizer,
            max_source_tokens=self.recipe.max_length,  # longer ones, which no student of this recipe learns, in parts
            split_long=True,
            scores=True,
            seed=seed,
            source_language=languages_of_model(self.teachers[0])[0],
            **self.teaching.search(model.generation_config.num_beams or 1),
        )
        return FileTranslator(translator, Layout(json=True))

    def _found(self) -> Iterator[list[dict[str, Any]]]:
        """The translations of each line, best first."""
        with self.translations.open(encoding="utf-8") as file:
            for line in file:
                yield parse_json(line)["hypotheses"]

    def _choose(self, reference: str, translations: list[dict[str, Any]]) -> tuple[int, float]:
        """The number of the translation to learn, and its log-probability a token; NaN if there is none."""
        usable = {
            place: one["log_probability"] / one["tokens"]
            for place, one in enumerate(translations)
            if one["text"].strip() and not one.get("repeats")
        }
        if not usable:
            return 0, math.nan
        place = next(iter(usable))
        if self.teaching.interpolate:
            place = max(usable, key=lambda one: _BLEU.sentence_score(translations[one]["text"], [reference]).score)
        return place, usable[place]

    def _write(self, settings: dict[str, Any]) -> None:
        """Write what is kept of the translations, and last the facts about it."""
        places, scores = array("i"), array("d")
        for (_, reference), translations in zip(self.source.stream(), self._found(), strict=True):
            place, score = self._choose(reference, translations)
            places.append(place)
            scores.append(score)
        are_kept = best_share(np.asarray(scores), self.teaching.keep)
        counts = {"lines": len(scores), "pairs": int(are_kept.sum()), "unusable": int(np.isnan(scores).sum())}
        logger.info(
            "distilled text: {lines:,} lines translated, {pairs:,} pairs kept; dropped: {unusable:,} empty or repeating"
            " themselves without end, {low:,} of low scores".format(
                **counts, low=counts["lines"] - counts["pairs"] - counts["unusable"]
            )
        )
        if not counts["pairs"]:
            raise UserError(f"no translation of {self.source.where} can be learned: all are empty or repeat themselves")
        names = [Path(teacher).resolve().name for teacher in self.teachers]
        facts = {"teachers": names, "files": self.names, **counts, "settings": settings}
        with self.output.staging() as staging:
            with (
                (staging / self.names[0]).open("w", encoding="utf-8") as sources,
                (staging / self.names[1]).open("w", encoding="utf-8") as targets,
            ):
                rows = zip(self._sources(), self._found(), places, are_kept, strict=True)
                for source, translations, place, is_kept in rows:
                    if is_kept:
                        sources.write(source + "\n")
                        targets.write(translations[place]["text"] + "\n")
            (staging / DISTILLATION).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            self.output.place(staging, last=DISTILLATION)


def best_share(scores: np.ndarray, share: float) -> np.ndarray:
    """Which scores are among the highest, up to this share of all that are not NaN (at least one); ties are kept."""
    ranked = np.sort(scores[~np.isnan(scores)])[::-1]
    if not len(ranked):
        return np.zeros(len(scores), dtype=bool)
    return scores >= ranked[math.ceil(share * len(ranked)) - 1]
