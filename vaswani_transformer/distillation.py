"""Training on what models translate: sequence-level knowledge distillation, and back-translation.

The method of distillation, with its sections, is that of Kim and Rush, 2016, Sequence-Level Knowledge Distillation
(arXiv 1606.07947). In place of a sum over all translations, the student's loss takes the one that the teacher's beam
search finds (Section 3.2; 5 beams there).

Back-translation makes sources for text of the target language alone (Sennrich et al., 2016, arXiv 1511.06709), by the
search of a model of the reverse direction, with a tag in front (Caswell et al., 2019, arXiv 1906.06442).
"""

import filecmp
import hashlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unicodedata import normalize

from .data.augmentation import TAG
from .data.parallel_text import PairSource
from .data.recipe_data import data_sources, load_training_pairs, validation_text
from .data.text_files import file_stamp, read_lines
from .data.tokenization import SIDES, load_tokenizer
from .decoding.file_translator import FileTranslator, record
from .decoding.output import ResumableOutput, notes_path
from .decoding.parts import write_in_parts
from .decoding.translator import Translator
from .distributed import joined_processes
from .errors import UserError, reading
from .evaluation.records import model_sha256
from .export.engine import load_for_decoding
from .files import written_whole
from .hub.card_facts import known_languages
from .json_and_yaml import parse_json, read_json
from .loading import check_folder
from .model.language_codes_vaswani import typed_code
from .output_folder import RECIPE, OutputFolder, locked_together
from .recipes.recipe import AUTO, CHOSEN, Recipe, languages_of, load_recipe
from .training.checkpoints import WEIGHTS
from .training.forecast import train_once
from .training.initial_model import read_model_of
from .training.run import TrainingResult, check_trainable, join_process_group, train
from .training.run_folder import CHECKPOINTS, DISTILLATION, REVERSE, VERDICT, check_is_elsewhere, check_output
from .training.settings import Row

logger = logging.getLogger(__name__)

DISTILLED = "distilled"  # files distilled.en and distilled.de, or whatever the languages are
TRANSLATIONS = "translations.jsonl"  # until these are written: the teachers' outputs, a line of JSON for each source
SOURCES = "sources.txt"  # and what is translated
BACK_TRANSLATED = "back_translated"  # the same of sources that a reverse model wrote, with the parallel text
PARALLEL, HELD_OUT = "parallel", "validation"  # files of the parallel text, by language
REVERSE_MINUTES = 0.25  # share of the training's minutes that the reverse model gets
ENOUGH = 60  # passes through the pairs alone that the minutes allow: with 20 text cost 7.0 chrF, 70 brought 4.0 BLEU
PASSES = 8  # that the final training is to make through its text: fewer lines are translated for few minutes
MOST_REPEATS = 8  # of the parallel text, of which there is about half as much as of the other, if that is enough


def distill(
    teachers: Sequence[str],
    recipe: Recipe,
    text: str | None = None,
    beams: int | None = None,
    precision: str | None = None,
    progress: bool = True,
    workers: int = 1,
) -> TrainingResult:
    """Have a text translated, unless it is in the output folder already, and train a student on the translations.

    The folder becomes that of the student, with the text that it was trained on. Of processes that were launched
    together the first one translates. After an interruption the same call resumes.

    Args:
        teachers: a model folder, or several, which translate together.
        recipe: of the student. Its training sources are what is translated, its validation data stays as it is.
        text: a file, pattern or folder, whose lines are translated instead; relative to the recipe's `data_dir`.
        beams, precision: how the teachers translate, as in `DistilledText`.
        progress: whether to show progress bars on standard error.
        workers: processes of this machine that translate, each with the teachers loaded, and on its own GPU if there
            are any; what they write is what one writes.

    Raises:
        UserError: for teachers that are no models or of different tokenizers, a text without lines, a folder that
            holds something else, and as `train`.
        TrainingStopped: as `train`.
    """
    for teacher in teachers:
        check_folder(teacher)
        check_is_elsewhere(recipe.output, teacher)
    student = student_recipe(teachers[0], recipe)
    if text is not None:
        recipe = replace(recipe, train_source=text, train_target=text, train_data=None, train_split="train")
    source, _ = data_sources(recipe, one_text=True)
    made = DistilledText(teachers, student, source, beams=beams, precision=precision)
    join_process_group(student)
    with locked_together(student.output):
        with joined_processes() as processes:
            processes.share("distilled text", lambda: made.make(progress, workers))
        return train(student, progress)


