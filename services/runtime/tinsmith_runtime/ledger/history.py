"""What the ledger still has of the past of a run, and the copying of it into another run.

A fork is a run whose rows are another one's: its operations up to a number, from a snapshot on.
What restores a run after a crash restores the fork too: there is one way to compute the past again.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith_runtime.ledger.records import RunRecord, SnapshotRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedOperation:
    """An operation that ended.

    Attributes:
        was_begun: Whether it was computed, and not refused before.
        result: The encoded response, if it succeeded and is kept.
    """

    sequence_number: int
    kind: str
    is_success: bool
    was_begun: bool
    result: bytes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHistory:
    """What is kept of the past of a run.

    Attributes:
        run: The run as it is.
        is_here: Whether its files are in the store of this process, as far as that is known.
        expired_through: Rows up to this number were deleted.
        payloads_through: Requests up to this number were dropped.
        ended: Operations of the kinds that were asked for, by number.
        snapshots: Its snapshots, newest first.
    """

    run: RunRecord
    is_here: bool
    expired_through: int
    payloads_through: int
    ended: tuple[EndedOperation, ...]
    snapshots: tuple[SnapshotRecord, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCopy:
    """What one run takes over from another.

    Attributes:
        source: Whose rows are copied.
        target: The run that has none yet.
        epoch: The fence of the target.
        rows_after: Rows above this number are copied.
        requests_after: Of those, requests above this number: the snapshot contains the others.
        through: The last operation that is copied.
        snapshot: Copied already, under the name of the target; None for initial weights.
        version: Optimizer steps before what is executed anew, if anything is.
        rerun_from: What succeeded from this number on waits to be executed anew; 0 for nothing.
        submit_time_s: Since when it waits.
        replayed_kinds: Kinds of operations whose requests a replay needs.
        rerun_kinds: Kinds of operations that are executed anew.
    """

    source: str
    target: str
    epoch: int
    rows_after: int
    requests_after: int
    through: int
    snapshot: SnapshotRecord | None
    version: int
    rerun_from: int
    submit_time_s: float
    replayed_kinds: frozenset[str]
    rerun_kinds: frozenset[str]
