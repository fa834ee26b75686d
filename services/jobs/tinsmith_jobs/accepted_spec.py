"""Which spec of a workload holds: the present one, or the one that was accepted before it.

While a workload holds nodes, `status.acceptedSpec` has the spec that its pods are kept by. An edit
that cannot be run, or that changes what is fixed by then, leaves all as it was and says so. What an
author asks for at any time, to suspend or to cancel, counts in any case.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from tinsmith_jobs.checkpoint_references import jobs_of
from tinsmith_jobs.recipe_check import check_recipe
from tinsmith_jobs.spec import JobSpec, PoolSpec
from tinsmith_jobs.spec_codec import decode_job, decode_pool
from tinsmith_jobs.spec_reader import SpecError

SpecT = TypeVar("SpecT", JobSpec, PoolSpec)

_NUM_KEPT = 4096


@dataclass(frozen=True, slots=True)
class HeldSpec(Generic[SpecT]):
    """The spec that holds.

    Attributes:
        spec: The spec; None if there is none that can be run.
        text: The same as JSON.
        spec_error: Why there is none.
        edit_error: Why it is not the present one.
    """

    spec: SpecT | None
    text: str
    spec_error: str = ""
    edit_error: str = ""


def held_job_spec(
    name: str,
    present: object,
    accepted: str,
    refusal: Callable[[JobSpec], str],
    *,
    has_begun: bool = False,
) -> HeldSpec[JobSpec]:
    """Return the spec of a job that holds.

    Args:
        name: Of the job.
        present: Its spec, as JSON.
        accepted: The spec that was accepted before, as text; empty if it holds no nodes.
        refusal: Says why a spec that can be run is not allowed to, or nothing.
        has_begun: Whether the job has ever held nodes.
    """
    text = _text(present)
    before, _ = _job_of(name, accepted, True, True) if accepted else (None, "")
    is_same = before is not None and text == accepted
    spec, error = (before, "") if is_same else _job_of(name, text, False, has_begun)
    if before is None or refusal(before):
        return HeldSpec(spec, text, spec_error=error)
    problem = error
    if spec is not None:
        problem = changed_while_held(before, spec) or refusal(spec)
    if not problem:
        return HeldSpec(spec, text)
    asked = present if isinstance(present, Mapping) else {}
    is_suspended, is_cancelled = asked.get("suspend") is True, asked.get("cancel") is True
    held = replace(before, suspend=is_suspended, cancel=is_cancelled)
    return HeldSpec(held, accepted, edit_error=problem)


def held_pool_spec(name: str, present: object, accepted: str) -> HeldSpec[PoolSpec]:
    """Return the spec of a pool that holds; see `held_job_spec`."""
    text = _text(present)
    before, _ = _pool_of(name, accepted, True) if accepted else (None, "")
    is_same = before is not None and text == accepted
    spec, error = (before, "") if is_same else _pool_of(name, text, False)
    if spec is not None or before is None:
        return HeldSpec(spec, text, spec_error=error)
    return HeldSpec(before, accepted, edit_error=error)


def changed_while_held(before: JobSpec, after: JobSpec) -> str:
    """Return which change has to wait until a job holds no nodes, in one sentence."""
    fixed: dict[str, tuple[object, object]] = {
        "spec.model": (before.model, after.model),
        "spec.poolRef": (before.pool, after.pool),
        "spec.adapter": (before.adapter, after.adapter),
        "spec.method.type": (before.method, after.method),
        "the job whose checkpoint is named": (jobs_of(before), jobs_of(after)),
    }
    for role in after.roles:
        same = before.role(role.name)
        if same is not None:
            *agent, kind = role.name.split("/")[1:] or [role.name]
            path = f"spec.roles.{kind}" if not agent else f"spec.roles.agents: {kind} of {agent[0]}"
            fixed[f"{path}.gpus"] = (same.gpus, role.gpus)
    changed = [name for name, (old, new) in fixed.items() if old != new]
    if not changed:
        return ""
    return f"{' and '.join(changed)} can change only while the job is suspended"


def _text(spec: object) -> str:
    return json.dumps(spec, sort_keys=True, separators=(",", ":"))


# Each write of a status brings the same spec again.
@functools.lru_cache(maxsize=_NUM_KEPT)
def _job_of(name: str, text: str, is_accepted: bool, has_begun: bool) -> tuple[JobSpec | None, str]:
    def decode(name: str, spec: object) -> JobSpec:
        job = decode_job(name, spec, is_accepted=is_accepted)
        if not is_accepted:
            check_recipe(job, has_begun=has_begun)
        return job

    return _decoded(decode, name, text)


@functools.lru_cache(maxsize=_NUM_KEPT)
def _pool_of(name: str, text: str, is_accepted: bool) -> tuple[PoolSpec | None, str]:
    return _decoded(functools.partial(decode_pool, is_accepted=is_accepted), name, text)


def _decoded(decode: Callable[[str, Any], SpecT], name: str, text: str) -> tuple[SpecT | None, str]:
    try:
        return decode(name, json.loads(text)), ""
    except (SpecError, json.JSONDecodeError) as error:
        return None, str(error)
