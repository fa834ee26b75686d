"""Rollouts that are kept, end to end: written by calls and recipes, shown, and played again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.servers import Deployment

import tinsmith
from tinsmith import cli
from tinsmith.cli.masked_text import visible
from tinsmith.recipes import evaluate, match, rl, self_play, two_policies
from tinsmith.rollouts import GroupConfig, RolloutConfig
from tinsmith.rollouts.records import EpisodeRecord, read_records, write_records
from tinsmith.types import AdamParams, Datum, ModelInput, SamplingParams

LIMITS = RolloutConfig(max_turns=3, max_tokens_per_turn=4)


@pytest.fixture(scope="module")
def client(embedded: Deployment) -> Iterator[tinsmith.Client]:
    with embedded.client() as client:
        yield client


@pytest.fixture(autouse=True)
def _use(embedded: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_ADDRESS", embedded.address)
    monkeypatch.setenv("TINSMITH_API_KEY", embedded.api_key)


def invoke(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(["rollouts", *words])
    return int(caught.value.code or 0)


def read(path: Path) -> list[EpisodeRecord]:
    return list(read_records(path))


@pytest.mark.parametrize("place", ["client", "server"])
def test_what_is_kept_is_what_was_returned_and_plays_again(
    client: tinsmith.Client, tmp_path: Path, place: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "played.jsonl"
    played = client.environments.play(
        "guessing",
        sampler=client.create_sampler(base_model="tiny"),
        seeds=[1, 2],
        config=LIMITS,
        groups=GroupConfig(group_size=2),
        batch_key="kept",
        rollouts=place,
        keep_in=path,
    )
    records = read(path)
    returned = [(group, each) for group in played.groups for each in group.trajectories]
    assert [record.tokens for record in records] == [
        each.samples[0].tokens.tolist() for _, each in returned
    ]
    assert [record.origin.environment_seed for record in records] == [1, 1, 2, 2]
    assert [record.advantage for record in records] == [
        value for group in played.groups for value in group.advantages
    ]
    # No seed was given: one was drawn, so that each can be played again.
    assert len({record.origin.sampling["seed"] for record in records}) == 1

    for index in range(len(records)):
        assert invoke("replay", str(path), str(index)) == 0
    assert capsys.readouterr().out.count("and the bits of their log-probabilities") == 4


def test_generate_keeps_parquet(client: tinsmith.Client, tmp_path: Path) -> None:
    path = tmp_path / "played.parquet"
    batch = client.rollouts.generate(
        "guessing",
        [3],
        sampler=client.create_sampler(base_model="tiny"),
        config=LIMITS,
        params=SamplingParams(seed=5),
        groups=GroupConfig(group_size=2),
        keep_in=path,
    )
    groups = batch.result().groups
    assert [record.tokens for record in read(path)] == [
        each.samples[0].tokens.tolist() for each in groups[0].trajectories
    ]
    assert {record.origin.sampling["seed"] for record in read(path)} == {5}


def test_a_file_of_no_layout_is_refused_before_anything_is_played(
    client: tinsmith.Client, tmp_path: Path
) -> None:
    sampler = client.create_sampler(base_model="tiny")
    with pytest.raises(tinsmith.ConfigurationError, match="no name of a file of rollouts"):
        client.environments.play("guessing", sampler=sampler, keep_in=tmp_path / "a.txt")
    with pytest.raises(tinsmith.ConfigurationError, match="no name of a file of rollouts"):
        client.rollouts.generate("guessing", [1], sampler=sampler, keep_in="a.txt")


def test_list_and_show(
    client: tinsmith.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "played.jsonl"
    client.environments.play(
        "guessing",
        sampler=client.create_sampler(base_model="tiny"),
        seeds=[7],
        config=LIMITS,
        params=SamplingParams(seed=1),
        keep_in=path,
    )
    [record] = read(path)
    assert invoke("list", str(path), "--json") == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["seed"], row["ended"], row["sampled"]) == (7, record.reason, sum(record.mask))
    assert invoke("list", str(path)) == 0
    assert "guessing" in capsys.readouterr().out
    assert invoke("show", str(path)) == 0
    head, _, text = capsys.readouterr().out.partition("\n\n")
    assert "weights: tiny, version 0" in head
    assert max(map(len, text.splitlines())) <= 80
    first = record.mask.index(1)
    assert text.replace("\n", "").startswith(
        visible("".join(record.texts[:first])).replace("\n", "") + "["
    )
    assert invoke("show", str(path), "--json") == 0
    assert json.loads(capsys.readouterr().out) == record.to_row()
    assert invoke("show", str(path), "4") == 1
    assert "there is no episode 4" in capsys.readouterr().err


def train(run: tinsmith.TrainingRun) -> None:
    """Move the weights far enough that greedy draws fall otherwise."""
    tokens = list(range(20, 40))
    datum = Datum(
        ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    for _ in range(3):
        run.forward_backward([datum], "cross_entropy")
        run.optim_step(AdamParams(learning_rate=0.05)).result()


def test_a_replay_says_where_other_weights_part(
    client: tinsmith.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = client.create_lora_training_run("tiny", rank=4)
    saved = run.save_weights_for_sampler("before").result()
    path = tmp_path / "played.jsonl"
    client.environments.play(
        "guessing",
        sampler=run.sampler(),
        seeds=[1],
        config=LIMITS,
        params=SamplingParams(temperature=0.0),
        keep_in=path,
    )
    train(run)
    assert invoke("replay", str(path), "0") == 3
    shown = capsys.readouterr().out
    [record] = read(path)
    first = record.mask.index(1)
    assert shown.startswith(f"different from token {first} of {len(record.tokens)} on: token ")
    assert "weights differ: version 0 in the record, version 3 now" in shown
    assert invoke("replay", str(path), "0", "--checkpoint", saved.name) == 0
    capsys.readouterr()
    assert invoke("replay", str(path), "0", "--json") == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["is_same"], found["first_difference"]) == (False, first)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        pytest.param({"kind": "agent"}, "remote agent", id="agent"),
        pytest.param({"sampling": {"temperature": 1.0}}, "without a seed", id="no-seed"),
        pytest.param({"sampling": {"seed": 1, "warmth": 2}}, "sampling", id="unknown-field"),
        pytest.param({"limits": {"max_turns": 0}}, "limits", id="wrong-limit"),
        pytest.param({"environment": "chess"}, "chess", id="unknown-environment"),
    ],
)
def test_what_cannot_be_replayed_is_said(
    client: tinsmith.Client,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    problem: str,
) -> None:
    path = tmp_path / "played.jsonl"
    client.environments.play(
        "guessing",
        sampler=client.create_sampler(base_model="tiny"),
        config=LIMITS,
        keep_in=path,
    )
    [record] = read(path)
    origin = dataclasses.replace(record.origin, **changes)
    write_records(path, [dataclasses.replace(record, origin=origin)])
    assert invoke("replay", str(path), "0") == 1
    assert problem in capsys.readouterr().err


def replays(client: tinsmith.Client, record: EpisodeRecord, **source: str) -> bool:
    sampler = client.create_sampler(**source)
    return client.environments.replay(record, sampler=sampler).is_bit_equal


def test_evaluate_keeps_what_it_played(client: tinsmith.Client, tmp_path: Path) -> None:
    for name, environment in {"data": "", "served": "guessing"}.items():
        config = evaluate.Config(
            base_model="tiny",
            num_validation=3,
            keep_rollouts="jsonl",
            output_dir=tmp_path / name,
            environment=environment,
        )
        [summary] = evaluate.main(config, client)
        records = read(tmp_path / name / "rollouts" / "validation-000000.jsonl")
        assert sum(record.reward for record in records) / 3 == pytest.approx(summary.reward)
        assert all(replays(client, record, base_model="tiny") for record in records)


def test_rl_keeps_each_step_and_each_validation(client: tinsmith.Client, tmp_path: Path) -> None:
    config = rl.Config(
        rank=2,
        num_steps=2,
        num_problems=2,
        group_size=3,
        num_validation=2,
        eval_every=1,
        keep_rollouts="parquet",
        output_dir=tmp_path,
    )
    # What an earlier experiment left there would be read as this one's.
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts/train-000009.jsonl").write_text("{}")
    summary = rl.main(config, client)
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [
        "train-000000.parquet",
        "train-000001.parquet",
        "validation-000000.parquet",
        "validation-000001.parquet",
        "validation-000002.parquet",
    ]
    trained = read(tmp_path / "rollouts/train-000000.parquet")
    assert len(trained) == 6
    assert {(each.origin.kind, each.origin.phase, each.origin.step) for each in trained} == {
        ("problem", "train", 0)
    }
    last = read(tmp_path / "rollouts/validation-000002.parquet")
    assert all(replays(client, record, checkpoint=summary.checkpoint) for record in last)
    # The first step played the weights that the adapter began with: those of the base model.
    assert all(replays(client, record, base_model="tiny") for record in trained)


def test_games_keep_the_sides_that_learn(client: tinsmith.Client, tmp_path: Path) -> None:
    shared: dict[str, Any] = {
        "data": "kuhn",
        "rank": 2,
        "num_imitation_steps": 1,
        "num_steps": 2,
        "num_games": 4,
        "num_validation": 2,
        "max_tokens": 4,
        "keep_rollouts": "jsonl",
    }
    self_play.main(self_play.Config(**shared, output_dir=tmp_path / "self"), client)
    played = read(tmp_path / "self/rollouts/train-000001.jsonl")
    assert {record.origin.kind for record in played} == {"local"}
    assert {record.origin.environment for record in played} == {"kuhn"}
    assert {record.origin.environment_config["opponent"] for record in played} == {"self"}

    two_policies.main(two_policies.Config(**shared, output_dir=tmp_path / "two"), client)
    names = {path.name for path in (tmp_path / "two/rollouts").iterdir()}
    assert {"train-000001-black.jsonl", "validation-000002-white.jsonl"} <= names

    summaries = match.main(match.Config(**shared, output_dir=tmp_path / "match"), client)
    for summary, agent in zip(summaries, ("black", "white"), strict=True):
        path = tmp_path / f"match/rollouts/validation-000002-{agent}.jsonl"
        records = read(path)
        assert {record.origin.agent for record in records} == {agent}
        assert all(replays(client, each, checkpoint=summary.checkpoint) for each in records)
