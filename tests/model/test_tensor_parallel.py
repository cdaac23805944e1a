"""A model cut over two processes computes, learns and saves what one process does (on CPUs, over gloo)."""

import os
import socket
import traceback
from pathlib import Path

import pytest
import torch
import transformers
from conftest import padded_batch, random_ids, tiny_model
from packaging.version import Version
from transformers.distributed.configuration_utils import DistributedConfig

from vaswani_transformer import VaswaniForConditionalGeneration

WORLD_SIZE = 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def inputs_for_all() -> dict[str, torch.Tensor]:
    input_ids, attention_mask = padded_batch((7, 4, 2))
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def compare(rank: int, port: int, folder: str, report: str) -> None:
    """One process: write to the file `report` what went wrong, or nothing."""
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD_SIZE, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
    try:
        whole = VaswaniForConditionalGeneration.from_pretrained(folder)
        cut = VaswaniForConditionalGeneration.from_pretrained(
            folder, distributed_config=DistributedConfig(tp_size=WORLD_SIZE)
        )
        check_sizes(cut)
        check_forward_and_generate(cut.eval(), whole.eval())
        check_gradients(cut, whole)
        cut.save_pretrained(f"{folder}-saved")
        torch.distributed.barrier()
        again = VaswaniForConditionalGeneration.from_pretrained(f"{folder}-saved").state_dict()
        assert again.keys() == whole.state_dict().keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in whole.state_dict().items())
    except BaseException:
        Path(f"{report}.{rank}").write_text(traceback.format_exc())
        os._exit(1)  # the other process waits for this one otherwise
    torch.distributed.destroy_process_group()


def check_sizes(cut) -> None:
    for name, parameter in cut.named_parameters():
        if parameter.dim() == 2 and "embed_positions" not in name:
            assert parameter.to_local().numel() < 0.55 * parameter.numel(), f"{name} is not cut"


def check_forward_and_generate(cut, whole) -> None:
    inputs = inputs_for_all()
    with torch.no_grad():
        logits = [model(**inputs, decoder_input_ids=random_ids(3, 5)).logits for model in (cut, whole)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)
    for options in ({}, {"num_beams": 3}, {"num_beams": 3, "cache_implementation": "static"}):
        tokens = [model.generate(**inputs, max_new_tokens=8, **options) for model in (cut, whole)]
        assert torch.equal(*tokens), f"generate with {options} differs"


def check_gradients(cut, whole) -> None:
    for model in (cut, whole):
        model(**inputs_for_all(), labels=random_ids(3, 5)).loss.backward()
    for (name, parameter), (_, expected) in zip(cut.named_parameters(), whole.named_parameters(), strict=True):
        gradient = parameter.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        assert torch.allclose(gradient, expected.grad, rtol=1e-3, atol=1e-5), f"the gradient of {name} differs"


uneven = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="cut a vocabulary into equal parts only",
)


@pytest.mark.slow  # 15 seconds each
@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 30},
        {"vocab_size": 30, "position_encoding": "learned", "tie_word_embeddings": False, "attention_bias": True},
        {"vocab_size": 30, "d_k": 5, "d_v": 7},
        pytest.param({"vocab_size": 29}, marks=uneven),
    ],
    ids=str,
)
def test_two_processes_equal_one(changes, tmp_path):
    tiny_model(num_heads=4, scale=1.5, **changes).save_pretrained(tmp_path / "model")
    report = tmp_path / "error"
    context = torch.multiprocessing.start_processes(
        compare,
        args=(free_port(), str(tmp_path / "model"), str(report)),
        nprocs=WORLD_SIZE,
        join=False,
        start_method="spawn",
    )
    try:
        while not context.join(timeout=120):
            pass
    except Exception:
        errors = [path.read_text() for path in sorted(tmp_path.glob("error.*"))]
        pytest.fail("\n".join(errors) or "a process ended without a word")
