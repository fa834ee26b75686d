"""Prompts whose answers a function rewards: one of the user's own, or one that asks a judge.

It is a function `score(row, completion) -> float` of a row of the data and of what the model
answered. One's own is named in one setting, `my.py:score`. It is imported into this process and
runs in its threads; nothing confines it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tinsmith.environments.environment import (
    Action,
    Environment,
    JsonValue,
    Message,
    Observation,
    StepResult,
)
from tinsmith.environments.local import STEP_TIMEOUT_S, LocalInstance, create_local_instance
from tinsmith.errors import ConfigurationError
from tinsmith.recipes.tasks.jsonl import DataFormatError, read_lines
from tinsmith.recipes.tasks.prompts import Messages, decode_prompt
from tinsmith.recipes.tasks.public_data import hold_out, is_public, read_rows
from tinsmith.recipes.tasks.rl_problems import SHIPPED, load_problems
from tinsmith.rollouts import Judge
from tinsmith.user_code import load_object

RewardFunction = Callable[[Mapping[str, Any], str], float]


def load_reward(reward: str) -> RewardFunction:
    """Return the function that `FILE.py:score` names.

    Raises:
        ConfigurationError: If it cannot be had.
    """
    score = load_object(reward, "reward")
    if not callable(score):
        raise ConfigurationError(
            f"reward: {reward} is no function", remedy="define score(row, completion)"
        )
    found: RewardFunction = score
    return found


def judged_by(judge: Judge) -> RewardFunction:
    """Return a function that asks a judge, beside the `answer` of a row if it has one."""

    def score(row: Mapping[str, Any], completion: str) -> float:
        known = row.get("answer")
        reference = str(known) if isinstance(known, str | int | float) else ""
        return judge.score(decode_prompt(row, "the row"), completion, reference=reference)

    return score


class RewardedPrompts:
    """Prompts whose answers a function rewards, as tasks by seed; see `Playable`.

    Args:
        data: `arithmetic`, `small_sums`, a JSONL file, a folder, or `hf://NAME[:CONFIG]`, of rows
            with a prompt. Further keys of a row are the function's to read. Of a file, every fifth
            row is held out.
        score: The function.
        step_timeout_s: What a call of it may take.

    Raises:
        ConfigurationError: If the data cannot be read.
    """

    def __init__(
        self, data: str, score: RewardFunction, *, step_timeout_s: float = STEP_TIMEOUT_S
    ) -> None:
        self._score = score
        self._step_timeout_s = step_timeout_s
        self._train, self._held_out = (_decode(rows, data) for rows in _read(data))
        # Seeds of a step lie beside each other; rows beside each other are often alike.
        random.Random("rows").shuffle(self._train)

    @property
    def num_held_out(self) -> int:
        """Prompts that are never trained on."""
        return len(self._held_out)

    async def create_instance(self, seed: int, *, is_validation: bool) -> LocalInstance:
        """Return the prompt of a seed, asked."""
        tasks = self._held_out if is_validation else self._train
        task = tasks[seed % len(tasks)]
        return await create_local_instance(
            lambda: _Answered(task, self._score), seed=seed, step_timeout_s=self._step_timeout_s
        )

    def demonstrate(self, seed: int, occurrence: str) -> Sequence[str]:
        """Return nothing: there is no pupil, and the recipe refuses a warm start."""
        del seed, occurrence
        return ()


@dataclass(frozen=True, slots=True)
class _Task:
    row: Mapping[str, Any]
    messages: Messages


class _Answered(Environment):
    """One prompt, one answer, one reward."""

    def __init__(self, task: _Task, score: RewardFunction) -> None:
        self._task = task
        self._score = score

    def reset(self, seed: int, config: Mapping[str, JsonValue]) -> Observation:
        del seed, config
        return Observation(
            tuple(Message(str(m["role"]), str(m["content"])) for m in self._task.messages)
        )

    def step(self, action: Action) -> StepResult:
        value = self._score(self._task.row, action.text or "")
        if not isinstance(value, bool | int | float) or not math.isfinite(value):
            raise TypeError(f"the reward is {value!r}, which is no finite number")
        return StepResult(Observation(), float(value), done=True)


def _read(data: str) -> tuple[list[Any], list[Any]]:
    """Return the rows to train on and those held out."""
    if data in SHIPPED:
        problems = load_problems(data)
        return (
            [asdict(problem) for problem in problems.train],
            [asdict(problem) for problem in problems.validation],
        )
    if is_public(data):
        found = read_rows(data)
        return list(found["train"]), list(found["validation"])
    rows = [line.value for line in read_lines(Path(data), DataFormatError)]
    if len(rows) < 2:
        raise DataFormatError(f"{data}: needs at least 2 rows", remedy="write one a line")
    return hold_out(rows)


def _decode(rows: Sequence[Any], data: str) -> list[_Task]:
    return [
        _Task(row, decode_prompt(row, f"{data}, row {number}")) for number, row in enumerate(rows)
    ]
