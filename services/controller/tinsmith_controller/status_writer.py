"""Writes the statuses of jobs and pools, and settles writes whose outcome is not known.

A status is written with the version that it was decided from as precondition. Where the answer is
lost, the copy of the object may be behind what this process wrote. Then *the same write with the
same version* is sent again until the server says yes or conflict. Reading the object would not do:
the first copy of the write may still land after that.
"""

from __future__ import annotations

import logging
import threading

from tinsmith_controller.kube.api_client import JOBS, POOLS, ApiError, Cluster, Json
from tinsmith_controller.kube.leader_election import LeaderElection
from tinsmith_controller.objects.caches import Caches
from tinsmith_controller.objects.conversion import WorkloadRecord
from tinsmith_jobs.naming import JOB_KIND, NamespacedName
from tinsmith_jobs.status import Status
from tinsmith_jobs.status_codec import encode_status

logger = logging.getLogger(__name__)


class StatusWriter:
    """The one writer of statuses."""

    def __init__(self, cluster: Cluster, stores: Caches, election: LeaderElection) -> None:
        self._cluster = cluster
        self._stores = stores
        self._election = election
        self._lock = threading.Lock()
        self._unsettled: dict[NamespacedName, Json] = {}

    def write(self, record: WorkloadRecord, status: Status) -> None:
        """Write a status, if it differs and the object was not changed since.

        Raises:
            ApiError: If it was not written, or may not have been. After a conflict the copy is as
                new as the server's.
            NotLeaderError: If this replica may not act any more.
        """
        encoded = encode_status(status)
        if not record.content.get("status") and status == record.item.status:
            # Of a new job there is nothing to say until something comes of it.
            return
        if encoded != record.content.get("status"):
            self._send(record.item.key, {**record.content, "status": encoded})

    def settle(self, key: NamespacedName) -> None:
        """Send a write again whose outcome is not known, if there is one of this workload.

        Raises:
            ApiError: If the outcome is still not known.
            NotLeaderError: If this replica may not act any more.
        """
        with self._lock:
            body = self._unsettled.get(key)
        if body is None:
            return
        try:
            self._send(key, body)
        except ApiError as error:
            if error.is_outcome_unknown:
                raise
            logger.info("a write was not done", extra={"workload": str(key), "problem": str(error)})

    def settle_all(self) -> None:
        """Send all writes again whose outcome is not known; see `settle`."""
        with self._lock:
            keys = sorted(self._unsettled)
        for key in keys:
            self.settle(key)

    def _send(self, key: NamespacedName, body: Json) -> None:
        self._election.require()
        resource = JOBS if key.kind == JOB_KIND else POOLS
        try:
            answer = self._cluster.replace(resource, key.namespace, body, subresource="status")
        except ApiError as error:
            if not error.is_outcome_unknown and not error.is_conflict:
                self._forget(key)
                raise
            # Of two writes of one object the later one has its latest version. Once that one is
            # settled, the other cannot land any more.
            self._remember(key, body)
            if error.is_conflict:
                self._read(key)
            raise
        except Exception:
            self._remember(key, body)
            raise
        self._stores.note(resource, answer)
        self._forget(key)

    def _read(self, key: NamespacedName) -> None:
        """Read what another write made of an object: nothing of its old version can land now."""
        resource = JOBS if key.kind == JOB_KIND else POOLS
        try:
            self._stores.note(resource, self._cluster.get(resource, key.namespace, key.name))
        except ApiError as error:
            if not error.is_not_found:
                raise
        self._forget(key)

    def _remember(self, key: NamespacedName, body: Json) -> None:
        with self._lock:
            self._unsettled[key] = body

    def _forget(self, key: NamespacedName) -> None:
        with self._lock:
            self._unsettled.pop(key, None)
