"""Chat templates of runs as the scheduler takes them: read, and never executed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode as Code
from tests.fakes.scheduler_fake_trainer import Rig, expect_rpc_error, running_rig

from tinsmith.v1 import models_pb2


@pytest.fixture
async def rig(tmp_path: Path, database_url: str) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, database_url=database_url) as rig:
        yield rig


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        pytest.param({"chat_template": "{% for"}, "adapter.chat_template", id="syntax"),
        pytest.param({"chat_template": "{{ " + "(" * 30_000}, "adapter.chat_template", id="deep"),
        pytest.param({"chat_template": "x" * 65_537}, "adapter.chat_template", id="length"),
        pytest.param({"stop_token_ids": [1]}, "adapter.stop_token_ids", id="ends-of-none"),
        pytest.param(
            {"chat_template": "x", "stop_token_ids": range(9)}, "adapter.stop_token_ids", id="ends"
        ),
        pytest.param(
            {"chat_template": "x", "stop_token_ids": [-1]}, "adapter.stop_token_ids", id="below-0"
        ),
    ],
)
async def test_a_chat_template_that_can_not_be_one(
    rig: Rig, fields: dict[str, Any], wrong: str
) -> None:
    await rig.register()
    session = await rig.session(rig.admin)
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD") as errors:
        await rig.begin_run(rig.admin, session, adapter=models_pb2.AdapterConfig(**fields))
    assert errors[0].metadata["field"] == wrong


async def test_a_chat_template_is_read_and_not_executed(rig: Rig) -> None:
    await rig.register()
    session = await rig.session(rig.admin)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    adapter = models_pb2.AdapterConfig(chat_template=endless, stop_token_ids=[3])
    run = await rig.create_run(rig.admin, session, adapter=adapter)
    assert (run.adapter.chat_template, list(run.adapter.stop_token_ids)) == (endless, [3])
    assert run.adapter.lora.rank == 32
    assert rig.trainer.adopted[run.name].adapter == run.adapter
