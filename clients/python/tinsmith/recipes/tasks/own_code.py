"""A reward or an environment of the user's own, named in one setting: `my.py:score`.

A reward is a function `score(row, completion) -> float` of a row of the data and of what the model
answered. An environment is a class with `reset` and `step` (`tinsmith.environments.environment`).
Both are imported into this process and run in its threads; nothing confines them.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import random
import sys
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

RewardFunction = Callable[[Mapping[str, Any], str], float]


def is_own(name: str) -> bool:
    """Whether an environment is named as code: `FILE.py:CLASS` or `MODULE:CLASS`."""
    return ":" in name


def load_object(path: str, setting: str) -> Any:
    """Return what `FILE.py:NAME` or `MODULE:NAME` names.

    Args:
        path: Where it is; a file is read from the current folder on.
        setting: Name of the setting, for messages.

    Raises:
        ConfigurationError: If there is no such file, module or name, or importing it fails.
    """
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise ConfigurationError(
            f"{setting} is {path!r}", remedy="write FILE.py:NAME, or MODULE:NAME"
        )
    module = import_place(place, f"{setting}: ")
    if not hasattr(module, name):
        raise ConfigurationError(f"{setting}: {place} has no {name}", remedy="correct the name")
    return getattr(module, name)


def import_place(place: str, prefix: str = "") -> Any:
    """Return the module of a file, `FILE.py`, or of a name.

    Args:
        place: Either.
        prefix: Begins the message of a failure.

    Raises:
        ConfigurationError: If there is no such file or module, or importing it fails.
    """
    try:
        if place.endswith(".py"):
            return _import_file(Path(place))
        # A console script does not look into the folder that it is called in.
        _look_into(Path.cwd())
        return importlib.import_module(place)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{prefix}{place} cannot be imported: {type(error).__name__}: {error}",
            remedy="run it by itself to see where it fails",
        ) from error


def _look_into(folder: Path) -> None:
    """Look for modules in a folder too, behind all others; imports may come later as well."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _import_file(file: Path) -> Any:
    path = file.expanduser().resolve()
    if not path.is_file():
        raise ConfigurationError(f"{file} is not there", remedy="check the path")
    # Two files of one name are two modules, and pickling finds either again.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{file} is no Python file", remedy="check the path")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # A file may import its neighbours, which come first, as when it is run by itself.
        sys.path.insert(0, str(path.parent))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(path.parent))
        _look_into(path.parent)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_class(path: str, setting: str) -> type[Environment]:
    made = load_object(path, setting)
    if not isinstance(made, type) or not issubclass(made, Environment):
        raise ConfigurationError(
            f"{setting}: {path} is no environment",
            remedy="derive it from tinsmith.environments.environment.Environment",
        )
    return made


class OwnEnvironment:
    """An environment class as tasks by seed; see `Playable`.

    Args:
        path: Names the class.
        config: Settings of training.
        validation_config: Settings of what is scored.
        validation_path: Names another class that is scored; the same if it is empty.
        step_timeout_s: What a call of either may take.

    Raises:
        ConfigurationError: If a class cannot be had.
    """

    def __init__(
        self,
        path: str,
        config: Mapping[str, JsonValue],
        validation_config: Mapping[str, JsonValue],
        *,
        validation_path: str = "",
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        trained = _load_class(path, "environment")
        scored = (
            _load_class(validation_path, "validation_environment") if validation_path else trained
        )
        self._train = (trained, config)
        self._scored = (scored, validation_config)
        self._step_timeout_s = step_timeout_s

    async def create_instance(self, seed: int, *, is_validation: bool) -> LocalInstance:
        """Return a fresh episode."""
        played, config = self._scored if is_validation else self._train
        return await create_local_instance(
            played, seed=seed, config=config, step_timeout_s=self._step_timeout_s
        )

    def demonstrate(self, seed: int, occurrence: str) -> Sequence[str]:
        """Return nothing: there is no pupil, and the recipe refuses a warm start."""
        del seed, occurrence
        return ()


class RewardedPrompts:
    """Prompts whose answers a function rewards, as tasks by seed; see `Playable`.

    Args:
        data: `arithmetic`, `small_sums`, a JSONL file, a folder, or `hf://NAME[:CONFIG]`, of rows
            with a prompt. Further keys of a row are the function's to read. Of a file, every fifth
            row is held out.
        reward: Names the function.
        step_timeout_s: What a call of it may take.

    Raises:
        ConfigurationError: If the function cannot be had, or the data not be read.
    """

    def __init__(self, data: str, reward: str, *, step_timeout_s: float = STEP_TIMEOUT_S) -> None:
        score = load_object(reward, "reward")
        if not callable(score):
            raise ConfigurationError(
                f"reward: {reward} is no function", remedy="define score(row, completion)"
            )
        self._score: RewardFunction = score
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
