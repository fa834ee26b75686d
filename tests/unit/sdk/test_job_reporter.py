"""Reports of a driver: what the server will never take does not stand in the way of what counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tinsmith.driver.reporter import Reporter
from tinsmith.errors import InvalidArgumentError, TinsmithError
from tinsmith.v1 import job_pb2


class Server:
    """Takes reports without metrics, and states of at most 10 bytes."""

    def __init__(self, diverged: tuple[str, ...] = ()) -> None:
        self.taken: list[job_pb2.ReportTrainingJobRequest] = []
        self.diverged = diverged

    def has_diverged(self, run: str) -> bool:
        if not run:
            raise InvalidArgumentError("no run")
        return run in self.diverged

    def send_report(self, request: job_pb2.ReportTrainingJobRequest) -> None:
        if request.metrics or len(request.state) > 10:
            raise InvalidArgumentError("too much")
        taken = job_pb2.ReportTrainingJobRequest()
        taken.CopyFrom(request)
        self.taken.append(taken)


def make_reporter(server: Server) -> Reporter:
    client: Any = SimpleNamespace(jobs=server)
    return Reporter(client, "projects/p/trainingJobs/j", "uid-1")


def test_a_state_arrives_though_the_metrics_beside_it_are_refused() -> None:
    server = Server()
    reporter = make_reporter(server)
    update = job_pb2.ReportTrainingJobRequest(step=3, metrics={"loss": 1.0}, state=b"here")

    reporter.post(update)
    reporter.close()

    assert [(report.step, report.state) for report in server.taken] == [(3, b"here")]


def test_a_state_that_is_refused_is_an_error_at_once() -> None:
    reporter = make_reporter(Server())
    reporter.post(job_pb2.ReportTrainingJobRequest(state=b"far too long a state"))

    with pytest.raises(TinsmithError, match="too much"):
        reporter.close()


@pytest.mark.parametrize("run", ["lost-its-bits", "sound"])
def test_the_last_report_says_whether_a_replay_of_the_run_diverged(run: str) -> None:
    server = Server(diverged=("lost-its-bits",))
    reporter = make_reporter(server)
    reporter.post(job_pb2.ReportTrainingJobRequest(run=run))
    reporter.flush()

    reporter.post(
        job_pb2.ReportTrainingJobRequest(outcome=job_pb2.TrainingJobReport.OUTCOME_SUCCEEDED)
    )
    reporter.close()

    assert [report.replay_diverged for report in server.taken] == [run == "lost-its-bits"] * 2


def test_a_run_that_cannot_be_asked_holds_up_no_report() -> None:
    server = Server()
    server.has_diverged = _unreachable  # type: ignore[method-assign]
    reporter = make_reporter(server)

    reporter.post(job_pb2.ReportTrainingJobRequest(run="r", step=1))
    reporter.close()

    assert [(report.step, report.replay_diverged) for report in server.taken] == [(1, False)]


def _unreachable(run: str) -> bool:
    raise TinsmithError(f"the trainer of {run} does not answer", reason="UNAVAILABLE")
