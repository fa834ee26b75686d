"""Copies of the cluster's objects, kept up to date by a watch each.

A copy can be behind the cluster, never ahead of it. What a request returned is put in at once. So a
copy is behind what this process wrote only where the outcome of a write is not known; the writer of
statuses settles those. All is listed anew whenever a watch cannot go on, and every few minutes in
any case.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from tinsmith.backoff import backoff
from tinsmith_controller.kube.api_client import ApiError, Json, Resource
from tinsmith_controller.metrics import WATCH_RESTARTS

logger = logging.getLogger(__name__)

RecordT = TypeVar("RecordT")

ObjectKey = tuple[str, str]
"""Namespace, empty if there is none, and name."""
OnChange = Callable[[RecordT | None, RecordT | None], None]
"""Called with a record before and after a change; None where there is none."""

_WATCH_S = 240
_RETRY_S = (0.2, 5.0)
_ABSENT_RETRY_S = 30.0
_TOMBSTONES = 4096


class Watchable(Protocol):
    """What an informer asks of the API server."""

    def list(self, resource: Resource, namespace: str = "") -> tuple[list[Json], str]:
        """Return all objects and the version to watch from."""
        ...

    def watch(
        self, resource: Resource, namespace: str, version: str, *, timeout_s: int
    ) -> Iterator[tuple[str, Json]]:
        """Yield changes after a version."""
        ...


class Informer(Generic[RecordT]):
    """The objects of one kind, as records.

    Args:
        cluster: The API server.
        resource: Which kind.
        namespaces: Namespaces to look at; an empty name is all of them.
        record: Makes what is kept of an object.
        on_change: Called after each change, one at a time, in the order of the changes; in the
            informer's thread, or in that of `put`.
        on_absent: Called when the server does not know the kind, which is looked for again now and
            then. By default that is a failure as any other.
    """

    def __init__(
        self,
        cluster: Watchable,
        resource: Resource,
        namespaces: tuple[str, ...],
        record: Callable[[Json], RecordT],
        on_change: OnChange[RecordT],
        *,
        on_absent: Callable[[], None] | None = None,
    ) -> None:
        self._cluster = cluster
        self._resource = resource
        self._namespaces = namespaces
        self._record = record
        self._on_change = on_change
        self._on_absent = on_absent
        self._telling = threading.RLock()
        self._lock = threading.Lock()
        self._records: dict[ObjectKey, RecordT] = {}
        self._versions: dict[ObjectKey, int] = {}
        self._gone: dict[Hashable, int] = {}
        self._listed: dict[str, int] = {}
        self._first_listed: dict[str, int] = {}
        self._synced = {namespace: threading.Event() for namespace in namespaces}
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to list and watch."""
        for namespace in self._namespaces:
            thread = threading.Thread(
                target=self._run,
                args=(namespace,),
                name=f"{self._resource.plural}-{namespace or 'all'}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Do not begin another watch; a running one ends with the process."""
        self._stopped.set()

    def wait_synced(self, timeout_s: float) -> bool:
        """Return whether everything was listed once, within a time."""
        return all(event.wait(timeout_s) for event in self._synced.values())

    def snapshot(self) -> Mapping[ObjectKey, RecordT]:
        """Return all records."""
        with self._lock:
            return dict(self._records)

    def get(self, key: ObjectKey) -> RecordT | None:
        """Return one record."""
        with self._lock:
            return self._records.get(key)

    def is_of_first_list(self, content: Json) -> bool:
        """Return whether an object was not changed since this process listed it for the first time.

        All that a process before this one read, and could write with its version, is in that list.
        """
        version = _number((content.get("metadata") or {}).get("resourceVersion"))
        with self._lock:
            return version <= _of_namespace(self._first_listed, _key_of(content))

    def put(self, content: Json) -> None:
        """Take what a request returned, however late."""
        self._apply(content, is_deleted=False)

    def remove(self, content: Json) -> None:
        """Take note that an object is gone."""
        self._apply(content, is_deleted=True)

    def replace(self, namespace: str, items: list[Json], version: str) -> None:
        """Take a whole list; what is not in it is gone, unless it was put in since."""
        number = _number(version)
        listed = {_key_of(content) for content in items}
        for content in items:
            self._apply(content, is_deleted=False, is_listed=True)
        with self._telling:
            with self._lock:
                self._listed[namespace] = max(number, self._listed.get(namespace, 0))
                self._first_listed.setdefault(namespace, number)
                missing = [
                    key
                    for key in self._records
                    if key not in listed
                    and (not namespace or key[0] == namespace)
                    and self._versions.get(key, 0) <= number
                ]
                removed = [self._records.pop(key) for key in missing]
                for key in missing:
                    self._versions.pop(key, None)
            for record in removed:
                self._on_change(record, None)
        if namespace in self._synced:
            self._synced[namespace].set()

    def _run(self, namespace: str) -> None:
        pauses = backoff(*_RETRY_S)
        while not self._stopped.is_set():
            try:
                items, version = self._cluster.list(self._resource, namespace)
                self.replace(namespace, items, version)
                pauses = backoff(*_RETRY_S)
                self._follow(namespace, version)
                reason = "ended"
            except ApiError as failure:
                reason = "too_old" if failure.is_gone else "failed"
                if failure.is_not_found and self._on_absent is not None:
                    self._on_absent()
                    self._stopped.wait(_ABSENT_RETRY_S)
                elif not failure.is_gone:
                    logger.warning(
                        "watch failed",
                        extra={"resource": self._resource.plural, "problem": str(failure)},
                    )
                    self._stopped.wait(next(pauses))
            except Exception:
                reason = "failed"
                logger.exception("watch failed by a bug")
                self._stopped.wait(_RETRY_S[1])
            WATCH_RESTARTS.labels(self._resource.plural, reason).inc()

    def _follow(self, namespace: str, version: str) -> None:
        timeout_s = int(_WATCH_S * random.uniform(0.8, 1.2))
        for kind, content in self._cluster.watch(
            self._resource, namespace, version, timeout_s=timeout_s
        ):
            if self._stopped.is_set():
                return
            if kind != "BOOKMARK":
                self._apply(content, is_deleted=kind == "DELETED")

    def _apply(self, content: Json, *, is_deleted: bool, is_listed: bool = False) -> None:
        key = _key_of(content)
        metadata = content.get("metadata") or {}
        version = _number(metadata.get("resourceVersion"))
        tombstone = (key, metadata.get("uid"))
        record = None if is_deleted else self._record(content)
        # What a listener keeps would be of an overtaken state if two were told at once.
        with self._telling:
            with self._lock:
                # Resource versions grow; what is older than what is known was overtaken on its way.
                known = max(self._versions.get(key, 0), self._gone.get(tombstone, 0))
                if version < known:
                    return
                before = self._records.get(key)
                listed = 0 if is_listed else _of_namespace(self._listed, key)
                if before is None and 0 < version <= listed:
                    # A newer list did not have it: it is gone, as a late answer cannot know.
                    return
                if is_deleted:
                    self._bury(key, tombstone, version)
                else:
                    assert record is not None
                    self._records[key] = record
                    self._versions[key] = version
            if before is not None or record is not None:
                self._on_change(before, record)

    def _bury(self, key: ObjectKey, tombstone: Hashable, version: int) -> None:
        self._gone[tombstone] = version
        while len(self._gone) > _TOMBSTONES:
            del self._gone[next(iter(self._gone))]
        self._records.pop(key, None)
        self._versions.pop(key, None)


def _key_of(content: Json) -> ObjectKey:
    metadata = content.get("metadata") or {}
    return str(metadata.get("namespace") or ""), str(metadata.get("name") or "")


def _of_namespace(versions: Mapping[str, int], key: ObjectKey) -> int:
    """Return the version of the list that an object would be in; 0 before the first."""
    return max(versions.get(key[0], 0), versions.get("", 0))


def _number(version: object) -> int:
    text = str(version or "0")
    return int(text) if text.isdigit() else 0
