"""Pods without processes: they run as soon as they are bound, and end when a test says so."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from urllib3.exceptions import HTTPError

from tests.e2e.cluster.api import ApiClient, ApiError, Json, path
from tests.e2e.cluster.nodes import timestamp
from tests.e2e.cluster.pod_status import ContainerState, pod_status, terminated

logger = logging.getLogger(__name__)

_NUM_ATTEMPTS = 10
_RETRY_S = 0.5

Outcome = Callable[[Json], int | None]
"""Gets a pod that was bound; returns the exit code with which it ends at once, None to run on."""
Ending = Callable[[Json], float]
"""Gets a pod that was deleted; returns the seconds that it takes to end."""


class InstantPods:
    """Writes the status of pods as if their containers ran.

    Args:
        api: Client of the kubelet.
        next_address: Gives a pod an address.
        outcome: Decides how a pod begins.
        ending: Decides how long a pod takes to end.
    """

    def __init__(
        self,
        api: ApiClient,
        next_address: Callable[[], str],
        outcome: Outcome,
        ending: Ending,
        num_threads: int = 8,
    ) -> None:
        self._api = api
        self._next_address = next_address
        self._outcome = outcome
        self._ending = ending
        self._timers: dict[str, threading.Timer] = {}
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="instant")
        self._lock = threading.Lock()
        self._started: dict[str, str] = {}
        """Addresses by uid."""

    def update(self, pod: Json) -> None:
        """Take note of a pod of a node whose kubelet speaks."""
        uid = pod["metadata"]["uid"]
        if "deletionTimestamp" in pod["metadata"]:
            self._let_end(pod)
            return
        with self._lock:
            if uid in self._started:
                return
            self._started[uid] = self._next_address()
        self._submit(self._begin, pod)

    def forget(self, uid: str) -> None:
        """Take note that a pod is gone."""
        with self._lock:
            self._started.pop(uid, None)

    def end(self, pod: Json, exit_code: int, message: str = "") -> None:
        """End every container of a pod."""
        started_at = pod["metadata"]["creationTimestamp"]
        self._write(pod, terminated(exit_code, started_at, message), is_ready=False)

    def close(self) -> None:
        """Wait for what is being written."""
        with self._lock:
            for timer in self._timers.values():
                timer.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _let_end(self, pod: Json) -> None:
        wait_s = self._ending(pod)
        if wait_s <= 0:
            self._submit(self._delete, pod)
            return
        uid = pod["metadata"]["uid"]
        with self._lock:
            if uid in self._timers:
                return
            timer = self._timers[uid] = threading.Timer(
                wait_s, lambda: self._submit(self._delete, pod)
            )
        timer.daemon = True
        timer.start()

    def _submit(self, act: Callable[[Json], None], pod: Json) -> None:
        def run() -> None:
            for _ in range(_NUM_ATTEMPTS):
                try:
                    act(pod)
                except (ApiError, HTTPError, OSError) as error:
                    if isinstance(error, ApiError) and error.status in (404, 409, 422):
                        return  # the pod is gone, or was replaced by a namesake
                    logger.warning("pod %s: %s", pod["metadata"]["name"], error)
                    time.sleep(_RETRY_S)
                except Exception:
                    logger.exception("pod %s", pod["metadata"]["name"])
                    return
                else:
                    return

        self._pool.submit(run)

    def _begin(self, pod: Json) -> None:
        code = self._outcome(pod)
        if code is None:
            self._write(pod, {"running": {"startedAt": timestamp()}}, is_ready=True)
        else:
            self.end(pod, code)

    def _delete(self, pod: Json) -> None:
        metadata = pod["metadata"]
        url = path("v1", "pods", metadata["namespace"], metadata["name"])
        self._api.delete(url, grace_s=0, uid=metadata["uid"])

    def _write(self, pod: Json, state: Json, *, is_ready: bool) -> None:
        metadata = pod["metadata"]

        def states(key: str) -> list[ContainerState]:
            return [
                ContainerState(c["name"], c["image"], state, is_ready=is_ready, is_started=is_ready)
                for c in pod["spec"].get(key, [])
            ]

        init = states("initContainers")
        for container in init:
            container.state = terminated(0, metadata["creationTimestamp"])
        # Nothing is started again: what ended, ended.
        spec = {**pod, "spec": {**pod["spec"], "restartPolicy": "Never"}}
        with self._lock:
            address = self._started.get(metadata["uid"])
        if address is None:
            return  # it is gone
        status = pod_status(spec, address, init, states("containers"))
        url = path("v1", "pods", metadata["namespace"], metadata["name"], "status")
        body = {"metadata": {"uid": metadata["uid"]}, "status": status}
        self._api.patch(url, body, kind="strategic")
