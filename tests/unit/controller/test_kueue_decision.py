"""What is done about a job and its Workload, state by state."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tinsmith_controller.kueue.decision import Action, QueuedJob, WorkloadView, decide

WAITS = QueuedJob()
WANTS = QueuedJob(is_suspended=False)
RUNS = QueuedJob(is_suspended=False, is_active=True)
STOPS = QueuedJob(is_active=True)
ENDED = QueuedJob(is_suspended=False, has_ended=True)
PENDING = WorkloadView()
RESERVED = WorkloadView(has_quota=True)
ADMITTED = WorkloadView(has_quota=True, is_admitted=True)
EVICTED = WorkloadView(has_quota=True, is_evicted=True)
REQUEUED = WorkloadView(is_evicted=True)
FINISHED = WorkloadView(is_finished=True)
CHANGED = WorkloadView(is_current=False)


@pytest.mark.parametrize(
    ("job", "workload", "action"),
    [
        pytest.param(WANTS, None, Action.SUSPEND, id="new-job-that-was-not-suspended"),
        pytest.param(WAITS, None, Action.CREATE, id="suspended-job-without-a-workload"),
        pytest.param(STOPS, None, Action.NONE, id="what-runs-ends-before-it-is-queued-again"),
        pytest.param(RUNS, None, Action.SUSPEND, id="workload-was-deleted"),
        pytest.param(WAITS, PENDING, Action.NONE, id="pending"),
        pytest.param(WANTS, PENDING, Action.SUSPEND, id="resumed-by-its-author-before-kueue"),
        pytest.param(WAITS, RESERVED, Action.NONE, id="quota-without-admission-checks"),
        pytest.param(WANTS, RESERVED, Action.SUSPEND, id="resumed-with-quota-alone"),
        pytest.param(WAITS, ADMITTED, Action.RESUME, id="admitted"),
        pytest.param(RUNS, ADMITTED, Action.REPORT, id="runs"),
        pytest.param(STOPS, ADMITTED, Action.RESUME, id="suspended-by-its-author-while-admitted"),
        pytest.param(RUNS, EVICTED, Action.SUSPEND, id="evicted"),
        pytest.param(STOPS, EVICTED, Action.NONE, id="evicted-and-saving"),
        pytest.param(WAITS, EVICTED, Action.RELEASE, id="evicted-and-gone"),
        pytest.param(WAITS, REQUEUED, Action.NONE, id="evicted-and-queued-again"),
        pytest.param(
            RUNS,
            dataclasses.replace(ADMITTED, counts_right=False, is_current=False),
            Action.SUSPEND,
            id="another-size-while-it-runs",
        ),
        pytest.param(
            RUNS,
            dataclasses.replace(ADMITTED, is_current=False),
            Action.REPORT,
            id="other-node-rules-while-it-runs",
        ),
        pytest.param(WAITS, CHANGED, Action.UPDATE, id="changed-before-it-was-admitted"),
        pytest.param(
            WAITS,
            dataclasses.replace(ADMITTED, is_current=False),
            Action.DELETE,
            id="changed-after-quota-was-reserved",
        ),
        pytest.param(
            STOPS,
            dataclasses.replace(ADMITTED, is_current=False),
            Action.NONE,
            id="changed-stopping",
        ),
        pytest.param(
            WAITS,
            dataclasses.replace(PENDING, has_priority=False),
            Action.UPDATE,
            id="another-priority",
        ),
        pytest.param(
            RUNS,
            dataclasses.replace(ADMITTED, has_priority=False),
            Action.REPORT,
            id="another-priority-while-it-runs",
        ),
        pytest.param(ENDED, ADMITTED, Action.FINISH, id="ended"),
        pytest.param(
            dataclasses.replace(ENDED, is_active=True), ADMITTED, Action.NONE, id="pods-still-end"
        ),
        pytest.param(ENDED, FINISHED, Action.NONE, id="ended-and-told"),
        pytest.param(ENDED, None, Action.NONE, id="ended-without-a-workload"),
        pytest.param(WANTS, FINISHED, Action.SUSPEND, id="tried-again-after-its-end"),
        pytest.param(WAITS, FINISHED, Action.DELETE, id="tried-again-and-suspended"),
        pytest.param(
            dataclasses.replace(WANTS, is_cancelled=True), PENDING, Action.NONE, id="cancelled"
        ),
        pytest.param(
            WAITS, dataclasses.replace(PENDING, is_deleting=True), Action.NONE, id="being-deleted"
        ),
        pytest.param(
            RUNS, dataclasses.replace(ADMITTED, is_deleting=True), Action.SUSPEND, id="deleted-runs"
        ),
        pytest.param(
            dataclasses.replace(WAITS, has_queue=False), PENDING, Action.DELETE, id="label-dropped"
        ),
        pytest.param(
            dataclasses.replace(RUNS, has_queue=False), ADMITTED, Action.NONE, id="label-of-a-run"
        ),
        pytest.param(
            dataclasses.replace(RUNS, has_queue=False), EVICTED, Action.SUSPEND, id="still-obeys"
        ),
        pytest.param(
            WAITS,
            dataclasses.replace(EVICTED, is_current=False),
            Action.RELEASE,
            id="edited-while-it-was-stopped",
        ),
        pytest.param(
            WAITS,
            dataclasses.replace(REQUEUED, has_priority=False),
            Action.UPDATE,
            id="another-priority-after-an-eviction",
        ),
        pytest.param(
            dataclasses.replace(RUNS, has_queue=False), None, Action.NONE, id="no-label-at-all"
        ),
    ],
)
def test_the_next_write(job: QueuedJob, workload: WorkloadView | None, action: Action) -> None:
    assert decide(job, workload) is action


def _all_of(kind: type[Any]) -> Iterator[Any]:
    names = [field.name for field in dataclasses.fields(kind)]
    for values in itertools.product((False, True), repeat=len(names)):
        yield kind(**dict(zip(names, values, strict=True)))


def test_what_holds_in_every_state() -> None:
    for job, workload in itertools.product(_all_of(QueuedJob), [None, *_all_of(WorkloadView)]):
        action = decide(job, workload)
        is_live = job.has_queue and not job.has_ended and not job.is_cancelled
        may_run = (
            workload is not None
            and workload.is_admitted
            and not (workload.is_evicted or workload.is_finished or workload.is_deleting)
        )
        if is_live and not job.is_suspended and not may_run:
            assert action is Action.SUSPEND
        if action is Action.RESUME:
            assert may_run
            assert workload.is_current
        if action in (Action.RELEASE, Action.FINISH, Action.CREATE, Action.UPDATE):
            assert not job.is_active or not workload.is_current or not workload.has_priority
        if action is Action.DELETE and job.has_queue:
            assert not job.is_active
        if action in (Action.CREATE, Action.NONE, Action.SUSPEND):
            continue
        assert workload is not None
