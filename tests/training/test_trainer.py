"""The trainer: accumulation, processes, the losses that it reports, and resuming."""

import itertools
import math
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from conftest import TINY_SIZES, tiny_model
from torch.nn.functional import cross_entropy
from training_runs import equal

from vaswani_transformer import VaswaniConfig, VaswaniForConditionalGeneration
from vaswani_transformer.data.augmentation import AugmentedPairs
from vaswani_transformer.data.batching import TokenBatchSampler
from vaswani_transformer.model import modeling_vaswani
from vaswani_transformer.model.loss_vaswani import projected_cross_entropy
from vaswani_transformer.training.selection import LENGTH_PENALTIES, choose_length_penalty
from vaswani_transformer.training.trainer import VaswaniTrainer, VaswaniTrainingArguments

BATCH_TOKENS = 128
SGD = {"optim": "sgd", "learning_rate_scale": 4.0, "warmup_steps": 4}  # parameters that move as gradients say


def make_pairs(number, seed=0):
    """Random pairs of 2 to 8 tokens a side."""
    generator = torch.Generator().manual_seed(seed)

    def ids():
        length = int(torch.randint(1, 8, (), generator=generator))
        return [*torch.randint(3, 30, (length,), generator=generator).tolist(), 2]

    rows = [{"input_ids": ids(), "labels": ids()} for _ in range(number)]
    for row in rows:
        row.update(source_length=len(row["input_ids"]), target_length=len(row["labels"]))
    return datasets.Dataset.from_list(rows)


def make_model(dropout=0.0, seed=1):
    torch.manual_seed(seed)
    model = VaswaniForConditionalGeneration(VaswaniConfig(**TINY_SIZES | {"vocab_size": 30}, dropout=dropout))
    model.set_attn_implementation("eager")
    return model


