"""What a project may keep at a trainer: numbers of checkpoints and exports."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.trainer_harness import error_of, refusal, running_trainer
from tests.support.checkpoint_calls import MERGED, copy, export, exported

from tinsmith.v1 import checkpoint_pb2
from tinsmith_engine.host import EngineHost


async def test_checkpoints_and_exports_of_a_project_are_bounded(
    tmp_path: Path, engine_host: EngineHost
) -> None:
    limits = {"max_project_checkpoints": 2, "max_project_exports": 1}
    async with running_trainer(tmp_path, engine_host, **limits) as rig:
        run = await rig.new_run("many", project="many")
        saved = await run.saved("a")
        await run.saved("b")
        failed = await run.wait(await run.save("c"))
        assert error_of(failed).reason == "LIMIT_EXCEEDED"
        assert "delete some" in error_of(failed).message
        assert (await refusal(copy(run, saved.name, "d"))).reason == "LIMIT_EXCEEDED"
        await exported(run, saved.name)
        error = await refusal(export(run, saved.name, MERGED))
        assert (error.reason, error.metadata["limit"]) == ("LIMIT_EXCEEDED", "1")
        # Those of another project are its own.
        await (await rig.new_run("few", project="few")).saved("a")
        await run.call("DeleteCheckpoint", checkpoint_pb2.DeleteCheckpointRequest(name=saved.name))
        await run.saved("c")
        await exported(run, f"{run.name}/checkpoints/c")
