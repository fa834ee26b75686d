"""Metrics of runs on their way to the server: kept, sent in the background, given up in the end.

A training never waits for its metrics and never fails by them. What cannot be recorded is told once
by a warning and left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from tinsmith.errors import ClientClosedError, ErrorCode, TinsmithError
from tinsmith.rpc.event_loop_thread import BackgroundLoop
from tinsmith.rpc.transport import Endpoint, Transport
from tinsmith.v1 import run_metrics_pb2

_LOG = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_MAX_PAUSE_S = 30.0
_CALL_TIMEOUT_S = 10.0
_VALUES_AT_ONCE = 5_000
_MAX_VALUES = 200_000
"""Values that wait for the server; beyond these the oldest steps are given up."""
_MAX_STEP = 2**48
_NAME = re.compile(r"[\x20-\x7e]{1,128}")
_RESERVED = "trainer/"
_PASSING = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.CANCELLED})

StepKey = tuple[str, int]
"""A run and a step."""


@dataclass(slots=True)
class _Step:
    metrics: dict[str, float] = field(default_factory=dict)
    time_s: float = field(default_factory=time.time)


class MetricLog:
    """Sends metrics of the runs of a client, about once a second."""

    def __init__(
        self, background: BackgroundLoop, transport: Transport, scheduler: Endpoint
    ) -> None:
        self._background = background
        self._transport = transport
        self._scheduler = scheduler
        self._waiting: dict[StepKey, _Step] = {}
        self._num_values = 0
        self._sender: asyncio.Task[None] | None = None
        self._told: set[str] = set()

    def add(self, run: str, metrics: Mapping[str, float], step: int) -> None:
        """Take metrics of a step; returns at once and raises nothing. Call it from any thread."""
        if not 0 <= step <= _MAX_STEP:
            self._tell(run, f"step {step} is not 0 to {_MAX_STEP}")
            return
        checked = {}
        for name, value in metrics.items():
            if _NAME.fullmatch(str(name)) is None or str(name).startswith(_RESERVED):
                self._tell(
                    run,
                    f"{str(name)!r:.140} is no name of a metric: give 1 to 128 printable ASCII "
                    f"characters that do not begin with {_RESERVED}",
                )
                continue
            try:
                checked[str(name)] = float(value)
            except (TypeError, ValueError):
                self._tell(run, f"{name} is a {type(value).__name__}: give a number")
        if checked:
            with contextlib.suppress(ClientClosedError):
                self._background.post(lambda: self._keep((run, step), _Step(checked)))

    async def close(self, timeout_s: float) -> None:
        """Send what is left, for as long as this."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._send_all()
        if self._waiting:
            _LOG.warning(
                "metrics were not recorded: the server did not take them in time",
                extra={"num_values": self._num_values},
            )
            self._waiting.clear()

    def _keep(self, key: StepKey, step: _Step) -> None:
        known = self._waiting.setdefault(key, _Step({}, step.time_s))
        before = len(known.metrics)
        known.metrics.update(step.metrics)
        self._num_values += len(known.metrics) - before
        while self._num_values > _MAX_VALUES:
            oldest = next(iter(self._waiting))
            self._num_values -= len(self._waiting.pop(oldest).metrics)
            self._tell(oldest[0], "the server is away for too long; the oldest are given up")
        if self._sender is None:
            self._sender = self._background.spawn(self._send_often())

    async def _send_often(self) -> None:
        pause_s = _INTERVAL_S
        while True:
            await asyncio.sleep(pause_s)
            delay_s = await self._send_all()
            pause_s = (
                _INTERVAL_S if delay_s is None else min(max(delay_s, pause_s * 2), _MAX_PAUSE_S)
            )

    async def _send_all(self) -> float | None:
        """Send what waits; return when to try again if the server does not take it now."""
        while self._waiting:
            run = next(iter(self._waiting))[0]
            taken = self._take(run)
            request = run_metrics_pb2.RecordRunMetricsRequest(run=run)
            for (_, number), step in taken.items():
                record = request.records.add(step=number, metrics=step.metrics)
                record.record_time.FromNanoseconds(int(step.time_s * 1e9))
            try:
                await self._transport.call_once(
                    self._scheduler,
                    lambda c: c.run_metrics.RecordRunMetrics,
                    request,
                    timeout_s=_CALL_TIMEOUT_S,
                )
            except TinsmithError as error:
                if error.code in _PASSING or error.retry_after_s is not None:
                    self._put_back(taken)
                    return error.retry_after_s or _INTERVAL_S
                self._tell(run, str(error))
            except asyncio.CancelledError:
                self._put_back(taken)
                raise
        return None

    def _take(self, run: str) -> dict[StepKey, _Step]:
        """Return steps of a run, the oldest first, as many as go into one request."""
        taken: dict[StepKey, _Step] = {}
        num_values = 0
        for key, step in self._waiting.items():
            if key[0] != run:
                continue
            num_values += len(step.metrics)
            if taken and num_values > _VALUES_AT_ONCE:
                break
            taken[key] = step
        for key, step in taken.items():
            del self._waiting[key]
            self._num_values -= len(step.metrics)
        return taken

    def _put_back(self, taken: Mapping[StepKey, _Step]) -> None:
        """Let steps wait again, before those that came meanwhile, whose values win."""
        later, self._waiting = self._waiting, {}
        self._num_values = 0
        for key, step in (*taken.items(), *later.items()):
            self._keep(key, step)

    def _tell(self, run: str, problem: str) -> None:
        """Warn of a problem, once."""
        if problem not in self._told and len(self._told) < _VALUES_AT_ONCE:
            self._told.add(problem)
            _LOG.warning("metrics of %s were not recorded: %s", run, problem)
