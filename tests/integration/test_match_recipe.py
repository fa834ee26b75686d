"""Two policies play each other, each learns from its side, and a run goes on with equal bits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tests.integration.servers import Deployment
from tests.integration.test_recipes import weights_sha256

import tinsmith
from tinsmith.recipes import match
from tinsmith.recipes.experiment.run_log import RunLog, read_metrics
from tinsmith.recipes.reinforcement import Summary
from tinsmith.rollouts import NoRolloutsError
from tinsmith.rollouts.adapters import ServiceSampler
from tinsmith.rollouts.interfaces import Completion
from tinsmith.types import ModelInput, SamplingParams

CONFIG = match.Config(
    data="kuhn",
    adapter="full",
    imitation_learning_rate=3e-3,
    learning_rate=3e-4,
    num_imitation_steps=24,
    num_practice_steps=2,
    num_steps=30,
    num_games=8,
    num_validation=8,
    save_every=26,
    max_tokens=4,
)


def test_both_policies_of_an_interrupted_match_go_on_with_the_same_bits(
    embedded: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = RunLog.add

    def interrupt_after(log: RunLog, step: int, metrics: dict[str, float]) -> None:
        add(log, step, metrics)
        if step in (24, 27):
            raise KeyboardInterrupt

    def hashes(client: tinsmith.Client, summaries: list[Summary]) -> list[str]:
        return [weights_sha256(client, summary.checkpoint) for summary in summaries]

    with embedded.client() as client:
        calm = match.main(dataclasses.replace(CONFIG, output_dir=tmp_path / "a"), client)
        config = dataclasses.replace(CONFIG, output_dir=tmp_path / "b")
        with monkeypatch.context() as patch:
            patch.setattr(RunLog, "add", interrupt_after)
            for _ in ("amid the practice", "amid the match"):
                with pytest.raises(KeyboardInterrupt):
                    match.main(config, client)
        resumed = match.main(config, client)
        first, second = hashes(client, calm)
        assert first != second, "each has weights of its own"
        assert hashes(client, resumed) == [first, second]
        assert not [each for each in client.matches.list() if each.is_open]

    rows = read_metrics(tmp_path / "a" / "metrics.jsonl")
    for agent in ("black", "white"):
        assert rows[23][f"{agent}/imitation_loss"] < rows[0][f"{agent}/imitation_loss"] / 3
        assert all(row[f"{agent}/mismatch"] == 0.0 for row in rows[24:])
    assert [step for step, row in enumerate(rows) if "black/forfeited" in row] == [24, 25]
    # A game that one side forfeits at its first move is none of the other side's.
    whole = [row for row in rows[26:] if row["black/lost"] == row["white/lost"] == 0.0]
    assert all(row["black/reward"] == -row["white/reward"] for row in whole), "zero-sum"
    assert all(row["black/trained"] + row["black/lost"] == CONFIG.num_games for row in rows[24:])
    kept = json.loads((tmp_path / "a" / "opponents.json").read_text())[-1]
    assert kept["partners"]["white"]["checkpoint"] == calm[1].checkpoint
    assert set(kept["baselines"]) == {"black", "white"}


SHORT = {"num_imitation_steps": 3, "num_steps": 5, "num_games": 4, "num_validation": 2}


def test_hands_are_shown_at_once_and_the_games_are_zero_sum(
    embedded: Deployment, tmp_path: Path
) -> None:
    config = match.Config(
        data="rock_paper_scissors", agents="left,right", output_dir=tmp_path, **SHORT
    )
    with embedded.client() as client:
        match.main(config, client)
        [played] = [each for each in client.matches.list() if "left" in str(each.agents)]
    assert played.turn_order == "simultaneous"
    for row in read_metrics(tmp_path / "metrics.jsonl")[3:]:
        assert row["left/reward"] == -row["right/reward"]
        assert row["left/trained"] == SHORT["num_games"]


def test_a_single_policy_plays_a_script_and_a_checkpoint(
    embedded: Deployment, tmp_path: Path
) -> None:
    shared = {"data": "kuhn", "agents": "learner", "max_tokens": 4, **SHORT}
    with embedded.client() as client:
        [first] = match.main(
            match.Config(opponent="honest", order="fixed", output_dir=tmp_path / "a", **shared),
            client,
        )
        [second] = match.main(
            match.Config(opponent=first.checkpoint, output_dir=tmp_path / "b", **shared), client
        )
        missing = f"{first.run}/checkpoints/nothing"
        with pytest.raises(tinsmith.NotFoundError, match="nothing"):
            match.main(match.Config(opponent=missing, output_dir=tmp_path / "c", **shared), client)
        assert not [each for each in client.matches.list() if each.is_open]
    assert first.run != second.run
    for folder in ("a", "b"):
        rows = read_metrics(tmp_path / folder / "metrics.jsonl")
        assert all("reward" in row for row in rows[3:])
    # The learner is the first of the agents, and order=fixed lets it begin every game.
    assert all(
        row["reward_second"] == 0.0 for row in read_metrics(tmp_path / "a/metrics.jsonl")[3:]
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"agents": "a", "opponent": "honest"}, "opponent is 'honest', which gomoku has no"),
        ({"opponent": "greedy"}, "not of 3, the opponent among them"),
        ({"order": "backwards"}, "order is 'backwards'"),
        ({"order": "simultaneous"}, "agents of gomoku move one after the other"),
        ({"data": "nothing.py:Game"}, "nothing.py is not there"),
        ({"data": "tinsmith.games:League"}, "is no game"),
        ({"data": "chess"}, "there is no game 'chess'"),
        ({"agents": "black"}, "gomoku is a game of 2 agents, not of 1"),
        ({"environment": "nosuch"}, "environment is 'nosuch', and no environment of this"),
        ({"agents": "a,b,c"}, "gomoku is a game of 2 agents, not of 3"),
        ({"agents": "black,black"}, "agents is 'black,black'"),
        ({"agents": "black,"}, "agents is 'black,'"),
        ({"validation_opponent": "honest"}, "validation_opponent is 'honest'"),
        (
            {"num_steps": 50, "num_imitation_steps": 40, "num_practice_steps": 10},
            "num_steps is 50, and 50 of them come before the match",
        ),
        (
            {"num_practice_steps": 1, "practice_opponent": "honest"},
            "practice_opponent is 'honest'",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_before_a_run_begins(
    embedded: Deployment, tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    config = dataclasses.replace(match.Config(output_dir=tmp_path / "new"), **changes)
    with embedded.client() as client:
        num_runs = len(client.runs.list())
        with pytest.raises(tinsmith.ConfigurationError, match=problem):
            match.main(config, client)
        assert len(client.runs.list()) == num_runs
    assert not (tmp_path / "new").exists()


def test_a_step_without_a_whole_game_says_why(
    embedded: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample_async = ServiceSampler.sample_async

    async def fail(
        sampler: ServiceSampler, prompt: ModelInput, params: SamplingParams
    ) -> Completion:
        if params.temperature > 0:  # Validation is greedy.
            raise tinsmith.UnavailableError("the sampler is gone")
        return await sample_async(sampler, prompt, params)

    monkeypatch.setattr(ServiceSampler, "sample_async", fail)
    config = match.Config(data="kuhn", output_dir=tmp_path, **SHORT | {"num_imitation_steps": 0})
    with (
        embedded.client() as client,
        pytest.raises(NoRolloutsError, match=r"white: .*the sampler is gone"),
    ):
        match.main(config, client)
