"""One episode of verifiers, in a thread with an event loop of its own, and how it ended."""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinsmith.environments.adapters.chat_endpoint import ChatEndpoint, Ended
from tinsmith.environments.adapters.failures import EpisodeFailedError

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 20.0
"""What verifiers may take to end what it started."""
PLAYER = "player"
"""What verifiers calls the model."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended."""

    reward: float
    info: Mapping[str, Any]

    @classmethod
    def read(cls, episode: Any, seat: str, name: str) -> Outcome:
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


class EpisodeThread:
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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._playing: asyncio.Task[Any] | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verifiers-episode", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the episode, wherever it is, and wait until what it started has ended."""
        self._begun.wait(STOP_TIMEOUT_S)
        if self._loop is not None and self._playing is not None and self._thread.is_alive():
            try:
                self._loop.call_soon_threadsafe(self._playing.cancel)
            except RuntimeError:
                logger.debug("the episode has ended by itself")
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("an episode of verifiers goes on", extra={"after_s": STOP_TIMEOUT_S})

    def _run(self) -> None:
        outcome: Any
        try:
            outcome = asyncio.run(self._play())
        except asyncio.CancelledError:
            outcome = EpisodeFailedError("it was stopped")
        except BaseException as error:
            # Passed to the player, whose call is waiting for it.
            outcome = error
        self._begun.set()
        self._endpoint.tell(Ended(outcome))

    async def _play(self) -> Any:
        self._loop = asyncio.get_running_loop()
        self._playing = asyncio.current_task()
        self._begun.set()
        vf: Any = importlib.import_module("verifiers.v1")
        # The path is the secret. The name keeps verifiers from sending a key of the user's.
        client = vf.EvalClientConfig(base_url=self._endpoint.url, api_key_var="NO_KEY_OF_A_PLAYER")
        async with self._env.serving():
            return await self._env.run_episode(
                self._task, vf.ModelContext(model=PLAYER, client=client)
            )
