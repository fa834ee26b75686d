"""What workers of one user with the server find in its folder."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.wait import eventually

from tinsmith_environment import Action
from tinsmith_environment.workers.pool import WorkerPool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")

HOSTILE = "hostile_environments:HostileEnvironment"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    (folder / "api_key").write_text("tsk_secret")
    return folder


@pytest.fixture
async def pool(data: Path) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(
        num_workers=1, python_path=str(Path(__file__).parent), closed_folders=[str(data)]
    )
    await pool.start()
    yield pool
    await pool.stop()


async def told(pool: WorkerPool, text: str) -> object:
    worker = await pool.assign("p")
    worker.num_instances += 1
    await worker.create(text, HOSTILE, {}, 1, {})
    info = (await worker.step(text, Action(text=text))).info
    return info.get("found", info.get("output"))


async def test_the_servers_folder_is_empty_for_a_worker(pool: WorkerPool, data: Path) -> None:
    assert await told(pool, f"reads {data}") == []
    # What lies beside it is there, also what was made later.
    (data.parent / "later").touch()
    assert str(data.parent / "later") in str(await told(pool, f"reads {data.parent}"))
    assert (data / "api_key").read_text() == "tsk_secret"


async def test_a_server_that_was_started_in_its_folder_hides_it_as_well(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data)
    pool = WorkerPool(
        num_workers=1, python_path=str(Path(__file__).parent), closed_folders=[str(data)]
    )
    await pool.start()
    assert await told(pool, "reads .") == []
    await pool.stop()


async def test_a_worker_cannot_uncover_it(pool: WorkerPool, data: Path) -> None:
    assert await told(pool, f"uncovers {data}") == "tries\n"


async def test_a_folder_that_cannot_be_closed_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = str(tmp_path / "missing")
    pool = WorkerPool(num_workers=1, closed_folders=[missing])
    await pool.start()
    await eventually(lambda: "workers may read the pod's files" in caplog.text)
    await pool.stop()


async def test_it_is_told_also_when_a_module_starts_threads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "threads.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    pool = WorkerPool(
        num_workers=1,
        python_path=str(tmp_path),
        modules=["threads"],
        closed_folders=[str(tmp_path / "missing")],
    )
    await pool.start()
    await eventually(lambda: "workers may read the pod's files" in caplog.text)
    await pool.stop()
