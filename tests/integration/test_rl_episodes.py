"""The recipe for remote agents, end to end: they play, it trains, and Ctrl-C loses nothing."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.episode_player import EpisodeEndpoint, agents
from tests.integration.servers import EmbeddedThread

import tinsmith
from tinsmith.recipes import rl_episodes
from tinsmith.recipes.episode_groups import EpisodeGroups, PlayedGroups
from tinsmith.recipes.experiment.run_log import RunLog, read_metrics
from tinsmith.rollouts.records import read_records

CONFIG = rl_episodes.Config(
    num_steps=3, num_tasks=2, group_size=4, num_validation=3, step_timeout_s=60, save_every=1
)
TYPES = ("train", "train", "eval")
EVALUATORS = """
import tinsmith

def version(sampler):
    params = tinsmith.SamplingParams(max_tokens=1, seed=1)
    [answer] = sampler.sample([5, 6], sampling_params=params).result().sequences
    return max(answer.versions)

def broken(sampler):
    raise RuntimeError("no data")
"""


@pytest.fixture
def endpoint_of(
    make_embedded: Callable[..., EmbeddedThread],
) -> Iterator[tuple[tinsmith.Client, EpisodeEndpoint]]:
    server = make_embedded()
    deployment = server.start()
    endpoint = EpisodeEndpoint(server.scheduler_address, server.pod_key)
    with deployment.client() as client:
        yield client, endpoint
    endpoint.close()


class Player:
    """Plays two turns and likes even tokens; the first episode that it gets goes wrong."""

    def __init__(self, client: tinsmith.Client, endpoint: EpisodeEndpoint) -> None:
        self._endpoint = endpoint
        self._tokenizer = client.get_tokenizer("tiny")
        self._unlucky = iter([True])

    def __call__(self, episode: tinsmith.HeldEpisode) -> None:
        if next(self._unlucky, False):
            episode.abort("the tool broke")
            return
        messages = episode.task["messages"]
        prompt = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        evens: list[int] = []
        for _ in range(2):
            # An answer may end before its third token.
            tokens = self._endpoint.complete(episode.openai.api_key, prompt, max_tokens=3)
            evens.append(sum(token % 2 == 0 for token in tokens))
            prompt = [*prompt, *tokens, 5, 6]
        # A reward for each of the two calls.
        output = tinsmith.WorkflowOutput(
            [even / 6 for even in evens],
            is_success=any(evens),
            log_metrics={"even": sum(evens), "reward": 7.0},
        )
        episode.end(output)


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_agents_play_and_the_recipe_trains(
    endpoint_of: tuple[tinsmith.Client, EpisodeEndpoint], tmp_path: Path, adapter: str
) -> None:
    client, endpoint = endpoint_of
    config = dataclasses.replace(
        CONFIG, adapter=adapter, keep_rollouts="jsonl", output_dir=tmp_path
    )
    with agents(client, Player(client, endpoint), queue="rl", types=TYPES) as failures:
        summary = rl_episodes.main(config, client)
    assert not failures
    assert client.checkpoints.get(summary.checkpoint).version == CONFIG.num_steps
    assert summary.num_validation == 3
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert 0 <= row["reward"] <= 1
        assert row["calls"] == 2
        assert row["trained"] > 0
        # Recorded as they were sampled: the trainer computes what the sampler said.
        assert row["mismatch"] < 1e-3
        assert row["staleness"] == 0
        assert row["late"] == row["lost"] == 0
        # What agents say of their episodes is in the row, and replaces nothing of the training.
        assert row["environment/even"] == pytest.approx(6 * row["reward"], abs=1e-5)
        assert row["environment/reward"] == 7.0
        assert 0 < row["is_success"] <= 1
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    kept = list(read_records(tmp_path / "rollouts" / "train-000002.jsonl"))
    mean = sum(record.reward for record in kept) / len(kept)
    # Metrics are written with six digits.
    assert mean == pytest.approx(rows[2]["reward"], abs=1e-6)
    assert {len(record.turns) for record in kept} == {2}
    for record in kept:
        sampled = [token for token, said in zip(record.tokens, record.mask, strict=True) if said]
        even = sum(token % 2 == 0 for token in sampled)
        assert len(record.rewards) == 2
        assert sum(record.rewards) == pytest.approx(even / 6)
        assert record.turns[-1].info["metrics"]["even"] == even
    assert {version for record in kept for version in record.versions} == {-1, 2}
    assert len(list(read_records(tmp_path / "rollouts" / "validation-000003.jsonl"))) == 3


def test_agents_play_what_is_held_out_on_the_way(
    endpoint_of: tuple[tinsmith.Client, EpisodeEndpoint],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client, endpoint = endpoint_of
    code = tmp_path / "my_evaluators.py"
    code.write_text(EVALUATORS)
    config = dataclasses.replace(
        CONFIG,
        eval_every=1,
        evaluators=f"{code}:version",
        rare_evaluators=f"{code}:broken",
        keep_rollouts="jsonl",
        output_dir=tmp_path / "out",
    )
    with agents(client, Player(client, endpoint), queue="rl", types=TYPES) as failures:
        summary = rl_episodes.main(config, client)
    assert not failures
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [row["evaluator/version"] for row in rows] == [1.0, 2.0, 3.0]
    # The last score is the one of the end: agents play each task once for it.
    assert ["validation" in row for row in rows] == [True, True, False]
    folder = tmp_path / "out" / "rollouts"
    for num_done in range(4):
        kept = list(read_records(folder / f"validation-{num_done:06d}.jsonl"))
        assert len(kept) == summary.num_validation == 3
        assert {version for record in kept for version in record.versions} == {-1, num_done}
        if 0 < num_done < 3:
            row = rows[num_done - 1]
            rewards = [record.reward for record in kept]
            assert row["validation"] == pytest.approx(sum(rewards) / 3, abs=1e-6)
            solved = sum(reward > 0 for reward in rewards)
            assert row["validation_is_success"] == pytest.approx(solved / 3, abs=1e-6)
    said = capsys.readouterr().out
    assert said.count("evaluator broken failed after step 3: RuntimeError: no data") == 1


def test_evaluators_are_looked_for_before_a_run_is_made(
    endpoint_of: tuple[tinsmith.Client, EpisodeEndpoint], tmp_path: Path
) -> None:
    client, _ = endpoint_of
    config = dataclasses.replace(CONFIG, evaluators="nofile.py:score", output_dir=tmp_path / "out")
    with pytest.raises(tinsmith.ConfigurationError, match=r"nofile\.py is not there"):
        rl_episodes.main(config, client)
    assert not list(client.runs.list())


def test_a_look_that_is_given_up_loses_no_step(
    endpoint_of: tuple[tinsmith.Client, EpisodeEndpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, endpoint = endpoint_of
    config = dataclasses.replace(CONFIG, eval_every=2, output_dir=tmp_path)
    play, num_scored = EpisodeGroups.play, itertools.count()

    def play_or_interrupt(groups: EpisodeGroups, tasks: Any, **how: Any) -> PlayedGroups:
        if how["episode_type"] == "eval" and next(num_scored) == 1:
            raise KeyboardInterrupt
        return play(groups, tasks, **how)

    monkeypatch.setattr(EpisodeGroups, "play", play_or_interrupt)
    with agents(client, Player(client, endpoint), queue="rl", types=TYPES) as failures:
        with pytest.raises(KeyboardInterrupt):
            rl_episodes.main(config, client)
        assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]
        rl_episodes.main(config, client)
    assert not failures
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_an_interrupted_loop_goes_on_where_it_saved(
    endpoint_of: tuple[tinsmith.Client, EpisodeEndpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, endpoint = endpoint_of
    config = dataclasses.replace(CONFIG, output_dir=tmp_path)
    add = RunLog.add

    def add_then_interrupt(log: RunLog, step: int, metrics: dict[str, float]) -> None:
        add(log, step, metrics)
        if step == 1:
            raise KeyboardInterrupt

    with agents(client, Player(client, endpoint), queue="rl", types=TYPES) as failures:
        with monkeypatch.context() as patch:
            patch.setattr(RunLog, "add", add_then_interrupt)
            with pytest.raises(KeyboardInterrupt):
                rl_episodes.main(config, client)
        summary = rl_episodes.main(config, client)
    assert not failures
    assert client.checkpoints.get(summary.checkpoint).version == CONFIG.num_steps
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]


def test_an_episode_goes_on_through_a_change_of_weights(
    endpoint_of: tuple[tinsmith.Client, EpisodeEndpoint],
) -> None:
    client, endpoint = endpoint_of
    run = client.create_lora_training_run("tiny", rank=4)
    client.episodes.create([tinsmith.EpisodeSpec()], sampler=run.sampler())
    with client.episodes.agent().episode() as episode:
        first = endpoint.complete(episode.openai.api_key, [1, 2, 3], max_tokens=4)
        data = [
            tinsmith.Datum(
                tinsmith.ModelInput.from_ints([1, 2, 3]),
                {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
            )
        ]
        run.forward_backward(data, "cross_entropy").result()
        run.optim_step(tinsmith.AdamParams(learning_rate=1e-3)).result()
        # Weights are published in the background; a call that asks for them waits.
        run.sampler().sample(
            [1, 2, 3], sampling_params=tinsmith.SamplingParams(max_tokens=1)
        ).result()
        second = endpoint.complete(episode.openai.api_key, [1, 2, 3, *first, 7], max_tokens=4)
        ended = episode.end(tinsmith.WorkflowOutput(reward=[0.0, 1.0]))
    [trajectory] = client.episodes.get(ended.name).trajectories
    assert trajectory.tokens.tolist() == [*first, 7, *second]
    assert trajectory.versions.tolist() == [0] * len(first) + [0] + [1] * len(second)
    assert ended.outcome == tinsmith.EpisodeOutcome(1.0, [0.0, 1.0])
