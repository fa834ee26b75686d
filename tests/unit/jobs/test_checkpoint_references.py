"""Checkpoints that are named by the job that saves them."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import pytest

from tinsmith_jobs.accepted_spec import changed_while_held
from tinsmith_jobs.checkpoint_references import jobs_of, with_checkpoints
from tinsmith_jobs.conditions import Phase
from tinsmith_jobs.naming import JOB_KIND, NamespacedName
from tinsmith_jobs.plan.named_checkpoints import missing_checkpoints, note_found
from tinsmith_jobs.plan.observed import ObservedJob
from tinsmith_jobs.plan.retry_policy import begun_anew
from tinsmith_jobs.recipe_check import check_recipe
from tinsmith_jobs.spec_codec import decode_job
from tinsmith_jobs.spec_reader import SpecError
from tinsmith_jobs.status import Saved, Status
from tinsmith_jobs.status_codec import decode_status, encode_status

SAVED = "projects/p/trainingRuns/r/checkpoints/final"
SAMPLER = {"sampler": {"gpus": 1}}
MODEL = {"name": "tiny", "source": "pvc://models/tiny"}


def spec_of(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "roles": {"trainer": {"gpus": 1}}, **fields}


RESUMED = spec_of(method={"type": "supervised"}, checkpoint={"resumeFrom": "trainingJobs/first"})
SERVED = spec_of(
    method={"type": "serve"}, serve={"checkpoint": "trainingJobs/first"}, roles=SAMPLER
)
SCORED = spec_of(
    method={
        "type": "evaluate",
        "parameters": {
            "base_model": "tiny",
            "checkpoint": f"trainingJobs/first, {SAVED},trainingJobs/second",
        },
    },
    roles=SAMPLER,
)


def job(name: str, spec: Mapping[str, Any], **status: Any) -> ObservedJob:
    return ObservedJob(
        key=NamespacedName(JOB_KIND, "team", name),
        uid=name,
        generation=1,
        created=datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        spec=decode_job(name, dict(spec)),
        spec_error="",
        status=Status(**status),
    )


@pytest.mark.parametrize(
    ("spec", "jobs"),
    [(RESUMED, ("first",)), (SERVED, ("first",)), (SCORED, ("first", "second"))],
)
def test_a_spec_names_jobs_where_it_takes_a_checkpoint(
    spec: dict[str, Any], jobs: tuple[str, ...]
) -> None:
    decoded = decode_job("job", spec)
    check_recipe(decoded)

    assert jobs_of(decoded) == jobs
    assert not jobs_of(with_checkpoints(decoded, dict.fromkeys(jobs, SAVED)))


def test_the_checkpoints_take_the_place_of_the_jobs() -> None:
    found = {"first": "a", "second": "b"}
    assert with_checkpoints(decode_job("job", RESUMED), found).checkpoint.resume_from == "a"
    assert with_checkpoints(decode_job("job", SERVED), found).serve_checkpoint == "a"
    scored = with_checkpoints(decode_job("job", SCORED), found)
    assert scored.parameters["checkpoint"] == f"a,{SAVED},b"


def test_what_names_neither_a_checkpoint_nor_a_job_is_refused() -> None:
    spec = spec_of(
        method={"type": "supervised"}, checkpoint={"resumeFrom": "trainingJobs/No_Name/x"}
    )
    with pytest.raises(SpecError, match="or trainingJobs/NAME for the final one of a job"):
        check_recipe(decode_job("job", spec))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (None, "the TrainingJob first, which does not exist"),
        (job("first", RESUMED), "the final checkpoint of the TrainingJob first"),
        (
            job("first", RESUMED, phase=Phase.FAILED),
            "the TrainingJob first, which ended as Failed and left no final checkpoint",
        ),
    ],
)
def test_what_a_job_waits_for_is_said(other: ObservedJob | None, says: str) -> None:
    waiting = job("second", RESUMED)
    assert list(missing_checkpoints(waiting, lambda _: other)) == [says]
    assert not note_found(waiting, lambda _: other).named_checkpoints


def test_what_was_found_is_kept_by_a_job_that_is_tried_again() -> None:
    status = Status(named_checkpoints={"first": SAVED}, phase=Phase.FAILED)
    assert begun_anew(status, 2).named_checkpoints == {"first": SAVED}


def test_a_running_job_names_no_other_job() -> None:
    before, after = decode_job("job", SERVED), decode_job("job", {**SERVED, "serve": {}})
    assert "only while the job is suspended" in changed_while_held(before, after)


def test_parameters_that_name_no_job_stay_as_they_are() -> None:
    method = {"type": "custom", "parameters": {"checkpoint": ["a", "b"], "judge": "a, b"}}
    template = {"command": ["python", "loop.py"]}
    roles = {"trainer": {"gpus": 1}, "driver": {"template": template}}
    spec = decode_job("job", spec_of(method=method, roles=roles))
    assert with_checkpoints(spec, {"first": SAVED}) == spec


def test_a_job_that_names_itself_is_told_so() -> None:
    waiting = job("first", RESUMED)
    [said] = missing_checkpoints(waiting, lambda _: waiting)
    assert said.endswith("name another job")


def test_what_was_found_is_kept_though_the_other_job_is_deleted() -> None:
    first = job("first", RESUMED, phase=Phase.SUCCEEDED, final=Saved(SAVED, 3))
    waiting = job("second", RESUMED)
    assert list(missing_checkpoints(waiting, lambda _: first))  # not in its status yet

    status = decode_status(encode_status(note_found(waiting, lambda _: first)))
    later = job("second", RESUMED, named_checkpoints=status.named_checkpoints)

    assert status.named_checkpoints == {"first": SAVED}
    assert not list(missing_checkpoints(later, lambda _: None))
    assert note_found(later, lambda _: None).named_checkpoints == {"first": SAVED}
