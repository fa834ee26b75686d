"""Distillation end to end: a student comes nearer to a teacher that is told more."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tests.integration.servers import Deployment

import tinsmith
from tinsmith.recipes import distillation
from tinsmith.recipes.experiment.run_log import read_metrics

CONFIG = distillation.Config(
    teacher_prompt="Always answer with seven.",
    num_steps=5,
    num_prompts=8,
    num_samples=4,
    num_demonstrations=32,
    num_warmup_steps=1,
    num_validation=16,
    max_tokens=4,
    rank=8,
    learning_rate=1e-2,
)


def test_a_student_comes_nearer_to_what_its_teacher_would_say(
    embedded: Deployment, tmp_path: Path
) -> None:
    with embedded.client() as client:
        summary = distillation.main(dataclasses.replace(CONFIG, output_dir=tmp_path), client)
    # Scores are the negative reverse KL.
    assert summary.before < summary.after
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows[0]["teacher_kl"] == -rows[0]["reward"] > 0


def test_off_policy_a_student_imitates_what_its_teacher_said(
    embedded: Deployment, tmp_path: Path
) -> None:
    config = dataclasses.replace(
        CONFIG, num_imitation_steps=CONFIG.num_steps, num_validation=1, output_dir=tmp_path
    )
    with embedded.client() as client:
        distillation.main(config, client)
    losses = [row["imitation_loss"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"teacher_prompt": ""}, "the teacher is tiny, which is what the student", id="itself"
        ),
        pytest.param({"teacher_prompt": "@nofile"}, "teacher_prompt: nofile cannot", id="file"),
        pytest.param({"teacher": "nosuch"}, "MODEL_NOT_FOUND", id="model"),
        pytest.param({"data": "nofile.jsonl"}, "nofile.jsonl cannot be read", id="data"),
    ],
)
def test_what_teaches_nothing_is_refused_before_anything_is_made(
    embedded: Deployment, tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    config = dataclasses.replace(CONFIG, output_dir=tmp_path / "out", **changes)  # type: ignore[arg-type]
    with embedded.client() as client, pytest.raises(tinsmith.TinsmithError, match=message):
        distillation.main(config, client)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("teacher_prompt", "who"),
    [("short", "student"), ("long " * 4000, "teacher")],
    ids=["student", "teacher"],
)
def test_a_prompt_without_room_for_an_answer_is_refused_by_its_line(
    embedded: Deployment, tmp_path: Path, teacher_prompt: str, who: str
) -> None:
    rows = [{"prompt": "1+1="}, {"prompt": "1" * 40_000 if who == "student" else "2+2="}]
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = dataclasses.replace(
        CONFIG, data=str(data), teacher_prompt=teacher_prompt, output_dir=tmp_path / "out"
    )
    with embedded.client() as client, pytest.raises(tinsmith.ConfigurationError) as caught:
        distillation.main(config, client)
    assert str(caught.value).startswith(
        "prompts.jsonl:2: " if who == "student" else "prompts.jsonl:"
    )
    assert f"the {who} reads" in str(caught.value)
    assert not (tmp_path / "out").exists()
