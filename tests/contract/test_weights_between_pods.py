"""Weights on their way from a real trainer to a real sampler, over real channels.

Both pods share the engine of the tests and nothing else: weights pass as they do between processes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from tests.fakes.sampler_harness import (
    SamplerRig,
    refusal,
    running_sampler,
    tokens_of,
    versions_of,
)
from tests.fakes.trainer_harness import (
    TIMEOUT_S,
    RunClient,
    TrainerRig,
    make_datum,
    running_trainer,
)
from tests.faults.proxy import Fault, FaultProxy
from tests.support.metrics import metric
from tests.support.pod_keys import pod

from tinsmith.tensors import decode_tensor
from tinsmith.v1 import sampler_pb2, trainer_control_pb2
from tinsmith_engine.host import EngineHost
from tinsmith_sampler.rpc import trainer_client
from tinsmith_trainer.residency import weight_exports

pytestmark = pytest.mark.asyncio(loop_scope="module")

IN_FLIGHT = {"weight_updates": sampler_pb2.WEIGHT_UPDATES_IN_FLIGHT}
NUM_CUTS = int(os.environ.get("TINSMITH_TEST_WEIGHT_CUTS", "40"))
NUM_VERSIONS = int(os.environ.get("TINSMITH_TEST_WEIGHT_VERSIONS", "50"))
MEMORY = trainer_control_pb2.ExportWeightsRequest.DESTINATION_MEMORY


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(
    tmp_path_factory: pytest.TempPathFactory, engine_host: EngineHost
) -> AsyncIterator[TrainerRig]:
    async with running_trainer(tmp_path_factory.mktemp("trainer"), engine_host) as rig:
        yield rig


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sampler(
    tmp_path_factory: pytest.TempPathFactory, engine_host: EngineHost, trainer: TrainerRig
) -> AsyncIterator[SamplerRig]:
    store = Path(trainer.config.storage().removeprefix("file://"))
    store.mkdir(exist_ok=True)
    async with running_sampler(store, engine_host, weight_poll_interval_s=0.02) as rig:
        yield rig


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the little weights of the tests into many chunks."""
    monkeypatch.setattr(weight_exports, "CHUNK_BYTES", 256)


