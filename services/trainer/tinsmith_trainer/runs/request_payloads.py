"""Requests as they are stored: small ones in the ledger's row, large ones as objects by hash."""

from __future__ import annotations

import asyncio
import hashlib

from tinsmith_runtime.errors import DataLossError
from tinsmith_runtime.ledger import OperationRecord
from tinsmith_runtime.storage import ObjectStore
from tinsmith_trainer.runs.operations import Submission

_INLINE_BYTES = 64 * 1024


def payload_folder(run: str) -> str:
    """Return where the large requests of a run are."""
    return f"{run}/payloads"


async def write_payload(
    store: ObjectStore, submission: Submission
) -> tuple[bytes | None, str | None]:
    """Return what goes into the row: the request itself, or the path that it was stored under.

    Raises:
        StorageFullError: If there is no room for a large request.
        StorageUnavailableError: If the store, which only a large request needs, does not answer.
    """
    if len(submission.payload) <= _INLINE_BYTES:
        return submission.payload, None
    path = f"{payload_folder(submission.run)}/{submission.digest.hex()}"
    await asyncio.to_thread(store.write, path, submission.payload)
    return None, path


async def read_payload(store: ObjectStore, record: OperationRecord) -> bytes:
    """Return the request of an operation, verified.

    Raises:
        DataLossError: If it is missing or was changed.
        StorageUnavailableError: If the store does not answer.
    """
    payload = record.payload
    if payload is None and record.payload_path is not None:
        payload = await asyncio.to_thread(store.read, record.payload_path)
    if payload is None or hashlib.sha256(payload).digest() != record.digest:
        raise DataLossError(
            f"the stored request of operation {record.sequence_number} of {record.run} is missing "
            "or was changed",
            run=record.run,
            sequence_number=record.sequence_number,
        )
    return payload
