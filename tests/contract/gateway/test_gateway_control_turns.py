"""Control calls of one project wait for each other, and not those of another for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.fakes.gateway_harness import PROJECT, RUN, GatewayRig, running_gateway
from tests.support.wait import eventually

from tinsmith.v1 import scheduler_pb2


def get_run(rig: GatewayRig, run: str, **options: Any) -> Any:
    return rig.call(
        "/tinsmith.v1.SchedulerService/GetTrainingRun",
        scheduler_pb2.GetTrainingRunRequest(name=run),
        scheduler_pb2.TrainingRun,
        **options,
    )


async def test_control_calls_of_a_flood_leave_the_scheduler_to_others(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as rig:
        other = rig.scheduler.new_key("quiet")
        quiet_run = RUN.replace(f"projects/{PROJECT}/", "projects/quiet/")
        rig.scheduler.runs[quiet_run] = rig.scheduler.runs[RUN]
        rig.scheduler.held_run = RUN
        calls = [asyncio.ensure_future(get_run(rig, RUN)) for _ in range(50)]
        await eventually(lambda: rig.scheduler.num_held == 2)
        assert (await get_run(rig, quiet_run, key=other)).name == quiet_run
        assert rig.scheduler.num_held == 2
        rig.scheduler.release.set()
        answers = await asyncio.gather(*calls)
        assert {one.name for one in answers} == {RUN}
        assert rig.scheduler.num_held == 50
