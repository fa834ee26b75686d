"""An environment that shows pictures, and more of them through a tool."""

from __future__ import annotations

from collections.abc import Mapping

from tests.fakes.pictures import picture

from tinsmith_environment import (
    Action,
    Environment,
    JsonValue,
    Message,
    Observation,
    StepResult,
    Tool,
)

TOOL = Tool("zoom", "Shows a part of the picture.", {"type": "object", "properties": {}})


class PictureEnvironment(Environment):
    """Two pictures; a call of `zoom` is answered with a third. Counts the letters said."""

    action_kinds = frozenset({"text", "tool_calls"})

    def __init__(self) -> None:
        self._num_steps = 0

    def reset(self, seed: int, config: Mapping[str, JsonValue]) -> Observation:
        parts: list[Mapping[str, str]] = [
            {"type": "text", "text": "one "},
            {"type": "image"},
            {"type": "text", "text": " two "},
            {"type": "image"},
        ]
        images = (picture(30 + seed % 40, 30, 1), picture(56, 60, 2))
        return Observation((Message("user", parts),), images, (TOOL,))

    def step(self, action: Action) -> StepResult:
        self._num_steps += 1
        info: dict[str, JsonValue] = {"calls": len(action.tool_calls)}
        reward = float(len(action.text or "") % 5) / 10
        if self._num_steps == 2:
            return StepResult(Observation(), reward, True, info)
        if action.tool_calls:
            [call] = action.tool_calls
            shown = Observation.of_tool([{"type": "image"}], call)
            shown = Observation(shown.messages, (picture(28, 90, 3),))
            return StepResult(shown, reward, False, info)
        return StepResult(Observation.of_user("again", [picture(90, 28)]), reward, False, info)
