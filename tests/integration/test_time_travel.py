"""The past of a run as a user reaches it: forked, played again and searched, by SDK and CLI."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integration.servers import TIMEOUT_S
from tests.support.wait import until

import tinsmith
from tinsmith import cli
from tinsmith.v1 import trainer_pb2
from tinsmith_local.process import ServerProcess

NUM_STEPS = 6
_SPIKE = 4
"""The step, by the version that it begins with, whose data are unlike the others."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("travel"), {"tiny": model_dir}) as process:
        yield process


@pytest.fixture(autouse=True)
def _use(server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_ADDRESS", server.address)
    monkeypatch.setenv("TINSMITH_API_KEY", server.api_key)
    monkeypatch.setenv("TINSMITH_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")


def make_datum(step: int) -> tinsmith.Datum:
    seed = 1 if step != _SPIKE else 77
    tokens = np.random.default_rng(seed).integers(3, 200, 25)
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(24)}
    return tinsmith.Datum(tinsmith.ModelInput.from_ints(tokens[:-1]), inputs)


def train(run: tinsmith.TrainingRun, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        gradient = run.forward_backward([make_datum(step)], "cross_entropy")
        run.optim_step(tinsmith.AdamParams(learning_rate=1e-1)).result()
        losses.append(gradient.result().loss)
    return losses


class Trained:
    """A run whose session is over, with one step whose loss is unlike the others."""

    def __init__(self, server: ServerProcess) -> None:
        with tinsmith.Client(server.address, server.api_key) as client:
            run = client.create_lora_training_run("tiny", rank=4)
            self.name = run.name
            self.id = run.name.rpartition("/")[2]
            self.losses = train(run, 0, NUM_STEPS)

            def is_recorded() -> bool:
                curves = client.runs.get_metrics(run.name, ["trainer/loss"])
                return [len(curve.steps) for curve in curves.values()] == [NUM_STEPS]

            until(is_recorded, timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def trained(server: ServerProcess) -> Trained:
    return Trained(server)


def invoke(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(words))
    return int(caught.value.code or 0)


def shown(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    """Return what a command prints as JSON."""
    assert invoke(*words, "--json") == code
    return json.loads(capsys.readouterr().out)


def test_a_fork_goes_on_with_the_same_losses(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    made = shown(capsys, "runs", "fork", f"{trained.id}@2", "--display-name", "again")
    assert (made["source_run"], made["source_step"]) == (trained.name, 2)
    with tinsmith.Client() as client:
        fork = client.runs.get(made["name"])
        assert fork.version == 2
        assert train(fork, 2, NUM_STEPS) == trained.losses[2:]
        client.runs.delete(fork)
    assert invoke("runs", "fork", f"{trained.id}@1", "--run-id", "by-words") == 0
    assert "client.runs.get('by-words')" in capsys.readouterr().out


def test_a_step_played_again_is_equal(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    before = shown(capsys, "runs", "list")
    replay = shown(capsys, "runs", "replay", f"{trained.id}@3")
    assert replay["is_equal"]
    batch, update = replay["operations"]
    assert (batch["kind"], batch["num_datums"], batch["num_tokens"]) == ("forward_backward", 1, 24)
    assert batch["recorded"] == batch["replayed"]
    assert batch["recorded"]["loss:sum"] / 24 == pytest.approx(trained.losses[2] / 24)
    assert (update["kind"], "grad_norm" in update["replayed"]) == ("optim_step", True)
    # It left nothing.
    assert [run["name"] for run in shown(capsys, "runs", "list")] == [run["name"] for run in before]
    assert invoke("runs", "replay", f"{trained.id}@3") == 0
    assert f"{trained.id}@3: equal to the bit" in capsys.readouterr().out


def test_a_turned_metric_is_found_and_confirmed(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    calm = max(loss for step, loss in enumerate(trained.losses) if 0 < step != _SPIKE)
    threshold = str((trained.losses[_SPIKE] + calm) / 2 / 24)
    found = shown(
        capsys,
        "runs",
        "bisect",
        trained.id,
        "--metric",
        "loss",
        "--good",
        "3",
        "--bad",
        str(_SPIKE),
    )
    assert (found["turn"]["metric"], found["turn"]["step"]) == ("trainer/loss", _SPIKE)
    assert found["turn"]["previous_step"] == 3
    assert not any(each["differences"] for each in found["replay"]["operations"])
    assert found["replay"]["operations"][0]["num_tokens"] == 24
    with tinsmith.Client() as client:
        fork = client.runs.fork(trained.id, found["turn"]["step"])
        assert train(fork, _SPIKE, _SPIKE + 1) == [trained.losses[_SPIKE]]
    assert invoke("runs", "bisect", trained.id, "--below", threshold) == 0
    assert f"tinsmith runs fork {trained.id}@" in capsys.readouterr().out


def test_the_past_is_kept_for_as_long_as_the_run_says(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = shown(capsys, "runs", "keep", trained.id, "--for", "30d")
    assert kept["history_retention_seconds"] == 30 * 86_400
    [listed] = [run for run in shown(capsys, "runs", "list") if run["name"] == trained.name]
    assert listed["history_retention_seconds"] == 30 * 86_400
    assert shown(capsys, "runs", "fork", f"{trained.id}@1")["history_retention_seconds"] == 90_000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["fork", "{}@99"], "it has steps 0 to 6", id="no-such-step"),
        pytest.param(["fork", "no-such-run@1"], "`tinsmith runs list` shows", id="no-such-run"),
        pytest.param(["replay", "{}@0"], "was not trained", id="nothing-to-replay"),
        pytest.param(["bisect", "{}", "--above", "1e9"], "was never above", id="never"),
        pytest.param(["bisect", "{}", "--metric", "x", "--above", "1"], "no metric x", id="metric"),
        pytest.param(["bisect", "{}"], "give one of above, below", id="no-threshold"),
        pytest.param(["keep", "{}", "--for", "1d"], "at least 25 h", id="kept-too-short"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    trained: Trained, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert invoke("runs", *(word.format(trained.id) for word in words)) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("moment", ["run-1", "@3", "run-1@", "run-1@-1", "run-1@x"])
def test_what_is_no_moment_is_refused(moment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("runs", "fork", moment) == 2
    assert "RUN@STEP" in capsys.readouterr().err


def test_a_killed_server_forks_and_a_changed_record_is_told_where(
    server: ServerProcess, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    server.kill()
    [ledger] = server.data_dir.rglob("trainer.db")
    with sqlite3.connect(ledger) as connection:
        query = "SELECT result FROM operations WHERE run = ? AND sequence_number = 5"
        [[result]] = connection.execute(query, (trained.name,)).fetchall()
        changed = trainer_pb2.ForwardBackwardResponse.FromString(result)
        changed.metrics["loss:sum"] += 1.0
        data = bytearray(changed.outputs[0].logprobs.data)
        data[4 * 7] ^= 1
        changed.outputs[0].logprobs.data = bytes(data)
        connection.execute(
            "UPDATE operations SET result = ? WHERE run = ? AND sequence_number = 5",
            (changed.SerializeToString(deterministic=True), trained.name),
        )
    connection.close()
    server.start()
    replay = shown(capsys, "runs", "replay", f"{trained.id}@3", code=3)
    assert not replay["is_equal"]
    batch, update = replay["operations"]
    first, second = batch["differences"]
    assert "logprobs of datum 0: 1 differ, the first at token 7" in first
    assert second.startswith("loss:sum: recorded")
    assert update["differences"] == []
    assert invoke("runs", "replay", f"{trained.id}@3") == 3
    assert "DIFFERS" in capsys.readouterr().out
    with tinsmith.Client() as client:
        fork = client.runs.fork(trained.id, 4)
        assert train(fork, 4, 6) == trained.losses[4:]
