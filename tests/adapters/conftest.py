"""Programs under the Python of an environment that holds a library as it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tests.fakes.scheduler import FakeScheduler, bearer
from tests.support.pod_keys import POD_KEY
from tests.support.wait import eventually
from tinsmith.v1 import environment_pb2, environment_pb2_grpc, trajectories_pb2
from tinsmith_local.process import ServerProcess
from tinsmith_local.tiny_model import TinyModelConfig, build_tiny_model

ROOT = Path(__file__).parents[2]
GAMES = Path(__file__).parent / "games"
MODEL = "tiny"
_PLAY = Path(__file__).parent / "programs/play.py"
_TIMEOUT_S = 240.0
_COMMAND = ("-c", "from tinsmith.cli import main; main()")
"""The command line, as its script begins it."""


def python_of(library: str) -> Path:
    """Return the Python that `make venv-adapters` made for a library."""
    python = ROOT / f".venv-{library}/bin/python"
    assert python.exists(), "run make venv-adapters first"
    return python


def variables(**further: str) -> dict[str, str]:
    """Return the variables of a program: a few of this process, and no setting of tinsmith."""
    inherited = ("PATH", "TMPDIR", "LANG", "HOME")
    return {
        **{name: os.environ[name] for name in inherited if name in os.environ},
        "PYTHONPATH": f"{ROOT}:{GAMES}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **further,
    }


def run(library: str, *words: str | Path, **further: str) -> str:
    """Run Python to its end; return what it wrote."""
    done = subprocess.run(
        [python_of(library), *words],
        env=variables(**further),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{words} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_tinsmith(library: str, server: ServerProcess, *words: str, **further: str) -> None:
    """Run the command line as a user of a server."""
    run(
        library,
        *_COMMAND,
        *words,
        TINSMITH_ADDRESS=server.address,
        TINSMITH_API_KEY=server.api_key,
        **further,
    )


def play(*asked: Mapping[str, Any], together: bool = False, **further: str) -> list[dict[str, Any]]:
    """Play episodes in one process; return what `programs/play.py` tells of each.

    Args:
        asked: The episodes, one after the other.
        together: Whether they are played at once.
        further: Variables of the process.
    """
    [library] = {each["adapter"] for each in asked}
    flags = ["--together"] if together else []
    output = run(library, _PLAY, *flags, *(json.dumps(each) for each in asked), **further)
    told = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(told) == len(asked)
    return told


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A whole server that knows no library; its model has learned nothing."""
    config = TinyModelConfig(num_layers=1, hidden_size=64)
    model = build_tiny_model(tmp_path_factory.mktemp("model"), config)
    with ServerProcess(tmp_path_factory.mktemp("server"), {MODEL: model}) as process:
        yield process


@contextmanager
def serving(library: str, *words: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`tinsmith env serve` under the library's Python."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [python_of(library), *_COMMAND, "env", "serve", *words],
            cwd=GAMES,
            env=variables(TINSMITH_POD_KEY=POD_KEY),
            stdout=output,
            stderr=output,
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class ServedPod:
    """A client of one environment pod."""

    def __init__(self, stub: Any, metadata: Any) -> None:
        self._stub = stub
        self._metadata = metadata
        self._num_instances = 0

    async def play(self, name: str, seed: int, *texts: str) -> list[Any]:
        """Play an episode; return the answer to each text."""
        self._num_instances += 1
        instance = await self._stub.CreateInstance(
            environment_pb2.CreateInstanceRequest(
                parent=f"projects/mine/environments/{name}",
                request_id=f"00000000-0000-4000-8000-0000000000{self._num_instances:02d}",
                seed=seed,
            ),
            metadata=self._metadata,
            timeout=60,
        )
        return [
            await self._stub.StepInstance(
                environment_pb2.StepInstanceRequest(
                    instance=instance.name,
                    step_index=index,
                    action=trajectories_pb2.Action(text=text),
                ),
                metadata=self._metadata,
                timeout=60,
            )
            for index, text in enumerate(texts)
        ]


@asynccontextmanager
async def served_pod(library: str, *words: str, log: Path) -> AsyncIterator[ServedPod]:
    """A pod of `tinsmith env serve` that a scheduler knows."""
    fake = FakeScheduler()
    await fake.server.start()
    try:
        flags = ("--scheduler", fake.server.address, "--name", "mine", "--num-workers", "1")
        with serving(library, *words, *flags, log=log) as process:

            def listed() -> Any:
                assert process.poll() is None, log.read_text()
                return fake.workers.get("workers/mine")

            worker = await eventually(listed)
            async with grpc.aio.insecure_channel(worker.address) as channel:
                stub: Any = environment_pb2_grpc.EnvironmentServiceStub(channel)
                yield ServedPod(stub, bearer(fake.new_key("mine")))
    finally:
        await fake.server.stop()
