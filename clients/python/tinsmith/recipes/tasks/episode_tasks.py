"""Tasks for remote agents: built-in arithmetic, or the lines of a JSONL file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.errors import ConfigurationError
from tinsmith.recipes.tasks import arithmetic
from tinsmith.recipes.tasks.arithmetic import MathRecord
from tinsmith.recipes.tasks.jsonl import read_lines
from tinsmith.recipes.tasks.rl_problems import load_problems

_VALIDATION_EVERY = 5


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What an agent plays, in its own words.

    Attributes:
        task_id: Names it, for people.
        content: What the agent is told; any JSON.
    """

    task_id: str
    content: Any


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Tasks to train on and tasks to validate with; none is in both."""

    train: Sequence[AgentTask]
    validation: Sequence[AgentTask]

    def draw(self, step: int, *, num_tasks: int, seed: int) -> list[AgentTask]:
        """Return the tasks of a step: a function of seed and step."""
        generator = random.Random(f"tasks:{seed}:{step}")
        return generator.sample(list(self.train), min(num_tasks, len(self.train)))


def load_tasks(data: str) -> TaskSet:
    """Return the tasks of `arithmetic`, or of a JSONL file: one task on each line, of any form.

    A task of arithmetic holds `messages` to begin with and the true `answer`. Of a file, every
    fifth line is for validation; `task_id` is taken from the line, or counts them.

    Raises:
        ConfigurationError: If the file cannot be read, or holds less than two tasks.
    """
    if data == "arithmetic":
        problems = load_problems(data)
        return TaskSet(
            [_arithmetic_task(record) for record in problems.train],
            [_arithmetic_task(record) for record in problems.validation],
        )
    tasks = _read_tasks(Path(data))
    if len(tasks) < 2:
        raise ConfigurationError(f"{data} holds {len(tasks)} tasks; at least 2 are needed")
    validation = tasks[::_VALIDATION_EVERY]
    return TaskSet(
        [task for index, task in enumerate(tasks) if index % _VALIDATION_EVERY], validation
    )


def _arithmetic_task(record: MathRecord) -> AgentTask:
    content = {"messages": arithmetic.build_prompt(record), "answer": record.final_answer}
    return AgentTask(record.question, content)


def _read_tasks(path: Path) -> list[AgentTask]:
    tasks = []
    for line in read_lines(path):
        named = line.value.get("task_id") if isinstance(line.value, dict) else None
        tasks.append(AgentTask(str(named or line.number), line.value))
    return tasks
