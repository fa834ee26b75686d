"""Metrics on their way to the server: sent once, kept while it is away, never in the way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from tests.support.wait import until

from tinsmith.errors import NotFoundError, TinsmithError, UnavailableError
from tinsmith.rpc.event_loop_thread import BackgroundLoop
from tinsmith.rpc.metric_log import MetricLog
from tinsmith.rpc.transport import Endpoint, Transport
from tinsmith.v1 import run_metrics_pb2

RUN = "projects/p/trainingRuns/r"


class Server:
    """Takes records, or answers with an error."""

    def __init__(self) -> None:
        self.error: TinsmithError | None = None
        self.num_calls = 0
        self.values: dict[tuple[str, int, str], float] = {}

    async def call_once(
        self, endpoint: Endpoint, method: Callable[..., Any], request: Any, *, timeout_s: float
    ) -> run_metrics_pb2.RecordRunMetricsResponse:
        self.num_calls += 1
        if self.error is not None:
            raise self.error
        for record in request.records:
            for name, value in record.metrics.items():
                self.values[request.run, record.step, name] = value
        return run_metrics_pb2.RecordRunMetricsResponse(revision=1)


class Rig:
    def __init__(self) -> None:
        self.server = Server()
        self.background = BackgroundLoop()
        transport = cast(Transport, self.server)
        self.log = MetricLog(self.background, transport, Endpoint("nowhere:1"))

    def close(self) -> None:
        self.background.call(self.log.close(1.0))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.background.close()


def test_what_is_logged_arrives_together_in_the_background(rig: Rig) -> None:
    for step in range(3):
        rig.log.add(RUN, {"loss": float(step)}, step)
    rig.log.add(RUN, {"reward": 1}, 2)
    until(lambda: len(rig.server.values) == 4)
    assert rig.server.values[RUN, 2, "loss"] == 2.0
    assert rig.server.num_calls == 1


def test_the_end_sends_what_is_left(rig: Rig) -> None:
    rig.log.add(RUN, {"loss": 1.0}, 0)
    rig.close()
    assert rig.server.values == {(RUN, 0, "loss"): 1.0}


def test_a_server_that_is_away_costs_nothing(rig: Rig) -> None:
    rig.server.error = UnavailableError("away")
    rig.log.add(RUN, {"loss": 1.0, "old": 1.0}, 0)
    until(lambda: rig.server.num_calls > 0)
    # What is logged later wins.
    rig.log.add(RUN, {"loss": 2.0}, 0)
    rig.server.error = None
    rig.close()
    assert rig.server.values == {(RUN, 0, "loss"): 2.0, (RUN, 0, "old"): 1.0}


def test_a_refusal_is_told_once_and_drops(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.server.error = NotFoundError("no such run")
    with caplog.at_level(logging.WARNING):
        for step in range(2):
            rig.log.add(RUN, {"loss": 1.0}, step)
            until(lambda step=step: rig.server.num_calls > step)  # type: ignore[misc]
        rig.server.error = None
        rig.close()
    assert not rig.server.values
    assert len([each for each in caplog.records if "no such run" in each.message]) == 1


def test_an_end_without_a_server_is_told(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.server.error = UnavailableError("away")
    rig.log.add(RUN, {"loss": 1.0}, 0)
    with caplog.at_level(logging.WARNING):
        rig.close()
    assert "in time" in caplog.text


@pytest.mark.parametrize(
    ("metrics", "step"),
    [
        ({"": 1.0}, 0),
        ({"ä": 1.0}, 0),
        ({"trainer/loss": 1.0}, 0),
        ({"a": "high"}, 0),
        ({"a": None}, 0),
        ({"a": 1.0}, -1),
    ],
    ids=["empty", "no-ascii", "of-trainer", "text", "none", "negative"],
)
def test_a_mistake_is_a_warning_and_keeps_the_rest(
    rig: Rig, caplog: pytest.LogCaptureFixture, metrics: dict[str, Any], step: int
) -> None:
    with caplog.at_level(logging.WARNING):
        rig.log.add(RUN, {**metrics, "good": 1.0}, step)
        rig.log.add(RUN, metrics, step)
        rig.close()
    expected = {} if step < 0 else {(RUN, step, "good"): 1.0}
    assert rig.server.values == expected
    assert len(caplog.records) == 1


def test_a_closed_client_takes_nothing_and_says_nothing(rig: Rig) -> None:
    rig.close()
    rig.background.close()
    rig.log.add(RUN, {"loss": 1.0}, 0)


def test_a_cancelled_send_loses_nothing(rig: Rig) -> None:
    class Stuck(Server):
        async def call_once(self, *args: Any, **named: Any) -> Any:
            self.num_calls += 1
            await asyncio.Event().wait()

    stuck = Stuck()
    log = MetricLog(rig.background, cast(Transport, stuck), Endpoint("nowhere:1"))
    log.add(RUN, {"loss": 1.0}, 0)
    until(lambda: stuck.num_calls > 0)
    stuck.call_once = rig.server.call_once  # type: ignore[method-assign]
    rig.background.call(log.close(1.0))
    assert rig.server.values == {(RUN, 0, "loss"): 1.0}
