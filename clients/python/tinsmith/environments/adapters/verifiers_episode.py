"""One episode of verifiers, and how it ended.

All episodes of a process run on one event loop, in a thread: verifiers keeps locks for the whole
process, and a lock belongs to one loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinsmith.environments.adapters.chat_endpoint import ChatEndpoint, Ended
from tinsmith.environments.adapters.failures import EpisodeFailedError

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 8.0
"""What is waited until verifiers has ended what it started; below what a server gives a close."""
PLAYER = "player"
"""What verifiers calls the model."""


@dataclass(frozen=True, slots=True)
class VerifiersOutcome:
    """How an episode of verifiers ended."""

    reward: float
    info: Mapping[str, Any]

    @classmethod
    def read(cls, episode: Any, seat: str, name: str) -> VerifiersOutcome:
        """Return the outcome of an `Episode` of verifiers.

        Raises:
            EpisodeFailedError: If it failed, or was not scored. It has no reward then.
        """
        traces = [trace for trace in episode.traces if trace.agent.name == seat]
        failures = [*episode.errors]
        failures += [error for trace in episode.traces if not trace.ok for error in trace.errors]
        if failures:
            raise EpisodeFailedError(f"{name} failed: {failures[-1].type}: {failures[-1].message}")
        if len(traces) != 1:
            raise EpisodeFailedError(
                f"{name} played its agent {seat} {len(traces)} times, not once"
            )
        [trace] = traces
        unscored = [each for each, reward in trace.rewards.items() if reward is None]
        if unscored:
            raise EpisodeFailedError(f"{name} was not scored in time: {', '.join(unscored)}")
        return cls(
            float(trace.reward),
            {
                "rewards": {each: reward.score for each, reward in trace.rewards.items()},
                "weights": {each: reward.weight for each, reward in trace.rewards.items()},
                "metrics": dict(trace.metrics),
                "stop_condition": trace.stop_condition,
                "task": episode.task.data.idx,
            },
        )


class BackgroundEpisode:
    """Plays an episode until it ends or is stopped; tells the endpoint when it has ended.

    Args:
        env: An `Env` of verifiers that serves nothing else.
        task: What is played.
        endpoint: Where the model is called.
    """

    def __init__(self, env: Any, task: Any, endpoint: ChatEndpoint) -> None:
        self._env = env
        self._task = task
        self._endpoint = endpoint
        self._playing: asyncio.Task[Any] | None = None
        self._ended = threading.Event()
        self._loop = _shared_loop()
        self._loop.call_soon_threadsafe(self._start, context=contextvars.Context())

    def stop(self) -> None:
        """End the episode, wherever it is, and wait until what it started has ended."""
        self._loop.call_soon_threadsafe(self._cancel)
        if not self._ended.wait(STOP_TIMEOUT_S):
            logger.warning("an episode of verifiers goes on", extra={"after_s": STOP_TIMEOUT_S})

    def _start(self) -> None:
        self._playing = self._loop.create_task(self._play())
        self._playing.add_done_callback(self._tell)

    def _cancel(self) -> None:
        assert self._playing is not None
        self._playing.cancel()

    def _tell(self, playing: asyncio.Task[Any]) -> None:
        """Pass the outcome, or the error, to the player, whose call is waiting for it."""
        if playing.cancelled():
            outcome: Any = EpisodeFailedError("it was stopped")
        else:
            error = playing.exception()
            outcome = playing.result() if error is None else error
        self._ended.set()
        self._endpoint.tell(Ended(outcome))

    async def _play(self) -> Any:
        vf: Any = importlib.import_module("verifiers.v1")
        # The path is the secret. The name keeps verifiers from sending a key of the user's.
        client = vf.EvalClientConfig(base_url=self._endpoint.url, api_key_var="NO_KEY_OF_A_PLAYER")
        async with self._env.serving():
            return await self._env.run_episode(
                self._task, vf.ModelContext(model=PLAYER, client=client)
            )


_loops: dict[int, asyncio.AbstractEventLoop] = {}
_lock = threading.Lock()


def _shared_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of this process; that of a parent has no thread here."""
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(loop,), name="verifiers", daemon=True).start()
        return loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    while True:
        try:
            loop.run_forever()
        except BaseException:
            # A task that exits, as by `sys.exit`, ends the loop; the other episodes go on.
            logger.exception("a task of verifiers wanted to exit")
