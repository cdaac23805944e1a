"""The same training for any number of processes: batches, losses, weights, rates, resuming with another number."""

import functools
import json
import math
import os
import signal
import sys
import time
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from conftest import free_port
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_device_memory import POSITIONS, step_where_positions_are_limited
from test_trainer import assert_same_training, evaluation_pairs, exact_loss, make_model, make_pairs, make_trainer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from training_runs import Signal

from vaswani_transformer import VaswaniForConditionalGeneration
from vaswani_transformer import distributed as agreement
from vaswani_transformer.data.batching import PairCollator
from vaswani_transformer.recipes.recipe import Recipe
from vaswani_transformer.training import averaging, device_memory
from vaswani_transformer.training.callbacks import StopAndSaveCallback, TrainingLogCallback
from vaswani_transformer.training.run import join_process_group, training_arguments
from vaswani_transformer.training.schedule import noam_learning_rate
from vaswani_transformer.training.selection import put_weights, select_weights

TOKENS, STEPS, PAIRS = 512, 12, 211  # an odd number of pairs; four batches an epoch or so, the last ones small
SGD = {"optim": "sgd", "learning_rate_scale": 1.0, "warmup_steps": 4}  # parameters that move as gradients say
ADAM = {"learning_rate_scale": 0.05, "warmup_steps": 10}  # with the paper's epsilon
# name: processes, parts that one process would take the batch in, settings
RUNS = {"2x4-packed-adam": (2, 4, {**ADAM, "padding_free": True}), "3": (3, 1, SGD)}


def settings(parts, more):
    return {"tokens_per_batch": TOKENS, "tokens_per_device": TOKENS // parts, "max_steps": STEPS, **more}


def record(trainer):
    history = trainer.state.log_history
    return {
        "batches": trainer.batches,
        "accumulation": trainer.args.gradient_accumulation_steps,
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "rates": [entry["learning_rate"] for entry in history if "loss" in entry],
        "tokens": trainer.tokens_of_steps,
        "seed": torch.initial_seed(),  # of dropout's draws
    }


def train_and_save(folder, name, rank, trainer, **options):
    trainer.train(**options)
    (folder / f"{name}-{rank}.json").write_text(json.dumps(record(trainer)))
    if rank == 0:
        save_file({key: tensor.clone() for key, tensor in trainer.model.state_dict().items()}, folder / f"{name}.st")


def as_one(rank, folder, name, world_size, parts, more):
    """One of several processes: trains, and validates."""
    train_and_save(folder, name, rank, make_trainer(folder / name, make_pairs(PAIRS), **settings(parts, more)))
    if name == "3":
        options = {"eval_dataset": evaluation_pairs().select_columns(["input_ids", "labels"])}
        options["compute_metrics"] = lambda prediction: {"rows": len(prediction.predictions)}
        for generate in (False, True):
            trainer = make_trainer(folder / name, trainer_options=options, predict_with_generate=generate)
            (folder / f"evaluation-{generate}-{rank}.json").write_text(json.dumps(trainer.evaluate()))


def resume(rank, folder, name, world_size, parts, more):
    trainer = make_trainer(folder / name, make_pairs(PAIRS), make_model(seed=9), **settings(parts, more))
    train_and_save(folder, name, rank, trainer, resume_from_checkpoint=str(folder / "start" / "checkpoint-5"))


def sharded(rank, folder, name, world_size, parts, more):
    """The model under FSDP2: loss and gradients of half a batch on each process, saved, and changed and put back."""
    torch.distributed.init_process_group("gloo")
    model, whole, layers = make_model(), make_model(), ["VaswaniEncoderLayer", "VaswaniDecoderLayer"]
    wrapping = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": layers}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **wrapping)
    with patch.object(AcceleratorState, "fsdp_plugin", plugin, create=True):
        make_trainer(folder / "x", make_pairs(8), model, label_smoothing_factor=0.0)
    model.config.use_cache = True
    state = {"torch_device_mesh": None, "parallelism_config": None, "mixed_precision": "no", "is_main_process": True}
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), device=torch.device("cpu"), **state)
    on_cpu = functools.partial(fully_shard, mesh=init_device_mesh("cpu", (world_size,)))
    with patch("torch.distributed.fsdp.fully_shard", on_cpu):
        model = fsdp2_prepare_model(accelerator, model)
    pairs = [{key: pair[key] for key in ("input_ids", "labels")} for pair in make_pairs(8)]
    tokens = sum(len(pair["labels"]) for pair in pairs)
    batch = PairCollator(1)(pairs)
    expected = cross_entropy(whole(**batch).logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / tokens
    expected.backward()
    for skip_logits in (False, True):
        model.zero_grad()
        batch = PairCollator(1)(pairs[4 * rank : 4 * rank + 4])
        loss = model(**batch, num_items_in_batch=tokens, skip_logits=skip_logits).loss
        (loss * world_size).backward()  # FSDP averages over processes
        loss = loss.detach()
        torch.distributed.all_reduce(loss)
        assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
        for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-6)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        model.save_pretrained(folder / name, state_dict=state)
    other = {key: tensor.clone() for key, tensor in make_model(seed=8).state_dict().items()}
    put_weights(model, other if rank == 0 else {})
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), other[key]), key
    put_weights(whole, other if rank == 0 else {})
    assert whole.lm_head.weight is whole.get_input_embeddings().weight
    for key, parameter in whole.named_parameters():
        assert torch.equal(parameter, other[key]), key