def train_with_target_text(recipe: Recipe, text: str, progress: bool = True) -> TrainingResult:
    """Train on the recipe's pairs, and on text of the target language that a model of the reverse direction translates.

    The reverse model, in the folder `reverse` of the output, is trained first, unless it is there, in a quarter of
    `max_minutes` if that is given, again for other minutes until its translations are of use; the final training has
    the rest. Translating, of as many lines as leave time for `PASSES` through all, comes on top. The same call resumes.
    The `text`, and errors, are as in `distill`; `UserError` also where the minutes are few for the pairs alone.
    """
    known = languages_of(vars(recipe)) or data_sources(recipe)[0].languages
    languages = [code or side for code, side in zip(known, SIDES, strict=True)] if len({*known}) == 2 else list(SIDES)
    mono = replace(recipe, train_source=text, train_target=text, train_data=None, train_split="train")
    source, _ = data_sources(mono, one_text=True)
    folder, share = Path(recipe.output).absolute(), REVERSE_MINUTES
    pairs, held_out, both = (
        [str(folder / f"{part}.{language}") for language in languages] for part in (PARALLEL, HELD_OUT, BACK_TRANSLATED)
    )
    reverse = _on_files(recipe, pairs[::-1], held_out[::-1], share * recipe.max_minutes, f"{recipe.output}/{REVERSE}")
    reverse = replace(reverse, bleu_tokenizer=None, tokenizer=None)  # the recipe's may be of the other language
    final = _on_files(recipe, both, held_out, (1 - share) * recipe.max_minutes, recipe.output)
    parallel = _on_files(recipe, pairs, held_out, 0, recipe.output)
    join_process_group(recipe)
    with locked_together(recipe.output):
        with joined_processes() as processes:
            processes.share("output", lambda: _check_output(final))
            processes.share("target text", lambda: _check_text(source))  # before hours are spent
            processes.share("parallel text", lambda: _write_parallel_text(recipe, languages))
        notes = [path for path in (folder / DISTILLATION, notes_path(folder / TRANSLATIONS)) if path.exists()]
        if not notes:  # the reverse model has not translated yet
            anew = recipe.overwrite or (recipe.max_minutes > 0 and (folder / REVERSE / WEIGHTS).exists())
            lines = train_once(replace(reverse, overwrite=anew), progress).verdict
            logger.info("reverse model: %s", "".join(each for each in lines if "BLEU" in each) or "trained")
        made = DistilledText([reverse.output], final, source, data_sources(parallel)[0])
        made_by, begun = folder / REVERSE / CHECKPOINTS / RECIPE, folder / CHECKPOINTS / RECIPE
        is_timed = recipe.max_minutes and made_by.exists() and (recipe.overwrite or not begun.exists())
        size = load_recipe(str(made_by)) if is_timed else final  # of one size, by which the passes are known
        open_fields = [name for name in CHOSEN if name in Row._fields and getattr(final, name) == AUTO]
        final = replace(final, **{name: getattr(size, name) for name in open_fields})
        if notes:  # other minutes do not change what is translated
            logger.info("back-translated text: as it was made before; another --output makes it again")
            made.step = (facts := read_json(notes[0])).get("settings", facts).get("lines", 1)
        elif recipe.max_minutes:
            made.step = _step(final, reverse, made)
        with joined_processes() as processes:
            processes.share("back-translated text", lambda: made.make(progress))
        return train(final, progress)


def _check_output(recipe: Recipe) -> None:
    """Check the output before hours are spent: a run that has begun there must be on text that was made for it."""
    if check_output(recipe) is not None and not (Path(recipe.output) / DISTILLATION).exists():
        problem = f"{recipe.output} holds an interrupted training on other text"
        raise UserError(f"{problem}: give another --output, or --overwrite to start again")


def _check_text(source: PairSource) -> None:
    with reading(source.where):
        next(line for line, _ in source.stream() if line.strip())  # or it is reported as empty


