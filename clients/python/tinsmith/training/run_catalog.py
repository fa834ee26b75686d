"""The runs of a project, as the scheduler lists them."""

from __future__ import annotations

from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.lists import read_pages
from tinsmith.v1 import scheduler_pb2


async def all_runs(core: ClientCore) -> list[scheduler_pb2.TrainingRun]:
    """Return the runs of the project, newest first. Runs in the background loop."""
    pages = read_pages(
        core.transport,
        core.scheduler,
        lambda c: c.scheduler.ListTrainingRuns,
        scheduler_pb2.ListTrainingRunsRequest(parent=core.project),
    )
    return [run async for page in pages for run in page.training_runs]
