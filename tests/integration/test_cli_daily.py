"""What a user asks a server on a day: its health, its runs, its sessions, and a conversation."""

from __future__ import annotations

import io
import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tinsmith
from tinsmith import cli
from tinsmith_local.process import ServerProcess


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("daily"), {"tiny": model_dir}) as process:
        yield process


@pytest.fixture(autouse=True)
def _use(server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_ADDRESS", server.address)
    monkeypatch.setenv("TINSMITH_API_KEY", server.api_key)
    monkeypatch.setenv("TINSMITH_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def run(server: ServerProcess) -> str:
    """A run with one checkpoint, whose session is over."""
    with tinsmith.Client(server.address, server.api_key, display_name="earlier") as client:
        run = client.create_lora_training_run("tiny", rank=4, display_name="first try")
        run.save_state("begin").result()
        return run.name


def invoke(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(words))
    return int(caught.value.code or 0)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Return what a command prints as JSON."""
    assert invoke(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_is_shown_with_its_checkpoints(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    short = run.rpartition("/")[2]
    found = shown(capsys, "runs", "show", short)
    assert found["display_name"] == "first try"
    assert [each["name"] for each in found["checkpoints"]] == [f"{run}/checkpoints/begin"]
    assert invoke("runs", "show", run) == 0
    text = capsys.readouterr().out
    assert "display_name: first try" in text
    assert f"{short}/begin" in text
    assert invoke("runs", "show", "no-such-run") == 1
    assert "`tinsmith runs list` shows" in capsys.readouterr().err


def test_runs_are_filtered(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = [each["name"] for each in shown(capsys, "runs", "list", "--name", "first")]
    assert names == [run]
    assert shown(capsys, "runs", "list", "--state", "deleted") == []
    assert shown(capsys, "runs", "list", "--base-model", "other") == []


def test_the_list_says_where_each_run_stands(
    server: ServerProcess, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with tinsmith.Client(server.address, server.api_key) as client:
        client.runs.log_metrics(run, {"reward": 0.25, "loss": 3.0}, step=6)
        client.runs.log_metrics(run, {"reward": 0.5, "loss": 2.0}, step=7)
    [found] = shown(capsys, "runs", "list", "--name", "first")
    assert (found["step"], found["last"]) == (7, "reward 0.5")
    with tinsmith.Client(server.address, server.api_key) as client:
        [loss] = client.runs.list_metrics(["loss"], run=run)
        assert (loss.run, loss.name, loss.step, loss.value) == (run, "loss", 7, 2.0)
        assert {each.name for each in client.runs.list_metrics()} >= {"reward", "loss"}


def test_sessions_say_how_they_ended_and_what_they_made(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [earlier] = [s for s in shown(capsys, "sessions", "list") if s["display_name"] == "earlier"]
    assert (earlier["state"], earlier["outcome"]) == ("finished", "success")
    assert shown(capsys, "sessions", "show", earlier["name"])["training_runs"] == [run]
    active = shown(capsys, "sessions", "list", "--active")
    assert [each["display_name"] for each in active] == ["tinsmith sessions list"]


def test_the_audit_trail_joins_scheduler_and_checkpoints(
    server: ServerProcess, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with tinsmith.Client(server.address, server.api_key) as client:
        client.checkpoints.publish(f"{run}/checkpoints/begin")
    events = shown(capsys, "audit", "--since", "1h")
    actions = [(event["action"], event["resource"]) for event in events]
    assert ("create_run", run) in actions
    assert ("publish_checkpoint", f"{run}/checkpoints/begin") in actions
    assert [e["time"] for e in events] == sorted(e["time"] for e in events)
    assert {e["action"] for e in shown(capsys, "audit", "--action", "create_run")} == {"create_run"}


def test_doctor_finds_nothing_wrong_with_a_server_that_works(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    del run
    assert invoke("doctor") == 0
    text = capsys.readouterr().out
    assert "connection: " in text
    assert "tiny trains and samples, exact" in text
    assert text.endswith("nothing is wrong\n")


def test_doctor_names_a_key_that_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINSMITH_API_KEY", f"tsk_nobody_{'0' * 43}")
    assert invoke("doctor") == 1
    assert "the server refuses the key" in capsys.readouterr().out


def test_a_conversation_on_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(*turns: str) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{turn}\n" for turn in turns)))
        words = ("--base-model", "tiny", "--max-tokens", "4", "--temperature", "0")
        assert invoke("chat", *words) == 0
        return capsys.readouterr().out.splitlines()

    first = answers("hello")
    assert answers("hello", "", "/clear", "hello") == first * 2
    assert invoke("chat") == 1
    assert "give one of --base-model" in capsys.readouterr().err


def _sample_elsewhere(sampler: tinsmith.Sampler, seed: int) -> list[int]:
    params = tinsmith.SamplingParams(max_tokens=4, seed=seed)
    return sampler.sample([1, 2, 3], sampling_params=params).result().sequences[0].tokens


def test_a_sampler_is_used_by_worker_processes(server: ServerProcess) -> None:
    with tinsmith.Client(server.address, server.api_key) as client:
        sampler = client.create_sampler(base_model="tiny")
        here = [_sample_elsewhere(sampler, seed) for seed in (1, 2)]
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            there = pool.starmap(_sample_elsewhere, [(sampler, 1), (sampler, 2)])
    assert there == here
