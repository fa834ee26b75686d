"""The workers that are registered, and what they serve.

Held in memory: workers register again within a heartbeat after a restart, because an unknown
worker's heartbeat is answered with `RESOURCE_NOT_FOUND`. Only the names of base models are kept on
disk. So right after a restart a known model is unavailable, which clients retry, not unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import sqlalchemy as sa

from tinsmith.names import pools_in_reach
from tinsmith_runtime.errors import ModelNotFoundError, NotFoundError, WorkerUnavailableError
from tinsmith_runtime.sql import Database, insert
from tinsmith_scheduler.metrics import WORKERS
from tinsmith_scheduler.store.records import (
    ModelOffer,
    Reach,
    Run,
    RunState,
    SamplerLoad,
    TokenizerFiles,
    Worker,
    WorkerRole,
)
from tinsmith_scheduler.store.tables import models
from tinsmith_scheduler.workers.placement import TrainerCandidate, choose_worker

_MAX_NAMED_MODELS = 10


@dataclass(slots=True)
class _Listed:
    worker: Worker
    heartbeat_s: float
    tokenizers: Mapping[str, TokenizerFiles]
    load: SamplerLoad | None = None
    """Of a sampler, from its last heartbeat."""


class Workers:
    """The registered workers.

    Args:
        database: Keeps the names of base models.
        timeout_s: Time after which a silent worker counts as gone.
        clock: Monotonic seconds.
    """

    def __init__(self, database: Database, *, timeout_s: float, clock: Callable[[], float]) -> None:
        self._database = database
        self._timeout_s = timeout_s
        self._clock = clock
        self._listed: dict[str, _Listed] = {}
        self._left: set[tuple[str, str]] = set()
        self._stored_models: set[str] = set()
        self._start_s = clock()

    async def load(self) -> None:
        """Read the names of base models; call once, before anything is served."""
        self._stored_models = await self._database.read(
            lambda connection: set(connection.execute(sa.select(models.c.base_model)).scalars())
        )
        self._start_s = self._clock()

    async def register(self, worker: Worker, tokenizers: Mapping[str, TokenizerFiles]) -> Worker:
        """Add a worker, or replace the one of the same name."""
        self._listed[worker.name] = _Listed(worker, self._clock(), tokenizers)
        new = worker.base_models - self._stored_models
        if new:
            rows = [{"base_model": base_model} for base_model in sorted(new)]
            await self._database.write(
                lambda connection: connection.execute(
                    insert(connection, models).on_conflict_do_nothing(), rows
                )
            )
            self._stored_models |= new
        return worker

    def listed(self, name: str) -> Worker | None:
        """Return what registered under a name last; None if nothing did."""
        listed = self._listed.get(name)
        return listed.worker if listed is not None else None

    def heartbeat(self, name: str, incarnation: str, load: SamplerLoad | None = None) -> Worker:
        """Keep a worker listed.

        Args:
            name: Of the worker.
            incarnation: Of its process.
            load: What a sampler has to do.

        Raises:
            NotFoundError: If it is not known, or another process of it registered; it has to
                register again.
        """
        listed = self._listed.get(name)
        if listed is None or listed.worker.incarnation != incarnation:
            raise NotFoundError(f"worker {name} is not registered; register again", worker=name)
        listed.heartbeat_s = self._clock()
        listed.load = load
        return listed.worker

    def load_of(self, name: str) -> SamplerLoad | None:
        """Return what a sampler had to do at its last heartbeat; None if that is not known."""
        listed = self._listed.get(name)
        if listed is None or listed.load is None or not self._is_alive(listed):
            return None
        return replace(listed.load, age_s=self._clock() - listed.heartbeat_s)

    def deregister(self, name: str, incarnation: str) -> None:
        """Take a process off the list that stops; repeating it changes nothing."""
        listed = self._listed.get(name)
        if listed is not None and listed.worker.incarnation == incarnation:
            del self._listed[name]
            self._left.add((name, incarnation))

    def is_lost(self, name: str, incarnation: str) -> bool:
        """Whether a process of a trainer is gone, or silent for too long.

        One that has not been heard of since this scheduler started gets the same time.
        """
        listed = self._listed.get(name)
        if listed is not None:
            return listed.worker.incarnation != incarnation or not self._is_alive(listed)
        is_young = self._clock() - self._start_s <= self._timeout_s
        return (name, incarnation) in self._left or not is_young

    def alive(self, role: WorkerRole | None, base_model: str | None = None) -> list[Worker]:
        """Return the workers of a role, or of all, that are alive, and that serve a base model."""
        return [
            listed.worker
            for listed in self._listed.values()
            if role in (None, listed.worker.role)
            and self._is_alive(listed)
            and (base_model is None or base_model in listed.worker.base_models)
        ]

    def address(self, name: str) -> str:
        """Return `host:port` of a worker; empty if it is not alive."""
        listed = self._listed.get(name)
        return listed.worker.address if listed is not None and self._is_alive(listed) else ""

    def trainer_address(self, run: Run) -> str:
        """Return `host:port` of the trainer of a run; empty if none holds it at the moment."""
        if run.state is RunState.MOVING or not run.worker or self._is_elsewhere(run):
            return ""
        return self.address(run.worker)

    def ledger_address(self, run: Run) -> str:
        """Return `host:port` of a trainer that knows the checkpoints of a run; empty if none does.

        That is the trainer of the run or, where several share a ledger, a shared one on it, or one
        of the same pool. Checkpoints outlive the pool that made them, and other pools serve other
        jobs.
        """
        address = self.trainer_address(run)
        if address or not run.ledger or run.state not in (RunState.ACTIVE, RunState.MOVING):
            return address
        pools = {
            worker.pool: worker.address
            for worker in self.alive(WorkerRole.TRAINER)
            if worker.ledger == run.ledger
        }
        return pools.get("") or pools.get(run.pool, "")

    def shared_service(self, role: WorkerRole, pool: str, key: str) -> str:
        """Return where a caller finds an environment or coordinator; empty if there is none.

        The nearest pool in reach that has one serves it. Callers spread over several, and stay
        where they are for as long as that one lives.

        Args:
            role: Of the service.
            pool: Of the caller, a user or a pod.
            key: Tells callers apart.
        """
        alive = {worker.name: worker for worker in self.alive(role)}
        for near in pools_in_reach(pool):
            names = [name for name, worker in alive.items() if worker.pool == near]
            if names:
                return alive[choose_worker(key, names)].address
        return ""

    def _is_elsewhere(self, run: Run) -> bool:
        listed = self._listed.get(run.worker)
        return listed is None or listed.worker.incarnation != run.incarnation

    def trainers(self) -> tuple[TrainerCandidate, ...]:
        """Return all trainers for the placement policy, whose `num_runs` the store fills in."""
        return tuple(
            TrainerCandidate(
                name=listed.worker.name,
                base_models=listed.worker.base_models,
                is_alive=self._is_alive(listed),
                num_runs=0,
                max_runs=listed.worker.max_runs,
                incarnation=listed.worker.incarnation,
                ledger=listed.worker.ledger,
                pool=listed.worker.pool,
            )
            for listed in self._listed.values()
            if listed.worker.role is WorkerRole.TRAINER
        )

    def require_model(self, base_model: str, role: WorkerRole, reach: Reach) -> None:
        """Raise `ModelNotFoundError` unless a worker in reach serves or served a base model."""
        if any(
            listed.worker.role is role
            and base_model in listed.worker.base_models
            and reach.includes(listed.worker)
            for listed in self._listed.values()
        ):
            return
        if not self._may_come_back(base_model):
            raise self._not_served(f"{role.value}{_of_pool(reach)}", base_model, reach, role)

    def _not_served(
        self, who: str, base_model: str, reach: Reach | None, role: WorkerRole | None = None
    ) -> ModelNotFoundError:
        """Return the error of a base model that is not served; it names some of those that are."""
        served = {
            name
            for each in WorkerRole
            for worker in self.alive(each)
            if role in (None, each) and (reach is None or reach.includes(worker))
            for name in worker.base_models
        }
        named = ", ".join(sorted(served)[:_MAX_NAMED_MODELS])
        more = ", ..." if len(served) > _MAX_NAMED_MODELS else ""
        known = f"served are: {named}{more}" if served else "none is served at the moment"
        return ModelNotFoundError(
            f"no {who} serves the base model {base_model}; {known}", base_model=base_model
        )

    def tokenizer(self, base_model: str, reach: Reach) -> TokenizerFiles:
        """Return the tokenizer of a base model, from a worker that is alive if there is one.

        Args:
            base_model: Name of the model.
            reach: Whose workers are asked.

        Raises:
            ModelNotFoundError: If no worker serves the base model.
            WorkerUnavailableError: If its workers are not back yet after a restart.
        """
        holders = [
            listed
            for listed in self._listed.values()
            if base_model in listed.tokenizers and reach.includes(listed.worker)
        ]
        if holders:
            best = max(holders, key=lambda listed: listed.heartbeat_s)
            return best.tokenizers[base_model]
        if self._may_come_back(base_model):
            raise WorkerUnavailableError(
                f"no worker of the base model {base_model} is there at the moment; send the "
                "request again",
                base_model=base_model,
            )
        raise self._not_served(f"worker{_of_pool(reach)}", base_model, reach)

    def offers(self, num_runs: Mapping[str, int], reach: Reach | None = None) -> list[ModelOffer]:
        """Return the base models that can be used now.

        Args:
            num_runs: Runs by name of the trainer.
            reach: Whose workers are meant; None for all. A sampler that serves one checkpoint
                offers no base model.
        """
        trainers, samplers = (
            [
                worker
                for worker in self.alive(role)
                if not worker.checkpoint and (reach is None or reach.includes(worker))
            ]
            for role in (WorkerRole.TRAINER, WorkerRole.SAMPLER)
        )
        descriptions: dict[str, bytes] = {}
        for worker in [*trainers, *samplers]:
            for model in worker.models:
                descriptions.setdefault(model.base_model, model.encoded_model)
        offers = []
        for base_model, encoded_model in sorted(descriptions.items()):
            holders = [worker for worker in trainers if base_model in worker.base_models]
            offers.append(
                ModelOffer(
                    encoded_model=encoded_model,
                    is_trainable=bool(holders),
                    is_sampleable=any(base_model in worker.base_models for worker in samplers),
                    num_runs=sum(num_runs.get(worker.name, 0) for worker in holders),
                    max_runs=sum(worker.max_runs for worker in holders),
                )
            )
        return offers

    def measure(self) -> None:
        """Bring the gauge of workers up to date."""
        for role in WorkerRole:
            WORKERS.labels(role.value).set(len(self.alive(role)))

    def _is_alive(self, listed: _Listed) -> bool:
        return self._clock() - listed.heartbeat_s <= self._timeout_s

    def _may_come_back(self, base_model: str) -> bool:
        """Whether the base model was served before a restart that is too recent to be sure."""
        is_young = self._clock() - self._start_s <= self._timeout_s
        return is_young and base_model in self._stored_models


def _of_pool(reach: Reach | None) -> str:
    return f" of pool {reach.pool}" if reach is not None and reach.pool else ""
