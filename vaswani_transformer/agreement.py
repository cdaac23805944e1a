"""What the processes of a training tell each other besides gradients, without waiting for their devices."""

from collections.abc import Sequence

import torch
import torch.distributed
from torch.distributed import ReduceOp
from transformers import TrainerCallback

_groups: dict[int, tuple[object, object]] = {}  # of the default group's id: it, so that it stays, and ours beside it


def _host_group() -> object:
    """Group whose messages go between the processes' own memories; all processes ask for it at the same place.

    A number that is read from a device comes only after all the work that the device was given before.
    """
    world = torch.distributed.group.WORLD
    if id(world) not in _groups:
        on_host = "gloo" in torch.distributed.get_backend(world)
        _groups.clear()
        _groups[id(world)] = world, world if on_host else torch.distributed.new_group(backend="gloo")
    return _groups[id(world)][1]


def over_processes(args, numbers: Sequence[int], operation: ReduceOp = ReduceOp.SUM) -> list[int]:
    """Integers of all processes, summed or otherwise reduced one by one; the same result on all.

    Args:
        args: a trainer's settings.
        numbers: this process's, as many as on the others.
        operation: what to do with them.
    """
    if args.world_size == 1:
        return list(numbers)
    reduced = torch.tensor(numbers, dtype=torch.int64)
    torch.distributed.all_reduce(reduced, operation, group=_host_group())
    return reduced.tolist()


def on_any_process(args, *flags: bool) -> list[bool]:
    """Whether each flag is up on any process, the same on all: else one would stop while others wait for it."""
    return [bool(flag) for flag in over_processes(args, [int(flag) for flag in flags], ReduceOp.MAX)]


class AgreedCallback(TrainerCallback):
    """Does something at the end of a step, on all processes at once, when one of them wants to.

    Several of them share one message between the processes a step, once `agree_together` has seen them.
    """

    def __init__(self):
        self.group, self.agreed = [self], False

    def wants(self) -> bool:
        """Whether this process wants to."""
        raise NotImplementedError

    def act(self, control) -> None:
        """Do it."""
        raise NotImplementedError

    def on_step_end(self, args, state, control, **kwargs):
        """The first of the group asks for all of it."""
        if self.group[0] is self:
            for one, answer in zip(self.group, on_any_process(args, *(one.wants() for one in self.group)), strict=True):
                one.agreed = answer
        if self.agreed:
            self.act(control)
        return control


def agree_together(callbacks: Sequence[TrainerCallback]) -> None:
    """Let all `AgreedCallback` among a trainer's callbacks, in their order, ask with one message."""
    group = [callback for callback in callbacks if isinstance(callback, AgreedCallback)]
    for callback in group:
        callback.group = group
