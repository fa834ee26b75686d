"""Math problems, one turn each, scored by their final number.

Problems come from the first of these that is there: the request (`question` and `answer`), the
JSONL file of the server's settings (GSM8K's layout), the arithmetic problems of the recipes.
A request never names a file. Seed `s` takes problem `s mod N`, so that a caller can walk through a
split without drawing one twice.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from tinsmith.recipes.tasks.arithmetic import (
    ANSWER_MARK,
    MathFormatError,
    MathRecord,
    make_split,
    parse_completion,
    read_jsonl,
)
from tinsmith_environment.environment import (
    Action,
    Environment,
    InvalidActionError,
    InvalidSettingError,
    JsonValue,
    Observation,
    StepResult,
    read_str,
)

_SPLITS = ("train", "validation", "warm_start")


class MathEnvironment(Environment):
    """Answer one math problem.

    Args:
        problems_path: JSONL file of the operator; arithmetic without it.
    """

    description = "Answer a math problem; reward 1 if the final number is right."
    default_config: ClassVar[Mapping[str, JsonValue]] = {
        "split": "train",
        "question": "",
        "answer": "",
    }

    def __init__(self, problems_path: str = "") -> None:
        self._problems_path = problems_path

    def reset(self, seed: int, config: Mapping[str, JsonValue]) -> Observation:
        """Ask the problem."""
        self._record = self._find_record(seed, config)
        self._final_answer = self._record.final_answer
        return Observation.of_user(self._record.question)

    def step(self, action: Action) -> StepResult:
        """Score the answer; one that cannot be read earns nothing."""
        if action.text is None:
            raise InvalidActionError("answers are texts")
        parsed = parse_completion(action.text)
        is_correct = parsed == self._final_answer
        info: dict[str, JsonValue] = {
            "correct": is_correct,
            "parsed_answer": parsed,
            "expected_answer": self._final_answer,
        }
        if parsed is None:
            info["parse_error"] = (
                f"no number behind {ANSWER_MARK}, and the answer is not one number alone"
            )
        return StepResult(Observation(), float(is_correct), True, info)

    def _find_record(self, seed: int, config: Mapping[str, JsonValue]) -> MathRecord:
        question, answer = read_str(config, "question"), read_str(config, "answer")
        if bool(question) != bool(answer):
            missing = "answer" if question else "question"
            raise InvalidSettingError(missing, "is required: question and answer go together")
        if question:
            worked = answer if ANSWER_MARK in answer else f"{ANSWER_MARK} {answer}"
            record = MathRecord(question, worked)
            try:
                _ = record.final_answer
            except MathFormatError as error:
                raise InvalidSettingError("answer", f"holds no number: {error}") from error
            return record
        split = read_str(config, "split")
        if split not in _SPLITS:
            raise InvalidSettingError("split", f"must be one of {', '.join(_SPLITS)}")
        if self._problems_path:
            records = _load_file(self._problems_path)
        else:
            records = getattr(_make_split(), split)
        return records[seed % len(records)]


@functools.cache
def _make_split() -> object:
    return make_split()


@functools.lru_cache(maxsize=4)
def _load_file(path: str) -> tuple[MathRecord, ...]:
    records = read_jsonl(Path(path))
    if not records:
        raise MathFormatError(f"{Path(path).name} holds no problems")
    return records
