"""The pod that answers a native call is decided on its service and the name in field 1."""

from __future__ import annotations

import pytest

from tinsmith.names import worker_tag
from tinsmith_gateway.proxy.proxied_methods import METHODS
from tinsmith_gateway.upstream.routing import (
    CHECKPOINT_SERVICE,
    ENVIRONMENT_SERVICE,
    SCHEDULER_SERVICE,
    AnyOf,
    InstanceOwner,
    Owner,
    RoleWorker,
    RunOwner,
    SchedulerOwner,
    choose_worker,
    owner_of,
)

RUN = "projects/p/trainingRuns/r"


@pytest.mark.parametrize(
    ("method", "resource", "owner"),
    [
        pytest.param(
            "PublishCheckpoint",
            f"{RUN}/checkpoints/c",
            RunOwner(RUN, f"{RUN}/checkpoints/c"),
            id="checkpoint",
        ),
        pytest.param("ListCheckpoints", RUN, RunOwner(RUN, is_any_on_ledger=True), id="list"),
        pytest.param("CreateCheckpointUpload", RUN, RunOwner(RUN), id="run"),
        pytest.param("ListCheckpoints", "projects/p/trainingRuns/-", AnyOf("trainer"), id="runs"),
        pytest.param("ListCheckpointEvents", "projects/p", AnyOf("trainer"), id="project"),
    ],
)
def test_a_call_about_checkpoints_goes_to_a_trainer_that_can_answer(
    method: str, resource: str, owner: Owner
) -> None:
    assert METHODS[f"/{CHECKPOINT_SERVICE}/{method}"].is_named
    assert owner_of(CHECKPOINT_SERVICE, method, resource) == owner


def test_events_of_sessions_are_the_schedulers() -> None:
    assert METHODS[f"/{SCHEDULER_SERVICE}/ListAuditEvents"].is_named
    assert owner_of(SCHEDULER_SERVICE, "ListAuditEvents", "projects/p") == SchedulerOwner()


def test_a_bound_caller_is_served_by_its_pool() -> None:
    shared = RoleWorker("workers/a", "a:1")
    pooled = RoleWorker("workers/b", "b:1", pool="p")
    dedicated = RoleWorker("workers/0", "0:1", project="x")
    everybody = [dedicated, pooled, shared]
    for role in ("trainer", "sampler", "environment", "coordinator"):
        assert choose_worker(AnyOf(role), everybody) == "a:1"
        assert choose_worker(AnyOf(role, "p"), everybody) == "b:1"
    assert choose_worker(AnyOf("environment", "q"), everybody) == "a:1"
    assert choose_worker(AnyOf("trainer", "q"), everybody) == ""
    assert choose_worker(AnyOf("trainer"), [pooled]) == "", "a trainer of another's job"
    assert choose_worker(AnyOf("sampler"), [pooled, dedicated]) == ""


@pytest.mark.parametrize("role", ["environment", "coordinator"])
def test_an_agent_of_a_job_comes_to_what_its_job_has(role: str) -> None:
    of_job = RoleWorker("b", "b:1", pool="duel.12")
    shared = RoleWorker("a", "a:1")
    agent = AnyOf(role, "duel.12.black")
    assert choose_worker(agent, [shared, of_job]) == "b:1"
    assert choose_worker(agent, [shared]) == "a:1"
    assert choose_worker(AnyOf("sampler", "duel.12.black"), [of_job]) == "", "no other's weights"


def test_an_instance_is_found_at_the_environment_that_made_it() -> None:
    workers = [RoleWorker(f"workers/environment-{n}", f"e:{n}") for n in range(3)]
    parent = "projects/p/environments/math"
    for worker in workers:
        name = f"{parent}/instances/{worker_tag(worker.name)}-0123456789ab"
        owner = owner_of(ENVIRONMENT_SERVICE, "StepInstance", name)
        assert isinstance(owner, InstanceOwner)
        assert choose_worker(owner, workers) == worker.address
        # Another one says that it is gone.
        others = [each for each in workers if each is not worker]
        assert choose_worker(owner, others) in {each.address for each in others}
    creations = [
        owner_of(ENVIRONMENT_SERVICE, "CreateInstance", parent, spread=str(n)) for n in range(60)
    ]
    chosen = [choose_worker(each, workers) for each in creations if isinstance(each, AnyOf)]
    assert set(chosen) == {"e:0", "e:1", "e:2"}
    assert METHODS[f"/{ENVIRONMENT_SERVICE}/CreateInstance"].is_spread
