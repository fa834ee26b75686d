"""Checkpoints that a job names by the job that saves them, `trainingJobs/NAME`.

Such a name stands for the final checkpoint of that job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tinsmith_jobs.spec import JobSpec

_PREFIX = "trainingJobs/"
_PARAMETERS = ("checkpoint", "judge")
"""Of methods: what `evaluate` scores, and the model that scores answers."""


def job_of(given: str) -> str:
    """Return the job whose final checkpoint a text names; empty if it names no job."""
    return given.removeprefix(_PREFIX) if given.startswith(_PREFIX) else ""


def jobs_of(spec: JobSpec) -> tuple[str, ...]:
    """Return the jobs whose final checkpoints a job begins with, serves or scores."""
    return tuple(dict.fromkeys(filter(None, map(job_of, _named(spec)))))


def with_checkpoints(spec: JobSpec, found: Mapping[str, str]) -> JobSpec:
    """Return a spec with the checkpoints that were found in place of the jobs.

    Args:
        spec: What the author wrote.
        found: Resource name of the final checkpoint by name of the job.
    """
    if not found:
        return spec

    def whole(given: str) -> str:
        return found.get(job_of(given), given)

    checkpoint = replace(spec.checkpoint, resume_from=whole(spec.checkpoint.resume_from))
    parameters = {
        name: ",".join(map(whole, _parts(value)))
        if name in _PARAMETERS and any(map(job_of, _parts(value)))
        else value
        for name, value in spec.parameters.items()
    }
    return replace(
        spec,
        checkpoint=checkpoint,
        serve_checkpoint=whole(spec.serve_checkpoint),
        parameters=parameters,
    )


def _named(spec: JobSpec) -> Iterator[str]:
    yield spec.checkpoint.resume_from
    yield spec.serve_checkpoint
    for name in _PARAMETERS:
        yield from _parts(spec.parameters.get(name))


def _parts(value: object) -> list[str]:
    """Return the names in a parameter, which has several with commas; none if it is no text."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else []
