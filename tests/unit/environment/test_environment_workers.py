from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.processes import is_alive
from tests.support.wait import eventually

from tinsmith_environment import Action
from tinsmith_environment.workers.pool import WorkerPool
from tinsmith_environment.workers.worker import WorkerProcess
from tinsmith_runtime.errors import EnvironmentFailedError, InvalidFieldError
from tinsmith_runtime.process_control import gain_no_privileges

UNRULY = "unruly_environments:UnrulyEnvironment"


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerPool]:
    monkeypatch.setenv("TINSMITH_POD_KEY", "secret")
    pool = WorkerPool(num_workers=1, step_timeout_s=5.0, python_path=str(Path(__file__).parent))
    await pool.start()
    yield pool
    await pool.stop()


async def create(worker: WorkerProcess, instance: str, hangs_at: str = "") -> None:
    await worker.create(instance, UNRULY, {}, 1, {"fail_reset": False, "hangs_at": hangs_at})


async def replaced(pool: WorkerPool, pid: int) -> WorkerProcess:
    async with asyncio.timeout(20):
        while not pool.workers or pool.workers[0].pid == pid:
            await asyncio.sleep(0.01)
    return pool.workers[0]


async def test_environments_that_raise_or_return_nonsense_do_not_disturb_others(
    pool: WorkerPool,
) -> None:
    (worker,) = pool.workers
    await create(worker, "good")
    await create(worker, "bad")
    for text, problem in [
        ("raise", r"RuntimeError: boom \(unruly_environments.py:\d+\)"),
        ("exit", "SystemExit: 3"),
        ("nan", "reward must be finite"),
        ("infinite", "reward must be finite"),
        ("text", "reward must be a number, got str"),
        ("lie", "done must be True or False, got str"),
        ("wrong", "expected a StepResult, got str"),
        ("unserialisable", "object has no JSON form"),
        ("empty stop", "a stop string has 1 to 256 characters"),
    ]:
        with pytest.raises(EnvironmentFailedError, match=problem) as caught:
            await worker.step("bad", Action(text=text))
        assert caught.value.metadata["cause"] == "raised"
    assert (await worker.step("good", Action(text="go"))).reward == 0.5
    assert worker.loss is None


async def test_what_an_environment_prints_reads_and_sees(pool: WorkerPool) -> None:
    (worker,) = pool.workers
    await create(worker, "a")
    result = await worker.step("a", Action(text="print"))
    assert result.info["secrets"] == []
    assert result.info["array"] == [0, 1]
    assert result.info["pid"] == worker.pid
    large = await worker.step("a", Action(text="large"))
    assert len(large.observation.messages[0].content) == 3_000_000
    tokens = await worker.step("a", Action(tokens=(4, 5)))
    assert tokens.observation.messages[0].content == "step 3: (4, 5)"


async def test_a_worker_that_dies_is_replaced(pool: WorkerPool) -> None:
    (worker,) = pool.workers
    await create(worker, "a")
    with pytest.raises(EnvironmentFailedError, match="exit code 7") as caught:
        await worker.step("a", Action(text="die"))
    assert caught.value.metadata["cause"] == "crashed"
    with pytest.raises(EnvironmentFailedError, match="exit code 7"):
        await worker.step("b", Action(text="go"))
    await create(await replaced(pool, worker.pid), "a")


async def test_what_the_pod_started_itself_outlives_a_worker(pool: WorkerPool) -> None:
    # As pods do, and what they start: on a laptop one process has workers and all else.
    waits = "import os, signal; os.write(1, b'.'); signal.pause()"
    own = subprocess.Popen(
        [sys.executable, "-c", waits], stdout=subprocess.PIPE, preexec_fn=gain_no_privileges
    )
    try:
        assert own.stdout is not None
        assert own.stdout.read(1) == b"."
        (worker,) = pool.workers
        os.kill(worker.pid, signal.SIGKILL)
        await replaced(pool, worker.pid)
        await pool.stop()
        assert own.poll() is None
    finally:
        own.kill()
        own.communicate()


async def test_a_kill_in_the_middle_of_a_step_fails_the_step(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (worker,) = pool.workers
    hangs = tmp_path / "hangs"
    await create(worker, "a", hangs_at=str(hangs))
    step = asyncio.create_task(worker.step("a", Action(text="hang")))
    await eventually(hangs.exists)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFailedError, match="signal SIGKILL"):
        await step
    await create(await replaced(pool, worker.pid), "a")


async def test_a_hanging_step_is_stopped() -> None:
    folder = str(Path(__file__).parent)
    pool = WorkerPool(num_workers=1, step_timeout_s=2.0, python_path=folder)
    await pool.start()
    try:
        (worker,) = pool.workers
        await create(worker, "a")
        with pytest.raises(EnvironmentFailedError, match="did not finish within 2 s") as caught:
            await worker.step("a", Action(text="hang"))
        assert caught.value.metadata["cause"] == "timeout"
        await create(await replaced(pool, worker.pid), "a")
    finally:
        await pool.stop()


async def test_a_failed_reset_leaves_nothing_behind(pool: WorkerPool) -> None:
    (worker,) = pool.workers
    with pytest.raises(EnvironmentFailedError, match="no level"):
        await worker.create("a", UNRULY, {}, 1, {"fail_reset": True})
    with pytest.raises(EnvironmentFailedError, match="No module named"):
        await worker.create("a", "nowhere:Nothing", {}, 1, {})
    with pytest.raises(EnvironmentFailedError, match="not a subclass"):
        await worker.describe("unruly_environments:NotAnEnvironment")
    assert worker.loss is None


