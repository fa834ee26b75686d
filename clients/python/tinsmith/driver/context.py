"""The job that this process is the driver of."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from tinsmith.driver.reporter import Reporter
from tinsmith.driver.waiting import missing_model, wait_for
from tinsmith.errors import ConfigurationError
from tinsmith.types import Checkpoint
from tinsmith.v1 import job_pb2

if TYPE_CHECKING:
    from tinsmith.client import Client

STOPPED_EXIT_CODE = 128 + signal.SIGTERM
"""Of a driver that was told to stop, and saved."""

_MAX_MESSAGE = 1000


@dataclass(frozen=True, slots=True)
class JobEnvironment:
    """What a driver is told about its job, by variables.

    Attributes:
        name: Resource name of the job, `TINSMITH_JOB`.
        uid: Tells it from others of the name, `TINSMITH_JOB_UID`.
        method: What it is to do, as JSON, `TINSMITH_JOB_METHOD`.
    """

    name: str
    uid: str
    method: str

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> JobEnvironment:
        """Return it from the variables of the process.

        Raises:
            ConfigurationError: If the process is not the driver of a job.
        """
        name, uid = environ.get("TINSMITH_JOB", ""), environ.get("TINSMITH_JOB_UID", "")
        if not name or not uid:
            raise ConfigurationError(
                "this process is not the driver of a job: TINSMITH_JOB and TINSMITH_JOB_UID are "
                "not set",
                remedy="submit it with `tinsmith jobs submit`",
            )
        return cls(name, uid, environ.get("TINSMITH_JOB_METHOD", "{}"))


class Job:
    """The job that this process drives.

    Reports are sent in the background, about one a second; the last one always. Those that say that
    something was saved, or how the job ends, are sent before the call returns.

    Args:
        client: Calls with the key of the job.
        environment: Which job.
    """

    def __init__(self, client: Client, environment: JobEnvironment) -> None:
        self._reporter = Reporter(client, environment.name, environment.uid)
        self._stop = threading.Event()
        self._before = self._reporter.read()
        self._client = client
        self._run = self._before.run
        self.name = environment.name
        self.method = environment.method

    @property
    def state(self) -> bytes:
        """What an earlier part of the job kept with `save_state`; empty in the first part."""
        return bytes(self._before.state)

    @property
    def step(self) -> int:
        """Steps that an earlier part of the job reported."""
        return self._before.step

    @property
    def run(self) -> str:
        """Resource name of the run that an earlier part of the job reported."""
        return self._before.run

    @property
    def should_stop(self) -> bool:
        """Whether the job is to save and end: it was told so, or was deleted."""
        return self._stop.is_set() or self._reporter.is_refused

    def report(
        self,
        *,
        step: int | None = None,
        max_steps: int | None = None,
        metrics: Mapping[str, float] | None = None,
        run: str | None = None,
        checkpoint: Checkpoint | str | None = None,
        checkpoint_step: int | None = None,
        state: bytes | None = None,
        message: str | None = None,
    ) -> None:
        """Say how far the job is; what is left out stays as it was.

        Args:
            step: Steps that are done.
            max_steps: Steps in all.
            metrics: Of the last step; `reward` is shown in lists of jobs.
            run: Resource name of the run.
            checkpoint: What was saved last.
            checkpoint_step: Steps that it contains; those that are done, unless told otherwise.
            state: Up to 256 KiB for the next part of the job, which finds them in `state`.
            message: For people.
        """
        self._run = run or self._run
        update = job_pb2.ReportTrainingJobRequest(
            step=step,
            max_steps=max_steps,
            metrics=metrics or {},
            run=run,
            state=state,
            message=message,
        )
        if checkpoint is not None:
            update.checkpoint.name = checkpoint if isinstance(checkpoint, str) else checkpoint.name
            update.checkpoint.step = (
                checkpoint_step if checkpoint_step is not None else self._reporter.step
            )
        self._reporter.post(update)
        # The same step as `run.log_metrics` counts, from 0: what a recipe logged is not doubled.
        if metrics and self._reporter.step > 0 and self._run:
            self._client.runs.log_metrics(self._run, metrics, step=self._reporter.step - 1)
        if checkpoint is not None or state is not None:
            self._reporter.flush()

    def wait_ready(
        self,
        client: Client,
        base_model: str,
        *,
        is_sampled: bool = False,
        timeout_s: float = 1800.0,
    ) -> None:
        """Return once a base model can be trained; the pods of a job start beside its driver.

        Meanwhile the job says what it waits for.

        Args:
            client: Reaches the pods: that of the job, or of one of its agents.
            base_model: What is trained, such as `spec.model.name`.
            is_sampled: Whether a sampler is waited for, too.
            timeout_s: How long to wait.

        Raises:
            UnavailableError: If they are still not there in the end.

        Example:
            >>> job = tinsmith.driver.current()
            >>> job.wait_ready(client, "qwen3-0.6b", is_sampled=True)
        """
        wait_for(
            lambda: missing_model(client, base_model, is_sampled=is_sampled),
            timeout_s=timeout_s,
            say=lambda text: self.report(message=text),
        )
        self.report(message="")

    def save_state(self, state: bytes) -> None:
        """Keep up to 256 KiB for the next part of the job, which finds them in `state`."""
        self.report(state=state)

    def stopped(self) -> int:
        """Say that the job was told to stop and saved; return the exit code that says the same."""
        self.end(job_pb2.TrainingJobReport.OUTCOME_SAVED)
        return STOPPED_EXIT_CODE

    def end(
        self, outcome: job_pb2.TrainingJobReport.Outcome.ValueType, message: str | None = None
    ) -> None:
        """Say how the job ends; the last report."""
        text = None if message is None else message[:_MAX_MESSAGE]
        self._reporter.post(job_pb2.ReportTrainingJobRequest(outcome=outcome, message=text))
        self._reporter.close()

    def request_stop(self) -> None:
        """Have `should_stop` say so."""
        self._stop.set()


_current: Job | None = None


def current(client: Client | None = None) -> Job:
    """Return the job that this process is the driver of.

    From then on SIGTERM sets `should_stop`, and a second one ends the process. Call it in the main
    thread.

    Args:
        client: Has the key of the job; one is opened if it is left out.

    Raises:
        ConfigurationError: If the process is not the driver of a job.
    """
    global _current
    if _current is None:
        # Not above: the client itself is imported together with this module.
        from tinsmith.client import Client

        environment = JobEnvironment.read()
        _current = job = Job(client or Client(display_name=environment.name), environment)

        def stop(number: int, frame: FrameType | None) -> None:
            del number, frame
            if job.should_stop:
                os._exit(STOPPED_EXIT_CODE)
            job.request_stop()

        signal.signal(signal.SIGTERM, stop)
    return _current
