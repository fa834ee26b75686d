"""Many runs on one engine: what shares a cycle, what waits for what, and what is reported."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.fakes.trainer_harness import (
    BASE_MODEL,
    TIMEOUT_S,
    RunClient,
    TrainerRig,
    error_of,
    logprobs_of,
    make_datum,
    metadata_of,
    query_ledger,
    response_of,
)
from tests.support.pod_keys import pod
from tests.support.wait import eventually

from tinsmith.v1 import checkpoint_pb2, trainer_control_pb2, trainer_pb2
from tinsmith_engine import AdamParams, BatchRequest, BatchResult, OptimStepResult
from tinsmith_engine.host import EngineHost
from tinsmith_engine.training.engine import Passes
from tinsmith_runtime.errors import TinsmithError

State = trainer_pb2.OperationMetadata
PARK = trainer_control_pb2.ReleaseRunRequest.MODE_PARK
DELETE = trainer_control_pb2.ReleaseRunRequest.MODE_DELETE


@dataclass
class Cycles:
    """What the engine was asked for: the short names of the runs of each call."""

    batches: list[list[str]] = field(default_factory=list)
    steps: list[list[str]] = field(default_factory=list)
    splits: list[int | None] = field(default_factory=list)
    broken_by: set[str] = field(default_factory=set)
    """Runs whose batches break the whole call, by a bug."""
    split: int = 0
    """The split that results report."""


@pytest.fixture
def cycles(engine_host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cycles]:
    """Records the calls of the real engine."""
    engine = engine_host.engine(BASE_MODEL)
    compute, optim_steps = engine.compute_by_pass, engine.optim_steps
    cycles = Cycles()

    def recorded_compute(requests: Sequence[BatchRequest]) -> Passes:
        names = [str(request.run).rpartition("/")[2] for request in requests]
        cycles.batches.append(names)
        cycles.splits += [request.micro_batch_tokens for request in requests]
        if cycles.broken_by & set(names):
            raise RuntimeError("a bug")
        answers = yield from compute(requests)
        for answer in answers:
            if isinstance(answer, BatchResult):
                answer.micro_batch_tokens = cycles.split
        return answers

    def recorded_steps(
        steps: Sequence[tuple[str, AdamParams]],
    ) -> list[OptimStepResult | TinsmithError]:
        cycles.steps.append([run.rpartition("/")[2] for run, _ in steps])
        return optim_steps(steps)

    monkeypatch.setattr(engine, "compute_by_pass", recorded_compute)
    monkeypatch.setattr(engine, "optim_steps", recorded_steps)
    return cycles


async def is_running(run: RunClient, number: int = 1) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while metadata_of(await run.get(number)).state != State.STATE_RUNNING:
            await asyncio.sleep(0.001)


def release(run: RunClient, mode: Any) -> Any:
    request = trainer_control_pb2.ReleaseRunRequest(run=run.name, epoch=1, mode=mode)
    return run.rig.stub.ReleaseRun(request, metadata=pod("scheduler"), timeout=TIMEOUT_S)


@dataclass
class Gate:
    """Holds the first call of a method until it is opened."""

    began: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    def hold_first(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        method = getattr(owner, name)

        async def held(*args: Any, **kwargs: Any) -> Any:
            if not self.began.is_set():
                self.began.set()
                await self.opened.wait()
            return await method(*args, **kwargs)

        monkeypatch.setattr(owner, name, held)


# What shares a cycle.


async def test_runs_that_wait_together_are_computed_together(
    rig: TrainerRig, cycles: Cycles
) -> None:
    alone = await rig.new_run("alone")
    await alone.step(make_datum(seed=1))
    wanted = await alone.bits("final")

    first = await rig.new_run("first")
    others = [await rig.new_run(f"other-{index}", project=f"q{index}") for index in range(3)]
    cycles.batches.clear()
    cycles.steps.clear()
    with rig.engine_held():
        await first.forward_backward()
        await is_running(first)
        for run in others:
            await run.forward_backward(make_datum(seed=1))
            await run.optim_step()
    for run in others:
        done = await run.wait(2)
        assert response_of(done, trainer_pb2.OptimStepResponse()).version == 1
    names = ["other-0", "other-1", "other-2"]
    assert [sorted(batch) for batch in cycles.batches] == [["first"], names]
    assert [sorted(steps) for steps in cycles.steps] == [names]
    for run in others:
        assert await run.bits("final") == wanted


async def test_a_step_that_arrives_during_its_gradient_shares_its_cycle(
    rig: TrainerRig, cycles: Cycles
) -> None:
    run = await rig.new_run("joined")
    with rig.engine_held():
        await run.forward_backward()
        await is_running(run)
        await run.optim_step()
    await run.wait(2)
    assert (cycles.batches, cycles.steps) == ([["joined"]], [["joined"]])
    # Both became durable in the same commit.
    times = query_ledger(rig.config.data_dir, "SELECT num_attempts, revision FROM operations")
    assert times == [(1, 1), (1, 2)]


async def test_one_tenants_backlog_holds_up_nobody_for_more_than_two_cycles(
    rig: TrainerRig, cycles: Cycles
) -> None:
    await rig.restart(cycle_tokens=256)
    greedy = await rig.new_run("greedy", project="greedy")
    modest = await rig.new_run("modest", project="modest")
    cycles.batches.clear()
    with rig.engine_held():
        for _ in range(40):
            await greedy.forward_backward(make_datum(num_tokens=50))
        await is_running(greedy)
        await modest.forward_backward()
        await modest.optim_step()
    await modest.wait(2)
    # The call that ran when it came, then its own.
    assert next(i for i, names in enumerate(cycles.batches) if "modest" in names) <= 1
    await greedy.wait(40)
    assert all(len(names) * 50 <= 2 * 256 for names in cycles.batches)


async def test_a_project_of_many_runs_gets_no_more_than_one_of_one(
    rig: TrainerRig, cycles: Cycles
) -> None:
    await rig.restart(cycle_tokens=400)
    many = [await rig.new_run(f"m{index}", project="many") for index in range(4)]
    one = await rig.new_run("one", project="one")
    cycles.batches.clear()
    with rig.engine_held():
        await many[0].forward_backward()
        await is_running(many[0])
        for run in many:
            for _ in range(30):
                await run.forward_backward(make_datum(num_tokens=25))
        for _ in range(60):
            await one.forward_backward(make_datum(num_tokens=25))
    await one.wait(60)
    last = max(index for index, names in enumerate(cycles.batches) if "one" in names)
    until_then = Counter(name for names in cycles.batches[: last + 1] for name in names)
    of_many = until_then.total() - until_then["one"]
    # Equal but for what the first cycle, and the last one, hold.
    assert abs(of_many - until_then["one"]) <= 2 * 400 / 25


# Continuous cycles.


async def test_the_next_cycle_computes_while_the_last_one_is_committed(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = await rig.new_run("slow"), await rig.new_run("fast")
    commit = Gate()
    commit.hold_first(monkeypatch, rig.pod._ledger, "finish_all")
    await slow.forward_backward()
    await commit.began.wait()
    assert await fast.step() == 1
    # Not told before it is on disk, and nothing is built on it.
    await slow.optim_step()
    assert not (await slow.get(1)).done
    second = metadata_of(await slow.get(2))
    assert (second.state, second.queue_position) == (State.STATE_QUEUED, 1)
    commit.opened.set()
    done = await slow.wait(2)
    assert response_of(done, trainer_pb2.OptimStepResponse()).version == 1


async def test_the_runs_of_a_cycle_are_committed_together(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await rig.new_run("first")
    others = [await rig.new_run(f"other-{index}") for index in range(3)]
    finish_all = rig.pod._ledger.finish_all
    groups: list[int] = []

    async def counted(commits: Any) -> Any:
        groups.append(len(commits))
        return await finish_all(commits)

    monkeypatch.setattr(rig.pod._ledger, "finish_all", counted)
    with rig.engine_held():
        await first.forward_backward()
        await is_running(first)
        for run in others:
            await run.forward_backward()
    for run in others:
        await run.wait(1)
    assert groups == [1, 3]


async def test_a_restore_holds_up_nobody_else(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    parked, other = await rig.new_run("parked"), await rig.new_run("other")
    await parked.step()
    await release(parked, PARK)
    restore = Gate()
    restore.hold_first(monkeypatch, rig.pod._residency._replayer, "replay")
    await parked.forward_backward()
    await restore.began.wait()
    assert metadata_of(await parked.get(3)).waiting_for == "the run to be restored"
    assert await other.step() == 1
    restore.opened.set()
    assert logprobs_of(await parked.wait(3))


async def test_a_save_holds_up_nobody_else(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving, other = await rig.new_run("saving"), await rig.new_run("other")
    await saving.step()
    save = Gate()
    save.hold_first(monkeypatch, rig.pod._cycle._run_tasks._saves._checkpoints, "save")
    await saving.save("slow")
    await save.began.wait()
    assert metadata_of(await saving.get(3)).state == State.STATE_RUNNING
    assert await other.step() == 1
    save.opened.set()
    response_of(await saving.wait(3), checkpoint_pb2.Checkpoint())


async def test_a_run_without_a_place_waits_for_one_and_says_so(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.restart(max_resident_runs=1)
    outside, deleted = await rig.new_run("outside"), await rig.new_run("deleted")
    inside = await rig.new_run("inside")
    commit = Gate()
    commit.hold_first(monkeypatch, rig.pod._ledger, "finish_all")
    await inside.forward_backward()
    await commit.began.wait()
    for run in (deleted, outside):
        await run.forward_backward()
        async with asyncio.timeout(TIMEOUT_S):
            while "a slot of the engine" not in (await run.status()).waiting_for:
                await asyncio.sleep(0.001)
    # A run needs no slot in order to be deleted.
    await release(deleted, DELETE)
    assert not (await outside.get(1)).done
    commit.opened.set()
    assert logprobs_of(await outside.wait(1))
    assert logprobs_of(await inside.wait(1))


async def test_a_run_that_always_has_work_lets_others_into_its_place(rig: TrainerRig) -> None:
    await rig.restart(max_resident_runs=1, cycle_tokens=16)
    runs = [await rig.new_run(f"turn-{index}") for index in range(3)]
    with rig.engine_held():
        for run in runs:
            for _ in range(3):
                await run.forward_backward()
                await run.optim_step()
    for run in runs:
        done = await run.wait(6)
        assert response_of(done, trainer_pb2.OptimStepResponse()).version == 3


# What is told meanwhile.


async def test_an_operation_says_its_position_and_what_is_before_it(rig: TrainerRig) -> None:
    busy, run = await rig.new_run("busy"), await rig.new_run("run", project="q")
    with rig.engine_held():
        await busy.forward_backward(make_datum(num_tokens=123))
        await is_running(busy)
        acknowledged = metadata_of(await run.forward_backward(make_datum(num_tokens=30)))
        await run.forward_backward()
        await run.optim_step()
        first, second, third = [metadata_of(await run.get(number)) for number in (1, 2, 3)]
    # An acknowledgement does not look at other runs.
    assert (acknowledged.waiting_for, acknowledged.num_tokens_ahead) == (
        "its turn on the engine",
        0,
    )
    assert first.waiting_for == ("its turn on the engine: 1 run and about 120 tokens before it")
    assert second.waiting_for == "1 operation of this run before it"
    assert third.waiting_for == "2 operations of this run before it"
    found = [(m.queue_position, m.num_tokens_ahead) for m in (first, second, third)]
    assert found == [(0, 123), (1, 153), (2, 159)]
    assert {metadata.state for metadata in (first, second, third)} == {State.STATE_QUEUED}
    done = metadata_of(await run.wait(3))
    assert (done.queue_position, done.num_tokens_ahead, done.waiting_for) == (0, 0, "")


# Bugs.


async def test_who_breaks_an_engine_call_fails_alone(rig: TrainerRig, cycles: Cycles) -> None:
    plain = await rig.new_run("plain")
    await plain.step(make_datum(seed=1))
    wanted = await plain.bits("final")
    first = await rig.new_run("first")
    broken, other = await rig.new_run("broken"), await rig.new_run("other")
    cycles.broken_by = {"broken"}
    with rig.engine_held():
        await first.forward_backward()
        await is_running(first)
        for run in (broken, other):
            await run.forward_backward(make_datum(seed=1))
            await run.optim_step()
    done = await other.wait(2)
    assert response_of(done, trainer_pb2.OptimStepResponse()).version == 1
    assert await other.bits("final") == wanted
    assert error_of(await broken.wait(1)).reason == "INTERNAL"
    assert error_of(await broken.wait(2)).reason == "GRADIENT_INCOMPLETE"
    cycles.broken_by = set()
    assert await broken.step(make_datum(seed=1)) == 1
    assert await broken.bits("final") == wanted
    assert rig.fenced == []


async def test_a_pod_whose_cycle_died_is_unhealthy(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.new_run("run")
    health = health_pb2_grpc.HealthStub(rig.channel)
    serving = await health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    assert serving.status == health_pb2.HealthCheckResponse.SERVING

    def broken(_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(rig.pod._cycle._planner, "take", broken)
    await run.forward_backward()
    await eventually(lambda: bool(rig.failed))
    answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert not (await run.get(1)).done
    # Started again, it goes on.
    monkeypatch.undo()
    await rig.restart()
    assert logprobs_of(await run.wait(1))


async def test_a_gap_whose_end_broke_off_half_way_is_closed_later(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.restart(gap_timeout_s=0.1)
    run = await rig.new_run("half")
    committer = rig.pod._cycle._committer
    commit, num_tries = committer.commit, 0

    async def once_broken(*args: Any, **kwargs: Any) -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 1:
            raise RuntimeError("a bug between two writes")
        await commit(*args, **kwargs)

    monkeypatch.setattr(committer, "commit", once_broken)
    await run.forward_backward(number=2)
    # Number 1 is given up already: the next try finds that out, and the run goes on.
    assert logprobs_of(await run.wait(2))
    assert error_of(await run.get(1)).reason == "SEQUENCE_GAP"
    error = error_of(await run.wait(await run.optim_step(number=3)))
    assert (error.reason, error.metadata["failed"]) == ("GRADIENT_INCOMPLETE", "1")


# Recovery.


async def test_a_replay_uses_the_split_that_was_recorded(rig: TrainerRig, cycles: Cycles) -> None:
    run = await rig.new_run("split")
    await run.wait(await run.forward_backward())
    cycles.split = 64
    await run.wait(await run.forward_backward())
    await run.wait(await run.optim_step())
    plans = query_ledger(rig.config.data_dir, "SELECT plan FROM operations ORDER BY 1 DESC")
    assert sum(plan.endswith(";micro_batch_tokens=64") for (plan,) in plans) == 1
    before = await run.bits("before")
    cycles.splits.clear()
    await rig.recover_from(rig.copy_data())
    assert await run.bits("after") == before
    assert cycles.splits == [None, 64]


async def test_files_of_a_deletion_that_broke_off_are_removed_at_the_next_start(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.new_run("deleted")
    await run.saved("a")
    folder = rig.config.data_dir / "store" / run.name

    def away(_: str) -> None:
        raise OSError("the store is away")

    monkeypatch.setattr(rig.pod._store, "delete_folder", away)
    await release(run, DELETE)
    assert folder.exists()
    await rig.restart()
    query = "SELECT * FROM deletions"
    await eventually(lambda: query_ledger(rig.config.data_dir, query) == [])
    assert not folder.exists()


async def test_a_name_used_again_does_not_find_files_of_the_run_before(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.new_run("again")
    await run.saved("a")
    stale = rig.config.data_dir / "store" / run.name / "checkpoints"
    with monkeypatch.context() as patch:
        patch.setattr(rig.pod._store, "delete_folder", lambda _: 1 / 0)
        await release(run, DELETE)
        assert stale.exists()
    await rig.adopt(run.name, epoch=2)
    assert not stale.exists()
