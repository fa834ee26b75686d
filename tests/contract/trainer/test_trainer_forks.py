"""Forks: the state of a run as it was after a step, bit for bit, whatever became of the run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contract.trainer.test_trainer_shared_ledger import release
from tests.fakes.trainer_harness import (
    RunClient,
    TrainerRig,
    checkpoint_files,
    error_of,
    make_datum,
    metadata_of,
    refusal,
    response_of,
    running_trainer,
)
from tests.support.pod_keys import pod
from tests.support.wait import eventually

from tinsmith.v1 import trainer_control_pb2, trainer_pb2
from tinsmith_engine.host import EngineHost

pytestmark = pytest.mark.asyncio(loop_scope="module")

ALWAYS_SNAPSHOT_S = 1e-9
_PARK = trainer_control_pb2.ReleaseRunRequest.MODE_PARK
_DELETE = trainer_control_pb2.ReleaseRunRequest.MODE_DELETE
_ACTIONS = [
    "batch",
    "batch",
    "batch",
    "step",
    "step",
    "large",
    "refused",
    "infinite",
    "load",
    "eval",
]
_ids = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["seldom", "always"])
async def rig(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    engine_host: EngineHost,
) -> AsyncIterator[TrainerRig]:
    """A trainer that takes snapshots seldom, or at each step."""
    options = {"snapshot_replay_s": ALWAYS_SNAPSHOT_S} if request.param == "always" else {}
    data_dir: Path = tmp_path_factory.mktemp("trainer")
    async with running_trainer(data_dir, engine_host, **options) as rig:
        yield rig


class Program:
    """Trains a run by a list of actions, and notes the bits at each version."""

    def __init__(self, run: RunClient) -> None:
        self.run = run
        self.bits: dict[int, dict[str, bytes]] = {}
        self.steps: dict[int, int] = {}
        self._saved = ""

    async def play(self, actions: list[str]) -> None:
        await self._note(0, 0)
        for number, action in enumerate(actions):
            await self.do(action, number)

    async def do(self, action: str, seed: int) -> None:
        run = self.run
        match action:
            case "batch":
                await run.forward_backward(make_datum(seed=seed))
            case "large":
                await run.forward_backward(*(make_datum(2500, seed + part) for part in (1, 2)))
            case "refused":
                await refusal(run.forward_backward(loss="mse"))
                run.next_number = (await run.status()).next_sequence_number
            case "infinite":
                datum = make_datum(weights=np.full(6, 3e38, np.float32), seed=seed)
                done = await run.wait(await run.forward_backward(datum))
                assert error_of(done).reason == "NON_FINITE_LOSS"
            case "eval":
                await run.forward_backward(make_datum(seed=seed), method="Forward")
            case "load":
                done = await run.wait(await run.load(self._saved))
                version = response_of(done, trainer_pb2.LoadCheckpointResponse()).version
                await self._note(version, run.next_number - 1)
            case "step":
                update = await run.wait(await run.optim_step(observed=run.next_number - 1))
                if update.HasField("error"):
                    assert error_of(update).reason == "NO_GRADIENT"
                    return
                version = response_of(update, trainer_pb2.OptimStepResponse()).version
                await self._note(version, run.next_number - 1)

    async def _note(self, version: int, number: int) -> None:
        saved = await self.run.saved(f"at-{number}")
        self._saved = saved.name
        self.bits[version] = checkpoint_files(saved)
        self.steps[version] = number


def new_name(prefix: str) -> str:
    return f"{prefix}-{next(_ids)}"


async def trained(rig: TrainerRig, actions: list[str], **lora: int) -> Program:
    program = Program(await rig.new_run(new_name("source"), **lora))
    await program.play(actions)
    return program


async def fork(
    rig: TrainerRig, source: RunClient, step: int, *, reruns_step: bool = False, **lora: int
) -> RunClient:
    return await rig.fork(source, step, new_name("fork"), reruns_step=reruns_step, **lora)


@given(st.lists(st.sampled_from(_ACTIONS), min_size=4, max_size=12), st.sampled_from([1, 2, 4]))
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
async def test_a_fork_at_each_step_has_the_bits_of_the_run_at_that_step(
    rig: TrainerRig, actions: list[str], rank: int
) -> None:
    program = await trained(rig, [*actions, "batch", "step"], rank=rank)
    for step, bits in program.bits.items():
        found = await fork(rig, program.run, step, rank=rank)
        status = await found.status()
        assert (status.version, status.next_sequence_number) == (step, program.steps[step] + 1)
        assert await found.bits("a") == bits
        assert not (await found.status()).replay_diverged
        await release(rig, found, _DELETE)
    # The source is what it was.
    assert (await program.run.bits("end")) == program.bits[(await program.run.status()).version]
    await release(rig, program.run, _DELETE)


async def test_a_fork_goes_on_as_the_run_did(rig: TrainerRig) -> None:
    program = await trained(rig, ["batch", "step", "batch", "large", "step", "batch", "step"])
    found = await fork(rig, program.run, 1)
    again = Program(found)
    for number, action in list(enumerate(["batch", "step", "batch", "large", "step"]))[2:]:
        await again.do(action, number)
    assert again.bits[2] == program.bits[2]


async def test_a_fork_outlives_its_source(rig: TrainerRig) -> None:
    program = await trained(rig, ["large", "step", "large", "step"])
    found = await fork(rig, program.run, 2)
    await release(rig, program.run, _DELETE)
    await eventually(lambda: not (rig.config.data_dir / "store" / program.run.name).exists())
    assert await found.bits("a") == program.bits[2]


async def test_a_retired_run_is_forked_without_being_woken(rig: TrainerRig) -> None:
    program = await trained(rig, ["batch", "step", "batch", "step"])
    await release(rig, program.run, _PARK)
    found = await fork(rig, program.run, 1)
    assert await found.bits("a") == program.bits[1]


async def test_a_fork_of_a_fork(rig: TrainerRig) -> None:
    program = await trained(rig, ["batch", "step", "batch", "step", "batch", "step"])
    first = await fork(rig, program.run, 2)
    same = await fork(rig, first, 2)
    assert await first.step(make_datum(seed=77)) == 3
    second = await fork(rig, first, 3)
    assert await same.bits("a") == program.bits[2]
    assert await second.bits("a") == await first.bits("a")


async def test_forks_beside_training_and_each_other(rig: TrainerRig) -> None:
    program = await trained(rig, ["batch", "step"] * 3)
    ahead = [await program.run.forward_backward(make_datum(seed=number)) for number in range(4)]
    forks = await asyncio.gather(*(fork(rig, program.run, step) for step in (0, 1, 2, 3, 3)))
    for step, found in zip((0, 1, 2, 3, 3), forks, strict=True):
        assert await found.bits("a") == program.bits[step]
    for operation in ahead:
        response_of(await program.run.wait(operation), trainer_pb2.ForwardBackwardResponse())


async def test_a_repeated_call_changes_nothing(rig: TrainerRig) -> None:
    program = await trained(rig, ["batch", "step", "batch", "step"])
    found = await fork(rig, program.run, 2, reruns_step=True)
    request = trainer_control_pb2.ForkRunRequest(
        run=found.name, epoch=1, source_run=program.run.name, source_step=2, reruns_step=True
    )
    begin = program.steps[1] + 1
    for _ in range(2):
        answer = await rig.stub.ForkRun(request, metadata=pod("scheduler"), timeout=20)
        assert answer.rerun_sequence_number == begin
    assert await found.bits("a") == program.bits[2]


@pytest.mark.parametrize("first", ["batch", "step"])
async def test_a_run_that_was_used_is_no_target(rig: TrainerRig, first: str) -> None:
    program = await trained(rig, ["batch", "step"])
    used = await rig.new_run(new_name("used"))
    await used.forward_backward()
    if first == "step":
        await used.optim_step()
    request = trainer_control_pb2.ForkRunRequest(
        run=used.name, epoch=1, source_run=program.run.name, source_step=1
    )
    refused = await refusal(used.call("ForkRun", request, metadata=pod("scheduler")))
    assert refused.code.name == "ABORTED"


async def test_a_rerun_executes_the_step_anew_with_its_inputs(rig: TrainerRig) -> None:
    actions = ["batch", "step", "batch", "refused", "infinite", "large", "eval", "step", "batch"]
    program = await trained(rig, actions)
    found = await fork(rig, program.run, 2, reruns_step=True)
    begin, through = program.steps[1] + 1, program.steps[2]
    for number in range(begin, through + 1):
        now, before = await found.wait(number), await program.run.wait(number)
        assert (now.response, now.error) == (before.response, before.error)
        kind, state = metadata_of(now).kind, metadata_of(now).state
        if state == trainer_pb2.OperationMetadata.STATE_SUCCEEDED and kind != "save_checkpoint":
            assert metadata_of(now).submit_time.ToNanoseconds() > (
                metadata_of(before).finish_time.ToNanoseconds()
            )
    assert (await found.status()).version == 2
    assert await found.bits("a") == program.bits[2]


@pytest.mark.parametrize(
    ("step", "reruns_step", "reason", "words"),
    [
        pytest.param(3, False, "STEP_NOT_FOUND", "it has steps 0 to 2", id="never-reached"),
        pytest.param(0, True, "STEP_NOT_FOUND", "was not trained", id="no-step-to-rerun"),
        pytest.param(-1, False, "INVALID_FIELD", "must be at least 0", id="negative"),
    ],
)
async def test_a_step_that_is_not_there_is_refused_with_those_that_are(
    rig: TrainerRig, step: int, reruns_step: bool, reason: str, words: str
) -> None:
    program = await trained(rig, ["batch", "step", "batch", "step"])
    refused = await refusal(fork(rig, program.run, step, reruns_step=reruns_step))
    assert refused.reason == reason
    assert words in refused.message


async def test_a_fork_is_of_the_same_adapter_and_of_a_run_that_is_known(rig: TrainerRig) -> None:
    program = await trained(rig, ["batch", "step"])
    other = await refusal(fork(rig, program.run, 1, rank=8))
    assert "trains something else" in other.message
    missing = RunClient(rig, "projects/p/trainingRuns/missing", "")
    assert (await refusal(fork(rig, missing, 1))).reason == "RUN_NOT_FOUND"


async def test_only_pods_fork_on_the_trainer(rig: TrainerRig) -> None:
    program = await trained(rig, ["batch", "step"])
    request = trainer_control_pb2.ForkRunRequest(
        run=program.run.name, epoch=1, source_run=program.run.name, source_step=1
    )
    assert (await refusal(program.run.call("ForkRun", request))).code.name == "PERMISSION_DENIED"
