"""Faults that are planted in the controller: the random lives find each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
from tests.unit.controller.cluster_in_memory import Connection
from tests.unit.controller.lives import failing_seeds

from tinsmith_controller import assignment_loop, reconciler
from tinsmith_controller.assignment.decide import decide
from tinsmith_controller.assignment.types import Decisions, QueueConfig, Stage
from tinsmith_controller.assignment_snapshot import Snapshot
from tinsmith_controller.kube.api_client import ApiError, Json, Resource
from tinsmith_controller.kube.informer import Informer
from tinsmith_controller.objects.caches import Caches
from tinsmith_controller.objects.conversion import WorkloadRecord
from tinsmith_controller.status_writer import StatusWriter
from tinsmith_jobs.conditions import ENDED, Phase
from tinsmith_jobs.plan import job_plan

Plant = Callable[[pytest.MonkeyPatch], None]
MOST = 300
"""Lives in which a fault has to be found."""


def nothing_is_settled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StatusWriter, "settle_all", lambda self: None)
    patch.setattr(StatusWriter, "settle", lambda self, key: None)


def answers_are_not_noted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Caches, "note", lambda self, resource, content: None)


def holdings_are_read_from_the_spec(patch: pytest.MonkeyPatch) -> None:
    plain = assignment_loop.take_snapshot

    def with_spec(record: WorkloadRecord) -> WorkloadRecord:
        roles = record.content["spec"]["roles"]
        status = record.item.status
        entries = tuple(
            dataclasses.replace(entry, gpus=roles[entry.role].get("gpus", 1))
            if entry.node
            else entry
            for entry in status.assignments
        )
        item = dataclasses.replace(
            record.item, status=dataclasses.replace(status, assignments=entries)
        )
        return dataclasses.replace(record, item=item)

    def take(records: Iterator[WorkloadRecord], *args: object, **more: object) -> object:
        return plain([with_spec(record) for record in records], *args, **more)

    patch.setattr(assignment_loop, "take_snapshot", take)


def a_gang_gets_all_but_one_node(patch: pytest.MonkeyPatch) -> None:
    plain = assignment_loop.decide_and_heal

    def decide(*args: object) -> Decisions:
        decisions = plain(*args)
        assign = {key: given[:-1] for key, given in decisions.assign.items() if len(given) > 3}
        return dataclasses.replace(decisions, assign={**decisions.assign, **assign})

    patch.setattr(assignment_loop, "decide_and_heal", decide)


def nodes_are_given_back_before_pods_end(patch: pytest.MonkeyPatch) -> None:
    plain = job_plan.tear_down
    patch.setattr(
        job_plan,
        "tear_down",
        lambda *args, **more: dataclasses.replace(plain(*args, **more), is_done=True),
    )


def pods_that_are_not_wanted_stay(patch: pytest.MonkeyPatch) -> None:
    plain = job_plan.tear_down
    patch.setattr(
        job_plan,
        "tear_down",
        lambda *args, **more: dataclasses.replace(plain(*args, **more), delete=()),
    )


def a_pod_whose_creation_was_not_answered_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    plain = Connection.get

    def get(self: Connection, resource: Resource, namespace: str, name: str) -> Json:
        if resource.plural == "pods":
            raise ApiError(404, "NotFound", "is not looked for")
        return plain(self, resource, namespace, name)

    patch.setattr(Connection, "get", get)


def deletions_are_not_heard_of(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Informer, "remove", lambda self, content: None)


def what_is_ending_counts_as_free(patch: pytest.MonkeyPatch) -> None:
    plain = assignment_loop.take_snapshot

    def take(*args: object, **more: object) -> Snapshot:
        view = plain(*args, **more)
        staying = tuple(w for w in view.workloads if w.stage is not Stage.RELEASING)
        return dataclasses.replace(view, workloads=staying)

    patch.setattr(assignment_loop, "take_snapshot", take)


def all_pods_go_to_one_node(patch: pytest.MonkeyPatch) -> None:
    plain = assignment_loop.decide_and_heal

    def decide(*args: object) -> Decisions:
        decisions = plain(*args)
        assign = {
            key: tuple(dataclasses.replace(entry, node="n0") for entry in given)
            for key, given in decisions.assign.items()
        }
        return dataclasses.replace(decisions, assign=assign)

    patch.setattr(assignment_loop, "decide_and_heal", decide)


def a_job_is_not_resumed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(job_plan, "ENDED", ENDED | {Phase.SUSPENDED})


def an_invalid_look_ends_a_job(patch: pytest.MonkeyPatch) -> None:
    """As an edit that changes GPUs did while it was not refused."""
    plain = reconciler.plan_job
    patch.setattr(
        reconciler,
        "plan_job",
        lambda job, *more: plain(
            dataclasses.replace(job, spec=None) if job.edit_error else job, *more
        ),
    )


def what_others_took_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(assignment_loop, "decide_and_heal", decide)


def what_is_missing_keeps_no_nodes_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(assignment_loop, "obstacle_of", lambda *args: "")


def quotas_do_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(assignment_loop, "policy_of", lambda policy: QueueConfig())


PLANTED: dict[Plant, int] = {
    nothing_is_settled: 395,
    answers_are_not_noted: 18,
    holdings_are_read_from_the_spec: 9,
    a_gang_gets_all_but_one_node: 0,
    nodes_are_given_back_before_pods_end: 0,
    pods_that_are_not_wanted_stay: 0,
    a_pod_whose_creation_was_not_answered_is_forgotten: 157,
    deletions_are_not_heard_of: 0,
    what_is_ending_counts_as_free: 1,
    all_pods_go_to_one_node: 0,
    a_job_is_not_resumed: 0,
    an_invalid_look_ends_a_job: 9,
    what_others_took_is_waited_for: 246,
    what_is_missing_keeps_no_nodes_back: 0,
    quotas_do_not_count: 6,
}
"""The first life that finds each; it is lived before the others are searched."""


@pytest.mark.parametrize(
    ("plant", "known"), [pytest.param(*each, id=each[0].__name__) for each in PLANTED.items()]
)
def test_a_planted_fault_is_found(
    plant: Plant, known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    assert any(failing_seeds([seed]) for seed in (known, *range(MOST)))
