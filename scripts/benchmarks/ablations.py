"""What each ingredient of the paper is worth: small models on Multi30k that differ from a baseline in one setting.

    python scripts/benchmarks/ablations.py FOLDER_OF_MULTI30K --output runs
    python scripts/benchmarks/ablations.py FOLDER_OF_MULTI30K --output runs --report     # the tables so far
    python scripts/benchmarks/ablations.py FOLDER_OF_MULTI30K --study initialization     # initial weights, three seeds
    python scripts/benchmarks/ablations.py FOLDER_OF_MULTI30K --study little-text        # what helps 29,000 pairs

Table 3 varies the model; this varies batches, warmup, checkpoints and search, in a study of its own the initial
weights, and in another, with the recipe `multi30k-en-de`, what is known to help where there is little text.
Experiments like those of `vaswani experiment`: finished cells are not repeated, an interrupted one is resumed.
Models are scored on test_2016_flickr: the last checkpoint and the average of the last five, the baseline with several
searches; those of the last study as the recipe leaves them. `docs/reproducing.md` holds the tables.
"""

import argparse
import itertools
import sys
from pathlib import Path

from safetensors.torch import load_file

from vaswani_transformer import Translator, average_checkpoints, load_model
from vaswani_transformer.errors import UserError
from vaswani_transformer.evaluation.metrics import score_translations
from vaswani_transformer.experiments.base import (
    Setup,
    chosen_cells,
    describe_runs,
    experiment_folder,
    markdown_table,
    read_results,
    run_cell,
    write_report,
)
from vaswani_transformer.experiments.launch import Job, device_environments, run_side_by_side
from vaswani_transformer.experiments.translation import (
    Training,
    TranslationExperiment,
    data_pairs,
    draw_against,
    train_cell,
    with_target,
)
from vaswani_transformer.recipes.recipe import load_recipe
from vaswani_transformer.training.callbacks import read_training_log
from vaswani_transformer.training.checkpoints import WEIGHTS, complete_checkpoints
from vaswani_transformer.training.run_folder import CHECKPOINTS, LOG

BASELINE = with_target("de") | {
    "validation_bleu": 0, "vocab_size": 6000, "d_model": 128, "d_ff": 512, "num_heads": 4, "encoder_layers": 3,
    "decoder_layers": 3, "dropout": 0.1, "tokens_per_batch": 4096, "tokens_per_device": 4096, "max_steps": 1800,
    "warmup_steps": 800, "evaluate_every": 120, "keep_checkpoints": 5, "average_checkpoints": 5, "best_by": "loss",
    "early_stopping": 0, "length_penalty": 0.6,
}  # fmt: skip
# Steps and warmup follow the batch where the same number of epochs is meant.
VARIANTS = {
    "baseline": ("baseline", {}),
    "seed-1": ("baseline, seed 1", {"seed": 1}),
    "seed-2": ("baseline, seed 2", {"seed": 2}),
    "no-smoothing": ("no label smoothing", {"label_smoothing": 0.0}),
    "batch-1024-steps": ("batches of 1,024 tokens, as many steps", {"tokens_per_batch": 1024}),
    "batch-1024-epochs": ("batches of 1,024 tokens, as many epochs", {
        "tokens_per_batch": 1024, "max_steps": 7200, "warmup_steps": 3200, "evaluate_every": 480}),
    "batch-16384-epochs": ("batches of 16,384 tokens, as many epochs", {
        "tokens_per_batch": 16384, "max_steps": 450, "warmup_steps": 200, "evaluate_every": 30}),
    "warmup-100": ("warmup of 100 steps", {"warmup_steps": 100}),
    "no-dropout": ("no dropout", {"dropout": 0.0}),
}  # fmt: skip
INITIALIZATIONS = {
    "tensor2tensor": "the authors' code",
    "xavier": "Xavier, each matrix alone",
    "normal": "normal(0, 0.02)",
}
LAYERS, SEEDS = (3, 6), (0, 1, 2)
HELP = {"as-it-is": ("as it is", {}), "bpe-dropout": ("BPE-dropout 0.1", {"bpe_dropout": 0.1})}
CHOSEN = "beam 4, alpha 0.6"
SEARCHES = {
    CHOSEN: {"num_beams": 4, "length_penalty": 0.6},
    "beam 4, alpha 0": {"num_beams": 4, "length_penalty": 0.0},
    "beam 4, alpha 1": {"num_beams": 4, "length_penalty": 1.0},
    "beam 1": {"num_beams": 1},
    "beam 10, alpha 0.6": {"num_beams": 10, "length_penalty": 0.6},
}


