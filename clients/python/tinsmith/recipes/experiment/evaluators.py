"""Functions of the user's own that score the live weights on the way: the setting `evaluators`.

Each is called with a sampler of the live weights, in a thread of this process. One that fails, or
does not end in time, is told by its name and has no figure at that step; the training goes on.
"""

from __future__ import annotations

import math
import queue
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from tinsmith.errors import ConfigurationError
from tinsmith.recipes.experiment.settings import TrainingConfig
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.training.run_forms import TrainingRun
from tinsmith.user_code import load_object

PREFIX = "evaluator/"
"""Begins the names of their metrics."""
_MAX_METRICS = 16
"""Of one evaluator: a job reports few at each step, and a reader looks at fewer."""
_KEY = re.compile(r"[A-Za-z0-9_.@/-]{1,64}")


class _EvaluatorFailedError(Exception):
    """A call of an evaluator came to nothing; says why."""


@dataclass(slots=True)
class _Evaluator:
    """One function, and how often it is called."""

    name: str
    score: Callable[[Sampler], Any]
    every: int
    thread: threading.Thread | None = field(default=None, init=False)
    """Of its last call."""

    def call(self, sampler: Sampler, timeout_s: float) -> dict[str, float]:
        """Return its metrics.

        Raises:
            _EvaluatorFailedError: If it raises, returns something else, or takes too long.
        """
        if self.thread is not None and self.thread.is_alive():
            raise _EvaluatorFailedError("its last call has not ended")
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def work() -> None:
            try:
                answers.put((self.score(sampler), None))
            except BaseException as error:
                # Also what would end a program, such as `sys.exit`.
                answers.put((None, error))

        self.thread = threading.Thread(target=work, name=f"evaluator {self.name}", daemon=True)
        self.thread.start()
        try:
            value, error = answers.get(timeout=timeout_s)
        except queue.Empty:
            raise _EvaluatorFailedError(
                f"it took over {timeout_s:g} s; raise evaluator_timeout_s if it may"
            ) from None
        if error is not None:
            raise _EvaluatorFailedError(f"{type(error).__name__}: {error}") from error
        return self._read(value)

    def _read(self, value: Any) -> dict[str, float]:
        own = f"{PREFIX}{self.name}"
        if not isinstance(value, Mapping):
            return {own: _number(value)}
        if len(value) > _MAX_METRICS:
            raise _EvaluatorFailedError(
                f"it returned {len(value)} numbers, and may return {_MAX_METRICS}"
            )
        for key in value:
            if not isinstance(key, str) or not _KEY.fullmatch(key):
                raise _EvaluatorFailedError(f"{key!r} is no name of a metric")
        return {f"{own}/{key}": _number(each) for key, each in value.items()}


class Evaluators:
    """The evaluators of an experiment.

    Raises:
        ConfigurationError: If a function cannot be had, or two have one name.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self._num_steps = config.num_steps
        self._timeout_s = config.evaluator_timeout_s
        self._samplers: dict[str, Sampler] = {}
        self._evaluators = [
            *_load(config.evaluators, "evaluators", config.eval_every),
            *_load(config.rare_evaluators, "rare_evaluators", config.rare_eval_every),
        ]
        names = [each.name for each in self._evaluators]
        for name in names:
            if names.count(name) > 1:
                raise ConfigurationError(
                    f"two evaluators are named {name}", remedy="give functions of different names"
                )

    def __bool__(self) -> bool:
        """Whether there is one at all."""
        return bool(self._evaluators)

    def are_due(self, num_done: int) -> bool:
        """Whether one is called after so many steps; after the last, all are."""
        return any(self._is_due(each, num_done) for each in self._evaluators)

    def run(self, num_done: int, run: TrainingRun, say: Callable[[str], None]) -> dict[str, float]:
        """Call those that are due, one after the other.

        Args:
            num_done: Steps that were done.
            run: Whose live weights are scored.
            say: Is told of one that fails.

        Returns:
            `evaluator/NAME`, or `evaluator/NAME/KEY` of one that returns several numbers.
        """
        found: dict[str, float] = {}
        for each in self._evaluators:
            if not self._is_due(each, num_done):
                continue
            sampler = self._samplers.get(run.name)
            if sampler is None:
                sampler = self._samplers[run.name] = run.sampler()
            try:
                found |= each.call(sampler, self._timeout_s)
            except _EvaluatorFailedError as error:
                say(f"warning: evaluator {each.name} failed after step {num_done}: {error}")
        return found

    def _is_due(self, evaluator: _Evaluator, num_done: int) -> bool:
        is_time = evaluator.every and num_done % evaluator.every == 0
        return bool(is_time) or num_done == self._num_steps


def _load(words: str, setting: str, every: int) -> list[_Evaluator]:
    found = []
    for word in filter(None, map(str.strip, words.split(","))):
        score = load_object(word, setting)
        if not callable(score):
            raise ConfigurationError(
                f"{setting}: {word} is no function", remedy="define score(sampler) -> float"
            )
        found.append(_Evaluator(word.rpartition(":")[2], score, every))
    return found


def _number(value: Any) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise _EvaluatorFailedError(f"it returned {value!r:.60}, which is no finite number")
    return float(value)