@pytest.fixture
def other_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the sampler seem to be on another machine, where no memory can be mapped."""
    monkeypatch.setattr(trainer_client, "memory_domain", lambda: "another machine")


async def stepped(run: RunClient, seed: int) -> int:
    """Train a step that changes what the model says."""
    return await run.step(*(make_datum(seed=seed + index) for index in range(2)))


async def bits_of(sampler: SamplerRig, session: str, **options: Any) -> tuple[Any, ...]:
    """Return versions, tokens and the bits of the log-probabilities of a sample.

    A trainer that cannot be reached is asked again, as the SDK does.
    """
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                response = await sampler.sample(session, **options)
                break
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
    logprobs = [decode_tensor(each.logprobs).tobytes() for each in response.sequences]
    return versions_of(response), tokens_of(response), logprobs


async def pinned(trainer: TrainerRig, sampler: SamplerRig, run: RunClient, name: str) -> str:
    """Save the weights of a run, and open a session that samples from them for good."""
    saved = await run.saved(name, kind=2)
    sampler.trainer.checkpoints[saved.name] = saved
    return sampler.session(checkpoint=saved.name)


def loads(source: str) -> float:
    """Return how many weights came by a way so far."""
    return metric("tinsmith_sampler_weight_loads_total", source=source)


def exported_folders(trainer: TrainerRig, run: RunClient) -> list[Path]:
    folder = Path(trainer.config.storage().removeprefix("file://")) / run.name / "published"
    return list(folder.glob("*")) if folder.exists() else []


@pytest.mark.parametrize("way", ["shared_memory", "stream"])
async def test_an_export_writes_no_file(
    trainer: TrainerRig, sampler: SamplerRig, way: str, request: pytest.FixtureRequest
) -> None:
    if way == "stream":
        request.getfixturevalue("other_machine")
    run = await trainer.new_run(f"no-file-{way.replace('_', '-')}")
    session = sampler.session(run=run.name, trainer_address=trainer.pod.address)
    before = loads(way)
    for version in range(1, 4):
        await stepped(run, version)
        found = await bits_of(sampler, session)
        assert found[0] == {version}
        reference = await pinned(trainer, sampler, run, f"v{version}")
        assert found[1:] == (await bits_of(sampler, reference))[1:]
    assert loads(way) == before + 3
    assert exported_folders(trainer, run) == []


async def test_weights_are_for_pods_alone(trainer: TrainerRig) -> None:
    run = await trainer.new_run("pods-alone")
    await stepped(run, 1)
    export = trainer_control_pb2.ExportWeightsRequest(run=run.name, destination=MEMORY)
    exported = await trainer.stub.ExportWeights(export, metadata=pod("sampler"), timeout=TIMEOUT_S)
    read = trainer_control_pb2.ReadWeightsRequest(run=run.name, weights_id=exported.weights_id)

    async def first(metadata: Any, request: Any = read) -> Any:
        return await trainer.stub.ReadWeights(request, metadata=metadata, timeout=TIMEOUT_S).read()

    assert (await first(pod("sampler"))).index
    for metadata in (run.metadata, pod("gateway")):
        assert (await refusal(first(metadata))).reason == "ROLE_MISSING"
    other = await trainer.new_run("pods-alone-too")
    wrong = [
        ("VERSION_NOT_LOADED", {"run": other.name}),
        ("VERSION_NOT_LOADED", {"weights_id": "0" * 64}),
        ("INVALID_FIELD", {"offset": 3}),
        ("RUN_NOT_FOUND", {"run": "projects/p/trainingRuns/none"}),
    ]
    for reason, fields in wrong:
        changed = trainer_control_pb2.ReadWeightsRequest()
        changed.CopyFrom(read)
        for name, value in fields.items():
            setattr(changed, name, value)
        assert (await refusal(first(pod("sampler"), changed))).reason == reason


@pytest.mark.usefixtures("small_chunks", "other_machine")
async def test_a_trainer_cut_off_at_any_byte_of_an_export(
    trainer: TrainerRig, sampler: SamplerRig
) -> None:
    run = await trainer.new_run("cut", rank=4)
    host, port = trainer.pod.address.rsplit(":", 1)
    with FaultProxy(host, int(port)) as proxy:
        session = sampler.session(run=run.name, trainer_address=proxy.address)
        version = await stepped(run, 0)
        old = await bits_of(sampler, session, min_version=version)
        size_bytes = await weights_bytes(trainer, run)
        for cut in range(NUM_CUTS):
            version = await stepped(run, cut + 1)
            # Of all that the trainer answers on one connection, the weights are nearly all.
            position = 1 + cut * (size_bytes + 2000) // NUM_CUTS
            with proxy.fault(Fault(cut_response_after=position, times=1)):
                call = asyncio.ensure_future(bits_of(sampler, session, min_version=version))
                # What decodes meanwhile, or may be older, has the old version whole.
                stale = await bits_of(
                    sampler, session, min_version=version, extras={"max_staleness": 1}
                )
                new = await call
            assert new[0] == {version}
            assert stale in (old, new)
            old = new
        reference = await pinned(trainer, sampler, run, "last")
        assert old[1:] == (await bits_of(sampler, reference))[1:]
        await trainer.restart()
        with proxy.outage():
            lasting = await bits_of(
                sampler, session, min_version=version, extras={"max_staleness": 1}
            )
        assert lasting == old


async def weights_bytes(trainer: TrainerRig, run: RunClient) -> int:
    tensors, _ = await trainer.host.call(trainer.host.engine("tiny").adapter_tensors, run.name)
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.usefixtures("small_chunks", "other_machine")
async def test_a_chunk_that_was_damaged_on_the_way_is_read_again(
    trainer: TrainerRig, sampler: SamplerRig
) -> None:
    run = await trainer.new_run("damaged", rank=4)
    host, port = trainer.pod.address.rsplit(":", 1)
    with FaultProxy(host, int(port)) as proxy:
        session = sampler.session(run=run.name, trainer_address=proxy.address)
        size_bytes = await weights_bytes(trainer, run)
        for number in range(8):
            version = await stepped(run, number)
            position = size_bytes * (number + 1) // 9
            with proxy.fault(Fault(damage_response_at=position, times=1)):
                found = await bits_of(sampler, session, min_version=version)
            reference = await pinned(trainer, sampler, run, f"v{version}")
            assert found == ({version}, *(await bits_of(sampler, reference))[1:])


@pytest.mark.usefixtures("other_machine")
async def test_weights_that_cannot_be_streamed_come_by_the_store(
    trainer: TrainerRig, sampler: SamplerRig
) -> None:
    run = await trainer.new_run("stored", rank=8)
    await stepped(run, 1)
    before = loads("store")
    host, port = trainer.pod.address.rsplit(":", 1)
    with FaultProxy(host, int(port)) as proxy:
        session = sampler.session(run=run.name, trainer_address=proxy.address)
        # Enough for the answer about where the weights are, and too little for one chunk.
        with proxy.fault(Fault(cut_response_after=4000)):
            found = await bits_of(sampler, session)
    assert loads("store") == before + 1
    assert len(exported_folders(trainer, run)) == 1
    reference = await pinned(trainer, sampler, run, "whole")
    assert found == ({1}, *(await bits_of(sampler, reference))[1:])


async def test_weights_above_the_budget_come_by_the_store(
    trainer: TrainerRig, sampler: SamplerRig
) -> None:
    await trainer.restart(max_exported_bytes=64)
    try:
        run = await trainer.new_run("large")
        session = sampler.session(run=run.name, trainer_address=trainer.pod.address)
        await stepped(run, 1)
        assert (await bits_of(sampler, session))[0] == {1}
        assert len(exported_folders(trainer, run)) == 1
    finally:
        await trainer.restart(max_exported_bytes=2**32)


async def test_versions_exported_during_decoding_are_neither_lost_nor_mixed(
    trainer: TrainerRig, sampler: SamplerRig
) -> None:
    run = await trainer.new_run("many", rank=4)
    session = sampler.session(run=run.name, trainer_address=trainer.pod.address)
    await stepped(run, 0)
    streams = [
        sampler.stream(session, max_tokens=3800, extras=IN_FLIGHT, seed=seed) for seed in range(3)
    ]
    seen: list[list[int]] = [[] for _ in streams]

    async def follow(index: int) -> None:
        async for answer in streams[index]:
            seen[index] += decode_tensor(answer.piece.versions).tolist()

    followers = [asyncio.ensure_future(follow(index)) for index in range(len(streams))]
    found, references = {}, {}
    for number in range(NUM_VERSIONS):
        version = await stepped(run, number + 1)
        assert version == number + 2
        found[version] = await bits_of(sampler, session, min_version=version, num_samples=2)
        if number % 8 == 0 or number == NUM_VERSIONS - 1:
            references[version] = await pinned(trainer, sampler, run, f"v{version}")
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*followers, return_exceptions=True)
    assert [versions for versions, *_ in found.values()] == [{version} for version in found]
    # No two versions say the same, so that none stood in for another.
    assert len({tuple(bits[2]) for bits in found.values()}) == NUM_VERSIONS
    for version, reference in references.items():
        assert found[version][1:] == (await bits_of(sampler, reference, num_samples=2))[1:]
    for versions in seen:
        assert versions
        assert np.all(np.diff(versions) >= 0)
    assert await sampler.num_active() == 0
