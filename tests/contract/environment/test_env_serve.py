"""`tinsmith env serve`: classes of a user as a process, found by the scheduler and played."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tests.fakes.scheduler import FakeScheduler, bearer
from tests.support.pod_keys import POD_KEY
from tests.support.wait import eventually

from tinsmith.v1 import (
    environment_pb2,
    environment_pb2_grpc,
    trajectories_pb2,
    workers_pb2,
)
from tinsmith_environment.class_names import named_classes
from tinsmith_environment.commands import read_settings
from tinsmith_local.commands import with_environments
from tinsmith_runtime.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "unit" / "environment"


@contextmanager
def process(*words: str, log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command in the user's folder."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TINSMITH_")
    }
    program = "from tinsmith.cli import main; main()"
    with log.open("wb") as output:
        started = subprocess.Popen(
            [sys.executable, "-c", program, "env", "serve", *words],
            cwd=FOLDER,
            env={**environment, **variables},
            stdout=output,
            stderr=output,
        )
        try:
            yield started
        finally:
            if started.poll() is None:
                started.kill()
            started.wait()


@asynccontextmanager
async def scheduler() -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler()
    await fake.server.start()
    try:
        yield fake
    finally:
        await fake.server.stop()


async def play(
    stub: Any, metadata: Any, environment: str, seed: int, *texts: str
) -> list[environment_pb2.StepInstanceResponse]:
    instance = await stub.CreateInstance(
        environment_pb2.CreateInstanceRequest(
            parent=f"projects/mine/environments/{environment}",
            request_id=f"00000000-0000-4000-8000-0000000000{seed:02d}",
            seed=seed,
        ),
        metadata=metadata,
        timeout=60,
    )
    return [
        await stub.StepInstance(
            environment_pb2.StepInstanceRequest(
                instance=instance.name, step_index=index, action=trajectories_pb2.Action(text=text)
            ),
            metadata=metadata,
            timeout=60,
        )
        for index, text in enumerate(texts)
    ]


async def test_classes_are_served_beside_those_of_gymnasium(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with scheduler() as fake:
        metadata = bearer(fake.new_key("mine"))
        words = ("maze_environments:MazeRunEnvironment", "pole=gymnasium:CartPole-v1")
        flags = ("--scheduler", fake.server.address, "--name", "mine", "--num-workers", "1")
        with process(*words, *flags, log=log, TINSMITH_POD_KEY=POD_KEY) as served:
            worker = await eventually(lambda: listed_by(fake, served, log))
            assert worker.role == workers_pb2.Worker.ROLE_ENVIRONMENT
            async with grpc.aio.insecure_channel(worker.address) as channel:
                stub: Any = environment_pb2_grpc.EnvironmentServiceStub(channel)
                listed = await stub.ListEnvironments(
                    environment_pb2.ListEnvironmentsRequest(parent="projects/mine"),
                    metadata=metadata,
                    timeout=60,
                )
                names = {each.name.rpartition("/")[2]: each for each in listed.environments}
                assert {name for name, each in names.items() if not each.builtin} == {
                    "maze-run",
                    "pole",
                }
                assert "until its end" in names["maze-run"].description
                assert "gymnasium:CartPole-v1" in names["pole"].description
                steps = await play(stub, metadata, "maze-run", 1, "right", "left", "right")
                assert [step.done for step in steps] == [False, False, True]
                assert [step.reward for step in steps] == [0.0, 0.0, 1.0]
                steps = await play(stub, metadata, "pole", 2, "0", "hm")
                assert steps[0].reward == 1.0
                assert steps[1].info.fields["invalid_action"].string_value
            served.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(served.wait, 60) == 0
    assert f"serving maze-run, pole at {worker.address}" in log.read_text()


def listed_by(
    fake: FakeScheduler, served: subprocess.Popen[bytes], log: Path
) -> workers_pb2.Worker | None:
    """Return the worker once it is listed; fail at once, where its process has ended."""
    assert served.poll() is None, log.read_text()
    return fake.workers.get("workers/mine")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        pytest.param(["nothing_here:Maze"], "No module named 'nothing_here'", id="module"),
        pytest.param(["maze_environments:Nothing"], "Nothing", id="class"),
        pytest.param(["maze_environments:Mapping"], "is not a subclass", id="no-environment"),
    ],
)
async def test_a_class_that_cannot_be_served_is_said(
    tmp_path: Path, words: list[str], problem: str
) -> None:
    log = tmp_path / "log"
    async with scheduler() as fake:
        flags = ("--scheduler", fake.server.address, "--num-workers", "1")
        with process(*words, *flags, log=log, TINSMITH_POD_KEY=POD_KEY) as served:
            assert await asyncio.to_thread(served.wait, 170) == 1
    said = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert problem in said[0]


def test_flags_win_over_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TINSMITH_POD_KEY", POD_KEY)
    monkeypatch.setenv("TINSMITH_LISTEN_ADDRESS", "127.0.0.1:1111")
    monkeypatch.setenv("TINSMITH_POOL", "blue")
    file = tmp_path / "pod.toml"
    file.write_text('step_timeout_s = 5.0\npool = "green"\n')
    settings = read_settings(["a.b:C"], {"listen_address": "127.0.0.1:2222", "pool": ""}, file)
    assert settings.listen_address == "127.0.0.1:2222"
    assert (settings.pool, settings.step_timeout_s, settings.pod_key) == ("blue", 5.0, POD_KEY)
    assert settings.class_paths() == {"c": "a.b:C"}
    assert settings.python_path == os.getcwd()
    assert settings.worker_name.endswith("-c")


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("a:MazeRunEnvironment", "maze-run"),
        ("a.b:Environment", "environment"),
        ("a:_Sums_2", "sums-2"),
        ("own=a:Maze", "own"),
        ("gymnasium:CartPole-v1", "CartPole-v1"),
        ("gymnasium:ALE/Pong-v5", "Pong-v5"),
    ],
)
def test_a_class_has_a_name_of_its_own(word: str, name: str) -> None:
    assert list(named_classes([word])) == [name]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["maze"], "is not module:Class"),
        (["a:"], "is not module:Class"),
        (["no way=a:B"], "is not module:Class"),
        (["a:Maze", "b:MazeEnvironment"], "two environments are named maze"),
    ],
)
def test_words_that_name_no_class_are_refused(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        named_classes(words)


def test_a_laptop_serves_classes_beside_those_of_its_file() -> None:
    table: dict[str, object] = {"environments": "own=a:B", "python_path": "/x"}
    found = with_environments({"environment": table, "sampler": {}}, ["c:MazeEnvironment"])
    assert found["environment"]["environments"] == "own=a:B,maze=c:MazeEnvironment"
    assert found["environment"]["python_path"] == f"/x:{os.getcwd()}"
    assert with_environments({"sampler": {}}, []) == {"sampler": {}}
