"""What a student learns from a text, and what from its teacher's translations of it: Multi30k, English to German.

    vaswani train multi30k-en-de --data-dir FOLDER_OF_MULTI30K --output TEACHER
    python scripts/benchmarks/distillation.py FOLDER_OF_MULTI30K --teacher TEACHER
    python scripts/benchmarks/distillation.py FOLDER_OF_MULTI30K --teacher TEACHER --report    # the table so far

For each seed a student of few decoder layers is trained on the text, and the same student, for as many steps, on what
the teacher's beam search makes of the sources (`vaswani distill`; the first seed's run has the text translated, the
others are trained on its files). Both have the teacher's tokenizer, and keep the average of the last five checkpoints.
All are scored on test_2016_flickr in int8. Sentences a second of processor time, one thread, are medians of rounds in
which the teacher and the students of the first seed take turns: greedy search in batches of 64, and 4 beams one
sentence after the other. Finished cells are not repeated, an interrupted one is resumed.
"""

import argparse
import random
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from vaswani_transformer import Translator, load_model, prepare_for_inference, train
from vaswani_transformer.cli.options import load_for_decoding
from vaswani_transformer.distillation import distill, student_recipe
from vaswani_transformer.errors import UserError
from vaswani_transformer.evaluation.metrics import score_translations
from vaswani_transformer.evaluation.records import weights_sha256
from vaswani_transformer.experiments.base import (
    Cell,
    Setup,
    describe_runs,
    experiment_folder,
    markdown_table,
    read_results,
    run_cell,
    write_recipe,
    write_report,
)
from vaswani_transformer.experiments.launch import Job, device_environments, run_side_by_side
from vaswani_transformer.experiments.translation import (
    Training,
    TranslationExperiment,
    data_pairs,
    settings_of,
    with_target,
)
from vaswani_transformer.loading import check_folder
from vaswani_transformer.training.checkpoints import WEIGHTS

STUDENT = with_target("de") | {
    "d_model": 128, "d_ff": 512, "num_heads": 4, "dropout": 0.1, "initialization": "normal", "tokens_per_batch": 4096,
    "tokens_per_device": 4096, "warmup_steps": 800, "evaluate_every": 200, "validation_bleu": 0, "best_by": "loss",
    "keep_weights": "average", "keep_checkpoints": 5, "average_checkpoints": 5, "early_stopping": 0,
    "length_penalty": 0.6,
}  # fmt: skip
TESTS = {"test_source": "test_2016_flickr.en.gz", "test_target": "test_2016_flickr.de.gz"}
KINDS = {"text": "student, on the text", "distilled": "student, on the teacher's output"}
SEARCHES = {"greedy": {"num_beams": 1}, "beam 4": {"num_beams": 4, "length_penalty": 0.6}}
SPEED = "speed"  # a cell: the teacher's scores too
BATCH, SINGLE = 64, 200  # sentences of a batch, and how many are translated one after the other


