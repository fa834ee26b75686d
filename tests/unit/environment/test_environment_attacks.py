"""Code of an environment against the pod it runs in and the episodes beside it."""

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
from tests.unit.environment.hostile_environments import MARK

from tinsmith_environment import Action, StepResult
from tinsmith_environment.config import EnvironmentConfig
from tinsmith_environment.workers.confinement import ProcessLimits, has_signal_scope
from tinsmith_environment.workers.pool import WorkerPool
from tinsmith_environment.workers.worker import Worker
from tinsmith_runtime.errors import (
    ConfigError,
    EnvironmentFailedError,
    WorkerUnavailableError,
)

HOSTILE = "hostile_environments:HostileEnvironment"
FOLDER = str(Path(__file__).parent)
LIMITS = ProcessLimits(max_processes=40, file_bytes=2**20, open_files=64)


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerPool]:
    for name in ("TINSMITH_POD_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MY_PASSWORD"):
        monkeypatch.setenv(name, f"{MARK}-{name}")
    pool = WorkerPool(
        num_workers=2, max_workers=4, step_timeout_s=20.0, python_path=FOLDER, limits=LIMITS
    )
    await pool.start()
    yield pool
    await pool.stop()


async def play(pool: WorkerPool, project: str) -> Worker:
    """Return a worker of a project with an instance `a`."""
    worker = await pool.assign(project)
    worker.num_instances += 1
    await worker.create("a", HOSTILE, {}, 1, {})
    return worker


async def act(worker: Worker, text: str) -> StepResult:
    return await worker.step("a", Action(text=text))


