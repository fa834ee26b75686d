"""Sweeps and code of one's own against a server: several runs at once, rewards of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.integration.servers import Deployment

from tinsmith.recipes import rl, supervised
from tinsmith.recipes.experiment.run_log import read_metrics
from tinsmith.recipes.sweep import Sweep, run_sweep

CODE = """
from tinsmith.environments.environment import Environment, Observation, StepResult

def score(row, completion):
    return len(completion) / 10

class Count(Environment):
    def reset(self, seed, config):
        return Observation.of_user("count")

    def step(self, action):
        return StepResult(Observation(), len(action.text) / 10, done=True)
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "chat.jsonl"
    rows = [{"prompt": f"say {number}", "completion": str(number)} for number in range(5)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_variants_train_runs_of_their_own_and_go_on_where_they_ended(
    embedded: Deployment, tmp_path: Path, data: Path
) -> None:
    words = [f"data={data}", f"output_dir={tmp_path / 'out'}", "num_steps=2", "batch_size=2"]
    axes = {"learning_rate": ["1e-3", "1e-2"]}
    sweep = Sweep("supervised", supervised, axes, [*words, "max_tokens=2", "rank=4"])
    with embedded.client() as client:
        outcomes = run_sweep(sweep, client, supervised.main)
        names = [
            json.loads((outcome.folder / "config.json").read_text())["run"] for outcome in outcomes
        ]
        again = run_sweep(sweep, client, supervised.main)
    assert len(set(names)) == 2
    assert [len(read_metrics(outcome.folder / "metrics.jsonl")) for outcome in outcomes] == [2, 2]
    # Nothing is trained twice.
    assert again == outcomes
    saves = (outcomes[0].folder / "checkpoints.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in saves] == ["final"]
    samples = (outcomes[0].folder / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in samples] == [0, 2]


@pytest.mark.parametrize("setting", ["reward", "environment"])
def test_rl_trains_with_code_of_a_file(
    embedded: Deployment, tmp_path: Path, data: Path, setting: str
) -> None:
    code = tmp_path / "my.py"
    code.write_text(CODE)
    name = {"reward": "score", "environment": "Count"}[setting]
    config = rl.Config(
        data=str(data),
        num_steps=1,
        num_problems=2,
        group_size=4,
        num_validation=1,
        max_tokens=4,
        rank=4,
        output_dir=tmp_path / "out",
        **{setting: f"{code}:{name}"},  # type: ignore[arg-type]
    )
    with embedded.client() as client:
        summary = rl.main(config, client)
    assert summary.num_validation == 1
    [row] = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert row["reward"] >= 0
    assert row["turns"] == 1
    assert row["lost"] == 0
