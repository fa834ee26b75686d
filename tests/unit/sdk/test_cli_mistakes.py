"""Mistakes on the command line: one line on stderr, one remedy in its own words, and no trace."""

from __future__ import annotations

import json
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.rpc import code_pb2
from tests.fakes.local_servers import local_server
from tests.fakes.sdk_fake_server import FakeServer, make_status
from tests.unit.sdk.test_cli import invoke
from tests.unit.sdk.test_tokenizer import CHATML, make_files

from tinsmith.cli import connection
from tinsmith.local_servers import Announcement

JOB = """
apiVersion: tinsmith.dev/v1alpha1
kind: TrainingJob
metadata: {name: first}
spec:
  model: {name: tiny}
  method: {type: supervised, maxStep: 5}
"""


@pytest.fixture(autouse=True)
def local(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeServer]:
    """A server that `tinsmith up` announced, and a folder with files that are wrong."""
    monkeypatch.chdir(tmp_path)
    server.state.tokenizer_files = make_files(CHATML)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "keys.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "cut.jsonl").write_text('{"messages": [')
    (tmp_path / "good.jsonl").write_text('{"question": "1+1", "answer": "#### 2"}\n' * 3)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "bad.toml").write_text("num_steps = 5\n[")
    told = local_server(server.address, model_sources={"tiny": "/models/tiny"})
    with Announcement(tmp_path / "state", told):
        yield server