async def test_no_secret_of_the_pod_is_found(tmp_path: Path) -> None:
    # A process of its own: the key is in the block of variables it was started with.
    code = (
        "import asyncio, os, sys\n"
        "from tinsmith_environment import Action\n"
        "from tinsmith_environment.workers.pool import WorkerPool\n"
        "async def main():\n"
        f"    pool = WorkerPool(num_workers=2, python_path={FOLDER!r})\n"
        "    await pool.start()\n"
        "    worker = await pool.assign('p')\n"
        f"    await worker.create('a', {HOSTILE!r}, {{}}, 1, {{}})\n"
        "    result = await worker.step('a', Action(text=f'look {os.getpid()}'))\n"
        "    print([each for each in result.info['found'] if not each[0].isdigit()\n"
        "           or int(each.split('/')[0]) in (os.getpid(), *[w.pid for w in pool.workers])])\n"
        "    await pool.stop()\n"
        "asyncio.run(main())\n"
    )
    names = ("TINSMITH_POD_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "SSH_AUTH_SOCK")
    variables = {**os.environ, **{name: f"{MARK}-{name}" for name in names}}
    found = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", code],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert found.stdout.strip() == "[]", found.stdout + found.stderr


async def test_a_process_of_one_project_is_never_another_projects(pool: WorkerPool) -> None:
    first = await play(pool, "one")
    assert (await act(first, "remember secret of one")).info["before"] == []
    workers = {"one": first}
    for project in ("two", "three", "four"):
        workers[project] = await play(pool, project)
        assert (await act(workers[project], "remember x")).info["before"] == []
    assert len({id(worker) for worker in workers.values()}) == 4
    # An idle process is given up rather than shared.
    first.num_instances = 0
    again = await play(pool, "five")
    assert again is not first
    assert (await act(again, "remember x")).info["before"] == []
    assert first.loss is not None


async def test_more_projects_than_processes_are_refused() -> None:
    pool = WorkerPool(num_workers=1, max_workers=2, python_path=FOLDER)
    await pool.start()
    try:
        await play(pool, "one")
        await play(pool, "two")
        with pytest.raises(WorkerUnavailableError, match="serve other projects"):
            await pool.assign("three")
    finally:
        await pool.stop()


async def test_a_worker_that_starts_slowly_holds_up_no_other_project() -> None:
    pool = WorkerPool(num_workers=1, max_workers=2, start_timeout_s=300.0, python_path=FOLDER)
    await pool.start()
    try:
        first = await play(pool, "one")
        first.num_instances = 0
        (fork_server,) = pool.fork_servers
        os.kill(fork_server, signal.SIGSTOP)
        waiting = asyncio.create_task(pool.assign("two"))
        async with asyncio.timeout(60):
            assert await pool.assign("one") is first
        assert not waiting.done()
        os.kill(fork_server, signal.SIGCONT)
        assert (await waiting).loss is None
    finally:
        await pool.stop()


async def test_the_death_of_the_fork_server_fails_its_workers_and_it_is_started_again() -> None:
    pool = WorkerPool(num_workers=1, python_path=FOLDER)
    await pool.start()
    try:
        worker = await play(pool, "one")
        (fork_server,) = pool.fork_servers
        os.kill(fork_server, signal.SIGKILL)
        with pytest.raises(EnvironmentFailedError, match="the episode is lost"):
            await act(worker, "sleeps")
        await eventually(lambda: any(each.pid != worker.pid for each in pool.workers))
        assert (await act(await play(pool, "one"), "remember x")).info["before"] == []
    finally:
        await pool.stop()


@pytest.mark.parametrize(
    "attack", ["forks", "allocate", "prints 2000", "file {}/large", "descriptors"]
)
async def test_what_one_takes_without_end_leaves_the_others_as_they_were(
    pool: WorkerPool, attack: str, tmp_path: Path
) -> None:
    good = await play(pool, "good")
    bad = await play(pool, "bad")
    if attack.startswith("prints"):
        await act(bad, attack)
    else:
        with pytest.raises(EnvironmentFailedError):
            await act(bad, attack.format(tmp_path))
    assert (await act(good, "remember x")).info["before"] == []
    assert good.loss is None
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert all(size <= LIMITS.file_bytes for size in sizes)


@pytest.mark.parametrize("attack", ["detaches-and-dies", "detaches-and-hangs"])
async def test_a_process_of_another_session_dies_with_its_worker(
    monkeypatch: pytest.MonkeyPatch, attack: str, tmp_path: Path
) -> None:
    pool = WorkerPool(num_workers=1, step_timeout_s=5.0, python_path=FOLDER)
    await pool.start()
    try:
        worker = await play(pool, "p")
        with pytest.raises(EnvironmentFailedError):
            await act(worker, f"{attack} {tmp_path / 'pid'}")
        pid = int((tmp_path / "pid").read_text())
        await eventually(lambda: not is_alive(pid))
    finally:
        await pool.stop()


async def test_the_end_of_the_pool_ends_what_was_detached(tmp_path: Path) -> None:
    pool = WorkerPool(num_workers=1, python_path=FOLDER)
    await pool.start()
    try:
        await act(await play(pool, "p"), f"detaches {tmp_path / 'pid'}")
        pid = int((tmp_path / "pid").read_text())
        assert is_alive(pid)
    finally:
        await pool.stop()
    await eventually(lambda: not is_alive(pid))


async def test_the_end_of_one_pool_leaves_the_workers_of_another(pool: WorkerPool) -> None:
    good = await play(pool, "good")
    other = WorkerPool(num_workers=1, python_path=FOLDER)
    await other.start()
    await other.stop()
    assert (await act(good, "remember x")).info["before"] == []
    assert good.loss is None


async def test_an_answer_that_is_too_long_ends_its_worker() -> None:
    pool = WorkerPool(num_workers=1, python_path=FOLDER, max_reply_bytes=2**16)
    await pool.start()
    try:
        with pytest.raises(EnvironmentFailedError, match="exceed the limit of 65536"):
            await act(await play(pool, "p"), f"reply {2**17}")
    finally:
        await pool.stop()


async def test_what_is_printed_is_shown_up_to_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    pool = WorkerPool(num_workers=1, python_path=FOLDER, show_output=True, max_output_bytes=1000)
    await pool.start()
    try:
        worker = await play(pool, "p")
        await act(worker, "prints 50")
        await eventually(lambda: capsys.readouterr().err.count("x") >= 1000)
        await act(worker, "prints 50")
    finally:
        await pool.stop()
    assert "x" not in capsys.readouterr().err


async def test_what_is_printed_passes_for_no_line_of_the_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pool = WorkerPool(num_workers=1, python_path=FOLDER, show_output=True)
    await pool.start()
    shown = ""

    def has_both() -> bool:
        nonlocal shown
        shown += capsys.readouterr().err
        return "second" in shown

    try:
        worker = await play(pool, "p")
        await act(worker, 'says {"level": "error"}\\r\\x1b[2Kfirst\\nsecond\\n')
        await eventually(has_both)
    finally:
        await pool.stop()
    mark = f"worker {worker.pid}: "
    assert f'{mark}{{"level": "error"}}??[2Kfirst\n{mark}second\n' in shown


@pytest.mark.skipif(not has_signal_scope(), reason="the kernel cannot keep signals")
async def test_signals_reach_neither_the_pod_nor_other_workers(pool: WorkerPool) -> None:
    await play(pool, "good")
    bad = await play(pool, "bad")
    own = (await act(bad, "remember x")).info["pid"]
    others = [os.getpid(), *(worker.pid for worker in pool.workers if worker.pid != own)]
    assert len(others) == 2
    assert (await act(bad, f"signals {' '.join(map(str, others))}")).info["reached"] == []


async def test_a_sandbox_works_in_a_worker(pool: WorkerPool) -> None:
    assert (await act(await play(pool, "p"), "sandbox")).info["output"] == "[]\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the user of a process")
async def test_workers_have_users_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests' own interpreter may be closed to other users; the system's finds their packages.
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    version = ".".join(map(str, sys.version_info[:2]))
    if Path("/usr/bin/python3").resolve().name != f"python{version}":
        pytest.skip(f"the system's Python is not {version}, whose packages are installed")
    packages = [path for path in sys.path if not path.startswith(sys.base_prefix)]
    pool = WorkerPool(
        num_workers=2,
        python_path=os.pathsep.join([FOLDER, *packages]),
        uid_base=70_000,
        limits=LIMITS,
    )
    await pool.start()
    try:
        workers = [await play(pool, "one"), await play(pool, "two")]
        uids = [(await act(worker, "remember x")).info["uid"] for worker in workers]
        assert sorted(map(int, uids)) == [70_000, 70_001]  # type: ignore[arg-type]
        with pytest.raises(EnvironmentFailedError):
            await act(workers[0], "forks")
        assert workers[1].loss is None
    finally:
        await pool.stop()


def test_settings_that_would_open_the_pod_are_refused() -> None:
    settings = {"scheduler_address": "127.0.0.1:1", "pod_key": "k" * 32}
    with pytest.raises(ConfigError, match="is the pod's own"):
        EnvironmentConfig(worker_variables="A, TINSMITH_POD_KEY", **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be"):
        EnvironmentConfig(max_workers=0, **settings)  # type: ignore[arg-type]
