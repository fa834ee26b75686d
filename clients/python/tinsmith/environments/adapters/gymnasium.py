"""Environments of Gymnasium: observations become text, and the text of a turn an action.

    GymnasiumEnvironment("CartPole-v1", instruction="Balance the pole: 0 pushes left, 1 right.")

It is an `Environment` like any other: played in the client, or named by the settings of a server as
`cartpole=gymnasium:CartPole-v1`. A subclass with an `env_id` of its own needs no arguments. A text
that holds no action is no failure: the environment stays, and the model is told what is wanted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from tinsmith.environments.adapters import spaces
from tinsmith.environments.adapters.shown import as_observation, refuse_action
from tinsmith.environments.environment import (
    Action,
    Content,
    Environment,
    InvalidSettingError,
    JsonValue,
    Observation,
    StepResult,
)
from tinsmith.environments.plain_values import to_plain
from tinsmith.errors import ConfigurationError

Render = Callable[[Any, Any], "Content | Observation"]
"""Returns what is shown of the environment and an observation: text, parts, or an `Observation`."""
Parse = Callable[[str, Any], Any]
"""Returns the action of a text and the environment; raises `ValueError` where it holds none."""

_MAX_SEED = 2**63 - 1


class GymnasiumEnvironment(Environment):
    """One episode of an environment of Gymnasium.

    Args:
        env: The id, what makes the environment, or the environment itself.
        instruction: What the model is told first.
        render: Returns what is shown; the observation as text by default.
        parse: Returns the action of a text; by the action space by default.
        invalid_reward: Reward of a turn that holds no action.
        **arguments: Of `gymnasium.make`, where `env` is an id.

    Example:
        >>> make = partial(GymnasiumEnvironment, "FrozenLake-v1", is_slippery=False)
        >>> runner.run(lambda: create_local_instance(make, seed=3))
    """

    env_id: ClassVar[str] = ""
    """What a subclass plays where it is built without arguments."""
    description = "an environment of Gymnasium"
    default_config: ClassVar[Mapping[str, JsonValue]] = {"options": {}}

    def __init__(
        self,
        env: Any = None,
        *,
        instruction: str = "",
        render: Render | None = None,
        parse: Parse | None = None,
        invalid_reward: float = 0.0,
        **arguments: Any,
    ) -> None:
        env = env if env is not None else self.env_id
        if not env:
            raise ConfigurationError(
                "no environment of Gymnasium is named", remedy="give its id, or set env_id"
            )
        if isinstance(env, str):
            self._env = _make(env, arguments)
        else:
            self._env = env(**arguments) if callable(env) else env
        self._instruction = instruction
        self._render = render
        self._parse = parse
        self._invalid_reward = invalid_reward

    def reset(self, seed: int, config: Mapping[str, JsonValue]) -> Observation:
        """Begin the episode; `options` are those of the environment's own `reset`."""
        options = config.get("options") or {}
        if not isinstance(options, Mapping):
            raise InvalidSettingError("options", f"must be an object, got {options!r}")
        observation, _ = self._env.reset(seed=seed & _MAX_SEED, options=dict(options) or None)
        said = [self._instruction, "" if self._parse else f"Answer with {self._wanted()}."]
        return self._show(observation, before="\n".join(filter(None, said)))

    def step(self, action: Action) -> StepResult:
        """Apply the action of a text, or tell which one is wanted."""
        try:
            chosen = self._read(action.text or "")
        except ValueError as error:
            return refuse_action(error, self._invalid_reward)
        observation, reward, terminated, truncated, info = self._env.step(chosen)
        done = bool(terminated or truncated)
        facts = {
            **to_plain(info),
            "terminated": bool(terminated),
            "truncated": bool(truncated),
        }
        shown = Observation() if done else self._show(observation)
        return StepResult(shown, float(reward), done, facts)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _read(self, text: str) -> Any:
        if self._parse is not None:
            return self._parse(text, self._env)
        return spaces.read(text, self._env.action_space)

    def _wanted(self) -> str:
        return spaces.describe(self._env.action_space)

    def _show(self, observation: Any, *, before: str = "") -> Observation:
        shown: Any = (
            spaces.show(observation)
            if self._render is None
            else self._render(self._env, observation)
        )
        return as_observation(shown, before)


def _make(env_id: str, arguments: Mapping[str, Any]) -> Any:
    try:
        gymnasium = importlib.import_module("gymnasium")
    except ImportError as error:
        raise ConfigurationError(
            f"the environment {env_id} needs gymnasium, which is not installed",
            remedy="pip install gymnasium",
        ) from error
    try:
        return gymnasium.make(env_id, **arguments)
    except gymnasium.error.Error as error:
        raise ConfigurationError(
            f"Gymnasium makes no environment {env_id}: {error}", remedy="check the id"
        ) from error
