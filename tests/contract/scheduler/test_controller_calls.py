"""What the controller asks of the scheduler, by the client that it has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.fakes.scheduler_fake_trainer import Rig, running_rig
from tests.support.pod_keys import credentials

from tinsmith.v1 import job_pb2
from tinsmith_controller.rpc.scheduler_client import (
    JobIdentity,
    KeySpentError,
    SchedulerClient,
    SchedulerError,
)
from tinsmith_runtime.rpc.auth import ApiKey

CHECKPOINT = "projects/default/trainingRuns/r/checkpoints/c"
JOB = JobIdentity("projects/default/trainingJobs/j", "uid-1")
NEXT = JobIdentity(JOB.name, "uid-2")
OTHER = JobIdentity("projects/default/trainingJobs/other", "uid-3")
POOLS = {"": "space.j", "red": "space.j-red"}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path) as rig:
        yield rig


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[SchedulerClient]:
    client = SchedulerClient(rig.pod.address, credentials("controller"))
    yield client
    client.close()


def settle(
    client: SchedulerClient, *epochs: int | None, job: JobIdentity = JOB, generation: int = 0
) -> dict[int | None, dict[str, str]]:
    found = client.settle_keys(job, frozenset(epochs), generation=generation, pools=POOLS)
    return {epoch: dict(keys) for epoch, keys in found.items()}


async def test_keys_are_made_once_and_those_that_are_not_asked_for_end(
    client: SchedulerClient,
) -> None:
    def use() -> None:
        first = settle(client, None, 1)
        # Agents have a key of their own; that of the job has none without an epoch.
        assert {epoch: set(keys) for epoch, keys in first.items()} == {
            None: {"red"},
            1: {"", "red"},
        }
        assert settle(client, None, 1) == first
        assert len(client.key_holders()) == 3
        assert set(client.key_holders().values()) == {JOB}

        second = settle(client, None, 2)
        assert second[None] == first[None]
        ids = {ApiKey.parse(key).key_id for keys in second.values() for key in keys.values()}
        assert {name.rpartition("/")[2] for name in client.key_holders()} == ids
        with pytest.raises(KeySpentError):
            settle(client, 1)

        # Another job of the name: keys of the first are bad.
        settle(client, 1, job=NEXT)
        assert set(client.key_holders().values()) == {NEXT}
        for name in client.key_holders():
            client.revoke(name)
        assert client.key_holders() == {}

    await asyncio.to_thread(use)


async def test_reports_of_drivers_are_read_until_they_are_forgotten(
    rig: Rig, client: SchedulerClient
) -> None:
    driver = await rig.job_key(JOB.name)
    assert await asyncio.to_thread(client.reports, [JOB]) == {}, "no driver has reported"
    await rig.jobs.ReportTrainingJob(
        job_pb2.ReportTrainingJobRequest(
            name=JOB.name,
            uid=JOB.uid,
            step=3,
            max_steps=9,
            metrics={"loss": 2.0},
            message="trains",
            checkpoint=job_pb2.ReportedCheckpoint(name=CHECKPOINT, step=2),
            outcome=job_pb2.TrainingJobReport.OUTCOME_SUCCEEDED,
        ),
        metadata=driver,
        timeout=60,
    )
    [(uid, report)] = (await asyncio.to_thread(client.reports, [OTHER, JOB])).items()
    assert uid == JOB.uid
    assert (report.step, report.max_steps, report.message) == (3, 9, "trains")
    assert report.metrics == {"loss": 2.0}
    assert report.checkpoint is not None
    assert (report.checkpoint.name, report.checkpoint.step) == (CHECKPOINT, 2)
    assert (report.has_succeeded, report.has_failed, report.has_diverged) == (True, False, False)

    await asyncio.to_thread(client.forget, JOB)
    assert await asyncio.to_thread(client.reports, [JOB]) == {}


async def test_a_refusal_is_told_in_the_words_of_the_scheduler(client: SchedulerClient) -> None:
    with pytest.raises(SchedulerError, match=r"refuses RevokeJobKey: .*no-key"):
        await asyncio.to_thread(client.revoke, "projects/default/keys/no-key")


async def test_a_scheduler_that_is_gone_is_told_by_its_state(rig: Rig) -> None:
    client = SchedulerClient("127.0.0.1:1", credentials("controller"))
    with pytest.raises(SchedulerError, match="refuses ListJobKeys: UNAVAILABLE"):
        await asyncio.to_thread(client.key_holders)
    client.close()