class Distillation(TranslationExperiment):
    """A cell for each student, and one for the clock."""

    name = "distillation"
    title = "students that learn from text, and from their teacher's translations"

    def __init__(self, options: argparse.Namespace):
        self.teacher, self.seeds, self.rounds = options.teacher, options.seeds, options.rounds
        self.fields = STUDENT | {"preset": options.preset, "max_steps": options.steps}

    def trainings(self, setup: Setup) -> dict:
        """One for each kind and seed."""
        return {
            f"{kind}-seed-{seed}": (f"{label}, seed {seed}", kind, self._training(seed), {})
            for seed in self.seeds
            for kind, label in KINDS.items()
        }

    def _training(self, seed: int) -> Training:
        return Training("small", self.fields | {"seed": seed}, **TESTS)

    def cells(self, setup: Setup) -> list[Cell]:
        """All students, then the clock."""
        own = {"teacher": weights_sha256(self.teacher)}
        cells = [
            Cell(name, label, settings_of(self.recipe(setup, training)) | own, group=kind)
            for name, (label, kind, training, _) in self.trainings(setup).items()
        ]
        return [*cells, Cell(SPEED, "speed", own | {"students": [cell.name for cell in cells], "rounds": self.rounds})]

    def run(self, setup: Setup, cell: Cell, folder: Path) -> dict[str, Any]:
        """Train and score a student, or measure."""
        write_recipe(folder, cell)
        if cell.name == SPEED:
            return self._measure(setup, folder)
        student = folder / "student"
        recipe = self.recipe(setup, self.training(setup, cell), student)
        if not (student / WEIGHTS).exists():
            if cell.group == "text":
                train(replace(recipe, tokenizer=self.teacher))
            elif recipe.seed == self.seeds[0]:
                teacher = argparse.Namespace(
                    model=self.teacher, ensemble=[], combine=None, device="auto", precision=None
                )
                distill([self.teacher], recipe, partial(load_for_decoding, teacher))
            else:
                first = replace(recipe, output=str(self._student(folder.parent, "distilled")))
                train(replace(student_recipe(self.teacher, first), output=recipe.output))
        return self._scores(setup, student)

    def _student(self, folder: Path, kind: str) -> Path:
        """The first seed's student."""
        return folder / f"{kind}-seed-{self.seeds[0]}" / "student"

    def _tests(self, setup: Setup) -> tuple[list[str], list[str]]:
        training = self._training(self.seeds[0])
        return data_pairs(self.recipe(setup, training), training.test_source, training.test_target, None)

    def _scores(self, setup: Setup, folder: Path | str) -> dict[str, Any]:
        """BLEU and chrF in int8 by each search, parameters, and the size of the weights."""
        sources, references = self._tests(setup)
        model, tokenizer = load_model(folder, "cpu")
        figures = {"parameters": model.num_parameters(), "megabytes": (Path(folder) / WEIGHTS).stat().st_size / 1e6}
        prepare_for_inference(model, "int8")
        for name, search in SEARCHES.items():
            translations = list(Translator(model, tokenizer, **search).translate(sources))
            figures[name] = score_translations(translations, references)
        return figures

    def _measure(self, setup: Setup, folder: Path) -> dict[str, Any]:
        torch.set_num_threads(1)
        sources, _ = self._tests(setup)
        models, seconds = {}, {}
        for name, place in {
            "teacher": self.teacher,
            **{kind: self._student(folder.parent, kind) for kind in KINDS},
        }.items():
            model, tokenizer = load_model(place, "cpu")
            models[name] = prepare_for_inference(model, "int8"), tokenizer
        for turn in range(self.rounds + 1):
            for name in random.sample(list(models), len(models)):
                for search, (lines, window) in {"greedy": (sources, BATCH), "beam 4": (sources[:SINGLE], 1)}.items():
                    translator = Translator(*models[name], 10**9, **SEARCHES[search])
                    started = time.process_time()
                    list(translator.translate(lines, window=window))
                    if turn:  # the first one warms up
                        taken = (time.process_time() - started) / len(lines)
                        seconds.setdefault(name, {}).setdefault(search, []).append(taken)
        rates = {name: {search: 1 / median(own) for search, own in each.items()} for name, each in seconds.items()}
        return {"teacher": self._scores(setup, self.teacher), "sentences_per_second": rates}

    def report(self, setup: Setup, cells: list[Cell], results: dict[str, dict]) -> str:
        """A row for the teacher, and one for each kind of student: means of the seeds, least and most."""
        figures = {name: result["figures"] for name, result in results.items()}
        speed = figures.get(SPEED)
        groups = {"teacher": [speed["teacher"]] if speed else []}
        groups |= {kind: [figures[c.name] for c in cells if c.group == kind and c.name in figures] for kind in KINDS}
        rows = []
        for kind, own in groups.items():
            if own:
                scores = [_spread([one[search][score] for one in own]) for search, score in SCORES]
                sizes = [f"{own[0]['parameters'] / 1e6:.2f}", f"{own[0]['megabytes']:.1f}"]
                rates = speed["sentences_per_second"][kind] if speed else {}
                times = [f"{rates[search]:.0f}" if rates else "" for search in SEARCHES]
                rows.append([KINDS.get(kind, kind), str(len(own)), *scores, *sizes, *times])
        titles = ["", "seeds", *(f"{NAMES[score]}, {search}" for search, score in SCORES), "parameters, millions"]
        titles += ["weights, MB", f"sentences/s, greedy, batches of {BATCH}", "sentences/s, beam 4, one by one"]
        signature = next((own[0]["greedy"]["bleu_signature"] for own in groups.values() if own), "")
        return "\n".join([markdown_table(titles, rows), "", f"{signature}; {describe_runs(results)}", ""])

    def draw(self, figure, cells: list[Cell], results: dict[str, dict]) -> None:
        """BLEU by greedy and beam search, a dot for each student."""
        axes = figure.subplots()
        for place, search in enumerate(SEARCHES):
            for kind, color in zip(KINDS, ("tab:blue", "tab:orange"), strict=True):
                own = [results[cell.name]["figures"] for cell in cells if cell.group == kind and cell.name in results]
                values = [one[search]["bleu"] for one in own]
                axes.scatter(values, [place] * len(own), color=color, label=None if place else KINDS[kind])
        axes.set_yticks(range(len(SEARCHES)), list(SEARCHES))
        axes.set_xlabel("BLEU")
        axes.legend()