def _step(final: Recipe, reverse: Recipe, made: "DistilledText") -> int:
    """Return of how many lines one is translated, by the passes that the reverse model's training made."""
    trained, minutes = read_json(Path(reverse.output) / VERDICT), final.max_minutes
    passes = trained["metrics"]["eval_epoch"] * 60 * minutes / trained["seconds"]  # through the pairs alone
    lines, pairs = (sum(1 for _ in text.stream()) for text in (made.source, made.parallel))
    if passes < ENOUGH:
        left = f"the {minutes:g} minutes that the reverse model leaves"
        problem = f"in {left} a training goes through the pairs alone {passes:.1f} times"
        needed = math.ceil(1.1 * ENOUGH / passes * minutes / (1 - REVERSE_MINUTES))
        raise UserError(f"{problem}: for more text give --max-minutes {needed} or more, or leave --target-text out")
    room = max(passes / PASSES / 1.5, passes / PASSES - MOST_REPEATS)  # times the pairs, which are repeated
    step = max(1, round(lines / (pairs * room)))
    logger.info("target text: %d of %d lines, one in %d", lines // step, lines, step)
    return step


def _on_files(recipe: Recipe, training: list[str], validation: list[str], minutes: float, output: str) -> Recipe:
    """Return a recipe on text files in place of its data."""
    names = ("train_source", "train_target", "validation_source", "validation_target")
    fields = dict(zip(names, training + validation, strict=True))
    fields |= dict.fromkeys(("train_data", "validation_data", "validation_split", "prepared"))
    fields |= {name: getattr(Recipe, name) for name in ("train_split", "source_column", "target_column")}
    return replace(recipe, **fields, max_minutes=minutes, output=output)


def _write_parallel_text(recipe: Recipe, languages: Sequence[str]) -> None:
    """Write the recipe's pairs, and those to validate on: what is held out is neither model's to learn."""
    output = OutputFolder(recipe.output)
    output.check_ours(REVERSE)
    with output.placing() as staging:
        for part, pairs in zip((PARALLEL, HELD_OUT), load_training_pairs(recipe), strict=True):
            for language, side in zip(languages, SIDES, strict=True):
                text = "".join(" ".join(line.splitlines()) + "\n" for line in pairs[side])
                (path := staging / f"{part}.{language}").write_text(text, encoding="utf-8")
                if (old := output.path / path.name).is_file() and filecmp.cmp(path, old, shallow=False):
                    path.unlink()  # an interrupted preparation knows the old one by its time
                elif any((output.path / name).exists() for name in (DISTILLATION, notes_path(Path(TRANSLATIONS)))):
                    problem = f"{output.shown} has text that was made from other pairs or with another seed"
                    raise UserError(f"{problem}: give the same ones, or another --output")


def student_recipe(teacher: str, recipe: Recipe) -> Recipe:
    """Return the recipe of a student: it is trained on the distilled text, by default with the teacher's tokenizer."""
    folder = Path(recipe.output) if recipe.data_dir is None else Path(recipe.output).absolute()
    languages = languages_of_model(teacher) or languages_of(vars(recipe)) or SIDES
    source, target = (str(folder / f"{DISTILLED}.{code or side}") for code, side in zip(languages, SIDES, strict=True))
    changes = {"train_source": source, "train_target": target, "train_data": None, "train_split": "train"}
    changes |= zip(("validation_source", "validation_target", "validation_data"), validation_text(recipe), strict=True)
    if recipe.tokenizer_folder is None:
        changes["tokenizer"] = str(teacher)
    return replace(recipe, prepared=None, **changes)


def languages_of_model(folder: str) -> tuple[str, ...]:
    """Return the codes of a model's languages, source first; nothing where they are not known."""
    codes = [*filter(None, known_languages(folder))]
    return tuple(codes) if len(codes) == len(set(codes)) == 2 else ()


def _digest(source: PairSource) -> str:
    digest = hashlib.sha256()
    for pair in source.stream():
        digest.update(json.dumps(pair).encode())
    return digest.hexdigest()


@dataclass
class DistilledText:
    """The text that a student is trained on, in its output folder."""

    teachers: Sequence[str]  # folders
    recipe: Recipe  # of the student, as `student_recipe` makes it
    source: PairSource  # pairs whose sources are translated
    parallel: PairSource | None = None  # of back-translation: the pairs that the new ones are added to
    beams: int | None = None  # as the first teacher was saved, if none
    precision: str | None = None  # what the teachers are loaded in
    step: int = 1  # one of so many sources is translated

    def __post_init__(self):
        self.output = OutputFolder(self.recipe.output)
        self.names = [Path(path).name for path in (self.recipe.train_source, self.recipe.train_target)]

    def make(self, progress: bool = True, workers: int = 1) -> None:
        """Write the files, and `distillation.json` last, unless they are there."""
        recipe, translations = self.recipe, self.output.path / TRANSLATIONS
        _check_output(recipe)
        if recipe.from_model is not None:
            read_model_of(recipe.from_model)
        elif recipe.tokenizer is not None:
            check_trainable(recipe, load_tokenizer(recipe.tokenizer))
        settings = {"teachers": [model_sha256(teacher) for teacher in self.teachers], "text": _digest(self.source)}
        settings |= {} if self.parallel is None else {"parallel text": _digest(self.parallel), "lines": self.step}
        settings |= {"beams": self.beams, "precision": self.precision, "max_length": recipe.max_length}
        if not self._is_made(settings):
            self.output.check([DISTILLATION, SOURCES, TRANSLATIONS, *self.names])
            self._translate(settings, progress, workers)
            self._write(settings)
        self.output.remove([SOURCES, TRANSLATIONS, notes_path(translations).name])

    def _is_made(self, settings: dict[str, Any]) -> bool:
        """Return whether the text is there; what was made with other settings is refused."""
        path = self.output.shown / DISTILLATION
        if not path.exists():
            return False
        with reading(path):
            earlier = dict(read_json(path)["settings"])
        free = () if all(Path(teacher).exists() for teacher in self.teachers) else ("teachers",)  # not needed any more
        if changed := ", ".join(name for name, x in settings.items() if earlier.get(name) != x and name not in free):
            problem = f"{self.output.shown} holds text that was distilled with other settings ({changed})"
            raise UserError(f"{problem}: give the same ones, or another --output")
        return True

    def _translate(self, settings: dict[str, Any], progress: bool, workers: int) -> None:
        """Translate what is not translated yet."""
        translator = self._file_translator()  # here too where workers translate: mistakes are found at once
        if known := ", ".join(translator.translator.codes.known.values()):
            logger.warning("sources without a code (%.300s) may be translated into any language", known)
        sources, translations = self.output.path / SOURCES, self.output.path / TRANSLATIONS
        self.output.note([SOURCES, TRANSLATIONS, notes_path(translations).name])
        with closing(ResumableOutput(translations, settings, resume=True)) as output:
            if not sources.is_file():
                with written_whole(sources) as new, new.open("w", encoding="utf-8") as file:
                    file.writelines(f"{line}\n" for line in self._sources())
            doing, window = translator.doing if progress else None, translator.window
            make = self._file_translator if workers > 1 else lambda loaded=translator: loaded
            del translator  # of which each worker loads its own
            write_in_parts(output, doing, make, ((sources, file_stamp(sources)),), window, workers)

    def _sources(self) -> Iterator[str]:
        """Yield each source as one line; those aside that are targets to validate on."""
        lines = (" ".join(source.splitlines()) for source, _ in islice(self.source.stream(), 0, None, self.step))
        held_out = () if self.parallel is None else read_lines(Path(self.recipe.validation_target))
        held_out = {normalize("NFC", line.strip()) for line in held_out}  # as models read and write
        return (line for line in lines if normalize("NFC", line.strip()) not in held_out)

    def _file_translator(self) -> FileTranslator:
        """Return the teachers' translator with their models loaded; workers call this too."""
        model, tokenizer = load_for_decoding(self.teachers, precision=self.precision)
        beams = self.beams or model.generation_config.num_beams or 1
        search = {"do_sample": False, "num_beams": beams, "num_return_sequences": 1}
        search["source_language"] = (languages_of_model(self.teachers[0]) or ["en"])[0]
        longest = self.recipe.max_length  # longer ones, which no student of this recipe learns, are split
        translator = Translator(model, tokenizer, max_source_tokens=longest, split_long=True, **search)
        translator.is_repaired = any(known_languages(self.teachers[0]))
        return FileTranslator(translator, partial(record, as_json=True))

    def _write(self, settings: dict[str, Any]) -> None:
        """Write what can be learned: translations that are neither empty nor repeat themselves; last the facts."""
        with (self.output.path / TRANSLATIONS).open(encoding="utf-8") as file:
            best = (next(iter(parse_json(line)["hypotheses"]), {"text": ""}) for line in file)
            translated = [each["text"] if each["text"].strip() and not each.get("repeats") else None for each in best]
        counts = {"lines": len(translated), "pairs": sum(each is not None for each in translated)}
        message = "{lines:,} lines translated, {pairs:,} pairs kept; others are empty or repeat themselves without end"
        logger.info("distilled text: %s", message.format(**counts))
        if not counts["pairs"]:
            self.output.remove([SOURCES, TRANSLATIONS, notes_path(Path(TRANSLATIONS)).name])  # for a better model's
            problem = f"no translation of {self.source.where} can be learned: all are empty or repeat themselves"
            raise UserError(f"{problem}; train the model that translates for longer (a reverse model: --overwrite)")
        names = [Path(teacher).resolve().name for teacher in self.teachers]
        facts = {"teachers": names, "files": self.names, **counts, "settings": settings}
        with self.output.placing(last=DISTILLATION) as staging:
            paths = [staging / name for name in self.names]
            with paths[0].open("w", encoding="utf-8") as sources, paths[1].open("w", encoding="utf-8") as targets:
                for source, target in self._pairs(translated, counts["pairs"]):
                    sources.write(source + "\n")
                    targets.write(target + "\n")
            (staging / DISTILLATION).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    def _pairs(self, translated: Sequence[str | None], number: int) -> Iterator[tuple[str, str]]:
        """Yield what the student learns: texts with their translations, of which there are `number`, or the reverse."""
        made = ((text, each) for text, each in zip(self._sources(), translated, strict=True) if each is not None)
        if self.parallel is None:
            yield from made
            return
        made = ((text, *typed_code(source)) for text, source in made)  # a language's tag stays in front, and once
        yield from ((f"{code}{TAG} {rest.replace(code, '')}", text) for text, code, rest in made)
        pairs = list(self.parallel.stream())
        yield from pairs * max(1, min(MOST_REPEATS, round(number / len(pairs) / 2)))
