"""AdamW on the parts of a full-parameter run: torch's fused kernel, as for a row (`adam.py`).

Each rank steps its own parts. Two things need all parts: the norm for clipping, and whether
everything stays finite. They are added or compared over the ranks in their order, so that all
ranks get the same numbers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tinsmith_engine.arena.adam import SlotBound, clip_factor
from tinsmith_engine.arena.slots import Slot
from tinsmith_engine.base.types import AdamParams
from tinsmith_engine.distributed.fsdp_module import ShardedModule
from tinsmith_engine.distributed.process_group import Ranks

# Far from the largest float32, 3.4e38; as in `engine`.
_SAFE = 1e36


@dataclass(slots=True)
class FullRun:
    """One run in memory: this rank's parts, and what all ranks know of it."""

    module: ShardedModule
    m: dict[str, DTensor]
    v: dict[str, DTensor]
    version: int = 0
    adam_steps: int = 0
    has_gradient: bool = False
    bound: SlotBound = field(default_factory=SlotBound.unknown)


def full_grad_norm(run: FullRun, ranks: Ranks) -> float:
    """Return the L2 norm of a run's gradient; infinite or NaN if the gradient is."""
    parts = run.module.locals_of(run.module.gradients)
    norms = [float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in parts]
    return math.sqrt(sum(_of_each(sum(norm * norm for norm in norms), ranks)))


def full_step(run: FullRun, params: AdamParams, grad_norm: float, ranks: Ranks) -> bool:
    """Apply a step; if the numbers would not stay finite, leave them and return False."""
    module = run.module
    parts = [module.locals_of(tensors) for tensors in (module.parameters, run.m, run.v)]
    bound = run.bound
    if not (math.isfinite(bound.largest) and math.isfinite(bound.moment_ratio)):
        bound = _look(parts, ranks)
    after = bound.after(params)
    changed = [part for kind in parts for part in kind]
    before = None if after.largest < _SAFE else [part.clone() for part in changed]
    _adamw(run, params, grad_norm, parts)
    if before is None:
        run.bound = after
        return True
    run.bound = SlotBound.unknown()
    is_finite = all(bool(torch.isfinite(part).all()) for part in changed)
    if all(_of_each(float(is_finite), ranks)):
        return True
    for part, old in zip(changed, before, strict=True):
        part.copy_(old)
    return False


def _adamw(
    run: FullRun, params: AdamParams, grad_norm: float, parts: Sequence[list[Tensor]]
) -> None:
    theta, m, v = parts
    gradients = run.module.locals_of(run.module.gradients)
    factor = clip_factor(grad_norm, params.grad_clip_norm)
    if factor != 1.0:
        torch._foreach_mul_(gradients, factor)
    torch._fused_adamw_(
        theta,
        gradients,
        m,
        v,
        [],
        [torch.tensor(float(run.adam_steps + 1), device=part.device) for part in theta],
        lr=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        weight_decay=params.weight_decay,
        eps=params.eps,
        amsgrad=False,
        maximize=False,
    )


def _look(parts: Sequence[Sequence[Tensor]], ranks: Ranks) -> SlotBound:
    """Return the bound of all parts of all ranks, by looking at them."""
    found = [
        SlotBound.of(Slot(0, theta.view(-1), theta.view(-1), m.view(-1), v.view(-1)))
        for theta, m, v in zip(*parts, strict=True)
    ]
    largest = max((one.largest for one in found), default=0.0)
    ratio = max((one.moment_ratio for one in found), default=0.0)
    return SlotBound(max(_of_each(largest, ranks)), max(_of_each(ratio, ranks)))


def _of_each(value: float, ranks: Ranks) -> list[float]:
    """Return the value of each rank."""
    found = ranks.all_gather(struct.pack("<d", value), "value")
    return [float(struct.unpack("<d", one)[0]) for one in found]
