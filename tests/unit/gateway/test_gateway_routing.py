"""Who answers a native call is decided on its service and the name in field 1."""

from __future__ import annotations

import pytest

from tinsmith_gateway.methods import METHODS
from tinsmith_gateway.routing import (
    SCHEDULER_SERVICE,
    TRAINER_SERVICE,
    AnyOf,
    Owner,
    RunOwner,
    SchedulerOwner,
    owner_of,
)

RUN = "projects/p/trainingRuns/r"


@pytest.mark.parametrize(
    ("method", "resource", "owner"),
    [
        pytest.param("PublishCheckpoint", f"{RUN}/checkpoints/c", RunOwner(RUN), id="checkpoint"),
        pytest.param("ListCheckpoints", RUN, RunOwner(RUN), id="run"),
        pytest.param("ListCheckpoints", "projects/p/trainingRuns/-", AnyOf("trainer"), id="runs"),
        pytest.param("ListCheckpointEvents", "projects/p", AnyOf("trainer"), id="project"),
    ],
)
def test_a_call_about_checkpoints_goes_to_a_trainer_that_can_answer(
    method: str, resource: str, owner: Owner
) -> None:
    assert METHODS[f"/{TRAINER_SERVICE}/{method}"].is_named
    assert owner_of(TRAINER_SERVICE, resource) == owner


def test_events_of_sessions_are_the_schedulers() -> None:
    assert METHODS[f"/{SCHEDULER_SERVICE}/ListAuditEvents"].is_named
    assert owner_of(SCHEDULER_SERVICE, "projects/p") == SchedulerOwner()
