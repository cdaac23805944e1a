"""Rows of a model card's tables, in words: sizes, training, decoding."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from .card_facts import CardFacts, datasets_of


def size_rows(facts: CardFacts) -> list[tuple[str, str]]:
    """Rows of the table of sizes."""
    config = facts.config
    shared = "shared by source, target and output" if config.tie_word_embeddings else "three matrices of embeddings"
    learned = config.position_encoding == "learned"
    return [
        ("parameters", f"{facts.parameters:,}"),
        ("layers", f"{config.encoder_layers} encoder, {config.decoder_layers} decoder"),
        ("d_model", f"{config.d_model:,}"),
        ("d_ff", f"{config.d_ff:,}"),
        ("attention heads", f"{config.num_heads}, d_k {config.d_k}, d_v {config.d_v}"),
        ("vocabulary", f"{config.vocab_size:,} entries, {shared}"),
        ("positions", f"learned, {config.max_position_embeddings:,}" if learned else "sinusoidal"),
        *([("self-attention", f"{config.attention_window} neighbours")] if config.attention_window else []),
    ]


def _data(recipe: Mapping, part: str) -> str | None:
    """The data of one part of a run in words; of paths only the last part, which is no secret of the machine."""
    source, target = recipe.get(f"{part}_source"), recipe.get(f"{part}_target")
    if source and target:
        return f"{Path(source).name} and {Path(target).name}"
    if part == "validation" and not recipe.get("validation_data"):
        if recipe.get("validation_split") and recipe.get("train_data"):
            return f"split {recipe['validation_split']} of the same dataset"
        return f"{recipe['validation_size']:,} pairs held out of them" if recipe.get("validation_size") else None
    if not recipe.get(f"{part}_data"):
        return None
    name = recipe["train_data"] if datasets_of(recipe) and part == "train" else Path(recipe[f"{part}_data"]).name
    return f"{name} {recipe['data_config']}" if recipe.get("data_config") else name


def _kept_weights(recipe: Mapping, log: Sequence[Mapping]) -> str | None:
    """Which weights the run kept, as its recipe says, or as its log tells where that says the better ones."""
    by = recipe.get("best_by")
    best, average = (
        next((entry[f"{name}_{by}"] for entry in reversed(log) if f"{name}_{by}" in entry), None)
        for name in ("best", "average")
    )
    if best is None and average is None:
        return None
    keep = recipe.get("keep_weights", "better")
    if keep == "last":
        return "last checkpoint"
    if best is None or average is None or keep in ("best", "average"):
        kept_best = average is None or (best is not None and keep == "best")
    else:
        kept_best = average <= best if by == "bleu" else average >= best
    if kept_best:
        return f"best checkpoint by validation {'BLEU' if by == 'bleu' else by}"
    count = recipe.get("average_checkpoints")
    return f"average of the last checkpoints, {count} at most" if count else "average of the last checkpoints"


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 36_000 else f"{seconds / 60:.1f} minutes"


def training_rows(facts: CardFacts) -> list[tuple[str, str]]:
    """Rows of the training table, from recipe and log; a row whose facts are absent is left out."""
    recipe, config = facts.recipe, facts.config
    steps = [
        entry
        for entry in facts.log
        if "step" in entry and not {"best_loss", "average_loss", "last_loss"} & entry.keys()
    ]
    last = steps[-1] if steps else {}

    def known(*names) -> bool:
        return all(recipe.get(name) is not None for name in names)

    rows = [("training data", _data(recipe, "train")), ("validation data", _data(recipe, "validation"))]
    if known("max_length"):
        rows.append(("longest pair", f"{recipe['max_length']:,} tokens on a side"))
    if known("tokens_per_batch"):
        rows.append(("batch", f"{recipe['tokens_per_batch']:,} source tokens, and as many target tokens, at most"))
    if last:
        epochs = f", {last['epoch']:.1f} epochs" if "epoch" in last else ""
        rows.append(("optimizer steps", f"{last['step']:,}{epochs}"))
    if known("adam_beta1", "adam_beta2", "adam_epsilon"):
        betas = f"β₁ {recipe['adam_beta1']}, β₂ {recipe['adam_beta2']}, ε {float(recipe['adam_epsilon']):g}"
        rows.append(("optimizer", f"Adam, {betas}"))
    if known("warmup_steps"):
        scale = recipe.get("learning_rate_scale")
        factor = f" times {scale:g}" if scale is not None and scale != 1 else ""
        rows.append(("learning rate", f"Equation 3 of the paper{factor}, {recipe['warmup_steps']:,} warmup steps"))
    if recipe or facts.log:
        parts = [f"{config.dropout:g}"]
        parts += [f"{value:g} on attention weights"] if (value := config.attention_dropout) else []
        parts += [f"{value:g} inside feed-forward layers"] if (value := config.activation_dropout) else []
        rows.append(("dropout", ", ".join(parts)))
    if known("label_smoothing"):
        rows.append(("label smoothing", f"{recipe['label_smoothing']:g}"))
    rows.append(("weights kept", _kept_weights(recipe, facts.log)))
    if "seconds" in last:
        rows.append(("duration", _duration(last["seconds"])))
    if known("seed"):
        rows.append(("seed", str(recipe["seed"])))
    return [(label, value) for label, value in rows if value is not None]


def decoding_rows(generation: Mapping) -> list[tuple[str, str]]:
    """Rows of the decoding table: the paper's settings in words, others by name; what is not set is left out."""
    words = {
        "num_beams": "beams",
        "length_penalty": "length penalty",
        "max_extra_tokens": "tokens more than the source, at most",
        "max_new_tokens": "tokens, at most",
    }
    names = [*words, *sorted(generation.keys() - words.keys())]
    return [
        (words.get(name, f"`{name}`"), number_in_words(generation[name]))
        for name in names
        if generation.get(name) is not None
    ]


def number_in_words(value) -> str:
    """A setting as cards show it: thousands apart, no more digits than are needed.

    >>> number_in_words(1000), number_in_words(0.6), number_in_words("early")
    ('1,000', '0.6', 'early')
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)
