"""Environments of OpenEnv: a server plays, and its client is stepped as an environment of ours.

    OpenEnvEnvironment("http://127.0.0.1:8000", instruction="Repeat what you read.")

It is an `Environment` like any other: played in the client, or named by the settings of a server as
`echo=openenv:http://127.0.0.1:8000`. A subclass with a `base_url` of its own needs no arguments.
Each episode is a session of its own. An environment whose action has one text field reads the text
of a turn. One of MCP gives its tools, and a turn without a call ends the episode, as in OpenEnv's
own rollouts. A text that is no action is no failure: the model is told what is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from tinsmith.environments.adapters import openenv_views as views
from tinsmith.environments.adapters.failures import EpisodeFailedError
from tinsmith.environments.adapters.openenv_actions import ActionForm, InvalidTextError
from tinsmith.environments.adapters.openenv_session import ANSWER_TIMEOUT_S, Session
from tinsmith.environments.adapters.shown import refuse_action
from tinsmith.environments.environment import (
    TEXT,
    TOOL_CALLS,
    Action,
    Content,
    Environment,
    InvalidSettingError,
    JsonValue,
    Message,
    Observation,
    StepResult,
)
from tinsmith.environments.plain_values import to_plain
from tinsmith.errors import ConfigurationError
from tinsmith.images import ImageChunk
from tinsmith.text.tool_notations import ToolCall

Render = Callable[[Any], "Content | Observation"]
"""Returns what is shown of an observation: text, parts, or an `Observation`."""
MakeAction = Callable[[str], Any]
"""Returns the action of a text, as the client takes it; raises `ValueError` where it holds none."""

_MAX_SEED = 2**31 - 1
"""Seeds of OpenEnv are whole numbers, which environments often pass on as 32 bits."""


class OpenEnvEnvironment(Environment):
    """One episode of an environment of OpenEnv.

    Args:
        env: The address of its server, or what makes a client: an `EnvClient`, or an awaitable of
            one such as `MyEnv.from_docker_image("my-env")` returns.
        instruction: What the model is told first.
        render: Returns what is shown; the fields of the observation as text by default.
        action: Returns the action of a text; the one text field of the action by default.
        invalid_reward: Reward of a turn that holds no action.
        headers: HTTP headers of the connection, such as those of a private Space.
        timeout_s: What the answers of the server to one turn may take in all.
        **reset: Arguments of the server's `reset`, beside the seed.

    Example:
        >>> make = partial(OpenEnvEnvironment, "http://127.0.0.1:8000")
        >>> runner.run(lambda: create_local_instance(make, seed=3))
    """

    base_url: ClassVar[str] = ""
    """What a subclass plays where it is built without arguments."""
    description = "an environment of OpenEnv"
    default_config: ClassVar[Mapping[str, JsonValue]] = {"reset": {}}
    """`reset`: further arguments of the server's `reset`, such as `split` and `index`."""
    action_kinds = frozenset({TEXT, TOOL_CALLS})

    def __init__(
        self,
        env: Any = None,
        *,
        instruction: str = "",
        render: Render | None = None,
        action: MakeAction | None = None,
        invalid_reward: float = 0.0,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
        **reset: Any,
    ) -> None:
        env = env if env is not None else self.base_url
        if not env:
            raise ConfigurationError(
                "no environment of OpenEnv is named",
                remedy="give the address of its server, or set base_url",
            )
        self._instruction = instruction
        self._render = render
        self._make_action = action
        self._invalid_reward = invalid_reward
        self._reset_arguments = reset
        self._session = Session(env, headers or {}, timeout_s)
        self._form: ActionForm | None = None

    def reset(self, seed: int, config: Mapping[str, JsonValue]) -> Observation:
        """Begin a session and its episode; `reset` are arguments of the server's own."""
        given = config.get("reset") or {}
        if not isinstance(given, Mapping):
            raise InvalidSettingError("reset", f"must be an object, got {given!r}")
        self._session.begin_turn()
        self._session.open()
        self._form = self._session.action_form(is_needed=self._make_action is None)
        arguments = {"seed": seed % _MAX_SEED, **self._reset_arguments, **given}
        result = self._session.reset(arguments)
        tools = self._session.tools() if self._form.has_tools else ()
        shown = self._show(result, self._instruction)
        if not shown.messages:
            raise ConfigurationError(
                f"the environment {self._session.name} of OpenEnv shows nothing at the start",
                remedy="say what is wanted with instruction=, or show it with render=",
            )
        return Observation(shown.messages, shown.images, tools, shown.stop)

    def step(self, action: Action) -> StepResult:
        """Apply what the model said, or tell it which action is wanted."""
        if self._form is None:
            raise RuntimeError("the episode has not begun")
        self._session.begin_turn()
        if action.tool_calls:
            return self._call_tools(action.tool_calls)
        if self._form.has_tools and self._make_action is None:
            return StepResult(Observation(), 0.0, True, {"ended_by": "a turn without a call"})
        text = action.text or ""
        try:
            taken = self._make_action(text) if self._make_action else self._form.make(text)
        except ValueError as error:
            return refuse_action(error, self._invalid_reward)
        try:
            return self._outcome(self._session.step(taken))
        except InvalidTextError as error:
            return refuse_action(error, self._invalid_reward)

    def close(self) -> None:
        """End the session."""
        self._session.close()

    def _call_tools(self, calls: tuple[ToolCall, ...]) -> StepResult:
        messages: list[Message] = []
        images: list[ImageChunk] = []
        facts: list[JsonValue] = []
        reward, is_done = 0.0, False
        for call in calls:
            if is_done:
                break
            answer: Content
            try:
                result = self._session.call_tool(call.name, call.read_arguments())
            except ValueError as error:
                answer = f"error: {error}"
            else:
                answer, found = views.show_answer(result.observation)
                images += found
                reward += _reward(result)
                is_done = bool(result.done)
                facts.append(to_plain(getattr(result, "metadata", None) or {}))
            messages.append(Message("tool", answer, tool_call_id=call.id, name=call.name))
        shown = Observation() if is_done else Observation(tuple(messages), tuple(images))
        return StepResult(shown, reward, is_done, {"metadata": facts})

    def _outcome(self, result: Any) -> StepResult:
        is_done = bool(result.done)
        shown = Observation() if is_done else self._show(result)
        facts = {"metadata": to_plain(getattr(result, "metadata", None) or {})}
        return StepResult(shown, _reward(result), is_done, facts)

    def _show(self, result: Any, before: str = "") -> Observation:
        if self._render is None:
            shown: Any = views.show(result.observation)
        else:
            shown = self._render(result.observation)
        return views.to_observation(shown, before)


def _reward(result: Any) -> float:
    """Return the reward of a step; OpenEnv has none where nothing was earned."""
    if result.reward is None:
        return 0.0
    if not isinstance(result.reward, int | float):
        raise EpisodeFailedError(f"a reward of OpenEnv is no number: {result.reward!r}")
    return float(result.reward)
