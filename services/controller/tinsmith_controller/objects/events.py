"""Events of workloads, which `kubectl describe` shows: one object for each thing that happened.

The same event again raises the count of the first. Losing one is no harm: the status has what
matters.
"""

from __future__ import annotations

import datetime
import hashlib
import logging

from tinsmith_controller.kube.api_client import EVENTS, ApiError, Cluster, Json
from tinsmith_jobs.naming import GROUP, MANAGER, VERSION, NamespacedName
from tinsmith_jobs.plan.actions import Event
from tinsmith_jobs.status_codec import encode_time

logger = logging.getLogger(__name__)

_MAX_MESSAGE = 1024
_MAX_COUNTS = 10_000


class EventRecorder:
    """Writes events."""

    def __init__(self, cluster: Cluster, *, identity: str) -> None:
        self._cluster = cluster
        self._identity = identity
        self._counts: dict[str, int] = {}

    def record(self, key: NamespacedName, uid: str, event: Event, now: datetime.datetime) -> None:
        """Write an event of a workload."""
        digest = hashlib.sha256(f"{uid}\0{event.reason}\0{event.message}".encode()).hexdigest()
        name = f"{key.name}.{digest[:16]}"
        count = self._counts[name] = self._counts.get(name, 0) + 1
        while len(self._counts) > _MAX_COUNTS:
            del self._counts[next(iter(self._counts))]
        try:
            if count == 1:
                self._cluster.create(EVENTS, key.namespace, self._body(key, uid, event, now, name))
            else:
                self._again(key, name, count, now)
        except ApiError as error:
            if error.already_exists:
                # Written by a controller before this one; from here on it is counted.
                self._counts[name] = 1
                return
            if error.is_not_found:
                # The cluster keeps events for an hour; the next one is written anew.
                del self._counts[name]
                return
            logger.info("an event was not written", extra={"problem": str(error)})

    def _again(self, key: NamespacedName, name: str, count: int, now: datetime.datetime) -> None:
        body = {"count": count, "lastTimestamp": encode_time(now)}
        self._cluster.patch(EVENTS, key.namespace, name, body)

    def _body(
        self, key: NamespacedName, uid: str, event: Event, now: datetime.datetime, name: str
    ) -> Json:
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": key.namespace},
            "involvedObject": {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": key.kind,
                "namespace": key.namespace,
                "name": key.name,
                "uid": uid,
            },
            "reason": event.reason,
            "message": event.message[:_MAX_MESSAGE],
            "type": "Warning" if event.is_warning else "Normal",
            "count": 1,
            "firstTimestamp": encode_time(now),
            "lastTimestamp": encode_time(now),
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "reportingInstance": self._identity,
        }