def selecting(rank, folder, name, world_size, parts, more):
    """Trains, evaluates best and average, and keeps the best; notes which files of weights it opens meanwhile."""
    options = {"eval_dataset": evaluation_pairs().select_columns(["input_ids", "labels"])}
    settings = {**SGD, "max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(folder / name, make_pairs(PAIRS), trainer_options=options, **settings)
    trainer.train()
    trainer.state.best_global_step = 4
    read, summed = [], []
    sys.addaudithook(lambda event, about: summed.append(str(about[0])) if event == "open" else None)
    counting = patch.object(averaging, "safe_open", lambda path, **more: read.append(path) or safe_open(path, **more))
    recipe = Recipe(average_checkpoints=3, evaluate_every=2, keep_weights="best")
    with agreement.joined_processes() as processes, counting:
        seen = folder / name if rank == 0 else folder / "nowhere"  # processes may not read the disk alike
        kept, _, metrics = select_weights(trainer, recipe, seen, processes)
    weights = [path for path in summed if path.endswith(".safetensors")]
    found = {"read": len(read), "summed": len(weights), "kept": kept, "loss": metrics["eval_loss"]}
    (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
    save_file({key: tensor.clone() for key, tensor in trainer.model.state_dict().items()}, folder / f"{name}-{rank}.st")


def beside_another_backend(rank, folder, name, world_size, parts, more):
    """Sums where the default group is of a backend whose messages go through devices."""
    torch.distributed.init_process_group("gloo")
    reduced, timeouts = [], []
    all_reduce, new_group = torch.distributed.all_reduce, torch.distributed.new_group
    noting = lambda timeout, **more: timeouts.append(timeout) or new_group(timeout=timeout, **more)  # noqa: E731
    with (
        patch.object(torch.distributed, "new_group", noting),
        patch.object(torch.distributed, "get_backend", lambda *_: "nccl"),
        patch.object(torch.distributed, "all_reduce", lambda *a, group: reduced.append(group) or all_reduce(*a, group)),
    ):
        arguments = SimpleNamespace(world_size=world_size, ddp_timeout_delta=timedelta(seconds=77))
        assert agreement.over_processes(arguments, [rank + 1, 2**40 + rank]) == [3, 2**41 + 1]
        assert agreement.over_processes(arguments, [rank + 5, rank], "MAX") == [6, 1]
    assert reduced[0] is reduced[1] and reduced[0] is not torch.distributed.group.WORLD
    assert "gloo" in torch.distributed.get_backend(reduced[0]) and timeouts == [timedelta(seconds=77)]


def impatient(rank, folder, name, world_size, parts, more):
    """The recipe's timeout counts: one process gives up the other one."""
    join_process_group(Recipe(ddp_timeout=1))
    training_arguments(Recipe(output=str(folder / name), ddp_timeout=1), 10)  # which resets accelerate's state
    if rank == 1:
        time.sleep(2)
        return
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="imed out"):
        torch.distributed.barrier()
    assert time.monotonic() - start < 1.9


def choose_together(rank, folder, name, world_size, parts, more):
    """Each process tries out its own device; the first has room for more than the second."""
    limited = functools.partial(step_where_positions_are_limited, limit=POSITIONS * (2 - rank))
    with patch.object(device_memory, "free_memory", lambda device: 1000), patch.object(device_memory, "_step", limited):
        trainer = make_trainer(folder / name, make_pairs(PAIRS), **settings(parts, more) | {"tokens_per_device": None})
    (folder / f"{name}-{rank}.json").write_text(json.dumps([trainer.tokens_per_device, trainer.micro_batches]))


def asked_to_stop(rank, folder, name, world_size, parts, more):
    """Sums over processes, other than the gradients', of steps that do nothing else; one has a signal in its third."""
    sums, all_reduce = [], torch.distributed.all_reduce
    trainer = make_trainer(folder / name, make_pairs(PAIRS), **settings(parts, more), logging_steps=100)
    log = TrainingLogCallback(folder / f"{name}-{rank}.jsonl")
    stopper = StopAndSaveCallback(log)
    for callback in (log, stopper, *[Signal(3, signal.SIGTERM)] * rank):
        trainer.add_callback(callback)
    noting = lambda *args, **more: sums.append(trainer.state.global_step) or all_reduce(*args, **more)  # noqa: E731
    with patch.object(torch.distributed, "all_reduce", noting):
        trainer.train()
    checkpoints = sorted(path.name for path in (folder / name).glob("checkpoint-*"))
    found = {"steps": trainer.state.global_step, "sums": sums, "received": stopper.received, "saved": checkpoints}
    (folder / f"{name}-{rank}.json").write_text(json.dumps(found))


def one_of_several(rank, world_size, port, work, arguments):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    work(rank, *arguments)
    torch.distributed.destroy_process_group()


def fork(work, folder, name, world_size, parts, more):
    arguments = (world_size, free_port(), work, (folder, name, world_size, parts, more))
    torch.multiprocessing.start_processes(one_of_several, arguments, world_size, start_method="fork")


def run_all(folder):
    for name, (world_size, parts, more) in RUNS.items():
        fork(as_one, folder, name, world_size, parts, dict(more))
    fork(sharded, folder, "sharded", 2, 1, {})
    fork(selecting, folder, "selected", 2, 1, {})
    fork(impatient, folder, "impatient", 2, 1, {})
    fork(beside_another_backend, folder, "backend", 2, 1, {})
    fork(asked_to_stop, folder, "asked", 2, 1, {**SGD, "save_strategy": "steps", "save_steps": 100})
    fork(choose_together, folder, "chosen", 2, 1, dict(SGD))
    fork(as_one, folder, "start", 2, 1, {**SGD, "max_steps": 5, "save_strategy": "steps", "save_steps": 5})
    for number in (2, 3):
        fork(resume, folder, f"resumed-by-{number}", number, 1, dict(SGD))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, forked):
    folder = tmp_path_factory.mktemp("runs")
    done = forked.run(lambda: run_all(folder))
    assert done.status == 0, done.out + done.err
    return folder


