"""What a job waits for in Kueue's queue, in one sentence."""

from __future__ import annotations

from tinsmith_controller.kueue.conditions import EVICTED, QUOTA_RESERVED
from tinsmith_controller.kueue.workload_record import KueueWorkload

NOT_SERVED = (
    "waits for Kueue, whose resources this cluster does not serve: install Kueue 0.15 or later, or "
    "set controller.settings.kueue to false"
)
NOT_READ = "waits for Kueue, whose resources cannot be read: the log of the controller says why"


def waiting_sentence(queue: str, workload: KueueWorkload | None) -> str:
    """Return what a job waits for that is not admitted.

    Args:
        queue: The LocalQueue that it names.
        workload: Its Workload; None if there is none yet.
    """
    goal = f"Kueue to admit it to {queue}"
    if workload is None or workload.is_deleting:
        return f"waits for {goal}"
    if not workload.is_active:
        return (
            f"its Workload {workload.name} is deactivated, so Kueue does not admit it to {queue}: "
            "set spec.active of the Workload to true"
        )
    if workload.has_quota and not workload.is_evicted:
        checks = "; ".join(workload.pending_checks) or "quota is reserved"
        return f"waits for {goal}: {checks}"
    reserved = workload.conditions.get(QUOTA_RESERVED)
    message = reserved.message if reserved is not None and not reserved.is_true else ""
    evicted = workload.conditions.get(EVICTED)
    if evicted is not None and evicted.is_true:
        message = f"it was evicted ({evicted.reason}): {message or evicted.message}"
    return f"waits for {goal}: {message}" if message else f"waits for {goal}"