@pytest.mark.parametrize(
    ("command", "message"),
    [
        pytest.param("run nosuch", "there is no recipe 'nosuch'; use one of", id="recipe"),
        pytest.param("run rl lerning_rate=1", "did you mean learning_rate", id="setting"),
        pytest.param("run rl learning_rate=abc", "give a value of float", id="type"),
        pytest.param("run rl learning_rate=-1", "learning_rate is -1.0; give a number", id="rate"),
        pytest.param("run supervised learning_rate=nan", "learning_rate is nan; give", id="nan"),
        pytest.param("run rl group_size=1", "group_size is 1; give a whole number, 2", id="group"),
        pytest.param("run rl loss=dpo", "loss is 'dpo'; give one of importance", id="loss"),
        pytest.param("run supervised batch_size=0", "batch_size is 0; give a whole", id="batch"),
        pytest.param("run supervised adapter=qlora", "'qlora'; give one of lora, full", id="qlora"),
        pytest.param("run supervised data=no.jsonl", "no.jsonl cannot be read", id="no-file"),
        pytest.param("run rl data=no.jsonl", "no.jsonl cannot be read", id="rl-no-file"),
        pytest.param("run supervised data=empty.jsonl", "holds no conversation", id="empty"),
        pytest.param("run supervised data=keys.jsonl", "keys.jsonl:1: a line with", id="keys"),
        pytest.param("run supervised data=cut.jsonl", "cut.jsonl:1: not JSON", id="cut"),
        pytest.param("run rl data=empty.jsonl", "empty.jsonl has too few rows: 0", id="rl-empty"),
        pytest.param(
            "run supervised data=good.jsonl output_dir=good.jsonl/a", "cannot be written", id="dir"
        ),
        pytest.param("run rl --config no.toml", "no.toml cannot be read", id="no-config"),
        pytest.param("run rl --config bad.toml", "bad.toml is not TOML", id="bad-config"),
        pytest.param("sample hi", "give one of --base-model, --checkpoint and --run", id="source"),
        pytest.param("sample --base-model tiny", 'tinsmith sample "a prompt"', id="prompt"),
        pytest.param("sample a --prompt b", "two prompts are given", id="two-prompts"),
        pytest.param("jobs submit", "give FILE or --recipe", id="no-job"),
        pytest.param("jobs submit --recipe rl", "add --name", id="no-name"),
        pytest.param(
            "jobs submit job.yaml", "spec.method.maxStep: did you mean maxSteps", id="yaml"
        ),
        pytest.param("jobs submit no.yaml", "no.yaml cannot be read", id="no-yaml"),
        pytest.param(
            "jobs submit --recipe nosuch --name a", "use one of supervised, rl,", id="job-recipe"
        ),
        pytest.param(
            "jobs submit --recipe supervised --name a --set data=no.jsonl",
            "no.jsonl is not there",
            id="job-data",
        ),
        pytest.param("checkpoints info first", "'first' is not a resource name", id="name"),
        pytest.param("checkpoints publish a/b/c", "is not a resource name", id="path"),
        pytest.param("checkpoints import . run-1 a", "adapter_config.json", id="no-adapter"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    local: FakeServer, capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    assert invoke(*command.split()) == 1
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert "Traceback" not in output.out + output.err
    assert not local.state.calls["CreateTrainingRun"]
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("command", "call", "reason", "message"),
    [
        pytest.param(
            "sample hi --base-model no",
            "CreateSamplingSession",
            "MODEL_NOT_FOUND",
            "`tinsmith models list` shows",
            id="model",
        ),
        pytest.param(
            "runs delete run-9",
            "DeleteTrainingRun",
            "RUN_NOT_FOUND",
            "`tinsmith runs list`",
            id="run",
        ),
    ],
)
def test_remedies_are_commands(
    local: FakeServer,
    capsys: pytest.CaptureFixture[str],
    command: str,
    call: str,
    reason: str,
    message: str,
) -> None:
    text = "it is not there; ListTrainingRuns lists those that do"
    local.state.fail_calls[call] = [make_status(code_pb2.NOT_FOUND, reason, text)]
    assert invoke(*command.split()) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith(f"error: it is not there ({reason}); ")
    assert "ListTrainingRuns" not in error


def test_the_models_that_are_served_are_listed(
    local: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke("models", "list") == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert (heading.split()[-1], row.split()[0], row.split()[-1]) == (
        "SOURCE",
        "tiny",
        "/models/tiny",
    )
    assert invoke("models", "--help") == 0
    assert "build-tiny" in capsys.readouterr().out


def test_a_prompt_may_be_an_argument(local: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("sample", "hello", "--base-model", "tiny", "--json") == 0
    assert json.loads(capsys.readouterr().out)["samples"]


def test_a_server_that_is_away_is_told_within_seconds(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("TINSMITH_ADDRESS", address)
    monkeypatch.setenv("TINSMITH_API_KEY", "tsk_test")
    monkeypatch.setattr(connection, "_PATIENCE_S", 0.5)
    monkeypatch.setattr("tinsmith.rpc.transport._TOLD_AFTER_S", 0.1)
    monkeypatch.setattr("tinsmith.rpc.transport._told_at_s", {})
    assert invoke("runs", "list") == 1
    error = capsys.readouterr().err
    assert f"error: no server answers at {address}: Connection refused" in error
    assert error.strip().count("\n") == 0
    [told] = caplog.records
    assert told.getMessage().startswith(
        f"no server answers at {address}: Connection refused; trying"
    )


def test_a_bug_is_one_line_and_its_trace_is_kept(
    local: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("tinsmith.recipes.broken")

    def fail(*_: object) -> None:
        raise KeyError("what no one thought of")

    module.Config = types.SimpleNamespace  # type: ignore[attr-defined]
    module.main = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("tinsmith.cli.recipe.load_config", lambda *_: None)
    assert invoke("run", "broken") == 1
    error = capsys.readouterr().err
    assert error.startswith("error: KeyError: 'what no one thought of' (a bug of tinsmith); ")
    assert error.count("\n") == 1
    trace = Path(error.rstrip().rpartition(" ")[2])
    assert "Traceback" in trace.read_text()
    trace.unlink()
    monkeypatch.setenv("TINSMITH_DEBUG", "1")
    with pytest.raises(KeyError):
        invoke("run", "broken")


def test_a_disk_that_fails_is_named(
    local: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", "runs/a/metrics.jsonl")

    monkeypatch.setattr("tinsmith.recipes.supervised.main", fail)
    assert invoke("run", "supervised") == 1
    assert capsys.readouterr().err == "error: runs/a/metrics.jsonl: No space left on device\n"
