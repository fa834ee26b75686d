"""`tinsmith run` as a user types it: killed, interrupted and repeated, it finds its way back."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.wait import until

import tinsmith
from tinsmith_local.process import ServerProcess

TIMEOUT_S = 240.0
DATA = Path(__file__).with_name("conversations.jsonl")
SUPERVISED = (
    "run",
    "supervised",
    f"data={DATA}",
    "rank=4",
    "batch_size=4",
    "max_tokens=2",
    "num_steps=8",
    "save_every=2",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[ServerProcess]:
    # Steps take long enough to be interrupted, however fast the machine is.
    slowly = {"TINSMITH_FAILPOINTS": "trainer.compute=sleep:0.2"}
    folder = tmp_path_factory.mktemp("runs")
    with ServerProcess(folder, {"tiny": model_dir}, environment=slowly) as process:
        yield process


_PROGRAM = "from tinsmith.cli import main; main()"
_IN_BACKGROUND = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {_PROGRAM}"
"""As a shell starts what ends in `&`."""
_BEFORE_IT_COUNTS = f"""
import signal
from tinsmith.training.run_forms import TrainingRun
optim_step, calls = TrainingRun.optim_step, []
def interrupted(run, *arguments):
    calls.append(optim_step(run, *arguments))
    if len(calls) == 3:
        signal.raise_signal(signal.SIGINT)
    return calls[-1]
TrainingRun.optim_step = interrupted
{_PROGRAM}
"""
"""Ctrl-C when a step is sent, before the program knows of it."""


def start(
    server: ServerProcess, folder: Path, *words: str, program: str = _PROGRAM
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *words],
        cwd=folder,
        env={
            **os.environ,
            "TINSMITH_ADDRESS": server.address,
            "TINSMITH_API_KEY": server.api_key,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code, (out, error)
    return out, error


def weights_of(server: ServerProcess, folder: Path) -> dict[str, str]:
    """Return the hashes of the weights that an experiment ended with."""
    name = json.loads((folder / "summary.json").read_text())["checkpoint"]
    with tinsmith.Client(server.address, server.api_key) as client:
        path = Path(client.checkpoints.get(name).manifest_uri.removeprefix("file://")).parent
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.glob("*.safetensors"))
    }


@pytest.mark.parametrize(
    ("how", "code", "program"),
    [
        (signal.SIGKILL, -signal.SIGKILL, _PROGRAM),
        (signal.SIGINT, 130, _PROGRAM),
        (signal.SIGTERM, 130, _PROGRAM),
        (signal.SIGTERM, 130, _IN_BACKGROUND),
        (None, 130, _BEFORE_IT_COUNTS),
    ],
    ids=[
        "kill",
        "ctrl-c",
        "terminate",
        "terminate in the background",
        "ctrl-c before a step counts",
    ],
)
def test_the_same_command_goes_on_with_the_same_bits(
    server: ServerProcess, tmp_path: Path, how: signal.Signals | None, code: int, program: str
) -> None:
    calm, disturbed = tmp_path / "calm", tmp_path / "disturbed"
    calm.mkdir()
    disturbed.mkdir()
    finish(start(server, calm, *SUPERVISED))
    process = start(server, disturbed, *SUPERVISED, program=program)
    folder = disturbed / "runs" / "supervised-conversations-1"
    if how is not None:
        until(lambda: process.poll() is not None or (folder / "state.json").is_file())
        assert process.poll() is None, process.communicate()
        process.send_signal(how)
    out, error = finish(process, code)
    assert "Traceback" not in error
    if how is not signal.SIGKILL:
        assert "saving after step" in out
        assert "the same command goes on" in out
    # Another experiment that is begun in between has a folder of its own.
    finish(start(server, disturbed, *SUPERVISED, "num_steps=1", "seed=1"))
    out, _ = finish(start(server, disturbed, *SUPERVISED))
    assert "goes on after step" in out
    assert weights_of(server, folder) == weights_of(
        server, calm / "runs" / "supervised-conversations-1"
    )
    names = sorted(path.name for path in (disturbed / "runs").iterdir())
    assert names == ["supervised-conversations-1", "supervised-conversations-2"]
    out, _ = finish(start(server, disturbed, *SUPERVISED))
    assert out.startswith("finished: runs/supervised-conversations-1 holds this experiment")


def test_a_loop_that_waits_for_agents_says_so_and_ends_at_ctrl_c(
    server: ServerProcess, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}\n' * 4)
    process = start(server, tmp_path, "run", "rl_episodes", "queue=rl", f"data={tasks}")
    assert process.stdout is not None
    begin = process.stdout.readline()
    assert "begins; its files are in runs/rl_episodes-tasks-1" in begin
    assert process.stdout.readline().startswith(
        "waiting for agents: 1 eval episode is open on queue rl and no agent plays"
    )
    process.send_signal(signal.SIGINT)
    out, error = finish(process, 130)
    assert out == "stopped before the first step; there is nothing to save\n"
    assert error == ""


def test_a_key_of_another_project_needs_nothing_else(server: ServerProcess) -> None:
    with tinsmith.Client(server.address, server.api_key) as operator:
        key = operator.keys.create(display_name="bob", project="other")
    with tinsmith.Client(server.address, key.secret) as client:
        assert client.project == "other"
        assert client.runs.list() == []
        run = client.create_lora_training_run("tiny", rank=4)
        assert run.name.startswith("projects/other/")
