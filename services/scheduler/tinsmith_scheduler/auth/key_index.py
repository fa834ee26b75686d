"""Keys in memory: by id, for every call; by project and by job, for lists that read what they show.

Revoked keys of jobs are many and are in no list of jobs, so that such a list costs what it holds.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

from tinsmith_scheduler.store.records import Key, KeyState

_Order = dict[str, list[tuple[int, str]]]


class KeyIndex:
    """All keys of a scheduler, each list in the order of its serials."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._by_id: dict[str, Key] = {}
        self._by_project: _Order = {}
        self._by_job: _Order = {}
        self._of_jobs: _Order = {}
        for key in keys:
            self.put(key)

    def get(self, key_id: str) -> Key | None:
        """Return a key, or None."""
        return self._by_id.get(key_id)

    def put(self, key: Key) -> None:
        """Add a key, or replace the one of its id."""
        self.drop(key.key_id)
        self._by_id[key.key_id] = key
        _add(self._by_project, key.project, key)
        if key.job and key.state is KeyState.ACTIVE:
            _add(self._by_job, key.job, key)
            _add(self._of_jobs, "", key)

    def drop(self, key_id: str) -> None:
        """Forget a key; none is fine."""
        key = self._by_id.pop(key_id, None)
        if key is not None:
            _remove(self._by_project, key.project, key)
            _remove(self._by_job, key.job, key)
            _remove(self._of_jobs, "", key)

    def newest_of_project(self, project: str, before: int | None) -> Iterator[Key]:
        """Yield the keys of a project below a serial, newest first."""
        entries = self._by_project.get(project, [])
        end = len(entries) if before is None else bisect.bisect_left(entries, (before, ""))
        for index in range(end - 1, -1, -1):
            yield self._by_id[entries[index][1]]

    def accepted_of_jobs(self, job: str, after: int) -> Iterator[Key]:
        """Yield the keys of a job, or of all jobs, above a serial that are accepted, oldest first.

        Args:
            job: Its name; empty for all jobs.
            after: The serial.
        """
        entries = self._by_job.get(job, []) if job else self._of_jobs.get("", [])
        for index in range(bisect.bisect_left(entries, (after + 1, "")), len(entries)):
            yield self._by_id[entries[index][1]]


def _add(order: _Order, group: str, key: Key) -> None:
    bisect.insort(order.setdefault(group, []), (key.serial, key.key_id))


def _remove(order: _Order, group: str, key: Key) -> None:
    entries = order.get(group, [])
    index = bisect.bisect_left(entries, (key.serial, key.key_id))
    if index < len(entries) and entries[index] == (key.serial, key.key_id):
        del entries[index]
        if not entries:
            del order[group]
