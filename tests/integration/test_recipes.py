"""The recipes end to end: they learn, score what was held out, and survive Ctrl-C."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.integration.servers import Deployment

import tinsmith
from tinsmith.names import shorten
from tinsmith.recipes import rl, rl_episodes, supervised
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.run_log import RunLog, read_metrics
from tinsmith.recipes.tasks import arithmetic, pig_latin

SUPERVISED = supervised.Config(
    adapter="full", learning_rate=3e-3, num_warmup_steps=2, num_steps=6, batch_size=8, save_every=2
)
RL = rl.Config(num_steps=2, num_problems=4, group_size=4, num_validation=8, max_tokens=4)


def weights_sha256(client: tinsmith.Client, name: str) -> dict[str, str]:
    folder = Path(client.checkpoints.get(name).manifest_uri.removeprefix("file://")).parent
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("*.safetensors"))
    }


def test_supervised_lowers_the_loss_and_leaves_metrics_and_a_picture(
    embedded: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phrases = pig_latin.load_phrases()[:100]
    monkeypatch.setattr(pig_latin, "load_phrases", lambda: phrases)
    with embedded.client() as client:
        config = dataclasses.replace(SUPERVISED, output_dir=tmp_path)
        summary = supervised.main(config, client)
        checkpoint = client.checkpoints.get(summary.checkpoint)
    assert checkpoint.version == config.num_steps
    assert summary.losses[-1] < summary.losses[0]
    assert set(summary.after.metrics) == {"held_out_words", "num_held_out_words"}
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_interrupted_supervised_run_goes_on_with_the_same_bits(
    embedded: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt_at(step: int) -> None:
        add = RunLog.add

        def add_then_interrupt(log: RunLog, current: int, metrics: dict[str, float]) -> None:
            add(log, current, metrics)
            if current == step:
                raise KeyboardInterrupt

        monkeypatch.setattr(RunLog, "add", add_then_interrupt)

    with embedded.client() as client:
        calm = supervised.main(dataclasses.replace(SUPERVISED, output_dir=tmp_path / "a"), client)
        config = dataclasses.replace(SUPERVISED, output_dir=tmp_path / "b")
        with monkeypatch.context():
            interrupt_at(2)
            with pytest.raises(KeyboardInterrupt):
                supervised.main(config, client)
        monkeypatch.undo()
        resumed = supervised.main(config, client)
        assert weights_sha256(client, resumed.checkpoint) == weights_sha256(client, calm.checkpoint)
    rows = read_metrics(tmp_path / "b" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert resumed.losses == calm.losses


def test_an_interrupt_while_a_step_is_awaited_repeats_no_step(
    embedded: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tinsmith.OperationFuture.result
    calls: list[int] = []

    def interrupted(
        future: tinsmith.OperationFuture[object], timeout_s: float | None = None
    ) -> object:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return result(future, timeout_s)

    with embedded.client() as client:
        calm = supervised.main(dataclasses.replace(SUPERVISED, output_dir=tmp_path / "a"), client)
        config = dataclasses.replace(SUPERVISED, output_dir=tmp_path / "b", save_every=0)
        with monkeypatch.context() as patch:
            patch.setattr(tinsmith.OperationFuture, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                supervised.main(config, client)
        resumed = supervised.main(config, client)
        assert client.checkpoints.get(resumed.checkpoint).version == config.num_steps
        assert weights_sha256(client, resumed.checkpoint) == weights_sha256(client, calm.checkpoint)


class Editable(Observer):
    """Of a run whose settings may change on the way."""

    may_change = True


def test_a_run_that_may_change_goes_on_with_other_settings(
    embedded: Deployment, tmp_path: Path
) -> None:
    config = dataclasses.replace(SUPERVISED, adapter="lora", output_dir=tmp_path, num_steps=3)
    with embedded.client() as client:

        def train(observer: Observer | None = None, **changes: Any) -> tuple[str, int]:
            summary = supervised.main(dataclasses.replace(config, **changes), client, observer)
            return summary.run, client.checkpoints.get(summary.checkpoint).version

        run, version = train()
        assert version == 3
        assert train(Editable(), num_steps=5, learning_rate=1e-4) == (run, 5)
        # Fewer than it did: nothing is trained, and nothing is lost.
        assert train(Editable(), num_steps=2, checkpoint="early") == (run, 5)
        other, version = train(Editable(), rank=2)
        assert (other != run, version) == (True, 3)
        # At a desk another setting is another experiment, and this folder is taken.
        with pytest.raises(tinsmith.ConfigurationError, match="another folder with output_dir"):
            train(rank=2, learning_rate=1e-3)


def test_rl_on_problems_takes_steps_and_scores_held_out_ones(
    embedded: Deployment, tmp_path: Path
) -> None:
    with embedded.client() as client:
        summary = rl.main(dataclasses.replace(RL, output_dir=tmp_path), client)
    assert summary.num_validation == RL.num_validation
    assert 0 <= summary.before <= 1
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1]
    # On policy, and by the same bits.
    trained = [row for row in rows if row["trained"]]
    assert all(abs(row["optim/kl_sample_train_v1"]) < 1e-5 for row in trained)
    assert all(row["optim/entropy"] > 0 for row in trained)
    assert (tmp_path / "reward.png").is_file()


@pytest.mark.parametrize("environment", ["math", "guessing"])
def test_rl_plays_a_served_environment(
    embedded: Deployment, tmp_path: Path, environment: str
) -> None:
    config = dataclasses.replace(
        RL, environment=environment, num_problems=2, group_size=2, num_validation=2
    )
    with embedded.client() as client:
        rl.main(dataclasses.replace(config, output_dir=tmp_path), client)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1]
    assert all(row["lost"] == 0 and row["turns"] >= 1 for row in rows)


def test_own_files_conversations_and_problems(embedded: Deployment, tmp_path: Path) -> None:
    conversations = tmp_path / "chat.jsonl"
    conversations.write_text(
        "".join(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": f"say {number}"},
                        {"role": "assistant", "content": str(number)},
                    ]
                }
            )
            + "\n"
            for number in range(20)
        )
    )
    problems = tmp_path / "problems.jsonl"
    arithmetic.write_jsonl(problems, [arithmetic.make_addition(n, 1) for n in range(20)])
    with embedded.client() as client:
        summary = supervised.main(
            dataclasses.replace(
                SUPERVISED, data=str(conversations), output_dir=tmp_path / "s", batch_size=4
            ),
            client,
        )
        rl.main(dataclasses.replace(RL, data=str(problems), output_dir=tmp_path / "r"), client)
    assert summary.after.metrics["held_out_loss"] < summary.before.metrics["held_out_loss"]
    assert len(summary.after.examples) == 4


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        pytest.param(supervised, {"data": "nofile.jsonl"}, "nofile.jsonl cannot be read", id="s"),
        pytest.param(rl, {"data": "nofile.jsonl"}, "nofile.jsonl cannot be read", id="rl"),
        pytest.param(rl_episodes, {"data": "nofile.jsonl"}, "nofile.jsonl cannot be read", id="e"),
        pytest.param(
            rl,
            {"environment": "nosuch"},
            "environment is 'nosuch', and no environment of this name .*guessing",
            id="environment",
        ),
        pytest.param(
            rl,
            {"validation_environment": "guessing"},
            "validation_environment belongs to environment=",
            id="validation-environment",
        ),
        pytest.param(supervised, {"base_model": "nosuch"}, "MODEL_NOT_FOUND", id="s-model"),
        pytest.param(rl, {"base_model": "nosuch"}, "MODEL_NOT_FOUND", id="rl-model"),
    ],
)
def test_a_start_that_fails_leaves_neither_a_run_nor_a_folder(
    embedded: Deployment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: ModuleType,
    settings: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with embedded.client() as client:
        before = client.runs.list()
        with pytest.raises(tinsmith.TinsmithError, match=message) as caught:
            recipe.main(recipe.Config(**settings), client)
        assert client.runs.list() == before
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("recipe", "config"),
    [pytest.param(supervised, SUPERVISED, id="s"), pytest.param(rl, RL, id="rl")],
)
def test_an_experiment_that_ended_is_not_repeated(
    embedded: Deployment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recipe: ModuleType,
    config: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    # The next command is named where commands find the server.
    monkeypatch.setenv("TINSMITH_ADDRESS", embedded.address)
    monkeypatch.setenv("TINSMITH_API_KEY", embedded.api_key)
    with embedded.client() as client:
        summary = recipe.main(config, client)
        shown = capsys.readouterr().out
        num_runs = len(client.runs.list())
        assert recipe.main(config, client) == summary
        assert len(client.runs.list()) == num_runs
    [folder] = (tmp_path / "runs").iterdir()
    # The last lines say what came out and what to do with it.
    for said in (
        summary.run,
        f"tinsmith sample --checkpoint {shorten(summary.checkpoint)}",
        folder.name,
    ):
        assert said in shown
    assert f"step {config.num_steps}/{config.num_steps}" in shown
    assert capsys.readouterr().out.startswith(f"finished: runs/{folder.name}")
    # And the command that is printed as the next one works.
    [line] = [line for line in shown.splitlines() if line.startswith("next ")]
    words = shlex.split(line)[1:]
    assert words[0] == "tinsmith"
    command = [sys.executable, "-c", "from tinsmith.cli import main; main()", *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_run_that_the_server_does_not_have_is_told_in_one_line(
    embedded: Deployment, tmp_path: Path
) -> None:
    config = dataclasses.replace(SUPERVISED, output_dir=tmp_path, num_steps=1)
    with embedded.client() as client:
        summary = supervised.main(config, client)
        client.runs.delete(summary.run)
        longer = dataclasses.replace(config, num_steps=2)
        with pytest.raises(tinsmith.ConfigurationError, match="does not have; begin anew with"):
            supervised.main(longer, client)
        anew = supervised.main(dataclasses.replace(longer, overwrite=True), client)
    assert anew.run != summary.run


def test_reinforcement_that_learns_nothing_says_so(
    embedded: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Random weights answer no sum, so all plays of a group earn the same.
    config = dataclasses.replace(RL, num_steps=4, num_validation=1, output_dir=tmp_path, seed=1)
    with embedded.client() as client:
        rl.main(config, client)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["trained"] for row in rows] == [0] * 4
    assert capsys.readouterr().out.count("warning: no group of the last 3 steps differs") == 1
