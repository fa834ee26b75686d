"""Events of workloads: what happens again raises the count of the first."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from tests.unit.controller.assignment_cases import NOW, key

from tinsmith_controller.kube.api_client import ApiError, Json, Resource
from tinsmith_controller.objects.events import EventRecorder
from tinsmith_jobs.plan.actions import Event

JOB = key("j")
SAVED = Event("Saved", "it was saved")
LATER = NOW + datetime.timedelta(minutes=1)


class EventServer:
    """The events of an API server.

    Attributes:
        written: By name.
        failure: How the next request ends; None if it is done.
    """

    def __init__(self) -> None:
        self.written: dict[str, Json] = {}
        self.failure: ApiError | None = None

    def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        self._fail()
        name = body["metadata"]["name"]
        if name in self.written:
            raise ApiError(409, "AlreadyExists", "there is one")
        self.written[name] = body
        return body

    def patch(self, resource: Resource, namespace: str, name: str, body: Json) -> Json:
        self._fail()
        if name not in self.written:
            raise ApiError(404, "NotFound", "gone")
        self.written[name] = self.written[name] | body
        return self.written[name]

    def counts(self) -> dict[str, int]:
        """Return how often each message was told."""
        return {body["message"]: body["count"] for body in self.written.values()}

    def _fail(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure


@pytest.fixture
def server() -> EventServer:
    return EventServer()


@pytest.fixture
def recorder(server: EventServer) -> EventRecorder:
    return recorder_of(server)


def recorder_of(server: Any) -> EventRecorder:
    return EventRecorder(server, identity="a")


def test_the_same_event_again_is_counted(recorder: EventRecorder, server: EventServer) -> None:
    for now in (NOW, NOW, LATER):
        recorder.record(JOB, "u", SAVED, now)
    recorder.record(JOB, "u", Event("Failed", "it failed", is_warning=True), NOW)
    recorder.record(JOB, "of another job of this name", SAVED, NOW)

    first, failed, other = server.written.values()
    assert (first["count"], failed["count"], other["count"]) == (3, 1, 1)
    assert (first["type"], failed["type"]) == ("Normal", "Warning")
    assert first["firstTimestamp"] == other["firstTimestamp"] == "2026-01-01T12:00:00Z"
    assert first["lastTimestamp"] == "2026-01-01T12:01:00Z"


def test_an_event_that_another_controller_wrote_is_counted_from_there(
    recorder: EventRecorder, server: EventServer
) -> None:
    recorder.record(JOB, "u", SAVED, NOW)
    second = recorder_of(server)
    second.record(JOB, "u", SAVED, NOW)
    assert server.counts() == {SAVED.message: 1}
    second.record(JOB, "u", SAVED, LATER)
    assert server.counts() == {SAVED.message: 2}


def test_an_event_that_the_cluster_forgot_is_written_anew(
    recorder: EventRecorder, server: EventServer
) -> None:
    recorder.record(JOB, "u", SAVED, NOW)
    server.written.clear()
    for _ in range(3):
        recorder.record(JOB, "u", SAVED, LATER)
    assert server.counts() == {SAVED.message: 2}


def test_an_event_that_cannot_be_written_harms_nothing(
    recorder: EventRecorder, server: EventServer
) -> None:
    recorder.record(JOB, "u", SAVED, NOW)
    server.failure = ApiError(503, "Unavailable", "later")
    recorder.record(JOB, "u", SAVED, NOW)
    recorder.record(JOB, "u", SAVED, NOW)
    assert server.counts() == {SAVED.message: 3}


def test_long_messages_are_cut(recorder: EventRecorder, server: EventServer) -> None:
    recorder.record(JOB, "u", Event("Long", "x" * 2000), NOW)
    assert list(server.counts()) == ["x" * 1024]