class Ablations(TranslationExperiment):
    """A cell for each variant of the baseline."""

    name = "ablations"
    title = "small models that differ from a baseline in one setting"

    def trainings(self, setup: Setup) -> dict:
        """One for each of `VARIANTS`."""
        tests = {"test_source": "test_2016_flickr.en.gz", "test_target": "test_2016_flickr.de.gz"}
        return {
            name: (label, "", Training("small", BASELINE | changes, **tests), {})
            for name, (label, changes) in VARIANTS.items()
        }

    def run(self, setup, cell, folder) -> dict:
        """Train a variant, then score its last checkpoint and the average of the last five."""
        training = self.training(setup, cell)
        recipe = self.recipe(setup, training, folder)
        if not (folder / WEIGHTS).exists():
            train_cell(setup, recipe)
        sources, references = data_pairs(recipe, training.test_source, training.test_target, None)
        words = sum(len(reference.split()) for reference in references)
        model, tokenizer = load_model(folder)
        checkpoints = complete_checkpoints(folder / CHECKPOINTS)[-5:]
        weights = {"last": load_file(checkpoints[-1] / WEIGHTS), "average": average_checkpoints(checkpoints)}
        figures = {}
        for kind, state in weights.items():
            model.load_state_dict(state, strict=False)
            model.tie_weights()
            figures[kind] = {}
            for search in SEARCHES if cell.name == "baseline" else [CHOSEN]:
                translations = list(Translator(model, tokenizer, 2048, **SEARCHES[search]).translate(sources))
                scores = score_translations(translations, references)
                length_ratio = sum(len(translation.split()) for translation in translations) / words
                figures[kind][search] = scores | {"length_ratio": length_ratio}
        log = read_training_log(folder / LOG)
        figures["losses"] = {
            key: [[entry["step"], entry[key]] for entry in log if key in entry] for key in ("loss", "eval_loss")
        }
        return figures

    def report(self, setup, cells, results) -> str:
        """BLEU of every variant, and of the baseline with every search."""
        figures = {name: result["figures"] for name, result in results.items()}
        if "baseline" not in figures:
            return "The baseline is not finished yet.\n"
        bleu = {
            name: [scores[kind][CHOSEN]["bleu"] for kind in ("last", "average")] for name, scores in figures.items()
        }
        reference = bleu["baseline"][1]
        rows = [
            [cell.label, *(f"{value:.2f}" for value in bleu[cell.name]), f"{bleu[cell.name][1] - reference:+.2f}"]
            for cell in cells
            if cell.name in bleu
        ]
        baseline = figures["baseline"]
        searches = [
            [search, *(f"{baseline[kind][search]['bleu']:.2f}" for kind in ("last", "average")),
             f"{baseline['average'][search]['length_ratio']:.3f}"]
            for search in SEARCHES
        ]  # fmt: skip
        titles = ["last checkpoint", "average of 5"]
        return "\n".join([
            markdown_table(["setting", *titles, "to the baseline's average"], rows), "",
            markdown_table(["search, baseline", *titles, "words to the reference's"], searches), "",
            f"{baseline['average'][CHOSEN]['bleu_signature']}; {describe_runs(results)}", "",
        ])  # fmt: skip

    def draw(self, figure, cells, results) -> None:
        """BLEU of the average of five checkpoints."""
        values = [results[cell.name]["figures"]["average"][CHOSEN]["bleu"] if cell.name in results else None
                  for cell in cells]  # fmt: skip
        draw_against(figure.subplots(), [cell.label for cell in cells], values, [None] * len(cells))


