"""`TINSMITH_JOB_METHOD`: what a driver is to do, as JSON.

Every value that has a default is written out, so that the driver needs no defaults of its own.
"""

from __future__ import annotations

import json
from typing import Any

from tinsmith_jobs.spec import JobSpec


def describe_method(spec: JobSpec, *, model: str, data: str) -> str:
    """Return the description that `tinsmith.driver` reads.

    Args:
        spec: Of the job.
        model: Name of the base model, which may be that of a pool; empty if none is known.
        data: Path or name of what the recipe trains on; empty if the recipe brings its own.
    """
    method: dict[str, Any] = {
        "type": spec.method.value,
        "parameters": dict(spec.parameters),
        "adapter": {"type": spec.adapter_type, "rank": spec.rank},
        "checkpoint": {
            "everySteps": spec.checkpoint.every_steps,
            "keepLast": spec.checkpoint.keep_last,
            "finalName": spec.checkpoint.final_name,
        },
    }
    if spec.max_steps is not None:
        method["maxSteps"] = spec.max_steps
    if spec.checkpoint.resume_from:
        method["checkpoint"]["resumeFrom"] = spec.checkpoint.resume_from
    if model:
        method["model"] = model
    if data:
        method["data"] = data
    return json.dumps(method, sort_keys=True)
