"""Runs with queues as a word: one letter for each operation."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from tinsmith_engine import AdamParams, Datum, Engine
from tinsmith_runtime.ledger import OperationRecord, OperationState, RunRecord
from tinsmith_trainer.runs.operations import (
    ForwardWork,
    Kind,
    LoadCheckpointWork,
    OptimStepWork,
    SaveCheckpointWork,
    Work,
)
from tinsmith_trainer.runs.run import LiveRun
from tinsmith_trainer.runs.run_queue import OperationSize, QueuedOperation, RunQueue

RUN = "projects/p/trainingRuns/r"
TOKENS = 4
"""Tokens of each batch."""
_DATUM = Datum(np.zeros(TOKENS, np.int64), np.zeros(TOKENS, np.int64), {})
_WORK: dict[str, tuple[Kind, Work]] = {
    "f": (Kind.FORWARD, ForwardWork([_DATUM], "cross_entropy", {}, is_backward=False)),
    "b": (Kind.FORWARD_BACKWARD, ForwardWork([_DATUM], "cross_entropy", {}, is_backward=True)),
    "o": (Kind.OPTIM_STEP, OptimStepWork(AdamParams(), 0)),
    "s": (Kind.SAVE_CHECKPOINT, SaveCheckpointWork("c", "training", {})),
    "l": (Kind.LOAD_CHECKPOINT, LoadCheckpointWork("c", include_optimizer=True)),
}


def record(number: int, kind: str = Kind.FORWARD_BACKWARD, **fields: Any) -> OperationRecord:
    values: dict[str, Any] = {
        "run": RUN,
        "sequence_number": number,
        "kind": kind,
        "request_id": None,
        "digest": b"",
        "state": OperationState.PENDING,
        "num_attempts": 0,
        "submit_time_s": 0.0,
    }
    return OperationRecord(**values | fields)


def finished(number: int, revision: int = 0, kind: str = Kind.FORWARD_BACKWARD) -> OperationRecord:
    return record(number, kind, state=OperationState.FAILED, revision=revision)


def queued(number: int, letter: str, **fields: Any) -> QueuedOperation:
    kind, work = _WORK[letter]
    num_tokens = TOKENS if isinstance(work, ForwardWork) else 0
    return QueuedOperation(
        record(number, kind, **fields), work, OperationSize(num_tokens, num_bytes=10)
    )


def make_run(
    letters: str,
    first: int = 1,
    *,
    name: str = RUN,
    model: str = "m",
    engine: object = None,
) -> LiveRun:
    """Return a run whose queue holds one operation for each letter.

    `.` is a missing number; a capital letter is an operation that was begun before.
    """
    run = LiveRun(
        RunRecord(name=name, base_model=model, adapter="{}", epoch=1),
        cast(Engine, engine),
        RunQueue(),
    )
    for number, letter in enumerate(letters, first):
        if letter != ".":
            run.queue.accept(queued(number, letter.lower(), num_attempts=int(letter.isupper())))
    return run