class InitialWeights(Ablations):
    """Three and six layers a stack with each kind of initial weights and three seeds."""

    name = "initialization"
    title = "small models that differ in their initial weights"

    def trainings(self, setup: Setup) -> dict:
        """One for each depth, kind and seed."""
        tests = {"test_source": "test_2016_flickr.en.gz", "test_target": "test_2016_flickr.de.gz"}
        trainings = {}
        for layers, seed, kind in itertools.product(LAYERS, SEEDS, INITIALIZATIONS):
            changes = {"encoder_layers": layers, "decoder_layers": layers, "seed": seed, "initialization": kind}
            label = f"{layers}+{layers} layers, {INITIALIZATIONS[kind]}, seed {seed}"
            training = Training("small", BASELINE | changes, **tests)
            trainings[_cell_name(layers, kind, seed)] = label, "", training, {}
        return trainings

    def report(self, setup, cells, results) -> str:
        """Validation loss and BLEU of each kind: mean of its seeds, lowest and highest."""
        rows = []
        for layers, kind in itertools.product(LAYERS, INITIALIZATIONS):
            finished = [
                results[name]["figures"] for seed in SEEDS if (name := _cell_name(layers, kind, seed)) in results
            ]
            if finished:
                losses = [figures["losses"]["eval_loss"][-1][1] for figures in finished]
                last, average = ([one[which][CHOSEN]["bleu"] for one in finished] for which in ("last", "average"))
                columns = [_spread(losses, 3), _spread(last, 2), _spread(average, 2)]
                rows.append([f"{layers}+{layers}", INITIALIZATIONS[kind], str(len(finished)), *columns])
        titles = ["layers", "initial weights", "seeds", "validation loss, last step", "BLEU, last checkpoint"]
        return "\n".join([markdown_table([*titles, "BLEU, average of 5"], rows), "", f"{describe_runs(results)}", ""])

    def draw(self, figure, cells, results) -> None:
        """Validation loss over the steps, a line for each seed."""
        for axes, layers in zip(figure.subplots(1, len(LAYERS), sharey=True), LAYERS, strict=True):
            for color, (kind, label) in zip(
                ("tab:blue", "tab:orange", "tab:green"), INITIALIZATIONS.items(), strict=True
            ):
                for seed in SEEDS:
                    if (name := _cell_name(layers, kind, seed)) in results:
                        points = results[name]["figures"]["losses"]["eval_loss"]
                        axes.plot(*zip(*points, strict=True), color=color, label=label if seed == SEEDS[0] else None)
            axes.set_title(f"{layers}+{layers} layers")
            axes.set_xlabel("optimizer step")
            axes.grid(alpha=0.3)
        figure.axes[0].set_ylabel("validation loss (nats a token)")
        figure.axes[0].legend()


