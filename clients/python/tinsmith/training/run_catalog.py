"""The runs of a project, as the scheduler lists them."""

from __future__ import annotations

from tinsmith.rpc.core import ClientCore
from tinsmith.v1 import scheduler_pb2

_PAGE_SIZE = 1000


async def all_runs(core: ClientCore) -> list[scheduler_pb2.TrainingRun]:
    """Return the runs of the project, newest first. Runs in the background loop."""
    runs: list[scheduler_pb2.TrainingRun] = []
    token = ""
    while True:
        request = scheduler_pb2.ListTrainingRunsRequest(
            parent=core.project, page_size=_PAGE_SIZE, page_token=token
        )
        answer = await core.transport.call(
            core.scheduler, lambda c: c.scheduler.ListTrainingRuns, request
        )
        runs.extend(answer.training_runs)
        token = answer.next_page_token
        if not token:
            return runs
