"""Hands requests to the engine's sampler and brings completions back.

The sampler lives on the engine's thread and steps there between other jobs. A request that its
caller gave up is cancelled, so that a client that went away does not decode to the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import Future
from dataclasses import dataclass, field

from tinsmith_engine import SampledSequence, Sampler, SampleRequest
from tinsmith_engine.host import EngineHost
from tinsmith_runtime.errors import (
    DrainingError,
    InternalError,
    NonFiniteLossError,
    QueueFullError,
)
from tinsmith_runtime.status import internal_error
from tinsmith_sampler.metrics import PROMPT_TOKENS, SAMPLED_TOKENS, SEQUENCES, WAITING_SEQUENCES

logger = logging.getLogger(__name__)

_RETRY_S = 0.5


@dataclass(slots=True)
class _Pending:
    """A request on the engine and what of it is finished."""

    future: Future[list[SampledSequence]]
    num_samples: int
    request_id: int | None = None
    """Set on the engine's thread."""
    finished: list[SampledSequence] = field(default_factory=list)


class SamplingDriver:
    """The sampler of one base model.

    Args:
        host: Owns the engine and its thread.
        base_model: Name of the model.
        max_rows: Sequences that decode at once.
        max_waiting: Sequences that may be unfinished; more are refused.
    """

    def __init__(
        self, host: EngineHost, base_model: str, *, max_rows: int, max_waiting: int
    ) -> None:
        self._host = host
        self._sampler = Sampler(host.engine(base_model), max_rows=max_rows)
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._pending: dict[int, _Pending] = {}
        host.thread.add_stepper(self._step, self._fail_all)

    async def run(self, request: SampleRequest) -> list[SampledSequence]:
        """Return the completions of a request, in the order of their random streams.

        Raises:
            QueueFullError: If too many sequences wait.
            VersionNotLoadedError: If the weights were replaced before the request began.
            NonFiniteLossError: If the weights give no finite distribution.
        """
        if self._num_waiting + request.num_samples > self._max_waiting:
            raise QueueFullError(
                f"{self._num_waiting} sequences wait; retry when some have finished",
                retry_after_s=_RETRY_S,
            )
        pending = _Pending(Future(), request.num_samples)
        self._num_waiting += request.num_samples
        WAITING_SEQUENCES.inc(request.num_samples)
        try:
            await self._host.call(self._add, request, pending)
            sequences = await asyncio.wrap_future(pending.future)
        except asyncio.CancelledError:
            # Behind `_add`, which may be running although its caller no longer waits for it.
            with contextlib.suppress(DrainingError):
                self._host.thread.submit(self._cancel, pending)
            raise
        finally:
            self._num_waiting -= request.num_samples
            WAITING_SEQUENCES.dec(request.num_samples)
        PROMPT_TOKENS.inc(len(request.prompt_tokens))
        for sequence in sequences:
            SAMPLED_TOKENS.inc(len(sequence.tokens))
            SEQUENCES.labels(sequence.finish_reason).inc()
        if any(sequence.finish_reason == "error" for sequence in sequences):
            raise NonFiniteLossError(
                "the weights give no finite distribution over tokens; sample from an earlier "
                "checkpoint"
            )
        return sorted(sequences, key=lambda sequence: sequence.sample_index)

    # On the engine's thread from here on.

    def _add(self, request: SampleRequest, pending: _Pending) -> None:
        pending.request_id = self._sampler.add(request)
        self._pending[pending.request_id] = pending

    def _cancel(self, pending: _Pending) -> None:
        if pending.request_id is not None:
            self._sampler.cancel(pending.request_id)
            self._pending.pop(pending.request_id, None)

    def _step(self) -> bool:
        for sequence in self._sampler.step():
            pending = self._pending.get(sequence.request_id)
            if pending is None:
                continue
            pending.finished.append(sequence)
            if len(pending.finished) == pending.num_samples:
                del self._pending[sequence.request_id]
                if pending.future.set_running_or_notify_cancel():
                    pending.future.set_result(pending.finished)
        return self._sampler.has_work

    def _fail_all(self, error: Exception) -> None:
        """End everything that decodes: a step failed, and its state can not be trusted."""
        reported: InternalError = internal_error()
        logger.error(
            "decoding failed",
            extra={"num_requests": len(self._pending), "problem": type(error).__name__},
        )
        for request_id, pending in list(self._pending.items()):
            self._sampler.cancel(request_id)
            if pending.future.set_running_or_notify_cancel():
                pending.future.set_exception(reported)
        self._pending.clear()
