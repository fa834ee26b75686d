"""The loop of the README, and the agent of its guide, run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.servers import Deployment
from tests.support.code_blocks import PYTHON, blocks_of

from tinsmith.recipes import rl_episodes

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_loop_of_the_readme_runs(
    embedded: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    monkeypatch.setenv("TINSMITH_ADDRESS", embedded.address)
    monkeypatch.setenv("TINSMITH_API_KEY", embedded.api_key)
    exec(compile(blocks[0], str(README), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    steps = [line.split() for line in lines[:10]]
    assert [int(version) for _, version in steps] == list(range(1, 11))
    assert float(steps[-1][0]) < float(steps[0][0])
    assert "10" in lines[-1]


def test_the_two_commands_are_shown() -> None:
    text = README.read_text(encoding="utf-8")
    assert "make demo" in text
    assert "make test" in text


def test_the_agent_of_the_guide_plays_what_the_recipe_registers(
    embedded: Deployment, tmp_path: Path
) -> None:
    blocks = list(blocks_of("docs/guides/rl-episodes.md"))
    [task] = [block.code for block in blocks if block.language == "json"]
    [agent] = [block.code for block in blocks if block.language == PYTHON]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(task * 6, encoding="utf-8")
    script = tmp_path / "agent.py"
    script.write_text(agent, encoding="utf-8")
    environment = {
        **os.environ,
        "TINSMITH_ADDRESS": embedded.address,
        "TINSMITH_API_KEY": embedded.api_key,
    }
    config = rl_episodes.Config(
        data=str(tasks),
        queue="rl",
        num_steps=1,
        num_tasks=2,
        group_size=2,
        step_timeout_s=90,
        output_dir=tmp_path / "run",
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        with embedded.client() as client:
            # Two tasks validate, before and after; four train.
            assert rl_episodes.main(config, client).num_validation == 2
    finally:
        process.kill()
        _, said = process.communicate(timeout=10)
    assert said == ""