class RecordingTrainer(VaswaniTrainer):
    """Notes the labels of each batch that it trains on, and source and target tokens of each step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches, self.tokens_of_steps = [], []

    def get_batch_samples(self, *args):
        samples = super().get_batch_samples(*args)
        self.tokens_of_steps += [self.step_tokens] if samples[0] else []
        return samples

    def training_step(self, model, inputs, *args, **kwargs):
        labels = inputs["labels"]
        if "target_offsets" in inputs:
            labels = [row.tolist() for row in labels[0].split(inputs["target_offsets"].diff().tolist())]
        self.batches.append(labels if isinstance(labels, list) else labels.tolist())
        return super().training_step(model, inputs, *args, **kwargs)


def make_trainer(folder, pairs=None, model=None, trainer_options=None, **settings):
    defaults = {"tokens_per_batch": BATCH_TOKENS, "tokens_per_device": BATCH_TOKENS, "per_device_eval_batch_size": 4}
    defaults |= {"max_steps": 3, "logging_steps": 1, "save_strategy": "no", "remove_unused_columns": False, "seed": 3}
    defaults |= {"output_dir": str(folder), "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    return RecordingTrainer(
        model=make_model() if model is None else model,
        args=VaswaniTrainingArguments(**{**defaults, **settings}),
        train_dataset=make_pairs(60) if pairs is None else pairs,
        **(trainer_options or {}),
    )


def trained(*args, **settings):
    trainer = make_trainer(*args, **settings)
    trainer.train()
    return trainer


def logged(trainer, name="loss"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def weights_of(trainer):
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def assert_same_training(weights, others, tolerance=1e-5):
    """Equal parameters, and equal changes: to `tolerance` of the largest one of each tensor."""
    start = make_model().state_dict()
    assert weights.keys() == others.keys()
    moved = 0
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=tolerance, atol=tolerance * weight.abs().max().item())
        change, other = weight - start[name], others[name] - start[name]
        torch.testing.assert_close(change, other, rtol=0, atol=20 * tolerance * change.abs().max().item())
        moved += change.abs().max().item() > 1e-3
    assert moved > 5  # it was training


ADAM = {"learning_rate_scale": 0.1, "warmup_steps": 4, "adam_epsilon": 1e-4}


@pytest.mark.parametrize(("optimizer", "parts"), [(SGD, 2), (SGD, 4), (ADAM, 2)])
def test_accumulated_parts_train_as_the_whole_batch_does(tmp_path, optimizer, parts):
    whole = trained(tmp_path, **optimizer)
    dealt = trained(tmp_path, tokens_per_device=BATCH_TOKENS // parts, **optimizer)
    assert dealt.args.gradient_accumulation_steps == parts
    assert len(dealt.batches) == parts * len(whole.batches) == 3 * parts
    assert_same_training(weights_of(whole), weights_of(dealt))
    assert logged(dealt, "loss") == pytest.approx(logged(whole, "loss"), rel=1e-5)
    assert dealt.tokens_of_steps == whole.tokens_of_steps and len(whole.tokens_of_steps) == 3
    dealt.train()
    assert dealt.tokens_seen.tolist() == whole.tokens_seen.tolist(), "a training of its own"


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_logged_training_loss_is_the_smoothed_one(tmp_path, parts, smoothing):
    pairs, settings = make_pairs(60), {"label_smoothing_factor": smoothing, "max_steps": 1}
    trainer = make_trainer(tmp_path, pairs, tokens_per_device=BATCH_TOKENS // parts, **settings)
    batch = itertools.chain(*itertools.islice(trainer.batch_sampler, trainer.micro_batches))
    expected = exact_loss(make_model(), pairs.select(batch), smoothing)
    assert "train_samples_per_second" not in trainer.train().metrics
    assert logged(trainer, "loss") == [pytest.approx(expected, rel=1e-5)]


@pytest.mark.parametrize("listener", [None, "lm_head", ""], ids=["nobody", "projection", "model"])
def test_the_loss_is_fused_with_the_projection_unless_somebody_reads_logits(tmp_path, monkeypatch, listener):
    fused, heard = [], []
    counted = lambda *inputs: fused.append(inputs) or projected_cross_entropy(*inputs)  # noqa: E731
    monkeypatch.setattr(modeling_vaswani, "projected_cross_entropy", counted)
    whole = trained(tmp_path, fused_loss=False, **SGD)
    assert not fused
    trainer = make_trainer(tmp_path, **SGD)
    if listener is not None:
        trainer.model.get_submodule(listener).register_forward_hook(
            lambda module, inputs, output: heard.append(getattr(output, "logits", output).shape[-1])
        )
    trainer.train()
    assert_same_training(weights_of(whole), weights_of(trainer))
    assert (len(fused), heard) == ((3, []) if listener is None else (0, [30] * 3))
    batch = {name: torch.randint(4, 30, (2, 5)) for name in ("input_ids", "labels")}
    for training in (True, False):
        trainer.model.train(training)
        assert trainer.compute_loss(trainer.model, dict(batch), return_outputs=True)[1].logits.shape == (2, 5, 30)


def exact_loss(model, pairs, smoothing=0.0):
    """Cross-entropy in nats a token over all pairs, one at a time, so that there is no padding."""
    model.eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for row in pairs:
            labels = torch.tensor([row["labels"]])
            logits = model(input_ids=torch.tensor([row["input_ids"]]), labels=labels).logits
            total += cross_entropy(logits[0].double(), labels[0], reduction="sum", label_smoothing=smoothing).item()
            tokens += len(row["labels"])
    return total / tokens


def evaluation_pairs():
    """Eleven pairs: lengths differ from batch to batch, and the last batch of four is not full."""
    return make_pairs(11, seed=9).sort("target_length")


@pytest.mark.parametrize("generate", [False, True])
@pytest.mark.parametrize("metrics", [False, True])
def test_evaluation_loss_is_the_exact_mean_over_tokens(tmp_path, generate, metrics):
    seen = []

    def compute_metrics(prediction):
        seen.append(prediction)
        return {"answer": 42}

    pairs = evaluation_pairs().select_columns(["input_ids", "labels"])
    options = {"eval_dataset": pairs, "compute_metrics": compute_metrics if metrics else None}
    model = make_model(dropout=0.5)  # which must be off
    trainer = make_trainer(tmp_path, model=model, trainer_options=options, predict_with_generate=generate)
    expected = exact_loss(model, pairs)
    model.train()
    for prefix, result in (
        ("eval", trainer.evaluate()),
        ("test", trainer.predict(pairs, metric_key_prefix="test").metrics),
        ("eval", trainer.evaluate()),  # sums start anew
    ):
        assert result[f"{prefix}_loss"] == pytest.approx(expected, rel=1e-5)
        assert result[f"{prefix}_perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
        assert result.get(f"{prefix}_answer") == (42 if metrics else None)
    if generate:  # also of sources alone
        assert len(trainer.predict(pairs.select_columns("input_ids")).predictions) == len(pairs)
    if metrics and generate:
        assert seen[0].predictions.shape[0] == len(pairs)
        assert np.issubdtype(seen[0].predictions.dtype, np.integer)
    if metrics:
        for row, labels in zip(pairs, seen[0].label_ids, strict=True):
            assert labels[labels >= 0].tolist()[: len(row["labels"])] == row["labels"]


def test_evaluation_during_training(tmp_path):
    """The model is in training mode before and after; validation is not smoothed, training is."""
    options = {"eval_dataset": evaluation_pairs().select_columns(["input_ids", "labels"])}
    trainer = trained(tmp_path, trainer_options=options, eval_strategy="steps", eval_steps=1, max_steps=2, **SGD)
    assert len(logged(trainer, "eval_loss")) == 2
    assert logged(trainer, "eval_loss")[-1] == pytest.approx(exact_loss(trainer.model, evaluation_pairs()), rel=1e-5)
    plain = trained(tmp_path, max_steps=2, **SGD)
    assert equal(weights_of(plain), weights_of(trainer))  # validation leaves training alone


def steps_an_epoch(source_lengths, target_lengths, parts):
    sampler = TokenBatchSampler(list(source_lengths), list(target_lengths), BATCH_TOKENS, micro_batches=parts)
    return len(sampler) // parts


def pairs_of_an_epoch(steps, parts):
    pairs = make_pairs(120)
    lengths = list(pairs["source_length"]), list(pairs["target_length"])
    for number in range(4 * parts, 120):
        if steps_an_epoch(*(side[:number] for side in lengths), parts) == steps:
            return pairs.select(range(number))
    raise AssertionError(f"no number of pairs makes {steps} steps")


@pytest.mark.parametrize(("epoch_steps", "parts"), [(5, 1), (5, 2), (3, 2), (2, 2)])
def test_a_resumed_run_goes_on_bit_by_bit(tmp_path, epoch_steps, parts):
    """Stopped after step 3: inside the first epoch, at its end, and inside the second."""
    pairs = pairs_of_an_epoch(epoch_steps, parts)
    settings = ADAM | {"max_steps": 6, "tokens_per_device": BATCH_TOKENS // parts}
    straight = trained(tmp_path / "a", pairs, make_model(dropout=0.3), **settings)
    stop = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3}
    first = trained(tmp_path / "b", pairs, make_model(dropout=0.3), **settings | stop)
    assert first.state.global_step == 3
    torch.manual_seed(12345)
    np.random.seed(1)
    resumed = make_trainer(tmp_path / "b", pairs, make_model(dropout=0.3, seed=77), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-3"))
    assert resumed.state.global_step == 6
    assert straight.batches == first.batches + resumed.batches
    assert straight.tokens_of_steps == first.tokens_of_steps + resumed.tokens_of_steps
    assert equal(weights_of(straight), weights_of(resumed))
    assert logged(resumed, "loss")[-3:] == logged(straight, "loss")[-3:]


def test_every_pair_is_trained_on_once_an_epoch(tmp_path):
    pairs = make_pairs(70)
    steps = steps_an_epoch(pairs["source_length"], pairs["target_length"], 1)
    trainer = trained(tmp_path, pairs, max_steps=2 * steps)

    def rows(batches):
        return sorted([label for label in row if label >= 0] for batch in batches for row in batch)

    assert rows(trainer.batches[:steps]) == rows(trainer.batches[steps:]) == sorted(pairs["labels"])
    assert trainer.batches[:steps] != trainer.batches[steps:] and trainer.state.epoch == 2
    trainer.train_dataset, trainer.batches = make_pairs(9), []  # as stages of a training have
    trainer.train()
    assert {tuple(row) for row in rows(trainer.batches)} == set(map(tuple, make_pairs(9)["labels"]))


def test_what_has_no_effect_is_named(tmp_path, caplog):
    sizes = {"per_device_train_batch_size": 2, "learning_rate": 5e-4, "lr_scheduler_type": "constant", "data_seed": 1}
    arguments = VaswaniTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **sizes)
    trainer = VaswaniTrainer(make_model(), arguments, None, make_pairs(9))  # in the order of Seq2SeqTrainer's
    assert trainer.train_dataset.num_rows == 9 and not (trainer.create_model_card() or [*tmp_path.glob("README*")])
    assert "per_device_train_batch_size, learning_rate, data_seed; see seed, learning_rate_scale" in caplog.text


def test_all_changes_of_an_epoch_are_looked_at_but_not_of_the_first(tmp_path, monkeypatch):
    looked = []
    lengths = lambda pairs, epoch: (looked.append((epoch, len(pairs))), np.zeros((2, len(pairs)), int))[1]  # noqa: E731
    monkeypatch.setattr(AugmentedPairs, "changed_lengths", lengths)
    for start in (0, 100):
        sizes = {"tokens_per_batch": BATCH_TOKENS, "augmentation_start": start}
        arguments = VaswaniTrainingArguments(str(tmp_path), use_cpu=True, augmentation="default", **sizes)
        trainer = VaswaniTrainer(make_model(), arguments, None, make_pairs(99), processing_class="not asked")
        for epoch in (0, 1):
            trainer.batch_sampler.set_epoch(epoch)
            next(iter(trainer.batch_sampler))
    assert looked == [(1, 99)]


def test_bf16(tmp_path):
    exact, rounded = trained(tmp_path, **SGD), trained(tmp_path, bf16=True, **SGD)
    assert logged(rounded, "loss") == pytest.approx(logged(exact, "loss"), rel=0.02)
    assert logged(rounded, "loss") != logged(exact, "loss")
    assert rounded.model.lm_head.weight.dtype == torch.float32


def test_batches_without_padding_train_as_padded_ones_do(tmp_path):
    padded = trained(tmp_path, tokens_per_device=BATCH_TOKENS // 2, **SGD)
    packed = trained(tmp_path, tokens_per_device=BATCH_TOKENS // 2, padding_free=True, **SGD)
    assert packed.tokens_of_steps == padded.tokens_of_steps
    assert logged(packed, "loss") == pytest.approx(logged(padded, "loss"), rel=1e-5)
    assert set(logged(packed, "padding")) == {0.0} and max(logged(padded, "padding")) > 0
    assert_same_training(weights_of(padded), weights_of(packed))


@pytest.mark.parametrize(
    ("bleu", "endless", "error", "seconds", "expected"),
    [
        ((10, 20, 30, 25, 5), (0, 0, 0, 0, 0), 1, 99, 1.0),
        ((30, 20, 10, 5, 5), (0, 0, 0, 0, 0), 1, 99, 0.2),
        ((10, 20, 20.04, 5, 5), (0, 0, 0, 0, 0), 1, 99, 0.6),  # less than a tenth of a point better than the paper's
        ((2, 6, 10, 14, 18), (0, 1, 1, 2, 3), 1, 99, 1.0),  # with the others more outputs do not end than with that
        ((2, 2.1, 2.9, 3.5, 4), (0, 0, 0, 0, 0), 0.5, 99, 0.6),  # chance
        ((10, 20, 30, 40, 50), (0, 0, 0, 0, 0), 1, 30, 1.4),  # for the last there is no time
        ((10, 20, 30, 40, 50), (0, 0, 0, 0, 0), 1, -1, 0.6),  # the time was over before
    ],
)
def test_the_length_penalty_is_the_one_with_most_bleu(bleu, endless, error, seconds, expected):
    model, ending, unending = tiny_model(), [1, 5, 2], [1, 5, 5]
    model.generation_config.num_beams, model.generation_config.eos_token_id = 4, 2
    tried = []

    def predict(pairs, metric_key_prefix, num_beams, length_penalty):
        number = LENGTH_PENALTIES.index(length_penalty)
        tried.append(length_penalty)
        rows = [ending] * (3 - endless[number]) + [unending] * endless[number]
        metrics = {"search_bleu": bleu[number], "search_bleu_error": error, "search_runtime": 10}
        return SimpleNamespace(predictions=np.array(rows), metrics=metrics)

    accelerator, args = SimpleNamespace(unwrap_model=lambda model: model), SimpleNamespace(world_size=1)
    trainer = SimpleNamespace(model=model, args=args, eval_dataset=None, accelerator=accelerator, predict=predict)
    choose_length_penalty(trainer, lambda: seconds - 10 * len(tried))
    assert model.generation_config.length_penalty == expected
    assert 10 * len(tried) <= max(seconds, 10)
