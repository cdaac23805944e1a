"""The paper's learning rate (Section 5.3, Equation (3)) as a function, a torch scheduler and a Trainer callback."""

import math

import torch
from transformers import TrainerCallback


def noam_learning_rate(step: int, d_model: int, warmup_steps: int, scale: float = 1.0) -> float:
    """Section 5.3, Equation (3): `d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)`.

    Args:
        step: the optimizer step that uses the rate, counted from 1.
        d_model: width of the model.
        warmup_steps: optimizer steps of linear growth; the paper used 4000.
        scale: factor on the whole schedule; 1 in the paper.
    """
    return scale * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def noam_scheduler(
    optimizer: torch.optim.Optimizer, d_model: int, warmup_steps: int = 4000, scale: float = 1.0
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a scheduler for a loop of your own; call its `step()` after each `optimizer.step()`.

    The optimizer's own rate must be 1.0, since the schedule multiplies it; all else is as in `noam_learning_rate`. Do
    not hand the result to `accelerator.prepare`, which steps a scheduler once for each process.
    """
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda steps_done: noam_learning_rate(steps_done + 1, d_model, warmup_steps, scale)
    )


class NoamSchedulerCallback(TrainerCallback):
    """Sets the rate of Equation 3 just before each optimizer step of any `Trainer`, stock or ours.

    The step comes from the trainer's own count of optimizer steps, so accumulation, the number of processes and a
    resume cannot shift it (DeepSpeed, which steps before, does). Whatever scheduler the trainer made is overruled, and
    reports the rate that was used.

    Without a `d_model` it is read from the model's configuration. Over the last `decline_steps` of the training, fewer
    in proportion where a limit of time has lowered the trainer's `max_steps`, the rate is also multiplied by what falls
    from 1 to 0. All else is as in `noam_learning_rate`.
    """

    def __init__(
        self, d_model: int | None = None, warmup_steps: float = 4000, scale: float = 1.0, decline_steps: int = 0
    ):
        self.d_model, self.warmup_steps, self.scale = d_model, warmup_steps, scale
        self.decline_steps = decline_steps

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Read `d_model` from the model where it was not given; a warmup below 1 is a share, as in transformers."""
        share, width = self.warmup_steps, self.d_model or model.config.hidden_size
        self._curve = width, max(1, math.ceil(share * state.max_steps)) if share < 1 else share, self.scale

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        """Set the rate for the step that is about to be taken."""
        rate = noam_learning_rate(state.global_step + 1, *self._curve)
        if self.decline_steps:
            planned = args.max_steps if args.max_steps > 0 else state.max_steps
            decline = min(self.decline_steps, planned) * state.max_steps / planned
            rate *= min(1, (state.max_steps - state.global_step) / decline)
        for group in optimizer.param_groups:
            group["lr"] = rate

    def on_optimizer_step(self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs):
        """Let the trainer's scheduler report the rate that was used: its log asks the scheduler, not the optimizer."""
        lr_scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
