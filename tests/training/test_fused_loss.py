"""The loss fused with the projection, against torch in float64, and in a training against the loss of whole logits."""

import dataclasses

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from vaswani_transformer import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTrainer, VaswaniTrainingArguments
from vaswani_transformer.data.tokenization import train_tokenizer
from vaswani_transformer.errors import UserError
from vaswani_transformer.recipes.recipe import load_recipe
from vaswani_transformer.training import loss
from vaswani_transformer.training.loss import loss_in_place_of_logits, projected_cross_entropy
from vaswani_transformer.training.run import new_model, training_arguments

TOKENS, WIDTH, VOCABULARY = 37, 6, 23


def example(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[::5] = -100
    return hidden, weight, labels


def reference(hidden, weight, labels, epsilon, items, factor=1.0):
    """torch's loss and both gradients in float64."""
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    total = cross_entropy(linear(hidden, weight), labels, label_smoothing=epsilon, reduction="sum")
    value = total / items
    (value * factor).backward()
    return value.item(), hidden.grad, weight.grad


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.9])
@pytest.mark.parametrize(("rows", "elements"), [(1, 1), (5, 1), (16, 3 * VOCABULARY), (37, 1), (100, 2**19)])
def test_value_and_gradients_equal_those_of_torch(monkeypatch, epsilon, rows, elements):
    monkeypatch.setattr(loss, "PROJECTED_ELEMENTS", rows * VOCABULARY)
    monkeypatch.setattr(loss, "PROJECTED_WIDTHS", 0)
    monkeypatch.setattr(loss, "BLOCK_ELEMENTS", elements)
    hidden, weight, labels = example()
    value = projected_cross_entropy(hidden, weight, labels, epsilon)
    value.backward()
    expected, hidden_gradient, weight_gradient = reference(hidden, weight, labels, epsilon, labels.ne(-100).sum())
    assert value.item() == pytest.approx(expected, rel=2e-6)
    torch.testing.assert_close(hidden.grad.double(), hidden_gradient, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(weight.grad.double(), weight_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("items", [50, torch.tensor(50), torch.tensor(50.0)])
def test_divides_by_the_items_of_the_whole_step_and_takes_upstream_gradients(items):
    hidden, weight, labels = example()
    value = projected_cross_entropy(hidden[None], weight, labels[None], 0.1, items)
    (3 * value).backward()
    expected, hidden_gradient, weight_gradient = reference(hidden, weight, labels, 0.1, 50, factor=3)
    assert value.item() == pytest.approx(expected, rel=2e-6)
    torch.testing.assert_close(hidden.grad.double(), hidden_gradient, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(weight.grad.double(), weight_gradient, rtol=1e-5, atol=1e-7)


def test_under_autocast_gradients_are_as_good_as_torchs_own():
    hidden, weight, labels = example()
    exact = reference(hidden, weight, labels, 0.1, labels.ne(-100).sum())
    with torch.autocast("cpu", torch.bfloat16):
        ours = projected_cross_entropy(hidden, weight, labels, 0.1)
        ours.backward()
    gradients = hidden.grad, weight.grad
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    hidden, weight, labels = example()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = cross_entropy(linear(hidden, weight), labels, label_smoothing=0.1)
    theirs.backward()
    assert ours.item() == pytest.approx(exact[0], rel=2**-8)
    for gradient, torchs, right in zip(gradients, (hidden.grad, weight.grad), exact[1:], strict=True):
        assert (gradient - right).norm() <= 1.5 * (torchs - right).norm()


def test_a_tied_matrix_gets_both_gradients():
    _, weight, labels = example()
    ids = torch.arange(TOKENS) % VOCABULARY
    projected_cross_entropy(weight[ids], weight, labels, 0.1).backward()
    exact = weight.detach().double().requires_grad_()
    cross_entropy(linear(exact[ids], exact), labels, label_smoothing=0.1).backward()
    torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)


def test_float16_and_smoothing_out_of_range_are_refused():
    hidden, weight, labels = example(torch.float16)
    with pytest.raises(ValueError, match="float16"):
        projected_cross_entropy(hidden, weight, labels)
    with pytest.raises(ValueError, match="below 1"):
        projected_cross_entropy(*example(), 1.0)


def test_the_projection_is_as_it_was_also_after_an_error():
    projection = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
    hidden, _, labels = example()
    before = projection(hidden)
    with pytest.raises(IndexError), loss_in_place_of_logits(projection, labels, 0.1):
        assert projection(hidden).shape == ()
        raise IndexError
    assert torch.equal(projection(hidden), before)


def test_no_whole_logits_exist(monkeypatch):
    """A tensor of as many elements as all logits would be seen by the allocator's own book-keeping."""
    monkeypatch.setattr(loss, "PROJECTED_ELEMENTS", 4 * 4096)
    monkeypatch.setattr(loss, "PROJECTED_WIDTHS", 0)
    hidden = torch.randn(512, 8, requires_grad=True)
    weight = torch.randn(4096, 8, requires_grad=True)
    labels = torch.randint(0, 4096, (512,))
    with torch.profiler.profile(profile_memory=True, record_shapes=True) as profile:
        projected_cross_entropy(hidden, weight, labels).backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < 512 * 4096


# Within a training.


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
    monkeypatch.setattr(loss, "projected_cross_entropy", lambda *a: calls.append(a) or projected_cross_entropy(*a))
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


def test_masks_made_beforehand_are_the_same_attention(tmp_path, monkeypatch, unfused):
    """What is done on a GPU so that nothing waits for it, on a CPU."""
    shapes = []

    def wrap(model):
        model.set_attn_implementation("sdpa")
        model.model.encoder.register_forward_pre_hook(
            lambda module, args, kwargs: shapes.append(kwargs["attention_mask"].ndim), with_kwargs=True
        )

    monkeypatch.setattr(VaswaniTrainer, "_asks_masks", lambda self: True)
    assert_same(train(tmp_path, wrap=wrap), unfused)
    assert set(shapes) == {4}


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