NAMES = {"bleu": "BLEU", "chrf": "chrF"}
SCORES = [(search, score) for search in SEARCHES for score in NAMES]


def _spread(values: list[float]) -> str:
    """Mean, least and most."""
    return f"{mean(values):.2f}" + (f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else "")


def main() -> int:
    """Run what is missing, in several processes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="FOLDER_OF_MULTI30K", help="train, val and test_2016_flickr, .en.gz and .de.gz")
    parser.add_argument("--teacher", required=True, metavar="FOLDER", help="a model of Multi30k, English to German")
    parser.add_argument("--output", default="runs", help="folder of all experiments (default: runs)")
    parser.add_argument("--preset", default="student-6-2", help="layers of the student (default: student-6-2)")
    parser.add_argument("--steps", type=int, default=2800, help="of each student (default: 2800)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--rounds", type=int, default=3, help="of the clock (default: 3)")
    parser.add_argument("--jobs", type=int, default=2, help="students that are trained at a time (default: 2)")
    parser.add_argument("--report", action="store_true", help="run nothing: print the table of what is finished")
    parser.add_argument("--one", metavar="CELL", help=argparse.SUPPRESS)  # a process of --jobs
    options = parser.parse_args()
    setup = Setup(output=Path(options.output), data_dir=Path(options.data))
    try:
        check_folder(options.teacher)
        experiment = Distillation(options)
        cells = {cell.name: cell for cell in experiment.cells(setup)}
        experiment.check(setup, [cell for cell in cells.values() if cell.name != SPEED])
        if options.one:
            run_cell(experiment, setup, cells[options.one], logged=False)
            return 0
        failed = [] if options.report else _run_missing(experiment, setup, cells, options.jobs)
        print(write_report(experiment, setup))
    except UserError as error:
        sys.exit(f"error: {error}")
    return len(failed)


def _run_missing(experiment: Distillation, setup: Setup, cells: dict[str, Cell], jobs: int) -> list[Job]:
    """Run all cells that are not finished, each after those that it needs; returns those that failed."""
    first = f"distilled-seed-{experiment.seeds[0]}"  # whose text the others are trained on
    on_text = [name for name, cell in cells.items() if cell.group == "text"]
    others = [name for name, cell in cells.items() if cell.group == "distilled" and name != first]
    folder = experiment_folder(experiment, setup)
    for names in ([first, *on_text], others, [SPEED]):
        finished = read_results(experiment, setup, [cells[name] for name in names])
        commands = {name: [sys.executable, *sys.argv, "--one", name] for name in names if name not in finished}
        started = [Job(name, command, folder / name) for name, command in commands.items()]
        if failed := run_side_by_side(started, device_environments([], max(1, jobs))):
            return failed
    return []


if __name__ == "__main__":
    sys.exit(main())
