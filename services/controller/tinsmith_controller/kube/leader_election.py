"""Leader election: the replica that holds a Lease decides.

The holder renews the Lease with its resource version as precondition. It trusts the Lease for less
time than others wait, counted on its monotonic clock from before the request. Others count on
theirs, from when they saw the Lease change. So no two clocks are ever compared.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from tinsmith_controller.kube.api_client import LEASES, ApiError, Json, Resource
from tinsmith_controller.metrics import IS_LEADER

logger = logging.getLogger(__name__)

BELIEF = 0.6
"""Part of the lease's life in which its holder believes in it."""


class LeaseStore(Protocol):
    """What the election asks of the API server."""

    def get(self, resource: Resource, namespace: str, name: str) -> Json:
        """Return one object."""
        ...

    def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        """Create an object."""
        ...

    def replace(
        self, resource: Resource, namespace: str, body: Json, *, subresource: str = ""
    ) -> Json:
        """Replace an object unless it was changed."""
        ...


class NotLeaderError(Exception):
    """This replica may not act, or not any more."""


class LeaderElection:
    """One replica's part in the election.

    Args:
        cluster: The API server.
        namespace: Of the Lease.
        name: Of the Lease.
        identity: Of this replica; no two have the same.
        ttl_s: After how long without a renewal others take the Lease.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        cluster: LeaseStore,
        *,
        namespace: str,
        name: str,
        identity: str,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._ttl_s = ttl_s
        self._clock = clock
        self._believed_until_s = 0.0
        self._seen: tuple[str, float] = ("", 0.0)
        self._stopped = threading.Event()
        # Held over what is asked of the server: what is under way at a stop is given back as well.
        self._asking = threading.Lock()

    @property
    def is_leader(self) -> bool:
        """Whether this replica may act now."""
        return self._clock() < self._believed_until_s

    def require(self) -> None:
        """Raise `NotLeaderError` unless this replica may act now."""
        if not self.is_leader:
            raise NotLeaderError(f"{self._identity} does not hold the lease {self._name}")

    def wait_elected(self) -> bool:
        """Return True once this replica is elected, False if it was stopped before."""
        while not self._stopped.is_set():
            if self.try_once():
                return not self._stopped.is_set()
            self._stopped.wait(self._ttl_s / 5)
        return False

    def keep(self, on_lost: Callable[[], None]) -> None:
        """Renew until stopped; call `on_lost` if that could not be done in time."""
        try:
            while not self._stopped.wait(self._ttl_s / 5):
                self.try_once()
                if not self.is_leader and not self._stopped.is_set():
                    break
            else:
                return
        except Exception:
            # A leader that does not renew would neither act nor make way.
            logger.exception("the lease is not renewed by a bug")
        IS_LEADER.set(0)
        on_lost()

    def stop(self) -> None:
        """End the election on this side, and release the Lease, so that no replica waits for it."""
        self._stopped.set()
        with self._asking:
            self._release()

    def _release(self) -> None:
        if not self.is_leader:
            return
        self._believed_until_s = 0.0
        IS_LEADER.set(0)
        try:
            lease = self._cluster.get(LEASES, self._namespace, self._name)
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                self._cluster.replace(LEASES, self._namespace, lease)
        except ApiError as failure:
            logger.info("the lease was not given back", extra={"problem": str(failure)})

    def try_once(self) -> bool:
        """Renew the Lease, or take it if it is free; return whether this replica holds it."""
        with self._asking:
            return not self._stopped.is_set() and self._try()

    def _try(self) -> bool:
        begin_s = self._clock()
        try:
            held = self._renew_or_take(begin_s)
        except ApiError as failure:
            logger.warning("the lease cannot be renewed", extra={"problem": str(failure)})
            return self.is_leader
        if held:
            self._believed_until_s = begin_s + BELIEF * self._ttl_s
            IS_LEADER.set(1)
        elif self._believed_until_s:
            self._believed_until_s = 0.0
        return held

    def _renew_or_take(self, now_s: float) -> bool:
        try:
            lease = self._cluster.get(LEASES, self._namespace, self._name)
        except ApiError as failure:
            if not failure.is_not_found:
                raise
            return self._write(None, num_transitions=0)
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        version = str(lease["metadata"]["resourceVersion"])
        if version != self._seen[0]:
            self._seen = (version, now_s)
        is_free = not holder or now_s - self._seen[1] > self._ttl_s
        if holder != self._identity and not is_free:
            return False
        transitions = int(spec.get("leaseTransitions") or 0) + (holder != self._identity)
        return self._write(lease, num_transitions=transitions)

    def _write(self, lease: Json | None, *, num_transitions: int) -> bool:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._ttl_s)),
            "renewTime": now,
            "leaseTransitions": num_transitions,
        }
        try:
            if lease is None:
                metadata = {"name": self._name, "namespace": self._namespace}
                body: Json = {
                    "apiVersion": "coordination.k8s.io/v1",
                    "kind": "Lease",
                    "metadata": metadata,
                    "spec": spec,
                }
                self._cluster.create(LEASES, self._namespace, body)
            else:
                lease["spec"] = {**lease.get("spec", {}), **spec}
                self._cluster.replace(LEASES, self._namespace, lease)
        except ApiError as failure:
            if failure.status == 409:
                return False
            raise
        return True
