"""A run whose replay gave other bits is listed as such: by its trainer, and by the scheduler."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.scheduler_fake_trainer import running_rig
from tests.fakes.trainer_harness import TIMEOUT_S, edit_ledger, running_trainer
from tests.support.pod_keys import pod

from tinsmith.v1 import scheduler_pb2, trainer_control_pb2, trainer_pb2
from tinsmith_engine.host import EngineHost


async def test_a_trainer_lists_a_diverged_run_that_has_no_work(
    tmp_path: Path, engine_host: EngineHost
) -> None:
    request = trainer_control_pb2.ListRunStatusesRequest(parent="projects/p/trainingRuns/-")
    async with running_trainer(tmp_path / "data", engine_host) as rig:
        run, other = await rig.new_run(), await rig.new_run("other")
        await other.step()
        await run.step()
        left_behind = rig.copy_data()
        edit_ledger(
            left_behind,
            "UPDATE operations SET result = x'00' WHERE sequence_number = 1 AND run = ?",
            run.name,
        )
        await rig.recover_from(left_behind)
        assert await run.step() == 2
        answer = await rig.stub.ListRunStatuses(
            request, metadata=pod("scheduler"), timeout=TIMEOUT_S
        )
    [status] = answer.statuses
    assert (status.run, status.num_pending_operations) == (run.name, 0)
    assert status.replay_diverged


async def test_a_list_of_the_scheduler_says_it(tmp_path: Path, database_url: str) -> None:
    async with running_rig(tmp_path, database_url=database_url) as rig:
        await rig.register()
        session = await rig.session(rig.admin)
        fine = await rig.create_run(rig.admin, session)
        diverged = await rig.create_run(rig.admin, session)
        rig.trainer.statuses[diverged.name] = trainer_pb2.RunStatus(
            run=diverged.name, replay_diverged=True
        )
        request = scheduler_pb2.ListTrainingRunsRequest(parent="projects/default")
        answer = await rig.stub.ListTrainingRuns(request, metadata=rig.admin, timeout=TIMEOUT_S)
    found = {run.name: run.replay_diverged for run in answer.training_runs}
    assert found == {fine.name: False, diverged.name: True}
