"""The placement policy: chooses a trainer for a run, by pure functions of what is known.

A run goes to the trainer with the fewest runs that serves its base model, is alive and has room.
The policy is consulted while a run is created, and when the process that held it is gone; then only
trainers on the same ledger qualify. The trainer that was asked before is preferred: it may have
adopted the run although its answer was lost, or have been started again.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainerCandidate:
    """What the policy knows of a trainer."""

    name: str
    base_models: frozenset[str]
    is_alive: bool
    num_runs: int
    max_runs: int
    incarnation: str = ""
    ledger: str = ""
    pool: str = ""

    @property
    def has_room(self) -> bool:
        """Whether another run fits."""
        return self.num_runs < self.max_runs


class WaitReason(enum.Enum):
    """Why no trainer was chosen."""

    NO_TRAINER = "no_trainer"
    """None that serves the base model is alive."""
    FULL = "full"
    """All that are alive are full."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The run has to wait."""

    reason: WaitReason
    message: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """The run goes to this trainer."""

    worker: str
    incarnation: str = ""
    ledger: str = ""


def choose_trainer(
    base_model: str,
    candidates: Sequence[TrainerCandidate],
    *,
    current: str = "",
    refused: Collection[str] = (),
    ledger: str | None = None,
    pool: str = "",
) -> Chosen | Wait:
    """Return the trainer for a run, or why it waits.

    Args:
        base_model: What the run trains.
        candidates: All trainers that are known.
        current: The trainer that was asked before and may hold the run; it is kept while it lives.
        refused: Trainers that just said that they are full.
        ledger: The ledger that holds the run already; None if it may be any.
        pool: The pool of the run; empty for the trainers that are shared.
    """
    serving = [
        entry
        for entry in candidates
        if entry.pool == pool and base_model in entry.base_models and ledger in (None, entry.ledger)
    ]
    alive = [entry for entry in serving if entry.is_alive]
    if not alive:
        problem = "has stopped its heartbeat" if serving else "is registered"
        subject = "every trainer" if serving else "no trainer"
        where = f" in pool {pool}" if pool else ""
        return Wait(WaitReason.NO_TRAINER, f"{subject} of base model {base_model} {problem}{where}")
    for entry in alive:
        if entry.name == current and entry.name not in refused:
            return Chosen(entry.name, entry.incarnation, entry.ledger)
    open_trainers = [entry for entry in alive if entry.has_room and entry.name not in refused]
    if not open_trainers:
        places = sum(entry.max_runs for entry in alive)
        return Wait(
            WaitReason.FULL,
            f"all {places} places for runs on base model {base_model} are taken",
        )
    best = min(open_trainers, key=lambda entry: (entry.num_runs, entry.name))
    return Chosen(best.name, best.incarnation, best.ledger)


@dataclass(frozen=True, slots=True)
class SamplerCandidate:
    """What the policy knows of a sampler that is alive and serves the base model."""

    name: str
    pool: str = ""
    project: str = ""
    checkpoint: str = ""

    @property
    def is_dedicated(self) -> bool:
        """Whether it serves one checkpoint, or the base model, for one project."""
        return bool(self.project)


def eligible_samplers(
    candidates: Sequence[SamplerCandidate],
    *,
    project: str,
    checkpoint: str = "",
    run: str = "",
    pool: str = "",
) -> list[str]:
    """Return the samplers that may serve a sampling session, those dedicated to it if there are.

    Args:
        candidates: The samplers of the base model that are alive.
        project: Of the session.
        checkpoint: What is sampled from; empty for a base model or a run.
        run: Whose live weights are sampled; empty otherwise.
        pool: Of the session; its callers reach no sampler elsewhere, dedicated ones included.
    """
    dedicated = [
        entry.name
        for entry in candidates
        if entry.is_dedicated
        and not pool
        and not run
        and (entry.project, entry.checkpoint) == (project, checkpoint)
    ]
    shared = [entry.name for entry in candidates if not entry.is_dedicated and entry.pool == pool]
    return dedicated or shared


def choose_worker(caller: str, workers: Collection[str]) -> str:
    """Return the worker of a caller, the same one for as long as it lives.

    Rendezvous hashing: callers spread evenly, keep their worker, and only those of a worker that
    is gone move. Nothing is stored.

    Args:
        caller: Tells callers apart.
        workers: Names of the workers that may be chosen; at least one.
    """
    return max(
        workers,
        key=lambda name: (hashlib.sha256(f"{caller}\0{name}".encode()).digest(), name),
    )
