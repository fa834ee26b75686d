"""Workers that are known: how long they count as alive, and what they serve in whose reach."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tinsmith.v1 import scheduler_pb2
from tinsmith_runtime.adapters import LoraConfig
from tinsmith_runtime.errors import (
    InvalidFieldError,
    ModelNotFoundError,
    NotFoundError,
    WorkerUnavailableError,
)
from tinsmith_runtime.sql import Database, open_store
from tinsmith_scheduler.rpc import worker_codec
from tinsmith_scheduler.store.records import (
    Reach,
    Run,
    RunState,
    SamplerLoad,
    ServedModel,
    TokenizerFiles,
    Worker,
    WorkerRole,
)
from tinsmith_scheduler.store.tables import STORE
from tinsmith_scheduler.workers.workers import Workers

TRAINER, SAMPLER = WorkerRole.TRAINER, WorkerRole.SAMPLER
TIMEOUT_S = 30.0
SHARED = Reach("p", "")


class Rig:
    """The list of workers, whose clock a test moves."""

    def __init__(self, database: Database) -> None:
        self.now_s = 1000.0
        self._database = database
        self.workers = self.restarted()

    def restarted(self) -> Workers:
        return Workers(self._database, timeout_s=TIMEOUT_S, clock=lambda: self.now_s)

    async def add(
        self,
        name: str,
        role: WorkerRole = SAMPLER,
        *models: str,
        tokenizers: Mapping[str, TokenizerFiles] | None = None,
        **fields: Any,
    ) -> None:
        worker = Worker(
            name=name,
            role=role,
            address=f"{name}:1",
            models=tuple(ServedModel(model, f"{model} of {name}".encode()) for model in models),
            **{"incarnation": "i", **fields},
        )
        await self.workers.register(worker, tokenizers or {})


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    database = await open_store(STORE, tmp_path)
    yield Rig(database)
    await database.close()


async def test_a_worker_is_alive_until_it_was_silent_for_too_long(rig: Rig) -> None:
    await rig.add("s")
    assert not rig.workers.is_lost("s", "i")
    rig.now_s += TIMEOUT_S
    assert [each.name for each in rig.workers.alive(SAMPLER)] == ["s"]
    assert (rig.workers.address("s"), rig.workers.is_lost("s", "i")) == ("s:1", False)
    rig.now_s += 1
    assert rig.workers.alive(None) == []
    assert (rig.workers.address("s"), rig.workers.is_lost("s", "i")) == ("", True)
    rig.workers.heartbeat("s", "i")
    assert rig.workers.address("s") == "s:1"
    assert rig.workers.is_lost("s", "another process")


async def test_a_process_that_is_not_the_listed_one_registers_again(rig: Rig) -> None:
    await rig.add("s")
    for name, incarnation in (("s", "other"), ("none", "i")):
        with pytest.raises(NotFoundError):
            rig.workers.heartbeat(name, incarnation)
    # What another process says at its stop is not of this one.
    rig.workers.deregister("s", "other")
    assert rig.workers.listed("s") is not None
    for _ in range(2):
        rig.workers.deregister("s", "i")
    assert rig.workers.listed("s") is None
    assert rig.workers.is_lost("s", "i")
    assert not rig.workers.is_lost("s", "not heard of yet")
    rig.now_s += TIMEOUT_S + 1
    assert rig.workers.is_lost("s", "not heard of yet")


async def test_the_load_of_a_sampler_is_that_of_its_last_heartbeat(rig: Rig) -> None:
    await rig.add("s")
    assert rig.workers.load_of("none") is None
    assert rig.workers.load_of("s") is None
    rig.workers.heartbeat("s", "i", SamplerLoad(1, 2, 3))
    rig.now_s += 5
    assert rig.workers.load_of("s") == SamplerLoad(1, 2, 3, age_s=5)
    rig.now_s += TIMEOUT_S
    assert rig.workers.load_of("s") is None


def test_a_load_is_not_negative() -> None:
    message = scheduler_pb2.SamplerLoad(num_requests=1, num_sequences=0, num_tokens=3)
    assert worker_codec.decode_load(message) == SamplerLoad(1, 0, 3)
    for name in ("num_requests", "num_sequences", "num_tokens"):
        with pytest.raises(InvalidFieldError) as refusal:
            worker_codec.decode_load(scheduler_pb2.SamplerLoad(**{name: -1}))
        assert refusal.value.metadata["field"] == f"load.{name}"


async def test_workers_are_found_by_role_and_model(rig: Rig) -> None:
    await rig.add("t", TRAINER, "a", "b")
    await rig.add("s", SAMPLER, "b")
    found = [
        [each.name for each in rig.workers.alive(role, model)]
        for role, model in ((None, None), (TRAINER, None), (None, "b"), (SAMPLER, "a"))
    ]
    assert found == [["t", "s"], ["t"], ["t", "s"], []]


async def test_trainers_stand_for_election_with_what_they_serve(rig: Rig) -> None:
    await rig.add("s", SAMPLER, "a")
    await rig.add("silent", TRAINER, "a")
    rig.now_s += TIMEOUT_S + 1
    await rig.add("t", TRAINER, "a", "b", max_runs=3, ledger="l", pool="job")
    silent, trainer = rig.workers.trainers()
    assert (silent.name, silent.is_alive, trainer.is_alive) == ("silent", False, True)
    assert (trainer.name, trainer.base_models, trainer.incarnation) == ("t", {"a", "b"}, "i")
    assert (trainer.num_runs, trainer.max_runs) == (0, 3)
    assert (trainer.ledger, trainer.pool) == ("l", "job")


async def test_offers_add_up_what_can_be_reached(rig: Rig) -> None:
    await rig.add("t1", TRAINER, "a", "b", max_runs=3)
    await rig.add("t2", TRAINER, "a", max_runs=4)
    await rig.add("s", SAMPLER, "a", "c")
    await rig.add("of-a-job", SAMPLER, "d", pool="job")
    await rig.add("of-one-project", SAMPLER, "e", project="p")
    await rig.add("of-one-checkpoint", SAMPLER, "f", project="p", checkpoint="x")
    await rig.add("silent", TRAINER, "g")
    rig.now_s += TIMEOUT_S + 1
    for name in ("t1", "t2", "s", "of-a-job", "of-one-project", "of-one-checkpoint"):
        rig.workers.heartbeat(name, "i")
    offers = rig.workers.offers({"t1": 1, "t2": 2, "gone": 9}, SHARED)
    assert [
        (each.encoded_model, each.is_trainable, each.is_sampleable, each.num_runs, each.max_runs)
        for each in offers
    ] == [
        (b"a of t1", True, True, 3, 7),
        (b"b of t1", True, False, 1, 3),
        (b"c of s", False, True, 0, 0),
        (b"e of of-one-project", False, True, 0, 0),
    ]
    pool = rig.workers.offers({}, Reach("p", "job"))
    assert [each.encoded_model for each in pool] == [b"d of of-a-job"]
    assert len(rig.workers.offers({})) == 5


async def test_a_model_that_is_not_served_is_refused_with_those_that_are(rig: Rig) -> None:
    await rig.add("t", TRAINER, *(f"m{number}" for number in range(11)))
    await rig.add("s", SAMPLER, "other", pool="job")
    # Longer after its start than a worker would need to come back.
    rig.now_s += TIMEOUT_S + 1
    for name in ("t", "s"):
        rig.workers.heartbeat(name, "i")
    rig.workers.require_model("m1", TRAINER, SHARED)
    with pytest.raises(ModelNotFoundError, match=r"no trainer serves .* m8, \.\.\. "):
        rig.workers.require_model("other", TRAINER, SHARED)
    with pytest.raises(ModelNotFoundError, match="none is served at the moment"):
        rig.workers.require_model("m1", SAMPLER, SHARED)
    with pytest.raises(ModelNotFoundError, match=r"no trainer of pool job .*none is served"):
        rig.workers.require_model("m1", TRAINER, Reach("p", "job"))


async def test_after_a_restart_a_model_may_come_back_for_a_while(rig: Rig) -> None:
    await rig.add("t", TRAINER, "a")
    again = rig.restarted()
    await again.load()
    rig.now_s += TIMEOUT_S
    again.require_model("a", TRAINER, SHARED)
    with pytest.raises(WorkerUnavailableError):
        again.tokenizer("a", SHARED)
    with pytest.raises(ModelNotFoundError):
        again.require_model("b", TRAINER, SHARED)
    rig.now_s += 1
    with pytest.raises(ModelNotFoundError):
        again.require_model("a", TRAINER, SHARED)
    with pytest.raises(ModelNotFoundError):
        again.tokenizer("a", SHARED)


async def test_a_tokenizer_is_that_of_the_worker_heard_of_last(rig: Rig) -> None:
    for name in ("old", "new"):
        files = {"a": TokenizerFiles(name, {})}
        await rig.add(name, SAMPLER, "a", tokenizers=files)
        rig.now_s += 1
    # It has none, or is out of reach.
    await rig.add("bare", SAMPLER, "a")
    elsewhere = {"a": TokenizerFiles("of another pool", {})}
    await rig.add("elsewhere", SAMPLER, "a", tokenizers=elsewhere, pool="job")
    assert rig.workers.tokenizer("a", SHARED).digest == "new"
    rig.workers.heartbeat("old", "i")
    assert rig.workers.tokenizer("a", SHARED).digest == "old"


def run_of(state: RunState = RunState.ACTIVE, **fields: Any) -> Run:
    values = {"worker": "t", "incarnation": "i", "ledger": "l", **fields}
    return Run(
        name="projects/p/trainingRuns/r",
        project="p",
        state=state,
        session="",
        base_model="a",
        adapter=LoraConfig(),
        display_name="",
        labels={},
        create_time_s=0.0,
        **values,
    )


async def test_a_run_is_where_its_trainer_is_and_its_checkpoints_where_its_ledger_is(
    rig: Rig,
) -> None:
    await rig.add("t", TRAINER, "a", ledger="l")
    assert rig.workers.trainer_address(run_of()) == "t:1"
    for elsewhere in (
        run_of(RunState.MOVING),
        run_of(worker=""),
        run_of(worker="none"),
        run_of(incarnation="before"),
    ):
        assert rig.workers.trainer_address(elsewhere) == ""
    # A ledger outlives the pool; a shared trainer on it comes first, then one of the pool.
    moving = run_of(RunState.MOVING, pool="job")
    assert rig.workers.ledger_address(moving) == "t:1"
    assert rig.workers.ledger_address(run_of(RunState.FAILED, worker="")) == ""
    assert rig.workers.ledger_address(run_of(RunState.MOVING, ledger="")) == ""
    await rig.add("in-pool", TRAINER, "a", ledger="l", pool="job")
    assert rig.workers.ledger_address(moving) == "t:1"
    rig.workers.deregister("t", "i")
    assert rig.workers.ledger_address(moving) == "in-pool:1"
    assert rig.workers.ledger_address(run_of(RunState.MOVING)) == ""


async def test_a_service_is_that_of_the_nearest_pool(rig: Rig) -> None:
    environment = WorkerRole.ENVIRONMENT
    assert rig.workers.shared_service(environment, "job", "k") == ""
    await rig.add("shared", environment)
    assert rig.workers.shared_service(environment, "job", "k") == "shared:1"
    await rig.add("own", environment, pool="job")
    assert rig.workers.shared_service(environment, "job", "k") == "own:1"
    assert rig.workers.shared_service(environment, "", "k") == "shared:1"
    await rig.add("second", environment)
    found = {rig.workers.shared_service(environment, "", f"k{number}") for number in range(64)}
    assert found == {"shared:1", "second:1"}
