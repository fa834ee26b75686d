"""A deployment as processes on one machine: scheduler, trainers and samplers that can be killed.

Pods share a database and an object store, nothing else. Each keeps the name of the last failpoint
that it passed in a file, so that a test knows what a kill interrupted. What ends is started again,
as a cluster would, unless it is held down.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import tinsmith
from tinsmith_local.process import free_port
from tinsmith_runtime.rpc.auth import ApiKey

BASE_MODEL = "tiny"
START_TIMEOUT_S = 90.0
CALL_TIMEOUT_S = 180.0
_POLL_S = 0.02


class Pod:
    """One process of a deployment, which may be started again and again.

    Args:
        name: Such as `trainer-0`; its files are named after it.
        module: What is run, `python -m MODULE`.
        folder: Where log and failpoint go.
        settings: `TINSMITH_*` variables without the prefix.
    """

    def __init__(self, name: str, module: str, folder: Path, settings: Mapping[str, str]) -> None:
        self.name = name
        self.exit_codes: list[int] = []
        self.armed = ""
        """Failpoints of the process that was started last."""
        self._module = module
        self._settings = dict(settings)
        self._folder = folder
        self._trace = folder / f"{name}.failpoint"
        self._process: subprocess.Popen[bytes] | None = None
        self._is_wanted = False
        self._armed: collections.deque[str] = collections.deque()
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """Process id of the last start."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def phase(self) -> str:
        """The last failpoint that it passed since its last start; empty before the first."""
        return self._trace.read_text().strip() if self._trace.is_file() else ""

    @property
    def log(self) -> str:
        """All that it wrote, over all starts."""
        return (self._folder / f"{self.name}.log").read_text(errors="replace")

    def start(self, *, failpoints: str = "") -> None:
        """Start the process.

        Args:
            failpoints: For this start alone; see `tinsmith_runtime.failpoints`.
        """
        with self._lock:
            self._is_wanted = True
            self._start(failpoints)

    def arm(self, failpoints: Iterable[str]) -> None:
        """Set the failpoints of the next starts, one value of TINSMITH_FAILPOINTS for each."""
        with self._lock:
            self._armed.extend(failpoints)

    def kill(self, *, hold_down: bool = False) -> str:
        """Send SIGKILL and reap; return the last failpoint that it passed.

        Args:
            hold_down: Whether it stays down until `start`.
        """
        with self._lock:
            self._is_wanted = self._is_wanted and not hold_down
            if self._process is not None and self._process.poll() is None:
                self._process.kill()
                self._reap()
            return self.phase

    def stop(self, *, timeout_s: float = 30.0) -> None:
        """Ask it to drain and end; kill it if it does not."""
        with self._lock:
            self._is_wanted = False
            if self._process is None or self._process.poll() is not None:
                return
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
            self._reap()

    def pause(self) -> None:
        """Send SIGSTOP: it holds its connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def wait_exit(self, timeout_s: float) -> int:
        """Return the exit code of the process that runs now.

        Raises:
            TimeoutError: If it does not end.
        """
        num_ends = len(self.exit_codes)
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            with self._lock:
                if len(self.exit_codes) == num_ends and not self.is_alive:
                    self._reap()
                if len(self.exit_codes) > num_ends:
                    return self.exit_codes[num_ends]
            time.sleep(_POLL_S)
        raise TimeoutError(f"{self.name} did not end within {timeout_s:g} s")

    def look_after(self) -> None:
        """Start it again if it ended and is wanted."""
        with self._lock:
            if not self._is_wanted or self.is_alive:
                return
            self._reap()
            self._start("")

    def _start(self, failpoints: str) -> None:
        if not failpoints and self._armed:
            failpoints = self._armed.popleft()
        self.armed = failpoints
        self._trace.unlink(missing_ok=True)
        inherited = {key: value for key, value in os.environ.items() if "TINSMITH_" not in key}
        variables = {f"TINSMITH_{key}": value for key, value in self._settings.items()}
        variables["TINSMITH_FAILPOINT_TRACE"] = str(self._trace)
        if failpoints:
            variables["TINSMITH_FAILPOINTS"] = failpoints
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                env={**inherited, "OMP_NUM_THREADS": "1", **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _reap(self) -> None:
        if self._process is not None:
            self.exit_codes.append(self._process.wait())
            self._process = None


class Cluster:
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
        settings: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.api_key = str(ApiKey.generate())
        self._is_over = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        further = {"scheduler": {}, "trainer": {}, "sampler": {}, **(settings or {})}
        shared = {
            "POD_KEY": "pod-key-of-the-tests",
            "LISTEN_ADDRESS": "127.0.0.1:0",
            "DRAIN_TIMEOUT_S": "5",
        }
        worker = {
            **shared,
            "SCHEDULER_ADDRESS": self.address,
            "BASE_MODELS": f"{BASE_MODEL}={model_dir}",
            "STORAGE_URI": storage_uri or f"file://{(folder / 'store').resolve()}",
            "NUM_THREADS": "1",
        }
        self.scheduler = Pod(
            "scheduler",
            "tinsmith_scheduler",
            folder,
            {
                **shared,
                "DATA_DIR": str(folder / "scheduler"),
                "DATABASE_URL": database_url,
                "BOOTSTRAP_KEY": self.api_key,
                "LISTEN_ADDRESS": self.address,
                # Quick to notice, because a test waits for it.
                "WORKER_HEARTBEAT_INTERVAL_S": "0.5",
                "WORKER_TIMEOUT_S": "2.5",
                "REAP_INTERVAL_S": "0.2",
                **further["scheduler"],
            },
        )
        self.trainers = [
            Pod(
                f"trainer-{index}",
                "tinsmith_trainer",
                folder,
                {
                    **worker,
                    "WORKER_NAME": f"trainer-{index}",
                    "DATA_DIR": str(folder / f"trainer-{index}"),
                    "DATABASE_URL": database_url,
                    "LEASE_TTL_S": "3",
                    **further["trainer"],
                },
            )
            for index in range(num_trainers)
        ]
        self.samplers = [
            Pod(
                f"sampler-{index}",
                "tinsmith_sampler",
                folder,
                {**worker, "WORKER_NAME": f"sampler-{index}", **further["sampler"]},
            )
            for index in range(num_samplers)
        ]

    @property
    def pods(self) -> list[Pod]:
        """All pods."""
        return [self.scheduler, *self.trainers, *self.samplers]

    def __enter__(self) -> Cluster:
        for pod in self.pods:
            pod.start()
        try:
            self.wait_served()
        except BaseException:
            self._end()
            raise
        self._supervisor.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def client(self, **options: object) -> tinsmith.Client:
        """Return a connected client, which tries for as long as a test may take."""
        return tinsmith.Client(
            self.address,
            self.api_key,
            operation_timeout_s=CALL_TIMEOUT_S,
            retry=tinsmith.RetryPolicy(budget_s=CALL_TIMEOUT_S),
            **options,  # type: ignore[arg-type]
        )

    def trainer_of(self, client: tinsmith.Client, run: str) -> Pod:
        """Return the trainer that holds a run; waits while it moves."""
        end_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end_s:
            [info] = [info for info in client.runs.list() if info.name == run]
            for trainer in self.trainers:
                if info.worker == f"workers/{trainer.name}" and info.state == "active":
                    return trainer
            time.sleep(_POLL_S)
        raise TimeoutError(f"no trainer holds {run}")

    def wait_served(self) -> None:
        """Return once all workers are listed."""
        end_s = time.monotonic() + START_TIMEOUT_S
        with self.client() as client:
            while True:
                models = client.list_models()
                is_sampled = not self.samplers or any(model.sampleable for model in models)
                listed = "".join(pod.log for pod in self.trainers).count('"event": "registered"')
                if any(m.trainable for m in models) and is_sampled and listed >= len(self.trainers):
                    return
                for pod in self.pods:
                    assert pod.is_alive, f"{pod.name} ended: {pod.log}"
                assert time.monotonic() < end_s, "the pods did not register in time"
                time.sleep(_POLL_S)

    def _supervise(self) -> None:
        while not self._is_over.wait(0.1):
            for pod in self.pods:
                pod.look_after()

    def _end(self) -> None:
        self._is_over.set()
        with contextlib.suppress(RuntimeError):
            self._supervisor.join()
        stops = [threading.Thread(target=pod.stop) for pod in self.pods]
        for stop in stops:
            stop.start()
        for stop in stops:
            stop.join()
