"""Which variables of the server a job on its machine gets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from tests.contract.scheduler.test_scheduler_jobs import create, log_of, script
from tests.fakes.scheduler_fake_trainer import Rig, running_rig
from tests.support.wait import eventually

CANARY = "canary-19c2"


@pytest.fixture
async def local(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Rig]:
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "SSH_AUTH_SOCK", "TINSMITH_POD_KEY"):
        monkeypatch.setenv(name, f"{CANARY}-{name}")
    monkeypatch.setenv("NAMED", "wanted")
    settings = {
        "job_launcher": "local",
        "job_variables": "NAMED",
        "local_job_stop_timeout_s": 5.0,
    }
    async with running_rig(tmp_path, database_url=database_url, **settings) as rig:
        await rig.register()
        yield rig


async def test_a_job_gets_no_secret_of_the_server(local: Rig) -> None:
    user = await local.user()
    await create(local, user, script("env; echo printed; sleep 30"))

    async def printed() -> str | None:
        try:
            text = "".join(part.text for part in await log_of(local, user))
        except grpc.aio.AioRpcError:
            return None
        return text if "printed" in text else None

    text: str = await eventually(printed)
    assert CANARY not in text
    assert "NAMED=wanted" in text
    assert "PATH=" in text