class LittleText(TranslationExperiment):
    """The recipe for Multi30k with each of `HELP` and three seeds."""

    name = "little-text"
    title = "what helps a small model of 29,000 pairs"

    def trainings(self, setup: Setup) -> dict:
        """One for each seed and each of `HELP`."""
        tests = {"test_source": "test_2016_flickr.en.gz", "test_target": "test_2016_flickr.de.gz"}
        return {
            f"{name}-seed-{seed}": (
                f"{label}, seed {seed}", "",
                Training("multi30k-en-de", changes | {"seed": seed}, **tests), {},
            )
            for (name, (label, changes)), seed in itertools.product(HELP.items(), SEEDS)
        }  # fmt: skip

    def run(self, setup, cell, folder) -> dict:
        """Train, and score the model with the search that it was saved with."""
        training = self.training(setup, cell)
        recipe = self.recipe(setup, training, folder)
        if not (folder / WEIGHTS).exists():
            train_cell(setup, recipe)
        translator = Translator(*load_model(folder), 2048)
        figures = {"losses": [entry["eval_loss"] for entry in read_training_log(folder / LOG) if "eval_loss" in entry]}
        files = {"validation": (recipe.validation_source, recipe.validation_target)}
        files["test"] = training.test_source, training.test_target
        for part, names in files.items():
            sources, references = data_pairs(recipe, *names, None)
            figures[part] = score_translations(list(translator.translate(sources)), references)
        return figures

    def report(self, setup, cells, results) -> str:
        """Validation loss, and BLEU on both sets: mean of the seeds, lowest and highest."""
        rows = []
        for name, (label, _) in HELP.items():
            cells = [f"{name}-seed-{seed}" for seed in SEEDS]
            figures = [results[cell]["figures"] for cell in cells if cell in results]
            if figures:
                bleu = [_spread([one[part]["bleu"] for one in figures], 2) for part in ("validation", "test")]
                losses = _spread([min(one["losses"]) for one in figures], 3)
                rows.append([label, str(len(figures)), losses, *bleu])
        titles = ["training", "seeds", "least validation loss", "BLEU, validation", "BLEU, test_2016_flickr"]
        return "\n".join([markdown_table(titles, rows), "", describe_runs(results), ""])

    def draw(self, figure, cells, results) -> None:
        """Validation loss over the steps, a line for each seed."""
        axes, every = figure.subplots(), load_recipe("multi30k-en-de").evaluate_every
        for number, (name, (label, _)) in enumerate(HELP.items()):
            for seed in SEEDS:
                if (cell := f"{name}-seed-{seed}") in results:
                    losses = results[cell]["figures"]["losses"]
                    steps = range(every, every * len(losses) + 1, every)
                    axes.plot(steps, losses, color=f"C{number}", label=label if seed == SEEDS[0] else None)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("validation loss (nats a token)")
        axes.legend()


def _cell_name(layers: int, kind: str, seed: int) -> str:
    return f"{layers}-layers-{kind}-seed-{seed}"


def _spread(values: list[float], digits: int) -> str:
    mean = sum(values) / len(values)
    return f"{mean:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


STUDIES = {study.name: study for study in (Ablations, InitialWeights, LittleText)}


def main() -> int:
    """Train what is missing, in several processes, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="FOLDER_OF_MULTI30K", help="train, val and test_2016_flickr, .en.gz and .de.gz")
    parser.add_argument("--output", default="runs", help="folder of all experiments (default: runs)")
    parser.add_argument("--study", choices=STUDIES, default=Ablations.name, help=f"default: {Ablations.name}")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="some of the study's cells")
    parser.add_argument("--jobs", type=int, default=2, help="variants that run at a time (default: 2)")
    parser.add_argument("--report", action="store_true", help="run nothing: print the tables of what is finished")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # a process of --jobs
    options = parser.parse_args()
    experiment, setup = STUDIES[options.study](), Setup(output=Path(options.output), data_dir=Path(options.data))
    try:
        cells = chosen_cells(experiment.cells(setup), options.only)
        finished = read_results(experiment, setup, cells)
        missing = [cell for cell in cells if cell.name not in finished and not options.report]
        experiment.check(setup, missing)
        if options.one:
            run_cell(experiment, setup, missing[0], logged=False)
            return 0
        command = [sys.executable, __file__, options.data, "--study", options.study, "--output", options.output]
        command += ["--one", "--only"]
        folder = experiment_folder(experiment, setup)
        jobs = [Job(cell.name, [*command, cell.name], folder / cell.name) for cell in missing]
        failed = run_side_by_side(jobs, device_environments([], max(1, options.jobs)))
        print(write_report(experiment, setup))
    except UserError as error:
        sys.exit(f"error: {error}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
