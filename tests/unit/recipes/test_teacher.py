"""What a teacher says to answers becomes advantages, token by token; prompts in every layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinsmith.errors import ConfigurationError
from tinsmith.recipes.tasks.prompts import PromptSet, decode_prompt, load_prompts
from tinsmith.recipes.teacher_source import Teacher, TeacherConfig, TeacherSource
from tinsmith.types import SampledSequence, SamplingParams

ASKED = {"role": "user", "content": "2+3="}
TOLD = "you add"


class Letters:
    """A tokenizer of bytes, with a template that only joins."""

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        """Return the bytes of all contents."""
        del options
        return list("|".join(message["content"] for message in messages).encode())


class Weights:
    """A sampler that always says `42`, and finds it as likely as it is told."""

    base_model = "tiny"

    def __init__(self, logprobs: list[float]) -> None:
        self._logprobs = logprobs
        self.asked: list[bytes] = []
        self.seeds: list[int] = []

    def sample(
        self, prompt: list[int], *, sampling_params: SamplingParams, num_samples: int = 1
    ) -> Any:
        """Return the same answer for each sample."""
        self.asked.append(bytes(prompt))
        assert sampling_params.seed is not None
        self.seeds.append(sampling_params.seed)
        one = SampledSequence(list(b"42"), self._logprobs, [0, 0], "stop")
        return SimpleNamespace(result=lambda: SimpleNamespace(sequences=[one] * num_samples))

    def compute_logprobs(self, tokens: list[int]) -> Any:
        """Return log-probabilities, of which those of the answer are at the end."""
        self.asked.append(bytes(tokens))
        found = [None, *([0.0] * (len(tokens) - 3)), *self._logprobs]
        return SimpleNamespace(result=lambda: found)


def make_source(student: Weights, teacher: Weights, **changes: Any) -> TeacherSource:
    settings = {
        "num_prompts": 1,
        "num_samples": 2,
        "num_demonstrations": 1,
        "max_tokens": 2,
        "temperature": 1.0,
        "kl_coef": 1.0,
        "kl_discount_factor": 0.0,
        "num_validation": 4,
        "seed": 0,
        **changes,
    }
    made: Any = (student, Letters(), teacher)
    return TeacherSource(
        TeacherConfig(**settings),
        made[0],
        made[1],
        PromptSet([[ASKED]], [[{"role": "system", "content": "s"}, ASKED]]),
        Teacher(made[2], made[1], TOLD),
    )


@pytest.mark.parametrize(
    ("changes", "advantages"),
    [
        ({}, [-0.5, 1.0]),
        ({"kl_coef": 2.0}, [-1.0, 2.0]),
        ({"kl_discount_factor": 0.5}, [0.0, 1.0]),
    ],
    ids=["plain", "factor", "discounted"],
)
def test_a_token_gains_what_the_teacher_finds_it_likelier(
    changes: dict[str, float], advantages: list[float]
) -> None:
    student, teacher = Weights([-0.5, -2.0]), Weights([-1.0, -1.0])
    [experience] = make_source(student, teacher, **changes).play(3)
    assert len(experience.sequences) == experience.num_plays == 2
    arrays = experience.sequences[0]
    np.testing.assert_allclose(arrays.advantages[arrays.mask > 0], advantages)
    assert not arrays.advantages[arrays.mask == 0].any()
    assert experience.metrics["teacher_kl"] == pytest.approx(-0.25)
    assert experience.mean_reward == pytest.approx(0.25)
    # Only the teacher is told more.
    assert student.asked == [b"2+3="]
    assert teacher.asked == [b"you add|2+3=42"] * 2


def test_held_out_prompts_are_answered_with_the_same_seeds_at_each_score() -> None:
    student, teacher = Weights([-0.5, -2.0]), Weights([-1.0, -1.0])
    source = make_source(student, teacher)
    [scores] = source.score(0)
    assert scores.rewards == [pytest.approx(0.25)]
    source.score(5)
    assert student.seeds[0] == student.seeds[1]
    # A system message of the data stays behind the teacher's.
    assert teacher.asked[0] == b"you add\n\ns|2+3=42"


def test_the_student_imitates_what_the_teacher_answers_to_its_own_prompt() -> None:
    student, teacher = Weights([-0.5, -2.0]), Weights([-1.0, -1.0])
    [[arrays]] = make_source(student, teacher).imitate(0)
    assert teacher.asked == [b"you add|2+3="]
    assert not student.asked
    assert bytes([*arrays.tokens, int(arrays.target_tokens[-1])]) == b"2+3=42"
    assert arrays.mask.sum() == 2


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+3="},
        {"prompt": [ASKED], "chosen": "5"},
        {"messages": [ASKED, {"role": "assistant", "content": "5"}]},
        {"question": "2+3=", "answer": "5"},
        {"conversations": [{"from": "human", "value": "2+3="}]},
    ],
)
def test_every_layout_is_the_same_prompt(row: dict[str, Any]) -> None:
    assert decode_prompt(row, "here") == [ASKED]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "x:1: a row holds no prompt"),
        ([1], "x:1: a row holds no prompt"),
        ({"prompt": []}, "x:1: a row holds no prompt"),
    ],
)
def test_a_row_without_a_prompt_is_refused_by_its_line(row: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        decode_prompt(row, "x:1")


@pytest.mark.parametrize("data", ["pig_latin", "small_sums", "arithmetic"])
def test_built_in_prompts_are_held_out_or_trained_on(data: str) -> None:
    prompts = load_prompts(data)
    assert prompts.train
    assert not [each for each in prompts.held_out[:20] if each in prompts.train]
    drawn = prompts.draw(2, num_prompts=4, seed=1)
    assert drawn == prompts.draw(2, num_prompts=4, seed=1)
    assert drawn != prompts.draw(3, num_prompts=4, seed=1)


def test_a_file_keeps_every_fifth_prompt_back(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": str(n)}) for n in range(6)))
    prompts = load_prompts(str(file))
    assert [each[0]["content"] for each in prompts.held_out] == ["0", "5"]
    file.write_text('{"prompt": "alone"}')
    with pytest.raises(ConfigurationError, match="needs at least 2 prompts"):
        load_prompts(str(file))
