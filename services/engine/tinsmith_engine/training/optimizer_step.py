"""One AdamW step of one run, taken back if a number of the run would not stay finite."""

from __future__ import annotations

import math

from tinsmith_engine.arena.adam import SlotBound, SlotStep, adamw_
from tinsmith_engine.base.types import AdamParams
from tinsmith_engine.runs.run_store import Run
from tinsmith_engine.training.batch_execution import is_all_finite

# Far from the largest float32, 3.4e38.
_SAFE = 1e36


def apply_step(run: Run, params: AdamParams, norm: float) -> bool:
    """Apply one AdamW step with the gradient in the run's slot.

    Args:
        run: What is changed.
        params: Hyper-parameters, valid.
        norm: Of the gradient, finite.

    Returns:
        Whether it was applied. It is not if a number would not stay finite; the run is as it was
        then.
    """
    slot = run.slot
    one = SlotStep(slot, run.adam_steps + 1, params, norm)
    bound = run.slot_bound
    if not (math.isfinite(bound.largest) and math.isfinite(bound.moment_ratio)):
        bound = SlotBound.of(slot)
    # Squares of a finite norm are finite, so the moments stay finite as well.
    after = bound.after(params)
    if after.largest < _SAFE:
        adamw_([one])
        run.note_step(after)
        return True
    changed = (slot.theta_P, slot.m_P, slot.v_P)
    before = [numbers_P.clone() for numbers_P in changed]
    adamw_([one])
    if all(is_all_finite(numbers_P) for numbers_P in changed):
        run.note_new_theta()
        return True
    for numbers_P, old_P in zip(changed, before, strict=True):
        numbers_P.copy_(old_P)
    return False
