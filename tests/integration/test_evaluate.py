"""Playing without a gradient: the recipe, the library call, and validation of its own."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.integration.servers import Deployment

import tinsmith
from tinsmith.names import shorten
from tinsmith.recipes import evaluate, rl
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.rollouts import EnvironmentTask, RolloutConfig
from tinsmith.types import SamplingParams


class Steps(Observer):
    """Notes what is reported."""

    def __init__(self) -> None:
        self.steps: list[tuple[tuple[int, int], dict[str, float]]] = []
        self.played: Counter[tuple[int, int]] = Counter()

    def step_done(self, num_done: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(((num_done, num_steps), dict(metrics)))

    def playing(self, num_done: int, num_steps: int) -> None:
        self.played[num_done, num_steps] += 1


@pytest.fixture(scope="module")
def client(embedded: Deployment) -> Iterator[tinsmith.Client]:
    with embedded.client() as client:
        yield client


def test_play_is_the_same_in_the_client_and_on_the_server(client: tinsmith.Client) -> None:
    sampler = client.create_sampler(base_model="tiny")
    params = SamplingParams(temperature=0.0, seed=1)
    both = [
        client.environments.play(
            "guessing",
            sampler=sampler,
            seeds=[1, EnvironmentTask(2, {"high": 9})],
            config=RolloutConfig(max_turns=2, max_tokens_per_turn=4),
            params=params,
            rollouts=place,
        )
        for place in ("client", "server")
    ]
    tokens = [
        [each.trajectories[0].samples[0].tokens.tolist() for each in result.groups]
        for result in both
    ]
    assert tokens[0] == tokens[1]
    with pytest.raises(tinsmith.ConfigurationError, match="rollouts is 'moon'"):
        client.environments.play("guessing", sampler=sampler, rollouts="moon")  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["client", "server"])
def test_evaluate_writes_metrics_with_an_interval(
    client: tinsmith.Client, tmp_path: Path, place: str
) -> None:
    run = client.create_lora_training_run("tiny", rank=2)
    saved = run.save_weights_for_sampler("evaluated").result()
    config = evaluate.Config(
        checkpoint=saved.name,
        environment="guessing",
        environment_config='{"max_turns": 2}',
        rollouts=place,
        num_validation=4,
        output_dir=tmp_path / "out",
    )
    observer = Steps()
    [summary] = evaluate.main(config, client, observer)
    assert observer.played[0, 1] >= 4, "each episode tells that the play goes on"
    assert summary.num_tasks == 4
    assert summary.reward_low <= summary.reward <= summary.reward_high
    [row] = map(json.loads, (tmp_path / "out/metrics.jsonl").read_text().splitlines())
    assert row["validation"] == row["reward"] == summary.reward
    with pytest.raises(tinsmith.ConfigurationError, match="holds results already"):
        evaluate.main(config, client)


def test_evaluate_scores_the_held_out_part_of_data(client: tinsmith.Client, tmp_path: Path) -> None:
    config = evaluate.Config(base_model="tiny", num_validation=5, output_dir=tmp_path)
    [summary] = evaluate.main(config, client)
    assert (summary.num_tasks, summary.is_success) == (5, 0.0)


def test_several_are_compared_with_the_first_task_by_task(
    client: tinsmith.Client, tmp_path: Path
) -> None:
    (tmp_path / "my.py").write_text("def score(row, completion):\n    return len(completion)\n")
    run = client.create_lora_training_run("tiny", rank=2)
    data = [
        tinsmith.Datum(
            tinsmith.ModelInput.from_ints([5, 6, 7]),
            {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},
        )
    ]
    run.forward_backward(data)
    run.optim_step(tinsmith.AdamParams(learning_rate=0.1)).result()
    saved = shorten(run.save_state("after").result().name)
    config = evaluate.Config(
        base_model="tiny",
        checkpoint=saved,
        run=f"{run.name},{run.name}",
        data="small_sums",
        reward=f"{tmp_path / 'my.py'}:score",
        num_validation=4,
        max_tokens=8,
        keep_rollouts="jsonl",
        output_dir=tmp_path / "out",
    )
    observer = Steps()
    first, *others = evaluate.main(config, client, observer)
    assert [step for step, _ in observer.steps] == [(1, 3), (2, 3), (3, 3)]
    assert observer.played == {(number, 3): 4 for number in range(3)}
    told = dict(observer.steps)[3, 3]
    assert {name: told[f"reward/{name}"] for name in ("tiny", saved, shorten(run.name))} == {
        each.weights: each.reward for each in (first, *others)
    }
    assert (told["reward"], told["gain"]) == (others[-1].reward, others[-1].gain)
    assert (first.weights, first.gain) == ("tiny", None)
    assert [each.weights for each in others] == [saved, shorten(run.name)]
    for each in others:
        assert each.gain == pytest.approx(each.reward - first.reward)
        assert each.gain is not None
        assert each.gain_low is not None
        assert each.gain_high is not None
        assert each.gain_low <= each.gain <= each.gain_high
    rows = [json.loads(line) for line in (tmp_path / "out/answers.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    for row in rows:
        assert list(row["answers"]) == ["tiny", saved, shorten(run.name)]
        for [said] in row["answers"].values():
            assert said["reward"] == len(said["answer"])
        # The checkpoint is what the run still is.
        assert row["answers"][saved] == row["answers"][shorten(run.name)]
    assert len(list((tmp_path / "out/rollouts").iterdir())) == 3
    assert (tmp_path / "out/comparison.png").is_file()


def test_evaluate_takes_a_score_of_ones_own(client: tinsmith.Client, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("def score(row, completion):\n    return row['worth']\n")
    rows = [{"prompt": str(number), "worth": number / 10} for number in range(11)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = evaluate.Config(
        base_model="tiny",
        data=str(tmp_path / "data.jsonl"),
        reward=f"{tmp_path / 'my.py'}:score",
        output_dir=tmp_path / "out",
    )
    # The rows 0, 5 and 10 are held out, and each is scored once.
    [summary] = evaluate.main(config, client)
    assert summary.num_tasks == 3
    rewards = json.loads((tmp_path / "out/rewards.json").read_text())["tiny"]["rewards"]
    assert sorted(rewards) == [0.0, 0.5, 1.0]


def test_a_model_judges_the_answers_of_another(client: tinsmith.Client, tmp_path: Path) -> None:
    rows = [{"prompt": f"count to {number}", "answer": number} for number in range(20)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = client.create_lora_training_run("tiny", rank=4)
    checkpoint = shorten(run.save_state("judge").result().name)
    found = []
    for judge in ("tiny", checkpoint):
        out = tmp_path / judge.replace("/", "-")
        config = evaluate.Config(
            base_model="tiny",
            data=str(tmp_path / "data.jsonl"),
            judge=judge,
            judge_instruction="Judge whether the answer counts as far as asked.",
            num_validation=4,
            output_dir=out,
        )
        [summary] = evaluate.main(config, client)
        assert summary.num_tasks == 4
        found.append(json.loads((out / "rewards.json").read_text())["tiny"]["rewards"])
    # A model that knows nothing writes a number as well, and no other text.
    assert {round(10 * reward) for reward in found[0]} <= set(range(11))
    # An adapter that was never trained judges as its base model does.
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        pytest.param({}, "one source", id="nothing"),
        pytest.param({"base_model": "tiny", "judge": "solomon"}, "solomon", id="judge"),
        pytest.param({"base_model": "tiny", "environment": "chess"}, "chess", id="unknown"),
        pytest.param(
            {"base_model": "tiny", "environment": "guessing", "environment_config": "[1]"},
            "environment_config",
            id="settings",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_said_before_anything_is_written(
    client: tinsmith.Client, tmp_path: Path, settings: dict[str, str], problem: str
) -> None:
    config = evaluate.Config(**settings, output_dir=tmp_path / "out")
    with pytest.raises((tinsmith.ConfigurationError, tinsmith.NotFoundError), match=problem):
        evaluate.main(config, client)
    assert not (tmp_path / "out").exists()


def test_validation_may_be_another_environment(client: tinsmith.Client, tmp_path: Path) -> None:
    config = rl.Config(
        environment="guessing",
        environment_config='{"shaping": 0.5, "max_turns": 2}',
        validation_environment="math",
        rollouts="server",
        rank=2,
        num_steps=1,
        num_problems=2,
        group_size=2,
        num_validation=3,
        output_dir=tmp_path,
    )
    summary = rl.main(config, client)
    assert summary.num_validation == 3
    with pytest.raises(tinsmith.ConfigurationError, match="validation_environment is 'chess'"):
        rl.main(
            rl.Config(environment="guessing", validation_environment="chess", output_dir=tmp_path),
            client,
        )


LUCKY = """
from tinsmith.environments.environment import Environment, Observation, StepResult


