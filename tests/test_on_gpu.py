"""What only a GPU computes, on one: the loss's kernel, attention, compiled layers, training, decoding."""

import itertools
import math
import warnings

import pytest
import torch
from conftest import padded_batch, tiny_model, tiny_recipe
from model import test_loss_kernel as kernel
from model.test_packed_sentences import both_batches, in_a_row, pass_through
from passes import relative_difference
from training.test_trainer import make_model, make_pairs
from training_runs import log_of, stop_after

from vaswani_transformer import Translator, train
from vaswani_transformer.export.engine import load_for_decoding
from vaswani_transformer.model import loss_kernel_vaswani
from vaswani_transformer.model import packed_sentences_vaswani as packing
from vaswani_transformer.training.trainer import VaswaniTrainer, VaswaniTrainingArguments

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no NVIDIA GPU here")


@pytest.fixture(autouse=True)
def exact_products():
    """A training lets float32 be multiplied in TF32."""
    torch.set_float32_matmul_precision("highest")


def test_the_kernel_of_the_loss():
    assert loss_kernel_vaswani.is_usable()
    kernel.check_kernel(torch.float32, 1e-5, DEVICE)
    kernel.check_kernel(torch.bfloat16, 2**-8, DEVICE)


@pytest.mark.parametrize(("vocab_size", "epsilon", "with_bias"), kernel.CASES)
def test_the_loss_with_its_projection(vocab_size, epsilon, with_bias):
    with kernel.small_blocks(vocab_size):
        kernel.check_projected(vocab_size, torch.float32, 2e-6, epsilon, with_bias, device=DEVICE)
        kernel.check_projected(vocab_size, torch.bfloat16, 2e-2, epsilon, with_bias, device=DEVICE)


def on_device(batch: dict) -> dict:
    return {name: value.to(DEVICE) if torch.is_tensor(value) else value for name, value in batch.items()}


def distance(gradients: dict, expected: dict) -> float:
    """Of all gradients together, relative."""
    one, other = (torch.cat([values[name].flatten() for name in expected]) for values in (gradients, expected))
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("short", [0, packing.SHORT])  # so by both kernels
def test_sentences_without_padding(short, is_compiled, monkeypatch):
    monkeypatch.setattr(packing, "SHORT", short)
    model = tiny_model().to(DEVICE).train()
    batch, packed = map(on_device, both_batches(True))
    expected, expected_gradients = pass_through(model, batch)  # padded, in float32
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        layer.is_compiled = is_compiled
    with torch.autocast(DEVICE, torch.bfloat16):
        assert packing.can_use_flash_attention(model.config, model.lm_head.weight)
        actual, gradients = pass_through(model, packed)
        padded, padded_gradients = pass_through(model, batch)
    rows = in_a_row(expected.logits)
    assert relative_difference(actual.logits[0, : len(rows)], rows) < 3e-2
    assert actual.loss.item() == pytest.approx(expected.loss.item(), rel=1e-2)
    assert padded.loss.item() == pytest.approx(expected.loss.item(), rel=1e-2)
    error, of_padded = (distance(each, expected_gradients) for each in (gradients, padded_gradients))
    assert error < 1.5 * of_padded + 1e-3 < 0.3  # as exact as bf16 lets padded sentences be


class CountingTrainer(VaswaniTrainer):
    """Notes how often each step has waited for the GPU."""

    def get_batch_samples(self, *args):
        self.waits_before.append([str(each.message) for each in self.caught if "synchroniz" in str(each.message)])
        return super().get_batch_samples(*args)


@pytest.mark.parametrize("padding_free", [False, True])
def test_no_step_waits_for_the_gpu_but_one_that_is_logged(tmp_path, padding_free):
    arguments = VaswaniTrainingArguments(
        output_dir=str(tmp_path), tokens_per_batch=128, tokens_per_device=64, max_steps=8, logging_steps=4, bf16=True,
        save_strategy="no", report_to="none", disable_tqdm=True, optim="adamw_torch_fused", padding_free=padding_free,
    )  # fmt: skip
    model = make_model(dropout=0.1)
    model.set_attn_implementation("sdpa")
    trainer = CountingTrainer(model=model, args=arguments, train_dataset=make_pairs(90))
    trainer.waits_before = []
    with warnings.catch_warnings(record=True) as trainer.caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.train()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    counts = [len(waits) for waits in trainer.waits_before]
    in_steps = [after - before for before, after in itertools.pairwise(counts)]
    assert in_steps[3] > 0  # the log's: so waiting is seen
    assert in_steps[1:3] == [0, 0] and in_steps[4:7] == [0, 0, 0], trainer.waits_before[-1]


def test_decoding_is_the_cpus():
    input_ids, mask = padded_batch((7, 4, 2))
    model = tiny_model(scale=2.0)
    settings = {"attention_mask": mask, "num_beams": 4, "max_new_tokens": 12}
    expected = model.generate(input_ids, **settings)
    assert torch.equal(model.to(DEVICE).generate(**on_device({"inputs": input_ids, **settings})).cpu(), expected)


def test_a_training_on_the_gpu_learns_resumes_and_translates(text, tmp_path):
    settings = {"compile": True, "tokens_per_device": "auto", "max_steps": 300, "warmup_steps": 100}
    recipe = tiny_recipe(text, tmp_path / "run", d_model=64, d_ff=128, **settings)
    stop_after(100, recipe)
    train(recipe, progress=False)
    losses = [line["loss"] for line in log_of(tmp_path / "run") if "loss" in line]
    assert len(losses) == 300 and all(map(math.isfinite, losses)) and losses[-1] < 0.7 * losses[0]
    sources = (text / "test.en").read_text("utf-8").splitlines()
    on_gpu, on_cpu = (Translator(*load_for_decoding(tmp_path / "run", name)) for name in (DEVICE, "cpu"))
    translations = on_gpu.translate(sources)
    same = sum(ours == theirs for ours, theirs in zip(translations, on_cpu.translate(sources), strict=True))
    assert same >= 0.9 * len(sources) and all(translations)  # rounding may decide where two words are as good
