"""Sends what a driver reports, in the background and about once a second."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from tinsmith.errors import ErrorCode, TinsmithError
from tinsmith.v1 import job_pb2

if TYPE_CHECKING:
    from tinsmith.client import Client

_LOG = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_LOOK_INTERVAL_S = 10.0
"""Between two looks whether a replay of the run diverged: it does so after a trainer was lost."""
_FLUSH_TIMEOUT_S = 300.0
_REFUSED_REASONS = frozenset(
    {"JOB_REPLACED", "KEY_REVOKED", "KEY_EXPIRED", "KEY_INVALID", "ROLE_MISSING"}
)
"""Of a job that was deleted, or ended by another caller."""


class Reporter:
    """Keeps the newest of what was posted, and sends it until it is acknowledged.

    A server that is away for a while costs reports, never the training: what was not sent is merged
    into what comes later.

    Args:
        client: Has the key of the job.
        name: Resource name of the job.
        uid: Tells it from others of the name.
    """

    def __init__(self, client: Client, name: str, uid: str) -> None:
        self._client = client
        self._name = name
        self._uid = uid
        self._changed = threading.Condition()
        self._pending: job_pb2.ReportTrainingJobRequest | None = None
        self._is_sending = False
        self._is_urgent = False
        self._is_closed = False
        self._refused: TinsmithError | None = None
        self._run = ""
        self._look_time_s = -_LOOK_INTERVAL_S
        self._has_diverged = False
        self.step = 0
        """The last step that was posted."""
        self._thread = threading.Thread(target=self._send_all, name="job-report", daemon=True)
        self._thread.start()

    @property
    def is_refused(self) -> bool:
        """Whether the server takes no more reports of this job: it was deleted, or has ended."""
        return self._refused is not None

    def read(self) -> job_pb2.TrainingJobReport:
        """Return what was reported before.

        Raises:
            TinsmithError: If it cannot be read.
        """
        return self._client.jobs.get_report(self._name, self._uid)

    def post(self, update: job_pb2.ReportTrainingJobRequest) -> None:
        """Report something, together with what is not sent yet."""
        with self._changed:
            if update.HasField("step"):
                self.step = update.step
            if self._pending is None:
                self._pending = job_pb2.ReportTrainingJobRequest(name=self._name, uid=self._uid)
            if update.metrics:
                self._pending.metrics.clear()
            self._pending.MergeFrom(update)
            self._changed.notify_all()

    def flush(self) -> None:
        """Return once everything that was posted is acknowledged.

        Raises:
            TinsmithError: If the server refuses it, or cannot be reached for minutes.
        """
        deadline_s = time.monotonic() + _FLUSH_TIMEOUT_S
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            while self._pending is not None or self._is_sending:
                left_s = deadline_s - time.monotonic()
                if self._refused is not None:
                    raise self._refused
                if left_s <= 0:
                    raise TinsmithError(
                        f"reports of {self._name} are not taken", reason="UNAVAILABLE"
                    )
                self._changed.wait(left_s)
            if self._refused is not None:
                raise self._refused

    def close(self) -> None:
        """Send what is left, and end."""
        try:
            self.flush()
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
            self._thread.join(timeout=_INTERVAL_S)

    def _send_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending is not None or self._is_closed)
                if self._pending is None or self._refused is not None:
                    return
                request, self._pending = self._pending, None
                self._is_sending = True
            error = self._send(request)
            with self._changed:
                self._is_sending = False
                if error is not None and error.reason in _REFUSED_REASONS:
                    self._refused = error
                elif error is not None and error.code is ErrorCode.INVALID_ARGUMENT:
                    # Sent again it would be no better. What a job is resumed from must arrive, and
                    # metrics are what a program of the user's gets wrong.
                    if request.metrics:
                        request.metrics.clear()
                        _put_back(self, request)
                    else:
                        self._refused = error
                elif error is not None:
                    _put_back(self, request)
                if self._pending is None:
                    self._is_urgent = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_urgent or self._is_closed, _INTERVAL_S)

    def _send(self, request: job_pb2.ReportTrainingJobRequest) -> TinsmithError | None:
        self._run = request.run or self._run
        self._look_at_run(is_last=bool(request.outcome))
        # Repeated in each report: one that is not taken loses nothing.
        request.replay_diverged = self._has_diverged
        try:
            self._client.jobs.send_report(request)
        except TinsmithError as error:
            _LOG.warning("report not taken", extra={"job": self._name, "error": str(error)})
            return error
        return None

    def _look_at_run(self, *, is_last: bool) -> None:
        """Note whether a replay of the run gave other bits; what cannot be asked comes later."""
        is_due = is_last or time.monotonic() - self._look_time_s >= _LOOK_INTERVAL_S
        if not self._run or self._has_diverged or not is_due:
            return
        self._look_time_s = time.monotonic()
        try:
            self._has_diverged = self._client.jobs.has_diverged(self._run)
        except TinsmithError as error:
            _LOG.info("run not found out about", extra={"run": self._run, "error": str(error)})


def _put_back(reporter: Reporter, request: job_pb2.ReportTrainingJobRequest) -> None:
    """Let what was posted meanwhile win over what was not sent."""
    later = reporter._pending
    if later is not None:
        if later.metrics:
            request.metrics.clear()
        request.MergeFrom(later)
    reporter._pending = request
