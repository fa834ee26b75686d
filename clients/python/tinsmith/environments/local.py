"""An environment inside the client: the same class that a pod runs, without a pod.

Each episode has a thread of its own in this process, so that one which computes, waits or hangs
holds up no other. Nothing confines it: it is code of the program's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tinsmith.environments.chat_messages import (
    check_action_kind,
    read_action_kinds,
    read_stop,
    read_tokens,
    to_chat_message,
    to_chat_tool,
)
from tinsmith.environments.environment import (
    Action,
    Environment,
    InvalidSettingError,
    JsonValue,
)
from tinsmith.environments.environment import Observation as ShownObservation
from tinsmith.environments.environment_calls import Observation, StepResult

logger = logging.getLogger(__name__)

STEP_TIMEOUT_S = 60.0
"""As long as a server's environments may take."""

Answer = TypeVar("Answer")
_Call = Callable[[], None]


class EnvironmentEndedError(Exception):
    """A call of an environment took too long, or ended the program."""


class LocalInstance:
    """One episode of an environment of this process; see `create_local_instance`."""

    def __init__(
        self, environment: Environment, observation: ShownObservation, thread: _Thread
    ) -> None:
        self._environment = environment
        self._thread = thread
        self.observation = _to_chat(observation)
        """What the environment shows at the start."""
        self.action_kinds = read_action_kinds(environment)
        """Kinds of actions that it understands."""

    async def step_async(self, action: str | Action) -> StepResult:
        """Apply an action.

        Raises:
            InvalidActionError: If it is of a kind that the environment lacks, as on a server.
            Exception: Whatever the environment raises; the episode is lost then.
        """
        taken = Action(text=action) if isinstance(action, str) else action
        check_action_kind(taken, self.action_kinds)
        result = await self._thread.call("step", lambda: self._environment.step(taken))
        return StepResult(
            observation=_to_chat(result.observation),
            reward=result.reward,
            done=result.done,
            info=dict(result.info),
        )

    async def delete_async(self) -> None:
        """Release what the environment holds, once it has ended what it does."""
        self._thread.end()


async def create_local_instance(
    make_environment: Callable[[], Environment],
    *,
    seed: int = 0,
    config: Mapping[str, JsonValue] | None = None,
    step_timeout_s: float = STEP_TIMEOUT_S,
) -> LocalInstance:
    """Create an episode in this process.

    Args:
        make_environment: The class, or what else returns an environment.
        seed: The same seed and config give the same episode.
        config: Settings that differ from the environment's defaults.
        step_timeout_s: What making it, `reset` and each `step` may take. Beyond it the episode is
            lost; the thread goes on, as a thread cannot be ended, and closes the environment then.

    Raises:
        InvalidSettingError: If the environment has no such setting, or refuses a value.
        EnvironmentEndedError: If it takes too long to begin.

    Example:
        >>> runner.run(lambda: create_local_instance(MyEnvironment, seed=3))
    """
    thread = _Thread(step_timeout_s)

    def make() -> Environment:
        environment = make_environment()
        thread.close_at_end(environment.close)
        return environment

    try:
        environment = await thread.call("its making", make)
        given: dict[str, Any] = dict(config or {})
        for setting in given:
            if setting not in environment.default_config:
                known = ", ".join(sorted(environment.default_config)) or "none"
                raise InvalidSettingError(setting, f"is not known; known are: {known}")
        merged = {**environment.default_config, **given}
        observation = await thread.call("reset", lambda: environment.reset(seed, merged))
        return LocalInstance(environment, observation, thread)
    except BaseException:
        thread.end()
        raise


class _Thread:
    """A thread that calls one after the other; it holds up neither others nor the program's end.

    Args:
        timeout_s: What is waited for a call.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._close: Callable[[], object] = _nothing
        self._stuck_in = ""
        threading.Thread(target=self._run, name="environment", daemon=True).start()

    def close_at_end(self, close: Callable[[], object]) -> None:
        """Call this behind the last call, however that ends."""
        self._close = close

    async def call(self, what: str, function: Callable[[], Answer]) -> Answer:
        """Return what a function returns.

        Raises:
            EnvironmentEndedError: If it takes too long, as an earlier one did, or raises what is no
                error, such as `SystemExit`.
            Exception: Whatever else it raises.
        """
        if self._stuck_in:
            raise EnvironmentEndedError(f"{what}: {self._stuck_in} has not ended")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self._calls.put(lambda: _answer(loop, answer, function))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError as error:
            if not answer.cancelled():
                raise
            self._stuck_in = what
            raise EnvironmentEndedError(
                f"{what} took over {self._timeout_s:g} s, as long as it may"
            ) from error

    def end(self) -> None:
        """Close, and end the thread, behind its last call; nothing waits for that."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
        try:
            self._close()
        except BaseException as error:
            logger.warning("environment not closed", extra={"error_type": type(error).__name__})


def _answer(
    loop: asyncio.AbstractEventLoop,
    answer: asyncio.Future[Answer],
    function: Callable[[], Answer],
) -> None:
    def tell(value: Answer | None, error: Exception | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)  # type: ignore[arg-type]  # `Answer` may be None itself

    value: Answer | None = None
    failure: Exception | None = None
    try:
        value = function()
    except Exception as error:
        # A future refuses this one, which is the end of a generator.
        failure = _ended(error) if isinstance(error, StopIteration) else error
    except BaseException as error:
        # Passed on as it is it would end the program, or count as a cancellation of the episode.
        failure = _ended(error)
    # The program may have ended its loop meanwhile.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(tell, value, failure)


def _ended(error: BaseException) -> EnvironmentEndedError:
    return EnvironmentEndedError(f"it raised {type(error).__name__}: {error}")


def _nothing() -> None:
    """There is no environment yet."""


def _to_chat(observation: ShownObservation) -> Observation:
    return Observation(
        messages=[to_chat_message(message) for message in observation.messages],
        images=list(observation.images),
        tools=[to_chat_tool(tool) for tool in observation.tools],
        stop=read_stop(observation),
        tokens=read_tokens(observation),
    )
