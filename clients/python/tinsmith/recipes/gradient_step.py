"""A gradient and the optimizer step that applies it, as every recipe sends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith.recipes.experiment.schedules import linear_schedule
from tinsmith.recipes.experiment.settings import TrainingConfig
from tinsmith.rpc.futures import OperationFuture
from tinsmith.training.custom_loss import CustomLoss
from tinsmith.training.run_forms import TrainingRun
from tinsmith.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepResponse


@dataclass(frozen=True, slots=True)
class SubmittedStep:
    """The operations of a step, on their way."""

    gradient: OperationFuture[ForwardBackwardOutput]
    update: OperationFuture[OptimStepResponse]


def rate_of(config: TrainingConfig, step: int, *, peak: float, num_steps: int) -> float:
    """Return the learning rate at a step of a phase, counted from the phase's first."""
    return linear_schedule(
        step,
        peak=peak,
        num_steps=num_steps,
        num_warmup_steps=config.num_warmup_steps,
        floor=config.learning_rate_floor,
    )


def submit_data(
    config: TrainingConfig,
    run: TrainingRun,
    data: Sequence[Datum],
    loss: str | CustomLoss,
    learning_rate: float,
) -> SubmittedStep:
    """Send a gradient and an optimizer step.

    Args:
        config: Settings.
        run: What is trained.
        data: The batch.
        loss: Name of a loss of the service, or one that is computed here; that waits for a forward
            pass.
        learning_rate: Of this step.
    """
    gradient = (
        run.forward_backward(data, loss)
        if isinstance(loss, str)
        else run.forward_backward_custom(data, loss)
    )
    adam = AdamParams(learning_rate=learning_rate, grad_clip_norm=config.grad_clip_norm)
    return SubmittedStep(gradient, run.optim_step(adam))
