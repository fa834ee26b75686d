"""What a job waits for that begins with, serves or scores the final checkpoint of another job.

What was found is kept in the status of the job that waits: the other one may be deleted while it
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tinsmith_jobs.checkpoint_references import jobs_of
from tinsmith_jobs.conditions import ENDED
from tinsmith_jobs.plan.observed import ObservedJob
from tinsmith_jobs.status import Status


def note_found(job: ObservedJob, look_up: Callable[[str], ObservedJob | None]) -> Status:
    """Return the status of a job with the checkpoints of other jobs that are there by now.

    Args:
        job: The job that names others.
        look_up: Returns a job of the same namespace by its name; None if there is none.
    """
    if job.spec is None or job.status.phase in ENDED:
        return job.status
    found = dict(job.status.named_checkpoints)
    for name in jobs_of(job.spec):
        other = look_up(name)
        if name not in found and other is not None and other.status.final is not None:
            found[name] = other.status.final.name
    return replace(job.status, named_checkpoints=found)


def missing_checkpoints(
    job: ObservedJob, look_up: Callable[[str], ObservedJob | None]
) -> Iterator[str]:
    """Yield what a job waits for, of the jobs that it names: what is not in its status yet."""
    if job.spec is None:
        return
    for name in jobs_of(job.spec):
        if name in job.status.named_checkpoints:
            continue
        other = look_up(name)
        if name == job.key.name:
            yield "its own final checkpoint, which is not there before it began; name another job"
        elif other is None:
            yield f"the TrainingJob {name}, which does not exist"
        elif other.status.phase in ENDED and other.status.final is None:
            phase = other.status.phase.value
            yield f"the TrainingJob {name}, which ended as {phase} and left no final checkpoint"
        else:
            yield f"the final checkpoint of the TrainingJob {name}"