class Lucky(Environment):
    def reset(self, seed, config):
        if seed % 4 == 3:
            raise RuntimeError("no such task")
        return Observation.of_user("go")

    def step(self, action):
        is_success = len(action.text) % 2 == 0
        return StepResult(Observation(), float(is_success), True, {"is_success": is_success})
"""


@pytest.mark.parametrize("played", ["environment", "data"])
def test_several_plays_of_a_task_give_pass_at_k(
    client: tinsmith.Client, tmp_path: Path, played: str
) -> None:
    (tmp_path / "my.py").write_text(LUCKY)
    what = {"environment": f"{tmp_path / 'my.py'}:Lucky", "data": "small_sums"}[played]
    config = evaluate.Config(
        base_model="tiny",
        num_samples=4,
        temperature=1.0,
        num_validation=8,
        keep_rollouts="jsonl",
        output_dir=tmp_path / "out",
        **{played: what},  # type: ignore[arg-type]
    )
    [summary] = evaluate.main(config, client)
    [row] = map(json.loads, (tmp_path / "out/metrics.jsonl").read_text().splitlines())
    [file] = (tmp_path / "out/rollouts").iterdir()
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    records = [each for each in kept if each["is_used"]]
    num_tasks = 6 if played == "environment" else 8
    # Every play is kept, each drawn anew; those that were lost count for nothing.
    assert (summary.num_tasks, len(records)) == (num_tasks, 4 * num_tasks)
    assert len({json.dumps(each["tokens"]) for each in records}) > num_tasks
    assert list(summary.pass_at) == [1, 2, 4]
    chances = [each.mean for each in summary.pass_at.values()]
    assert chances[0] == pytest.approx(summary.is_success)
    assert chances == sorted(chances)
    assert row["pass@4_low"] <= row["pass@4"] <= row["pass@4_high"]
    assert sum(summary.ends.values()) >= 4 * num_tasks
    if played == "environment":
        assert 0 < chances[0] < chances[2]
        # The tasks that cannot be begun are lost, and counted for what they are.
        assert summary.ends["environment_failed"] >= 2 * 4
    kept = json.loads((tmp_path / "out/rewards.json").read_text())["tiny"]
    assert len(kept["rewards"]) == len(kept["successes"]) == num_tasks


ENDLESS = """
from tinsmith.environments.environment import Environment, Observation, StepResult


class Endless(Environment):
    def reset(self, seed, config):
        return Observation.of_user("go")

    def step(self, action):
        return StepResult(Observation.of_user("on"), 1.0, False, {"metrics": {"reward": 7.0}})
"""


def test_an_episode_without_an_end_has_the_turns_of_the_setting(
    client: tinsmith.Client, tmp_path: Path
) -> None:
    (tmp_path / "my.py").write_text(ENDLESS)
    config = evaluate.Config(
        base_model="tiny",
        environment=f"{tmp_path / 'my.py'}:Endless",
        num_validation=2,
        max_turns=3,
        max_episode_tokens=50,
        output_dir=tmp_path / "out",
    )
    [summary] = evaluate.main(config, client)
    assert summary.reward == 3.0