async def test_settings_and_actions_are_refused_as_fields(pool: WorkerPool) -> None:
    (worker,) = pool.workers
    guessing = "tinsmith_environment.builtin.guessing:GuessingEnvironment"
    config = (await worker.describe(guessing)).default_config
    with pytest.raises(InvalidFieldError, match=r"config\.max_turns must be from 1"):
        await worker.create("a", guessing, {}, 1, {**config, "max_turns": 0})
    await worker.create("a", guessing, {}, 1, config)
    with pytest.raises(InvalidFieldError, match="must be of the kind text, got tokens"):
        await worker.step("a", Action(tokens=(1,)))


async def test_a_property_says_of_an_object_what_it_understands(tmp_path: Path) -> None:
    (tmp_path / "choosing.py").write_text(
        "from tinsmith_environment import Environment, Observation\n"
        "class Choosing(Environment):\n"
        "    default_config = {'kind': 'tokens'}\n"
        "    def reset(self, seed, config):\n"
        "        self._kind = config['kind']\n"
        "        return Observation.of_user('Go.')\n"
        "    @property\n"
        "    def action_kinds(self):\n"
        "        return {self._kind}\n"
        "    def step(self, action):\n"
        "        raise NotImplementedError\n"
    )
    pool = WorkerPool(num_workers=1, python_path=str(tmp_path), modules=["choosing"])
    await pool.start()
    try:
        (worker,) = pool.workers
        assert (await worker.describe("choosing:Choosing")).action_kinds == {"text"}
        begun = await worker.create("a", "choosing:Choosing", {}, 1, {"kind": "tokens"})
        assert begun.action_kinds == {"tokens"}
        with pytest.raises(EnvironmentFailedError, match="action_kinds holds 'moves'"):
            await worker.create("b", "choosing:Choosing", {}, 1, {"kind": "moves"})
    finally:
        await pool.stop()


async def test_a_hanging_worker_ends_with_its_pod(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from tinsmith_environment import Action\n"
        "from tinsmith_environment.workers.pool import WorkerPool\n"
        "async def main():\n"
        f"    pool = WorkerPool(num_workers=1, python_path={str(Path(__file__).parent)!r})\n"
        "    await pool.start()\n"
        "    (worker,) = pool.workers\n"
        f"    await worker.create('a', {UNRULY!r}, {{}}, 1, {{'fail_reset': False}})\n"
        "    print(worker.pid, *pool.fork_servers, flush=True)\n"
        "    await worker.step('a', Action(text='hang'))\n"
        "asyncio.run(main())\n"
    )
    pod = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=tmp_path, stdout=asyncio.subprocess.PIPE
    )
    assert pod.stdout is not None
    async with asyncio.timeout(60):
        pids = [int(part) for part in (await pod.stdout.readline()).split()]
    pod.kill()
    await pod.wait()
    await eventually(lambda: not any(is_alive(pid) for pid in pids))


async def test_workers_draw_other_numbers_and_import_nothing_twice(tmp_path: Path) -> None:
    # The module counts its imports in a file and draws a number in each process.
    (tmp_path / "drawing.py").write_text(
        "import random\n"
        "from tinsmith_environment import Environment, Observation, StepResult\n"
        f"with open({str(tmp_path / 'imports')!r}, 'a') as file:\n"
        "    file.write('x')\n"
        "class Drawing(Environment):\n"
        "    def reset(self, seed, config):\n"
        "        return Observation.of_user(str(random.random()))\n"
        "    def step(self, action):\n"
        "        return StepResult(Observation(), 0.0, True)\n"
    )
    pool = WorkerPool(num_workers=3, python_path=str(tmp_path), modules=["drawing", "nowhere"])
    await pool.start()
    try:
        drawn = [
            (await worker.create("a", "drawing:Drawing", {}, 1, {})).observation.messages[0].content
            for worker in pool.workers
        ]
    finally:
        await pool.stop()
    assert len(set(drawn)) == 3
    assert (tmp_path / "imports").read_text() == "x"


async def test_modules_that_start_threads_are_imported_by_each_worker(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\n"
        "from tinsmith_environment import Environment, Observation, StepResult\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "class Threaded(Environment):\n"
        "    def reset(self, seed, config):\n"
        "        return Observation.of_user(str(threading.active_count()))\n"
        "    def step(self, action):\n"
        "        return StepResult(Observation(), 0.0, True)\n"
    )
    pool = WorkerPool(num_workers=1, python_path=str(tmp_path), modules=["threaded"])
    await pool.start()
    try:
        (worker,) = pool.workers
        begun = await worker.create("a", "threaded:Threaded", {}, 1, {})
    finally:
        await pool.stop()
    assert begun.observation.messages[0].content == "2"


async def test_a_process_that_closes_its_socket_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "closing.py").write_text(
        "import os, time\n"
        "from tinsmith_environment import Environment, Observation, StepResult\n"
        "class Closing(Environment):\n"
        "    def reset(self, seed, config):\n"
        "        os.closerange(3, 64)\n"
        "        time.sleep(600)\n"
        "    def step(self, action):\n"
        "        return StepResult(Observation(), 0.0, True)\n"
    )
    pool = WorkerPool(num_workers=1, python_path=str(tmp_path))
    await pool.start()
    try:
        (worker,) = pool.workers
        with pytest.raises(EnvironmentFailedError, match=r"SIGKILL|closed its socket") as caught:
            await worker.create("a", "closing:Closing", {}, 1, {})
        assert caught.value.metadata["cause"] == "crashed"
    finally:
        await pool.stop()
