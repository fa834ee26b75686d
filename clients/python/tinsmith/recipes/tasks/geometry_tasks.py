"""Geometry as tasks of the RL recipe: figures by seed, and the pupil that is imitated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tinsmith.environments.environment import JsonValue
from tinsmith.environments.local import LocalInstance, create_local_instance
from tinsmith.errors import ConfigurationError
from tinsmith.recipes.tasks.calculator import calculate
from tinsmith.recipes.tasks.geometry import draw_problem, pupil_expression
from tinsmith.recipes.tasks.geometry_environment import (
    CALCULATOR,
    GeometryEnvironment,
    PictureProblem,
)
from tinsmith.recipes.tasks.public_data import load_pictures


def load_geometry(
    data: str, *, calculator: bool, format_coef: float, instruction: str
) -> GeometryTasks | None:
    """Return the tasks of `geometry`, or of a data set with pictures; None for other data."""
    problems = None
    if data != "geometry":
        problems = load_pictures(data)
        if problems is None:
            return None
    return GeometryTasks(
        problems,
        has_calculator=calculator,
        format_coef=format_coef,
        instruction=instruction,
    )


class GeometryTasks:
    """Problems by seed, played in this process; see `Playable`.

    Args:
        problems: Of a data set, by split; figures are drawn without.
        has_calculator: Whether the model may call it.
        format_coef: What an answer loses that has not the wanted form.
        instruction: What is written below each question.
    """

    def __init__(
        self,
        problems: Mapping[str, Sequence[PictureProblem]] | None,
        *,
        has_calculator: bool,
        format_coef: float,
        instruction: str,
    ) -> None:
        self._problems = problems
        self._has_calculator = has_calculator
        self._config: dict[str, JsonValue] = {
            "calculator": has_calculator,
            "format_coef": format_coef,
            "instruction": instruction,
        }

    async def create_instance(self, seed: int, *, is_validation: bool) -> LocalInstance:
        """Return the problem of a seed, asked."""
        return await create_local_instance(
            lambda: GeometryEnvironment(self._problems),
            seed=seed,
            config={**self._config, "split": "validation" if is_validation else "train"},
        )

    def demonstrate(self, seed: int, occurrence: str) -> Sequence[str]:
        """Return how the hasty pupil answers: a call of the calculator first, if there is one."""
        if self._problems is not None:
            raise ConfigurationError(
                "the pupil answers for figures that are drawn, not for those of a data set",
                remedy="set num_imitation_steps=0",
            )
        problem = draw_problem(seed, is_validation=False)
        expression = pupil_expression(problem, occurrence)
        answer = calculate(expression)
        if not self._has_calculator:
            return [answer]
        return [write_call(expression), answer]


def write_call(expression: str) -> str:
    """Return a call of the calculator in the notation of Qwen's templates."""
    arguments = json.dumps({"expression": expression})
    return f'<tool_call>\n{{"name": "{CALCULATOR.name}", "arguments": {arguments}}}\n</tool_call>'
