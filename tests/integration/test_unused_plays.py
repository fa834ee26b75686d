"""Plays that are in no group are kept, by the client and by the server alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.servers import EmbeddedThread

from tinsmith.recipes import evaluate, rl
from tinsmith.rollouts import GroupConfig, NoRolloutsError, RolloutConfig
from tinsmith.rollouts.records import EpisodeRecord, read_records
from tinsmith.types import SamplingParams

CODE = '''
from tinsmith.environments.environment import Environment, Message, Observation, StepResult


class FailingEnvironment(Environment):
    """Fail at the second turn, of each odd seed or of all."""

    default_config = {"period": 2}

    def reset(self, seed, config):
        self._num_turns, self._fails = 0, seed % config["period"] == config["period"] - 1
        return Observation((Message("user", f"say {seed}"),))

    def step(self, action):
        self._num_turns += 1
        if self._fails and self._num_turns == 2:
            raise RuntimeError("the board is gone")
        is_over = self._num_turns == 2
        shown = Observation() if is_over else Observation((Message("user", "more"),))
        return StepResult(shown, 0.5, is_over)
'''
LIMITS = RolloutConfig(max_turns=3, max_tokens_per_turn=4)
GROUPS = GroupConfig(group_size=2, min_group_size=1, max_replacements=1)


def read(path: Path) -> list[EpisodeRecord]:
    return list(read_records(path))


def test_what_failed_is_kept_and_counts_for_nothing(
    make_embedded: Callable[..., EmbeddedThread], tmp_path: Path
) -> None:
    (tmp_path / "failing_boards.py").write_text(CODE)
    served = {
        "environments": "failing=failing_boards:FailingEnvironment",
        "python_path": str(tmp_path),
        "num_workers": 1,
    }
    with make_embedded(environment=served).start().client() as client:
        sampler = client.create_sampler(base_model="tiny")

        def play(place: str, seeds: list[int]) -> list[EpisodeRecord]:
            layout = "parquet" if place == "server" else "jsonl"
            path = tmp_path / f"{place}-{len(seeds)}.{layout}"
            try:
                client.environments.play(
                    "failing",
                    sampler=sampler,
                    seeds=seeds,
                    config=LIMITS,
                    params=SamplingParams(seed=5),
                    groups=GROUPS,
                    rollouts=place,  # type: ignore[arg-type]
                    keep_in=path,
                )
            finally:
                kept = read(path)
            return sorted(kept, key=lambda record: (not record.is_used, record.episode))

        here, there = play("client", [0, 1]), play("server", [0, 1])
        assert [record.is_used for record in here] == [True] * 2 + [False] * 4
        for mine, theirs in zip(here, there, strict=True):
            assert mine == theirs
        for record in here[2:]:
            assert (record.reason, record.advantage) == ("environment_failed", None)
            assert "the board is gone" in record.failure
            assert (record.rewards, record.origin.environment_seed) == ([0.5, 0.0], 1)
            assert record.num_sampled_tokens == sum(turn.num_tokens for turn in record.turns) > 1
        # One that failed is played again to where it failed.
        again = client.environments.replay(there[-1], sampler=sampler)
        assert again.is_bit_equal
        # Not one group: the file says what was played, and the error why.
        for place in ("client", "server"):
            with pytest.raises(NoRolloutsError, match="the board is gone"):
                play(place, [1])
            layout = "parquet" if place == "server" else "jsonl"
            kept = read(tmp_path / f"{place}-1.{layout}")
            assert [record.is_used for record in kept] == [False] * 4

        # A score counts none of them.
        config = evaluate.Config(
            environment="failing",
            base_model="tiny",
            num_validation=4,
            num_samples=1,
            max_tokens=4,
            keep_rollouts="jsonl",
            output_dir=tmp_path / "scored",
        )
        [summary] = evaluate.main(config, client)
        assert (summary.reward, summary.num_tasks) == (1.0, 2)
        [file] = (tmp_path / "scored" / "rollouts").glob("*.jsonl")
        assert {record.is_used for record in read(file)} == {True, False}

        # A recipe that cannot go on leaves what it played.
        training = rl.Config(
            environment="failing",
            environment_config='{"period": 1}',
            base_model="tiny",
            num_steps=1,
            num_problems=2,
            group_size=2,
            num_validation=2,
            keep_rollouts="jsonl",
            output_dir=tmp_path / "trained",
        )
        with pytest.raises(NoRolloutsError, match="the board is gone"):
            rl.main(training, client)
        [file] = (tmp_path / "trained" / "rollouts").glob("*.jsonl")
        assert not any(record.is_used for record in read(file))
