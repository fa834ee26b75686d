"""Copies and exports of one project do not hold up those of another."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

from tests.support.wait import eventually

from tinsmith_runtime.ledger import OperationState, TaskRecord
from tinsmith_trainer.checkpoints.tasks import CheckpointTasks


class HeldWork:
    """Work that goes on until its project is let go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ends: dict[str, asyncio.Event] = {"loud": asyncio.Event(), "quiet": asyncio.Event()}

    async def do(self, run: Any, work: Any, task_id: str, progress: Any) -> Any:
        project = work.split("/")[1]
        self.begun.append(project)
        await self.ends[project].wait()
        return "made"

    async def tidy(self, run: Any, work: Any, task_id: str) -> None:
        """Nothing was written."""

    def end(self, work: Any) -> None:
        """Nothing is kept."""


class MemoryLedger:
    """Tasks in memory."""

    def __init__(self) -> None:
        self.tasks: dict[str, TaskRecord] = {}

    async def submit_task(self, task: TaskRecord, *, max_pending: int) -> TaskRecord:
        self.tasks[task.name] = task
        return task

    async def get_task(self, name: str) -> TaskRecord | None:
        return self.tasks.get(name)

    async def finish_task(self, task: TaskRecord, epoch: int, **ended: Any) -> TaskRecord:
        state = OperationState.SUCCEEDED
        self.tasks[task.name] = dataclasses.replace(task, state=state)
        return self.tasks[task.name]


def task(project: str, number: int) -> TaskRecord:
    run = f"projects/{project}/trainingRuns/r"
    return TaskRecord(
        name=f"{run}/operations/copy-{number}",
        run=run,
        kind="copy",
        checkpoint=f"{run}/checkpoints/c",
        digest=b"",
        payload=b"",
        submit_time_s=0.0,
    )


async def test_tasks_of_a_project_that_floods_leave_places_to_another() -> None:
    work, ledger = HeldWork(), MemoryLedger()
    codec = SimpleNamespace(
        decode_task=lambda kind, checkpoint, payload: checkpoint,
        encode_made=lambda made: b"made",
        encode_error=lambda error: b"error",
    )
    run = SimpleNamespace(record=SimpleNamespace(epoch=1))

    async def find_run(_: str) -> SimpleNamespace:
        return run

    tasks: Any = CheckpointTasks(
        ledger,  # type: ignore[arg-type]
        work,  # type: ignore[arg-type]
        codec,
        find_run=find_run,  # type: ignore[arg-type]
        clock=lambda: 0.0,
    )
    for number in range(50):
        await tasks.submit(task("loud", number))
    await eventually(lambda: len(work.begun) >= 2)
    quiet = await tasks.submit(task("quiet", 0))
    await eventually(lambda: "quiet" in work.begun)
    assert work.begun.count("loud") == 2
    work.ends["quiet"].set()
    ended = await tasks.wait(quiet.name, 30)
    assert ended.state is OperationState.SUCCEEDED
    work.ends["loud"].set()
    await eventually(lambda: work.begun.count("loud") == 50)
    await tasks.stop()
