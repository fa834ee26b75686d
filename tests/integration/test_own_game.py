"""A game of the user's own, and the matches of the README, by the commands that stand there."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from tests.integration.servers import Deployment
from tests.support.code_blocks import PYTHON, blocks_of

from tinsmith import cli
from tinsmith.recipes.experiment.run_log import read_metrics

TEST = "tests/integration/test_own_game.py"
SHORT = "num_imitation_steps=2 num_steps=4 num_games=4 num_validation=2"
MAX_LINES = 40


@pytest.fixture(autouse=True)
def _use(embedded: Deployment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TINSMITH_ADDRESS", embedded.address)
    monkeypatch.setenv("TINSMITH_API_KEY", embedded.api_key)
    monkeypatch.chdir(tmp_path)


def run(command: str) -> None:
    program, *words = shlex.split(command, comments=True)
    assert program == "tinsmith"
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert not caught.value.code


def test_the_game_of_the_page_is_learned(tmp_path: Path) -> None:
    own = [block for block in blocks_of("docs/matches.md") if block.what.startswith(TEST)]
    [game] = [block.code for block in own if block.language == PYTHON]
    [command] = [block.code.strip() for block in own if block.language != PYTHON]
    assert len(game.splitlines()) + len(command.splitlines()) <= MAX_LINES
    (tmp_path / "nim.py").write_text(game, encoding="utf-8")
    run(f"{command} {SHORT} eval_every=1 output_dir=curves")
    rows = read_metrics(tmp_path / "curves" / "metrics.jsonl")
    for agent in ("black", "white"):
        assert all(f"{agent}/validation" in row for row in rows)
        assert all(f"{agent}/reward" in row for row in rows[2:])
    # Both have a line in one picture.
    pictures = list((tmp_path / "curves").glob("*.png"))
    assert [picture.name for picture in pictures] == ["reward.png"]


def test_the_match_of_the_readme_runs(tmp_path: Path) -> None:
    [block] = [each for each in blocks_of("README.md") if each.what.startswith(TEST)]
    for number, line in enumerate(block.code.splitlines()):
        command = line.partition("#")[0]
        run(f"{command} {SHORT} output_dir=run-{number}")
        assert read_metrics(tmp_path / f"run-{number}" / "metrics.jsonl")
