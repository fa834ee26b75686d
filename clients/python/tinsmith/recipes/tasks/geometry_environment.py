"""Geometry as an environment: a figure and a question, with a calculator if wished.

Without a calculator an episode is one turn. With it, the model may call `calculator` as its chat
template writes calls, reads the result, and answers. A call that cannot be computed costs
`format_coef` at once. A turn without a call is the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from tinsmith.environments.environment import (
    TEXT,
    TOOL_CALLS,
    Action,
    Environment,
    InvalidActionError,
    InvalidSettingError,
    JsonValue,
    Message,
    Observation,
    StepResult,
    Tool,
    read_float,
    read_int,
    read_str,
)
from tinsmith.recipes.tasks.arithmetic import MathRecord, format_reward, is_formatted, is_right
from tinsmith.recipes.tasks.calculator import CalculationError, calculate
from tinsmith.recipes.tasks.figures import draw
from tinsmith.recipes.tasks.geometry import draw_problem
from tinsmith.text.tool_notations import ToolCall
from tinsmith.types import ImageChunk

CALCULATOR = Tool(
    "calculator",
    # Its name says it. Forty tokens more before each figure kept a small model from learning: three
    # seeds, docs/scenarios.
    "",
    {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
)
SPLITS = ("train", "validation")


class PictureProblem:
    """A picture, a question about it, and the number that answers it."""

    def __init__(self, images: Sequence[ImageChunk], question: str, answer: str) -> None:
        self.images = tuple(images)
        self.question = question
        self.record = MathRecord(question, f"#### {answer}")


class GeometryEnvironment(Environment):
    """Answer a question about a figure.

    Args:
        problems: Problems by split, of which a seed takes one; figures are drawn without.
    """

    description = "Read a figure and compute; reward 1 if the number is right."
    default_config: ClassVar[Mapping[str, JsonValue]] = {
        "split": "train",
        "calculator": False,
        "max_calls": 3,
        "format_coef": 0.1,
        "instruction": "",
    }
    action_kinds: ClassVar[frozenset[str]] = frozenset({TEXT, TOOL_CALLS})

    def __init__(self, problems: Mapping[str, Sequence[PictureProblem]] | None = None) -> None:
        self._problems = problems

    def reset(self, seed: int, config: Mapping[str, JsonValue]) -> Observation:
        """Show the figure and ask."""
        split = read_str(config, "split")
        if split not in SPLITS:
            raise InvalidSettingError("split", f"must be one of {', '.join(SPLITS)}")
        self._format_coef = read_float(config, "format_coef", minimum=0.0, maximum=1.0)
        self._max_calls = read_int(config, "max_calls", minimum=1, maximum=64)
        self._num_calls = self._num_failed_calls = 0
        problem = self._find_problem(seed, split)
        self._record = problem.record
        instruction = read_str(config, "instruction")
        question = f"{problem.question}\n{instruction}" if instruction else problem.question
        content = [*({"type": "image"} for _ in problem.images), {"type": "text", "text": question}]
        return Observation(
            (Message("user", content),),
            problem.images,
            (CALCULATOR,) if config.get("calculator") else (),
        )

    def step(self, action: Action) -> StepResult:
        """Compute for the model, or score its answer."""
        if action.tool_calls:
            return self._compute(action.tool_calls)
        if action.text is None:
            raise InvalidActionError("answers are texts")
        reward = format_reward(self._record, action.text, self._format_coef)
        return self._end(reward, action.text)

    def _compute(self, calls: Sequence[ToolCall]) -> StepResult:
        messages = []
        reward = 0.0
        for call in calls:
            try:
                result = calculate(_expression_of(call))
            except CalculationError as error:
                result = f"error: {error}"
                reward -= self._format_coef
                self._num_failed_calls += 1
            messages.append(Message("tool", result, tool_call_id=call.id, name=call.name))
        self._num_calls += len(calls)
        if self._num_calls > self._max_calls:
            return self._end(reward - self._format_coef, "")
        return StepResult(Observation(tuple(messages)), reward, False, {})

    def _end(self, reward: float, answer: str) -> StepResult:
        metrics = {
            "is_formatted": float(is_formatted(answer)),
            "calls": float(self._num_calls),
            "failed_calls": float(self._num_failed_calls),
        }
        is_success = is_right(self._record, answer)
        return StepResult(
            Observation(), reward, True, {"is_success": is_success, "metrics": metrics}
        )

    def _find_problem(self, seed: int, split: str) -> PictureProblem:
        if self._problems is not None:
            problems = self._problems[split]
            return problems[seed % len(problems)]
        problem = draw_problem(seed, is_validation=split == "validation")
        image = ImageChunk(draw(problem.figure), "png")
        return PictureProblem([image], problem.question, calculate(problem.expression))


def _expression_of(call: ToolCall) -> str:
    try:
        expression = call.read_arguments().get("expression")
    except ValueError as error:
        raise CalculationError(str(error)) from error
    if call.name != CALCULATOR.name or not isinstance(expression, str):
        raise CalculationError("call calculator with an expression")
    return expression
