"""Reads a log file: whole lines from a position on, followed for as long as it grows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from tinsmith_runtime.errors import InvalidFieldError, JobLogMissingError
from tinsmith_scheduler.store.records import LogPart, LogPosition

_PART_BYTES = 256 * 1024
_POLL_S = 0.2


async def read_file_log(
    job: str, path: Path, wanted: LogPosition, has_ended: Callable[[], Awaitable[bool]]
) -> AsyncIterator[LogPart]:
    """Yield the lines of a driver's log.

    Args:
        job: Name of the job, for errors.
        path: The file.
        wanted: Which part of it.
        has_ended: Whether nothing more will be written.

    Raises:
        JobLogMissingError: If there is no such pod, or it has not started.
    """
    if wanted.role != "driver" or wanted.index != 0:
        raise JobLogMissingError(
            f"job {job} has no log of {wanted.role} {wanted.index}: on one machine trainers and "
            "samplers print into the log of the server",
            job=job,
        )
    if wanted.position and not wanted.position.isdigit():
        raise InvalidFieldError("position", "is not a position of this log")
    if not path.is_file():
        raise JobLogMissingError(f"the driver of job {job} has not started", job=job)
    offset = int(wanted.position) if wanted.position else 0
    if wanted.tail_lines and not wanted.position:
        offset = await asyncio.to_thread(_tail, path, wanted.tail_lines)
    while True:
        # Asked first: what is printed before the end is read after it.
        is_over = not wanted.follow or await has_ended()
        data = await asyncio.to_thread(_read, path, offset)
        if data:
            offset += len(data)
            yield LogPart(data.decode(errors="replace"), str(offset))
        elif is_over:
            return
        else:
            await asyncio.sleep(_POLL_S)


def _read(path: Path, offset: int) -> bytes:
    """Return whole lines from an offset on; a last one without its end only if it is very long."""
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(_PART_BYTES)
    end = data.rfind(b"\n") + 1
    return data[:end] if end or len(data) < _PART_BYTES else data


def _tail(path: Path, num_lines: int) -> int:
    """Return where the last lines of a file begin."""
    with path.open("rb") as file:
        position = file.seek(0, 2)
        found = 0
        while position > 0:
            size = min(position, _PART_BYTES)
            position -= size
            file.seek(position)
            block = file.read(size)
            for index in range(size - 1, -1, -1):
                if block[index : index + 1] != b"\n":
                    continue
                found += 1
                if found > num_lines:
                    return position + index + 1
    return 0
