"""Reading weights from a trainer that is cut off, lies, or forgets."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tinsmith_engine import FullConfig
from tinsmith_engine.files.weight_index import WeightIndex, digests_of, numbers_of
from tinsmith_runtime.errors import (
    CheckpointCorruptError,
    RunNotFoundError,
    TinsmithError,
    VersionNotLoadedError,
    WorkerUnavailableError,
)
from tinsmith_runtime.sealed_memory import MemoryLocation, SealedMemory
from tinsmith_sampler.weights.trainer_protocol import (
    ExportedWeights,
    StoredWeights,
    WeightChunk,
    WeightDescription,
)
from tinsmith_sampler.weights.weight_transfer import HeldWeights, ReceivedWeights, WeightTransfer

RUN = "projects/p/trainingRuns/r"
NUM_CHUNKS = 9
CHUNK_BYTES = 40


class Weights:
    """Weights of nine chunks, the last of them short."""

    def __init__(self, seed: int = 0, changed: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            "a": torch.randn(7, 5, generator=generator),
            "b": torch.randn(52, generator=generator),
        }
        if changed is not None:
            self.tensors["b"][changed] = 0.5
        self.numbers = b"".join(numbers_of(self.tensors))
        self.index = WeightIndex(
            run=RUN,
            base_model="tiny",
            config=FullConfig(),
            version=seed,
            shapes={name: tuple(tensor.shape) for name, tensor in self.tensors.items()},
            chunk_bytes=CHUNK_BYTES,
            digests=digests_of(memoryview(self.numbers), CHUNK_BYTES),
        )
        self.id = f"weights-{seed}-{changed}"

    def held(self, tensors: Mapping[str, Tensor] | None = None) -> HeldWeights:
        found = self.tensors if tensors is None else tensors
        return HeldWeights(self.id, self.index, lambda: found)


@dataclass
class FakeTrainers:
    """A trainer with one set of weights, whose calls end after so many messages, or in an error."""

    weights: Weights
    known: WeightIndex | None = None
    ends: list[int | TinsmithError] = field(default_factory=list)
    damaged: set[int] = field(default_factory=set)
    """Numbers of messages, over all calls, whose data have another bit."""
    location: MemoryLocation | None = None
    calls: list[tuple[int, str]] = field(default_factory=list)
    num_messages: int = 0

    async def newest(self, address: str, run: str) -> ExportedWeights | StoredWeights:
        raise NotImplementedError

    async def export_to_store(self, address: str, run: str) -> StoredWeights:
        raise NotImplementedError

    async def checkpoint(self, address: str, name: str) -> StoredWeights:
        raise NotImplementedError

    async def read(
        self, address: str, run: str, weights_id: str, *, offset: int, held: str, maps_memory: bool
    ) -> AsyncGenerator[WeightDescription | WeightChunk, None]:
        assert (address, run, weights_id) == ("trainer", RUN, self.weights.id)
        self.calls.append((offset, held))
        end = self.ends.pop(0) if self.ends else None
        if isinstance(end, TinsmithError):
            raise end
        index = self.weights.index
        location = self.location if maps_memory else None
        if location is not None:
            index = dataclasses.replace(index, digests=())
        messages: list[WeightDescription | WeightChunk] = [WeightDescription(index, location)]
        if location is None:
            messages += [
                WeightChunk(index.span(chunk).start, self.weights.numbers[index.span(chunk)])
                for chunk in index.chunks_beyond(self.known if held else None)
                if index.span(chunk).start >= offset
            ]
        for number, message in enumerate(messages):
            if number == end:
                raise WorkerUnavailableError("the trainer cannot be reached (UNAVAILABLE)")
            if isinstance(message, WeightChunk) and self.num_messages in self.damaged:
                message = WeightChunk(
                    message.offset, bytes([message.data[0] ^ 1]) + message.data[1:]
                )
            self.num_messages += 1
            yield message


async def receive(trainers: FakeTrainers, held: HeldWeights | None = None) -> ReceivedWeights:
    transfer = WeightTransfer(trainers, "trainer", RUN, trainers.weights.id, held)
    return await transfer.receive()


def assert_same(received: ReceivedWeights, weights: Weights) -> None:
    assert received.index.shapes == weights.index.shapes
    assert b"".join(numbers_of(received.tensors)) == weights.numbers


@pytest.mark.parametrize("end", range(NUM_CHUNKS + 1))
async def test_a_stream_that_is_cut_goes_on_where_it_ended(end: int) -> None:
    trainers = FakeTrainers(Weights(), ends=[end])
    received = await receive(trainers)
    assert_same(received, trainers.weights)
    assert [offset for offset, _ in trainers.calls] == [0, CHUNK_BYTES * max(0, end - 1)]
    assert received.num_received_bytes == len(trainers.weights.numbers)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(2, NUM_CHUNKS), max_size=9))
async def test_any_cuts_with_progress_between_them_lose_nothing(ends: list[int]) -> None:
    trainers = FakeTrainers(Weights(), ends=list(ends))
    assert_same(await receive(trainers), trainers.weights)


@settings(deadline=None, max_examples=60)
@given(st.sets(st.integers(0, 30), max_size=4))
async def test_a_damaged_chunk_is_read_again(damaged: set[int]) -> None:
    trainers = FakeTrainers(Weights(), damaged=damaged)
    received = await receive(trainers)
    assert_same(received, trainers.weights)
    assert received.num_received_bytes == len(trainers.weights.numbers)


async def test_a_chunk_that_is_always_wrong_ends_the_transfer() -> None:
    trainers = FakeTrainers(Weights(), damaged=set(range(3, 1000)))
    with pytest.raises(CheckpointCorruptError, match="hash"):
        await receive(trainers)
    assert {offset for offset, _ in trainers.calls[1:]} == {2 * CHUNK_BYTES}


async def test_a_trainer_that_is_gone_ends_the_transfer_which_can_go_on_later() -> None:
    gone = WorkerUnavailableError("the trainer cannot be reached (UNAVAILABLE)")
    trainers = FakeTrainers(Weights(), ends=[4, *[gone] * 20])
    transfer = WeightTransfer(trainers, "trainer", RUN, trainers.weights.id)
    with pytest.raises(WorkerUnavailableError):
        await transfer.receive()
    trainers.ends.clear()
    assert_same(await transfer.receive(), trainers.weights)
    assert trainers.calls[-1][0] == 3 * CHUNK_BYTES


@pytest.mark.parametrize(
    "error", [VersionNotLoadedError("no longer in memory"), RunNotFoundError("no such run")]
)
async def test_what_a_trainer_refuses_is_not_asked_again(error: TinsmithError) -> None:
    trainers = FakeTrainers(Weights(), ends=[error])
    with pytest.raises(type(error)):
        await receive(trainers)
    assert len(trainers.calls) == 1


async def test_chunks_that_are_held_are_not_sent() -> None:
    held, weights = Weights(), Weights(changed=30)
    trainers = FakeTrainers(weights, known=held.index)
    received = await receive(trainers, held.held())
    assert_same(received, weights)
    assert received.num_received_bytes == CHUNK_BYTES
    assert trainers.calls == [(0, held.id)]


async def test_a_trainer_that_knows_nothing_of_what_is_held_sends_all() -> None:
    held, weights = Weights(), Weights(changed=30)
    received = await receive(FakeTrainers(weights), held.held())
    assert_same(received, weights)


@pytest.mark.parametrize("kept", [{}, {"a": torch.zeros(7, 5), "b": torch.zeros(52)}])
async def test_held_weights_that_are_gone_or_wrong_are_read(kept: Mapping[str, Tensor]) -> None:
    held, weights = Weights(), Weights(changed=30)
    trainers = FakeTrainers(weights, known=held.index)
    received = await receive(trainers, held.held(kept))
    assert_same(received, weights)
    assert trainers.calls == [(0, held.id), (0, "")]


async def test_memory_of_the_machine_is_mapped() -> None:
    weights = Weights()
    memory = SealedMemory([memoryview(weights.numbers)], len(weights.numbers))
    trainers = FakeTrainers(weights, location=memory.location)
    received = await receive(trainers)
    assert_same(received, weights)
    assert received.is_mapped
    assert received.num_received_bytes == 0


async def test_memory_that_is_gone_or_is_other_memory_is_not_used() -> None:
    weights, other = Weights(), Weights(seed=1)
    gone = SealedMemory([memoryview(weights.numbers)], len(weights.numbers))
    where = gone.location
    gone.close()
    wrong = SealedMemory([memoryview(other.numbers)], len(other.numbers))
    assert where is not None
    assert wrong.location is not None
    for descriptor in (10**6, wrong.location.descriptor):
        location = MemoryLocation(where.pid, descriptor, where.inode)
        trainers = FakeTrainers(weights, location=location)
        received = await receive(trainers)
        assert_same(received, weights)
        assert not received.is_mapped
        assert len(trainers.calls) == 2


async def test_chunks_of_a_transfer_that_failed_serve_the_same_weights_of_another_name() -> None:
    gone = WorkerUnavailableError("the trainer cannot be reached (UNAVAILABLE)")
    trainers = FakeTrainers(Weights(), ends=[5, *[gone] * 20])
    failed = WeightTransfer(trainers, "trainer", RUN, trainers.weights.id)
    with pytest.raises(WorkerUnavailableError):
        await failed.receive()
    # A trainer that was started again has the bits of the run back, under a new name.
    again = FakeTrainers(Weights())
    again.weights.id = "again"
    received = await WeightTransfer(again, "trainer", RUN, "again", earlier=failed).receive()
    assert_same(received, again.weights)
    assert received.num_received_bytes == len(again.weights.numbers) - 4 * CHUNK_BYTES
    newer = FakeTrainers(Weights(seed=1))
    transfer = WeightTransfer(newer, "trainer", RUN, newer.weights.id, earlier=failed)
    received = await transfer.receive()
    assert_same(received, newer.weights)
    assert received.num_received_bytes == len(newer.weights.numbers)
