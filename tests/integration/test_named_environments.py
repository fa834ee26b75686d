"""One class in four ways: by name, by file, by module and by address, in all that take one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.integration.servers import Deployment, EmbeddedThread
from tests.support.wait import TIMEOUT_S

import tinsmith
from tinsmith import cli
from tinsmith.recipes import evaluate, match, rl
from tinsmith.rollouts import EnvironmentTask, RolloutConfig
from tinsmith.rollouts.groups import GroupResult
from tinsmith.rollouts.records import read_records
from tinsmith.types import SamplingParams
from tinsmith_environment.config import EnvironmentConfig
from tinsmith_environment.pod import EnvironmentPod
from tinsmith_local.process import free_port

CODE = '''
from tinsmith.environments.environment import Environment, Message, Observation, StepResult


class LengthEnvironment(Environment):
    """Say much."""

    default_config = {"num_turns": 2, "ends": False}

    def reset(self, seed, config):
        self._left, self._ends = config["num_turns"], config["ends"]
        return Observation((Message("user", f"say {seed}"),), stop=("e", "a") if self._ends else ())

    def step(self, action):
        self._left -= 1
        stop = tuple(range(64)) if self._ends else ()
        shown = Observation((Message("user", "more"),), stop=stop) if self._left else Observation()
        return StepResult(shown, float(len(action.text)), self._left == 0)
'''
LIMITS = RolloutConfig(max_turns=4, max_tokens_per_turn=4)


@dataclass(frozen=True)
class Places:
    """A server, a client of it, and the class of this module in its forms."""

    deployment: Deployment
    client: tinsmith.Client
    file: str
    address: str


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Places]:
    folder = tmp_path_factory.mktemp("code")
    (folder / "lengths_of_answers.py").write_text(CODE)
    server = EmbeddedThread(tmp_path_factory.mktemp("data"), model_dir)
    deployment = server.start()
    settings = EnvironmentConfig(
        environments="length=lengths_of_answers:LengthEnvironment",
        python_path=str(folder),
        num_workers=1,
        # No caller of another pool is led here: it is reached by its address alone.
        pool="lengths",
        worker_name="lengths",
        scheduler_address=server.scheduler_address,
        pod_key=server.pod_key,
    )

    async def start() -> EnvironmentPod:
        pod = EnvironmentPod(settings)
        await pod.start()
        return pod

    try:
        pod = server.run(start())
        try:
            with deployment.client() as client:
                file = f"{folder / 'lengths_of_answers.py'}:LengthEnvironment"
                yield Places(deployment, client, file, f"grpc://{pod.address}")
        finally:
            server.run(pod.stop())
    finally:
        server.stop()


def tokens_of(result: GroupResult[object]) -> list[list[int]]:
    return [each.trajectories[0].samples[0].tokens.tolist() for each in result.groups]


def test_a_class_plays_the_same_here_and_at_an_address(places: Places, tmp_path: Path) -> None:
    client = places.client
    sampler = client.create_sampler(base_model="tiny")
    named = f"{places.address}/length"
    played = [
        client.environments.play(
            environment,
            sampler=sampler,
            seeds=range(3),
            config=LIMITS,
            params=SamplingParams(seed=7),
            keep_in=tmp_path / f"{number}.jsonl",
        )
        for number, environment in enumerate((places.file, places.address, named))
    ]
    assert tokens_of(played[0]) == tokens_of(played[1]) == tokens_of(played[2])
    assert [len(group.trajectories[0].turns) for group in played[0].groups] == [2, 2, 2]
    kept = [next(iter(read_records(tmp_path / f"{number}.jsonl"))) for number in range(3)]
    assert [each.origin.kind for each in kept] == ["local", "served", "served"]
    assert [each.origin.environment for each in kept] == [places.file, named, named]
    # A file does not choose what this process calls or imports.
    with pytest.raises(tinsmith.ConfigurationError, match="which a file does not choose"):
        client.environments.replay(kept[1], sampler=sampler)
    forged = replace(kept[1], origin=replace(kept[1].origin, environment=places.file))
    with pytest.raises(tinsmith.ConfigurationError, match="which a file does not choose"):
        client.environments.replay(forged, sampler=sampler)
    replay = client.environments.replay(kept[1], sampler=sampler, environment=named)
    assert (replay.is_bit_equal, replay.reward) == (True, kept[1].reward)
    assert client.environments.replay(kept[0], sampler=sampler).is_bit_equal


def test_a_class_is_given_as_it_is(places: Places) -> None:
    found = places.client.environments.find(places.file)
    assert found.environment_class is not None
    sampler = places.client.create_sampler(base_model="tiny")
    played = places.client.environments.play(
        found.environment_class, sampler=sampler, config=LIMITS, params=SamplingParams(seed=7)
    )
    assert len(played.groups) == 1


@pytest.mark.parametrize("form", ["file", "address"])
def test_rl_trains_in_each_form_and_scores_in_another(
    places: Places, tmp_path: Path, form: str
) -> None:
    config = rl.Config(
        environment=getattr(places, form),
        environment_config='{"num_turns": 1}',
        validation_environment="guessing",
        num_steps=1,
        num_problems=2,
        group_size=4,
        num_validation=2,
        rank=2,
        keep_rollouts="jsonl",
        output_dir=tmp_path,
    )
    summary = rl.main(config, places.client)
    assert summary.num_validation == 2
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["turns"] == 1.0
    assert rows[0]["reward"] > 0
    [trained] = (tmp_path / "rollouts").glob("train-*")
    assert "lengths_of_answers" in trained.read_text() or "grpc://" in trained.read_text()


def test_eval_scores_each_form_alike(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINSMITH_ADDRESS", places.client.address)
    monkeypatch.setenv("TINSMITH_API_KEY", places.deployment.api_key)
    rewards = []
    for number, environment in enumerate((places.file, places.address)):
        folder = tmp_path / str(number)
        words = [f"environment={environment}", "num_validation=3", f"output_dir={folder}"]
        with pytest.raises(SystemExit) as caught:
            cli.main(["eval", "base_model=tiny", *words])
        assert not caught.value.code
        rewards.append(json.loads((folder / "rewards.json").read_text())["tiny"]["rewards"])
    assert rewards[0] == rewards[1]
    assert len(rewards[0]) == 3


def test_a_match_is_scored_in_a_class_and_at_an_address(places: Places, tmp_path: Path) -> None:
    for number, environment in enumerate((places.file, places.address)):
        summaries = match.main(
            match.Config(
                environment=environment,
                num_imitation_steps=1,
                num_steps=1,
                num_games=2,
                num_validation=2,
                rank=2,
                output_dir=tmp_path / str(number),
            ),
            places.client,
        )
        assert [each.num_validation for each in summaries] == [2, 2]
        # Games against a script are worth 1 at most.
        assert all(each.before > 1 for each in summaries)


def test_what_is_not_there_is_one_line_in_all_of_them(places: Places, tmp_path: Path) -> None:
    client = places.client
    sampler = client.create_sampler(base_model="tiny")
    known = "served are guessing, math; give a served name, FILE.py:CLASS, MODULE:CLASS, or grpc://"
    calls = (
        lambda: client.environments.play("chess", sampler=sampler),
        lambda: rl.main(rl.Config(environment="chess", output_dir=tmp_path), client),
        lambda: match.main(match.Config(environment="chess", output_dir=tmp_path), client),
        lambda: evaluate.main(evaluate.Config(base_model="tiny", environment="chess"), client),
    )
    for call in calls:
        with pytest.raises(tinsmith.ConfigurationError, match="environment is 'chess'") as caught:
            call()
        assert known in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_address_without_a_server_is_said(places: Places) -> None:
    with tinsmith.Client(
        places.client.address,
        places.deployment.api_key,
        operation_timeout_s=TIMEOUT_S,
        retry=tinsmith.RetryPolicy(budget_s=0.1),
    ) as client:
        nothing = f"grpc://127.0.0.1:{free_port()}"
        with pytest.raises(tinsmith.ConfigurationError, match="start one: tinsmith env serve"):
            client.environments.find(nothing)
        with pytest.raises(tinsmith.ConfigurationError, match="served are guessing, length, math"):
            client.environments.find(f"{places.address}/chess")


@pytest.mark.parametrize("form", ["file", "address"])
def test_the_server_plays_names_alone(places: Places, tmp_path: Path, form: str) -> None:
    config = rl.Config(
        environment=getattr(places, form), rollouts="server", output_dir=tmp_path / "out"
    )
    with pytest.raises(tinsmith.ConfigurationError, match="is not played on the server"):
        rl.main(config, places.client)
    assert not (tmp_path / "out").exists()


def test_turns_end_where_an_environment_says(places: Places, tmp_path: Path) -> None:
    client = places.client
    sampler = client.create_sampler(base_model="tiny")
    tokenizer = client.get_tokenizer("tiny")
    [model] = [each for each in client.list_models() if each.base_model == "tiny"]
    played = [
        client.environments.play(
            environment,
            sampler=sampler,
            seeds=[EnvironmentTask(seed, {"ends": True}) for seed in range(4)],
            config=replace(LIMITS, max_tokens_per_turn=64),
            params=SamplingParams(seed=7),
            keep_in=tmp_path / f"{number}.jsonl",
        )
        for number, environment in enumerate((places.file, places.address))
    ]
    assert tokens_of(played[0]) == tokens_of(played[1])
    records = list(read_records(tmp_path / "0.jsonl"))
    num_own_ends = 0
    for record in records:
        assert [turn.stop for turn in record.turns] == [("e", "a"), tuple(range(64))]
        for number, turn in enumerate(record.turns):
            pairs = zip(record.turn_indices, record.tokens, strict=True)
            said = [token for index, token in pairs if index == number]
            is_stop = [token in model.stop_token_ids for token in said]
            if number:
                is_stop = [stop or token < 64 for stop, token in zip(is_stop, said, strict=True)]
            else:
                texts = [tokenizer.decode(said[:length]) for length in range(1, len(said) + 1)]
                found = ["e" in text or "a" in text for text in texts]
                is_stop = [a or b for a, b in zip(is_stop, found, strict=True)]
            assert not any(is_stop[:-1])
            assert is_stop[-1] == (turn.stop_reason == "stop")
            num_own_ends += is_stop[-1] and said[-1] not in model.stop_token_ids
    assert num_own_ends > 1
    # A turn that is sampled again ends there too.
    for record in records:
        assert client.environments.replay(record, sampler=sampler).is_same
