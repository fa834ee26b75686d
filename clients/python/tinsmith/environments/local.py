"""An environment inside the client: the same class that a pod runs, without a pod.

It runs in a thread of this process, so that an episode which computes holds up no other. Nothing
confines it: it is code of the program's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from tinsmith.environments.chat_messages import to_chat_message, to_chat_tool
from tinsmith.environments.environment import (
    Action,
    Environment,
    InvalidSettingError,
    JsonValue,
)
from tinsmith.environments.environment import Observation as ShownObservation
from tinsmith.environments.environment_calls import Observation, StepResult


class LocalInstance:
    """One episode of an environment of this process; see `create_local_instance`."""

    def __init__(self, environment: Environment, observation: ShownObservation) -> None:
        self._environment = environment
        self.observation = _to_chat(observation)
        """What the environment shows at the start."""

    async def step_async(self, action: str | Action) -> StepResult:
        """Apply an action.

        Raises:
            Exception: Whatever the environment raises; the episode is lost then.
        """
        taken = Action(text=action) if isinstance(action, str) else action
        result = await asyncio.to_thread(self._environment.step, taken)
        return StepResult(
            observation=_to_chat(result.observation),
            reward=result.reward,
            done=result.done,
            info=dict(result.info),
        )

    async def delete_async(self) -> None:
        """Release what the environment holds."""
        await asyncio.to_thread(self._environment.close)


async def create_local_instance(
    make_environment: Callable[[], Environment],
    *,
    seed: int = 0,
    config: Mapping[str, JsonValue] | None = None,
) -> LocalInstance:
    """Create an episode in this process.

    Args:
        make_environment: The class, or what else returns an environment.
        seed: The same seed and config give the same episode.
        config: Settings that differ from the environment's defaults.

    Raises:
        InvalidSettingError: If the environment has no such setting, or refuses a value.

    Example:
        >>> runner.run(lambda: create_local_instance(MyEnvironment, seed=3))
    """
    environment = make_environment()
    given: dict[str, Any] = dict(config or {})
    for setting in given:
        if setting not in environment.default_config:
            known = ", ".join(sorted(environment.default_config)) or "none"
            raise InvalidSettingError(setting, f"is not known; known are: {known}")
    merged = {**environment.default_config, **given}
    observation = await asyncio.to_thread(environment.reset, seed, merged)
    return LocalInstance(environment, observation)


def _to_chat(observation: ShownObservation) -> Observation:
    return Observation(
        messages=[to_chat_message(message) for message in observation.messages],
        images=list(observation.images),
        tools=[to_chat_tool(tool) for tool in observation.tools],
    )
