"""Weights that a trainer keeps in memory for samplers of other processes."""

from __future__ import annotations

import pytest
import torch
from tests.support.wait import eventually

from tinsmith_engine import LoraConfig
from tinsmith_engine.files.weight_index import CHUNK_BYTES
from tinsmith_runtime.errors import InvalidFieldError, VersionNotLoadedError
from tinsmith_runtime.sealed_memory import memory_domain
from tinsmith_trainer.residency.weight_exports import ExportedWeights, WeightExports

RUN = "projects/p/trainingRuns/r"
NUM_NUMBERS = 3 * CHUNK_BYTES // 4 - 100
SIZE_BYTES = 4 * NUM_NUMBERS


def exported(version: int, *, run: str = RUN, changed: int | None = None) -> ExportedWeights:
    """Return weights of three chunks; `changed` is a number that others of the seed differ in."""
    numbers = torch.arange(NUM_NUMBERS, dtype=torch.float32)
    if changed is None:
        numbers += version
    else:
        numbers[changed] = -1.0
    return ExportedWeights.of(
        {"a": numbers},
        run=run,
        base_model="tiny",
        config=LoraConfig(rank=4),
        version=version,
    )


async def offsets(exports: WeightExports, weights: ExportedWeights, **options: object) -> list[int]:
    reading = await exports.read(RUN, weights.id, **options)  # type: ignore[arg-type]
    assert reading.location is None
    return [offset for offset, _ in reading.chunks]


async def test_chunks_are_read_from_an_offset_on() -> None:
    exports = WeightExports(2 * SIZE_BYTES, grace_s=60)
    exports.keep(weights := exported(1))
    chunks = list((await exports.read(RUN, weights.id)).chunks)
    assert b"".join(data for _, data in chunks) == weights.memory.view
    assert [offset for offset, _ in chunks] == [0, CHUNK_BYTES, 2 * CHUNK_BYTES]
    assert await offsets(exports, weights, offset=CHUNK_BYTES) == [CHUNK_BYTES, 2 * CHUNK_BYTES]
    assert await offsets(exports, weights, offset=SIZE_BYTES) == []
    for wrong in (-1, 1, CHUNK_BYTES + 4, SIZE_BYTES + CHUNK_BYTES):
        with pytest.raises(InvalidFieldError, match="offset"):
            await exports.read(RUN, weights.id, offset=wrong)


async def test_chunks_that_the_reader_holds_are_left_out() -> None:
    exports = WeightExports(4 * SIZE_BYTES, grace_s=60)
    weights = [exported(1, changed=0), exported(2, changed=CHUNK_BYTES // 4)]
    for each in weights:
        exports.keep(each)
    # Weights that were mapped, or read by no sampler, were never hashed.
    assert len(await offsets(exports, weights[1], held=weights[0].id)) == 3
    assert len(await offsets(exports, weights[0])) == 3
    assert await offsets(exports, weights[1], held=weights[0].id) == [0, CHUNK_BYTES]
    assert len(await offsets(exports, weights[1], held="unknown")) == 3
    foreign = exported(1, run="projects/q/trainingRuns/r", changed=0)
    exports.keep(foreign)
    assert len(list((await exports.read(foreign.index.run, foreign.id)).chunks)) == 3
    assert len(await offsets(exports, weights[1], held=foreign.id)) == 3


async def test_what_was_held_is_known_after_its_numbers_are_gone() -> None:
    exports = WeightExports(SIZE_BYTES, grace_s=60)
    weights = [exported(1, changed=0), exported(2, changed=1)]
    for each in weights:
        exports.keep(each)
        assert len(await offsets(exports, each)) == 3
    assert not exports.holds(weights[0].id)
    assert await offsets(exports, weights[1], held=weights[0].id) == [0]


async def test_memory_is_named_to_processes_that_can_map_it() -> None:
    exports = WeightExports(SIZE_BYTES, grace_s=60)
    exports.keep(weights := exported(1))
    reading = await exports.read(RUN, weights.id, domain=memory_domain())
    assert reading.location == weights.memory.location
    assert list(reading.chunks) == []
    assert len(await offsets(exports, weights, domain="another machine")) == 3


async def test_weights_of_another_run_are_not_told_from_none() -> None:
    exports = WeightExports(SIZE_BYTES, grace_s=60)
    exports.keep(weights := exported(1))
    for run, weights_id in (("projects/q/trainingRuns/r", weights.id), (RUN, "0" * 64)):
        with pytest.raises(VersionNotLoadedError):
            await exports.read(run, weights_id)


async def test_replaced_weights_give_way_before_newest_ones() -> None:
    exports = WeightExports(2 * SIZE_BYTES, grace_s=60)
    idle, old, new = exported(1, run=f"{RUN}-idle"), exported(1), exported(2)
    exports.keep(idle)
    exports.keep(old)
    exports.replace(old.id)
    exports.keep(new)
    assert [exports.holds(each.id) for each in (idle, old, new)] == [True, False, True]
    assert exports.size_bytes == 2 * SIZE_BYTES
    exports.keep(exported(3))
    assert not exports.holds(idle.id)
    assert exports.size_bytes == 2 * SIZE_BYTES


async def test_a_reading_goes_on_after_its_weights_were_dropped() -> None:
    exports = WeightExports(SIZE_BYTES, grace_s=60)
    exports.keep(weights := exported(1))
    content = bytes(weights.memory.view)
    reading = await exports.read(RUN, weights.id)
    exports.close()
    assert exports.size_bytes == 0
    assert b"".join(data for _, data in reading.chunks) == content


async def test_replaced_weights_go_after_the_grace_and_others_stay() -> None:
    exports = WeightExports(4 * SIZE_BYTES, grace_s=0.01)
    old, new = exported(1), exported(2)
    exports.keep(old)
    exports.replace(old.id)
    exports.keep(new)
    await eventually(lambda: not exports.holds(old.id))
    assert exports.holds(new.id)


def test_weights_above_the_budget_do_not_fit() -> None:
    exports = WeightExports(SIZE_BYTES, grace_s=60)
    assert exports.fits(SIZE_BYTES)
    assert not exports.fits(SIZE_BYTES + 1)
