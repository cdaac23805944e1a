"""Training with the loss that is fused with the projection, against training with the loss of whole logits."""

import dataclasses

import pytest
import torch

from vaswani_transformer import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTrainer, VaswaniTrainingArguments
from vaswani_transformer.data.tokenization import train_tokenizer
from vaswani_transformer.errors import UserError
from vaswani_transformer.model import modeling_vaswani
from vaswani_transformer.model.loss_vaswani import projected_cross_entropy
from vaswani_transformer.recipes.recipe import load_recipe
from vaswani_transformer.training.run import new_model, training_arguments


def train(tmp_path, steps=6, wrap=None, **settings):
    """Weights and losses after some steps of a tiny model."""
    import datasets

    generator = torch.Generator().manual_seed(3)
    rows = [
        torch.randint(4, 30, (int(n),), generator=generator).tolist()
        for n in torch.randint(2, 9, (60,), generator=generator)
    ]
    pairs = datasets.Dataset.from_dict(
        {
            "input_ids": rows,
            "labels": [row[::-1] for row in rows],
            "source_length": [len(row) for row in rows],
            "target_length": [len(row) for row in rows],
        }
    )
    torch.manual_seed(0)
    model = VaswaniForConditionalGeneration(
        VaswaniConfig(vocab_size=30, d_model=16, d_ff=32, num_heads=2, encoder_layers=1, decoder_layers=1, dropout=0.0)
    )
    if wrap:
        wrap(model)
    arguments = VaswaniTrainingArguments(
        output_dir=str(tmp_path),
        tokens_per_batch=64,
        tokens_per_device=settings.pop("tokens_per_device", 64),
        max_steps=steps,
        warmup_steps=20,
        adam_epsilon=1e-3,  # or Adam makes steps of rounding where gradients are near 0
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    trainer = VaswaniTrainer(model=model, args=arguments, train_dataset=pairs)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {name: value.clone() for name, value in model.state_dict().items()}, losses, trainer


@pytest.fixture(scope="module")
def unfused(tmp_path_factory):
    return train(tmp_path_factory.mktemp("unfused"), fused_loss=False)


def assert_same(one, other):
    assert one[1] == pytest.approx(other[1], rel=1e-5)
    for name, value in one[0].items():
        torch.testing.assert_close(value, other[0][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens_per_device", [64, 32])
def test_trains_as_with_whole_logits(tmp_path, monkeypatch, unfused, tokens_per_device):
    calls = []
    counted = lambda *a: calls.append(a) or projected_cross_entropy(*a)  # noqa: E731
    monkeypatch.setattr(modeling_vaswani, "projected_cross_entropy", counted)
    assert_same(train(tmp_path, tokens_per_device=tokens_per_device), unfused)
    assert len(calls) == 6 * 64 // tokens_per_device


@pytest.mark.parametrize("whole", [False, True])
def test_somebody_who_listens_hears_logits(tmp_path, unfused, whole):
    heard = []

    def listen(model):
        if whole:
            model.register_forward_hook(lambda module, inputs, output: heard.append(output.logits.shape))
        else:
            model.lm_head.register_forward_hook(lambda module, inputs, output: heard.append(output.shape))

    assert_same(train(tmp_path, wrap=listen), unfused)
    assert all(shape[-1] == 30 for shape in heard)


def test_evaluation_and_return_outputs_have_logits(tmp_path):
    _, _, trainer = train(tmp_path, steps=1)
    batch = {"input_ids": torch.randint(4, 30, (2, 5)), "labels": torch.randint(4, 30, (2, 7))}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    for training in (True, False):
        trainer.model.train(training)
        _, outputs = trainer.compute_loss(trainer.model, dict(batch), return_outputs=True)
        assert outputs["logits"].shape == (2, 7, 30)


def test_workers_make_the_same_batches(tmp_path, unfused):
    assert_same(train(tmp_path, fused_loss=False, dataloader_num_workers=1), unfused)


def test_options_of_the_recipe_reach_the_training(tmp_path):
    """Compilation itself happens at the first step and takes a minute, so here only that every layer asks for it."""
    tokenizer = train_tokenizer(["a few words to learn from"], vocab_size=300, show_progress=False)
    fields = {"output": str(tmp_path), "fused_loss": "no", "data_workers": "2", "compile": "yes"}
    recipe = load_recipe("demo", fields)
    arguments = training_arguments(recipe, longest=10)
    assert (arguments.fused_loss, arguments.dataloader_num_workers) == (False, 2)
    for wanted in (True, False):
        model = new_model(dataclasses.replace(recipe, compile=wanted), tokenizer)
        layers = [*model.model.encoder.layers, *model.model.decoder.layers]
        assert [layer._compiled_call_impl is not None for layer in layers] == [wanted] * len(layers)
    with pytest.raises(UserError, match="data_workers is -1"):
        load_recipe("demo", {**fields, "data_workers": "-1"})
