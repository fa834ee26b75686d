"""A deployment as processes on one machine: scheduler, trainers and samplers that can be killed.

Pods share a database and an object store, nothing else. Each keeps the name of the last failpoint
that it passed in a file, so that a test knows what a kill interrupted. What ends is started again,
as a cluster would, unless it is held down.
"""

from __future__ import annotations

import collections
import contextlib
import signal
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

import tinsmith
from tests.support.pods import PodDeployment, PodProcess
from tests.support.wait import until

BASE_MODEL = "tiny"


class Pod(PodProcess):
    """A pod that a cluster starts again when it ends, unless it is held down.

    Args:
        name: Such as `trainer-0`; its files are named after it.
        folder: Where log and failpoint go.
        settings: By name of the field.
    """

    def __init__(self, name: str, folder: Path, settings: Mapping[str, object]) -> None:
        super().__init__(name, folder, settings)
        self.armed = ""
        """Failpoints of the process that was started last."""
        self._trace = folder / f"{name}.failpoint"
        self.variables["TINSMITH_FAILPOINT_TRACE"] = str(self._trace)
        self._is_wanted = False
        self._armed: collections.deque[str] = collections.deque()
        self._lock = threading.RLock()

    @property
    def phase(self) -> str:
        """The last failpoint that it passed since its last start; empty before the first."""
        return self._trace.read_text().strip() if self._trace.is_file() else ""

    def start(self, variables: Mapping[str, str] | None = None) -> None:
        """Start the process, with the failpoints that were armed for this start."""
        with self._lock:
            self._is_wanted = True
            self.armed = self._armed.popleft() if self._armed else ""
            self._trace.unlink(missing_ok=True)
            armed = {"TINSMITH_FAILPOINTS": self.armed} if self.armed else {}
            super().start({**armed, **(variables or {})})

    def arm(self, failpoints: Iterable[str]) -> None:
        """Set the failpoints of the next starts, one value of TINSMITH_FAILPOINTS for each."""
        with self._lock:
            self._armed.extend(failpoints)

    def kill(self) -> None:
        """Send SIGKILL and reap; it is started again."""
        with self._lock:
            super().kill()

    def hold_down(self) -> None:
        """Kill it, and have it stay down until `start`."""
        with self._lock:
            self._is_wanted = False
            self.kill()

    def strike(self) -> str:
        """Kill it, and return the last failpoint that it passed."""
        with self._lock:
            self.kill()
            return self.phase

    def stop(self, *, is_asked: bool = False) -> bool:
        """Ask it to drain and end, also if it is paused, and keep it down."""
        with self._lock:
            self._is_wanted = False
            if self.is_running:
                self.send(signal.SIGCONT)
            return super().stop(is_asked=is_asked)

    def look_after(self) -> None:
        """Start it again if it ended and is wanted."""
        with self._lock:
            if self._is_wanted and not self.is_running:
                self.start()


class Cluster(PodDeployment):
    """Scheduler, trainers and samplers on one database and one store.

    Args:
        folder: Data and logs go below it.
        model_dir: Of the base model, served as `tiny`.
        database_url: `postgresql://...`.
        storage_uri: The object store; a folder by default.
        num_trainers: Trainers that share the ledger.
        num_samplers: Samplers; none samples nothing.
        settings: Further settings by role: `scheduler`, `trainer`, `sampler`.
    """

    def __init__(
        self,
        folder: Path,
        model_dir: Path,
        *,
        database_url: str,
        storage_uri: str = "",
        num_trainers: int = 2,
        num_samplers: int = 0,
        settings: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        further = {"scheduler": {}, "trainer": {}, **(settings or {})}
        # Quick to notice, because a test waits for it.
        scheduler = {
            "worker_heartbeat_interval_s": 0.5,
            "worker_timeout_s": 2.5,
            "reap_interval_s": 0.2,
        }
        merged = {
            **further,
            "scheduler": {"database_url": database_url, **scheduler, **further["scheduler"]},
            "trainer": {"database_url": database_url, "lease_ttl_s": 3, **further["trainer"]},
        }
        super().__init__(folder, {BASE_MODEL: model_dir}, settings=merged, storage_uri=storage_uri)
        self._is_over = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self.scheduler = self._pod("scheduler")
        self.trainers = [self._pod(f"trainer-{index}") for index in range(num_trainers)]
        self.samplers = [self._pod(f"sampler-{index}") for index in range(num_samplers)]
        self.processes = {pod.name: pod for pod in self.pods}

    @property
    def pods(self) -> list[Pod]:
        """All pods."""
        return [self.scheduler, *self.trainers, *self.samplers]

    def __enter__(self) -> Self:
        super().__enter__()
        self._supervisor.start()
        return self

    def stop(self) -> None:
        """End all pods, and start none again."""
        self._is_over.set()
        with contextlib.suppress(RuntimeError):
            self._supervisor.join()
        super().stop()

    def _pod(self, name: str) -> Pod:
        return Pod(name, self.folder, self.settings_of(name))

    def trainer_of(self, client: tinsmith.Client, run: str) -> Pod:
        """Return the trainer that holds a run; waits while it moves."""

        def holder() -> Pod | None:
            [info] = [info for info in client.runs.list() if info.name == run]
            holders = [each for each in self.trainers if info.worker == f"workers/{each.name}"]
            return holders[0] if holders and info.state == "active" else None

        return until(holder)

    def _supervise(self) -> None:
        while not self._is_over.wait(0.1):
            for pod in self.pods:
                pod.look_after()
