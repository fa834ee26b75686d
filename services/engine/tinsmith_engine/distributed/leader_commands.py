"""Rank 0 decides what is done, the others do the same.

Rank 0 sends each call of the engine to all ranks. Every rank makes it on its own engine, and
then they compare what came of it. Most often that is the same value or the same typed error,
since all
ranks hold the same runs and compute from the same numbers. If it is not, the state of the ranks may
differ, and nothing that is computed from it could be trusted: the group ends, its supervisor starts
it again, and the runs are restored from the ledger.

Between calls rank 0 sends a heartbeat. Followers then need not tell a quiet service from a dead
one, and rank 0 learns of a dead follower before a client's operation does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from tinsmith_engine.distributed.process_group import RankFault, Ranks
from tinsmith_engine.distributed.serialization import decode, digest, encode
from tinsmith_runtime.errors import RanksLostError, TinsmithError

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_BEAT, _STOP = "beat", "stop"
_MAX_BEAT_S = 10.0


class Performer(Protocol):
    """An engine of a rank, as commands see it."""

    def perform(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Make a call on this rank's part of the engine."""


class Leader:
    """Rank 0's side; safe to use from several threads.

    Args:
        ranks: All ranks.
        on_lost: Called once, in whichever thread finds out, when the ranks cannot go on. A service
            ends its process here: what it had not committed is done again after the restart.
    """

    def __init__(
        self, ranks: Ranks, *, on_lost: Callable[[RanksLostError], None] | None = None
    ) -> None:
        self._ranks = ranks
        self._on_lost = on_lost
        self._lock = threading.RLock()
        self._lost: RanksLostError | None = None
        self._last_s = time.monotonic()
        self._beat_s = min(ranks.timeout_s / 4, _MAX_BEAT_S)
        self._stopped = threading.Event()
        self._beating: threading.Thread | None = None

    def start(self) -> None:
        """Begin to send beats."""
        self._beating = threading.Thread(target=self._beat_forever, name="rank-beat", daemon=True)
        self._beating.start()

    def call(
        self, engine: str, method: str, arguments: tuple[Any, ...], here: Callable[[], ResultT]
    ) -> ResultT:
        """Make a call on all ranks and return, or raise, what came of it.

        Args:
            engine: Name of the engine.
            method: Name of the call, for the followers.
            arguments: Of the call.
            here: Makes the call on this rank.

        Raises:
            RanksLostError: The ranks cannot go on.
        """
        with self._lock:
            self._check()
            try:
                self._ranks.broadcast(encode((engine, method, arguments)), "command")
                outcome = _Outcome.of(here)
                outcome.agree(self._ranks, method)
            except RankFault as fault:
                raise self._lose(fault) from fault
            finally:
                self._last_s = time.monotonic()
        result: ResultT = outcome.result()
        return result

    def stop(self) -> None:
        """Let the followers end; repeating it, or doing it after a loss, changes nothing."""
        self._stopped.set()
        with self._lock:
            if self._lost is not None:
                return
            self._lost = RanksLostError("the ranks of this engine were stopped")
            try:
                self._ranks.broadcast(encode((_STOP,)), "command")
            except RankFault as fault:
                logger.warning("a rank was gone at the stop", extra={"problem": str(fault)})

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _lose(self, fault: RankFault) -> RanksLostError:
        self._stopped.set()
        self._lost = RanksLostError(f"the ranks of this trainer cannot go on: {fault}; restart it")
        if self._on_lost is not None:
            self._on_lost(self._lost)
        logger.critical("ranks lost", extra={"problem": str(fault)})
        return self._lost

    def _beat_forever(self) -> None:
        while not self._stopped.wait(self._beat_s / 4):
            # A call that is under way tells the followers enough.
            if not self._lock.acquire(blocking=False):
                continue
            try:
                if self._lost is None and time.monotonic() - self._last_s >= self._beat_s / 2:
                    self._ranks.broadcast(encode((_BEAT,)), "command")
                    self._ranks.all_gather(b"", _BEAT)
                    self._last_s = time.monotonic()
            except RankFault as fault:
                self._lose(fault)
            finally:
                self._lock.release()


def follow(ranks: Ranks, engines: Mapping[str, Performer]) -> None:
    """Do what rank 0 says until it stops.

    Raises:
        RanksLostError: Rank 0 or another rank is gone, or the ranks differ.
    """
    try:
        while True:
            command = decode(ranks.broadcast(None, "command"))
            if command == (_STOP,):
                return
            if command == (_BEAT,):
                ranks.all_gather(b"", _BEAT)
                continue
            engine, method, arguments = command
            outcome = _Outcome.of(_call(engines[engine], method, arguments))
            outcome.agree(ranks, method)
    except RankFault as fault:
        raise RanksLostError(f"this rank cannot go on: {fault}") from fault


def _call(engine: Performer, method: str, arguments: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: engine.perform(method, arguments)


class _Outcome:
    """What came of a call on this rank."""

    def __init__(self, value: Any, error: Exception | None) -> None:
        self._value, self._error = value, error

    @classmethod
    def of(cls, call: Callable[[], Any]) -> _Outcome:
        try:
            return cls(call(), None)
        except TinsmithError as error:
            return cls(None, error)
        except Exception as error:
            logger.exception("a call failed on this rank")
            return cls(None, error)

    def agree(self, ranks: Ranks, method: str) -> None:
        """Compare with the other ranks.

        Raises:
            RankFault: Not all ranks have this outcome.
        """
        found = ranks.all_gather(self._summary().encode(), method)
        if len(set(found)) > 1:
            texts = (f"rank {rank}: {text.decode()}" for rank, text in enumerate(found))
            raise RankFault(f"the ranks disagree about {method}: {'; '.join(texts)}")

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def _summary(self) -> str:
        if self._error is None:
            return f"done {digest(self._value)}"
        kind = type(self._error).__name__
        if isinstance(self._error, TinsmithError):
            return f"{kind} {digest(self._error)}"
        # Whatever a bug left behind, at least it is the same everywhere only if it came everywhere.
        return f"{kind}: {self._error}"
