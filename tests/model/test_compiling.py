"""Layers compiled for training: how many graphs, how often, and what they compute."""

import functools

import pytest
import torch
from conftest import padded_batch, tiny_model
from test_packed_sentences import both_batches, on_meta, with_kernel  # noqa: F401

from vaswani_transformer.model import layers_vaswani
from vaswani_transformer.recipes.recipe import Recipe
from vaswani_transformer.training import initial_model


@functools.cache
def traced(function, has_static_shapes: bool):
    """`compiled` without the seconds that machine code takes; a graph that breaks is an error."""
    return torch.compile(function, dynamic=None if has_static_shapes else True, backend="eager", fullgraph=True)


@pytest.fixture
def compiling(monkeypatch):
    """Counts graphs; every recompilation is an error."""
    monkeypatch.setattr(layers_vaswani, "compiled", traced)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()


def three_layers(**changes):
    return tiny_model(encoder_layers=3, decoder_layers=3, **changes)


def compiled_model(**changes):
    model = three_layers(**changes)
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        layer.is_compiled = True
    return model


@pytest.mark.parametrize(
    ("attn_implementation", "autocast"), [pytest.param("eager", True, marks=pytest.mark.slow), ("sdpa", False)]
)
def test_one_graph_for_each_kind_of_layer(compiling, attn_implementation, autocast):
    model, plain = (make(attn_implementation=attn_implementation) for make in (compiled_model, three_layers))
    for step, lengths in enumerate([(7, 4, 2), (5, 6, 3, 2), (9, 3), (12, 11, 8)]):
        input_ids, mask = padded_batch(lengths, seed=step)
        labels = padded_batch(lengths[::-1], seed=step + 9)[0]
        batch = {"input_ids": input_ids, "attention_mask": mask, "labels": labels}
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = [each.train()(**batch).loss for each in (model, plain)]
        losses[0].backward()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
        with torch.no_grad():  # as in a validation
            model.eval()(**batch)
            model.generate(input_ids, attention_mask=mask, num_beams=2, max_new_tokens=3)
    assert compiling["unique_graphs"] == 2


def test_layers_are_not_cut_for_several_processes(compiling, tmp_path):
    """torch would divide a graph by the parameters whose gradients are sent together."""
    with torch._dynamo.config.patch(optimize_ddp=True):
        model = initial_model.with_attention(three_layers(), Recipe(compile=True)).train()
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            torch.nn.parallel.DistributedDataParallel(model)(**both_batches(False)[0]).loss.backward()
        finally:
            torch.distributed.destroy_process_group()
    assert compiling["unique_graphs"] == 2


def test_batches_without_padding(compiling):
    model = compiled_model().train()
    for with_filling in (False, True):
        model(**both_batches(with_filling)[1]).loss.backward()
    assert compiling["unique_graphs"] == 2


def test_batches_without_padding_on_a_device(compiling, with_kernel):  # noqa: F811
    """Static sizes but for the number of sentences; the graph has the kernel's operation in it."""
    model = compiled_model(dtype=torch.bfloat16).to("meta").train()
    for sentences in (4, 8, 2):
        batch = both_batches(False)[1]
        for side in ("source_offsets", "target_offsets"):
            batch[side] = batch[side].new_empty(sentences + 1)
        model(**on_meta(batch)).logits.sum().backward()
    assert compiling["unique_graphs"] == 2