def reports(folder, name, world_size):
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(world_size)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    found = {}
    for name, more in (("sgd", SGD), ("adam", ADAM)):
        trainer = make_trainer(tmp_path_factory.mktemp(name), make_pairs(PAIRS), **settings(1, more))
        trainer.train()
        found[name] = record(trainer), {key: tensor.clone() for key, tensor in trainer.model.state_dict().items()}
    return found


def pairs_of_steps(batches, accumulation):
    """The targets of each optimizer step, without padding, in some fixed order."""
    steps = [batches[start : start + accumulation] for start in range(0, len(batches), accumulation)]
    return [sorted([label for label in row if label >= 0] for part in step for row in part) for step in steps]


def together(found):
    dealt = [pairs_of_steps(report["batches"], report["accumulation"]) for report in found]
    return [sorted(pair for part in step for pair in part) for step in zip(*dealt, strict=True)]


@pytest.mark.parametrize("name", RUNS)
def test_as_one_process_does(folder, alone, name):
    world_size, parts, more = RUNS[name]
    found = reports(folder, name, world_size)
    one, weights = alone["sgd" if "optim" in more else "adam"]
    for report in found:
        assert report["accumulation"] == math.ceil(parts / world_size)
        assert len(report["batches"]) == STEPS * report["accumulation"]  # none waits for another
        assert report["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert report["tokens"] == [list(tokens) for tokens in one["tokens"]]
        schedule = more["warmup_steps"], more["learning_rate_scale"]
        rates = [noam_learning_rate(step, 16, *schedule) for step in range(1, STEPS + 1)]
        assert report["rates"] == pytest.approx(rates, rel=1e-12)
    assert together(found) == pairs_of_steps(one["batches"], 1)
    others, start = load_file(folder / f"{name}.st"), make_model().state_dict()
    for key, weight in weights.items():
        assert (weight - others[key]).norm() <= 1e-4 * (weight - start[key]).norm(), key


def test_resumed_by_another_number_of_processes(folder, alone, tmp_path):
    """Two processes until step 5, inside the second epoch; from there two, one, and three."""
    straight, weights = alone["sgd"]
    resumed = make_trainer(tmp_path / "one", make_pairs(PAIRS), make_model(seed=9), **settings(1, SGD))
    resumed.train(resume_from_checkpoint=str(folder / "start" / "checkpoint-5"))
    steps = pairs_of_steps(straight["batches"], 1)
    assert pairs_of_steps(resumed.batches, 1) == steps[5:]
    assert_same_training(weights, {key: tensor.clone() for key, tensor in resumed.model.state_dict().items()}, 1e-4)
    for number in (2, 3):
        found = reports(folder, f"resumed-by-{number}", number)
        assert together(found) == steps[5:]
        for report in found:
            assert report["tokens"] == [list(tokens) for tokens in straight["tokens"][5:]]
        assert_same_training(weights, load_file(folder / f"resumed-by-{number}.st"), 1e-4)


def test_one_process_reads_the_checkpoints_that_are_selected_from(folder):
    """The best one's weights twice, the average's three, each with its sum, and three sums before; the other none."""
    first, second = reports(folder, "selected", 2)
    assert [(report.pop("read"), report.pop("summed")) for report in (first, second)] == [(2 + 3, 3 + 2 + 3), (0, 0)]
    assert first == second and first["kept"] == "best checkpoint"
    best = load_file(folder / "selected" / "checkpoint-4" / "model.safetensors")
    for rank in range(2):
        weights = load_file(folder / f"selected-{rank}.st")
        assert all(torch.equal(weights[name], weight) for name, weight in best.items())


def test_processes_stop_together_by_one_message_a_step(folder):
    """What one is asked for in a step travels with the next step's count of tokens, the only sum there."""
    for report in reports(folder, "asked", 2):
        assert (report["steps"], report["saved"]) == (4, ["checkpoint-4"])
        assert report["received"] == signal.SIGTERM
        assert [report["sums"].count(step) for step in range(4)] == [1] * 4


def test_processes_take_what_the_smallest_device_holds(folder):
    chosen, other = reports(folder, "chosen", 2)
    assert chosen == other and 1.5 * chosen[0] <= POSITIONS < 1.5 * 1.3 * chosen[0]


def test_processes_drop_different_units(folder):
    assert len({report["seed"] for report in reports(folder, "3", 3)}) == 3


def test_a_sharded_model_is_saved_as_any_other(folder, tmp_path):
    """FSDP2 renames its class: the code beside the weights is ours nevertheless, and none of torch's."""
    whole = make_model()
    whole.save_pretrained(tmp_path)
    assert sorted(path.name for path in (folder / "sharded").iterdir()) == sorted(p.name for p in tmp_path.iterdir())
    for name in ("config.json", "modeling_vaswani.py"):
        assert (folder / "sharded" / name).read_text() == (tmp_path / name).read_text()
    loaded = VaswaniForConditionalGeneration.from_pretrained(folder / "sharded").state_dict()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in whole.state_dict().items())


@pytest.mark.parametrize("generate", [False, True])
def test_three_processes_validate_exactly(folder, generate):
    """Eleven pairs on three processes: the shards are not of one size, and no pair may count twice."""
    expected = exact_loss(make_model(), evaluation_pairs())
    for rank in range(3):
        result = json.loads((folder / f"evaluation-{generate}-{rank}.json").read_text())
        assert result["eval_loss"] == pytest.approx(expected, rel=1e-5)
        assert result["eval_perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
        if generate:
            assert result["eval_rows"] == 11
