"""The two ways to run the services in tests: in one process, and as one process for each pod."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
from tests.support.pod_keys import POD_KEY
from tests.support.wait import TIMEOUT_S

import tinsmith
from tinsmith.v1 import keys_pb2, keys_pb2_grpc, scheduler_pb2_grpc
from tinsmith_local.embedded import EmbeddedConfig, EmbeddedServer
from tinsmith_local.process import free_port
from tinsmith_runtime.rpc.auth import ApiKey

BASE_MODEL = "tiny"
_POLL_S = 0.05
T = TypeVar("T")


@dataclass(frozen=True)
class Deployment:
    """Where running services are, and a key of their operators."""

    address: str
    api_key: str
    model_dir: Path

    def client(self, **options: Any) -> tinsmith.Client:
        """Return a connected client that waits no longer than a test may take."""
        return tinsmith.Client(
            self.address,
            options.pop("api_key", self.api_key),
            operation_timeout_s=TIMEOUT_S,
            retry=tinsmith.RetryPolicy(budget_s=TIMEOUT_S),
            **options,
        )

    @contextlib.contextmanager
    def scheduler_stub(self) -> Iterator[Any]:
        """Open a stub of the scheduler, for what the SDK does not offer."""
        with grpc.insecure_channel(self.address) as channel:
            yield scheduler_pb2_grpc.SchedulerServiceStub(channel)

    @contextlib.contextmanager
    def key_stub(self) -> Iterator[Any]:
        """Open a stub of the keys, for what the SDK does not offer."""
        with grpc.insecure_channel(self.address) as channel:
            yield keys_pb2_grpc.KeyServiceStub(channel)


class EmbeddedThread:
    """The embedded server in a thread of this process; may be stopped and started again.

    Args:
        data_dir: Kept between starts.
        model_dir: Of the base model.
        overrides: Settings by pod.
        metrics_address: Of the endpoint of Prometheus; None serves none.
    """

    def __init__(
        self,
        data_dir: Path,
        model_dir: Path,
        overrides: Mapping[str, dict[str, object]] | None = None,
        *,
        metrics_address: str | None = None,
    ) -> None:
        self._metrics_address = metrics_address
        self._data_dir = data_dir
        self._model_dir = model_dir
        self._overrides = dict(overrides or {})
        # Its own from the beginning: a port of any would be given to another while it is stopped.
        self._port = free_port()
        self._server: EmbeddedServer
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None

    def start(self) -> Deployment:
        """Start the server, on the port of the last start if there was one."""
        self._server = EmbeddedServer(
            EmbeddedConfig(
                data_dir=self._data_dir,
                models={BASE_MODEL: str(self._model_dir)},
                port=self._port,
                metrics_address=self._metrics_address,
                num_threads=1,
                overrides=self._overrides,
            )
        )
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_handle_exception)
        self._thread = threading.Thread(target=self._loop.run_forever, name="server")
        self._thread.start()
        try:
            self.run(self._server.start())
        except BaseException:
            self._end_thread()
            raise
        self._port = int(self._server.address.rpartition(":")[2])
        return Deployment(self._server.address, self._server.api_key, self._model_dir)

    def stop(self) -> None:
        """Drain and stop; repeating it changes nothing."""
        if self._thread is None:
            return
        try:
            self.run(self._server.stop())
        finally:
            self._end_thread()

    @property
    def pod_key(self) -> str:
        """The secret of its pods, for what no client may do."""
        return self._server._pod_key

    @property
    def scheduler_address(self) -> str:
        """Where pods find the scheduler; clients are given the gateway."""
        return self._server._scheduler_address

    @contextlib.contextmanager
    def engine_held(self) -> Iterator[None]:
        """Keep the engine busy, so that what is submitted waits."""
        engines = self._server._engines
        assert engines is not None
        release = threading.Event()
        held = engines.thread.submit(release.wait)
        try:
            yield
        finally:
            release.set()
            held.result(TIMEOUT_S)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns that runs in the loop of the server."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)

    def _end_thread(self) -> None:
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self._thread = None


@contextlib.contextmanager
def embedded_server(
    data_dir: Path, model_dir: Path, **overrides: dict[str, object]
) -> Iterator[Deployment]:
    """Run all services in this process; settings by pod."""
    server = EmbeddedThread(data_dir, model_dir, overrides)
    deployment = server.start()
    try:
        yield deployment
    finally:
        server.stop()


@contextlib.contextmanager
def pod_processes(folder: Path, model_dir: Path) -> Iterator[Deployment]:
    """Run scheduler, trainer and sampler as processes that share nothing but the store."""
    with pods(folder, model_dir) as (deployment, _):
        yield deployment


@contextlib.contextmanager
def pods(
    folder: Path,
    model_dir: Path,
    *,
    with_gateway: bool = False,
    more: Sequence[str] = (),
    num_samplers: int = 1,
    certificates: Path | None = None,
    settings: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[tuple[Deployment, dict[str, PodProcess]]]:
    """Run the pods as processes, which may be killed and started again.

    Args:
        folder: Of their data, logs and store.
        model_dir: Of the base model.
        with_gateway: Whether there is a gateway, whose address the deployment then has.
        more: Of `environment` and `coordinator`, which there are.
        num_samplers: Samplers, named `sampler`, `sampler-1` and so on.
        certificates: A folder of `tinsmith certificates`; without one pods speak in clear.
        settings: Further ones by pod, by name in capitals.
    """
    address = f"127.0.0.1:{free_port()}"
    api_key = str(ApiKey.generate())
    shared = {
        "POD_KEY": POD_KEY,
        "SCHEDULER_ADDRESS": address,
        "LISTEN_ADDRESS": "127.0.0.1:0",
        "DRAIN_TIMEOUT_S": "5",
    }
    engine = {
        **shared,
        "BASE_MODELS": f"{BASE_MODEL}={model_dir}",
        "STORAGE_URI": f"file://{folder / 'store'}",
        "NUM_THREADS": "1",
    }
    by_pod = {
        "scheduler": {
            **engine,
            "DATA_DIR": str(folder / "scheduler"),
            "BOOTSTRAP_KEY": api_key,
            "LISTEN_ADDRESS": address,
        },
        "trainer": {**engine, "DATA_DIR": str(folder / "trainer")},
        "sampler": engine,
    }
    for index in range(1, num_samplers):
        by_pod[f"sampler-{index}"] = {**engine, "WORKER_NAME": f"sampler-{index}"}
    served = address
    if with_gateway:
        served = f"127.0.0.1:{free_port()}"
        by_pod["gateway"] = {
            **shared,
            "DATA_DIR": str(folder / "gateway"),
            "LISTEN_ADDRESS": served,
            "LONG_POLL_S": "2",
        }
    for pod in more:
        by_pod[pod] = {**shared, "DATA_DIR": str(folder / pod)} if pod == "coordinator" else shared
    for pod, further in (settings or {}).items():
        by_pod[pod] = {**by_pod[pod], **further}
    if certificates is not None:
        for pod, values in by_pod.items():
            own = certificates / pod.partition("-")[0]
            values["POD_CERTIFICATE"] = str(own / "tls.crt")
            values["POD_CERTIFICATE_KEY"] = str(own / "tls.key")
            values["POD_AUTHORITY"] = str(own / "ca.crt")
    processes = {pod: PodProcess(pod, folder, values) for pod, values in by_pod.items()}
    try:
        for process in processes.values():
            process.start()
        asked = address if certificates is None else served
        _wait_until_served(Deployment(asked, api_key, model_dir), processes, folder)
        yield Deployment(served, api_key, model_dir), processes
    finally:
        # All at once: they drain beside each other.
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait()


class PodProcess:
    """One pod as a process.

    Args:
        pod: Its kind, with `-` and a number where there are several.
        folder: Where its log goes.
        settings: By name, in capitals.
    """

    def __init__(self, pod: str, folder: Path, settings: Mapping[str, str]) -> None:
        inherited = {key: value for key, value in os.environ.items() if "TINSMITH_" not in key}
        self.metrics_address = f"127.0.0.1:{free_port()}"
        settings = {"METRICS_ADDRESS": self.metrics_address, **settings}
        variables = {f"TINSMITH_{key}": value for key, value in settings.items()}
        self._environment = {**inherited, **variables}
        self._pod = pod
        self.log = folder / f"{pod}.log"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Start the pod, and do not wait for it."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"tinsmith_{self._pod.partition('-')[0]}"],
                env=self._environment,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """Send SIGKILL to the pod, and reap it."""
        assert self._process is not None, "the pod was not started"
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        """Number of the process."""
        assert self._process is not None, "the pod was not started"
        return self._process.pid

    def poll(self) -> int | None:
        """Return how the pod ended; None if it has not."""
        assert self._process is not None, "the pod was not started"
        return self._process.poll()

    def terminate(self) -> None:
        """Ask the pod to drain and end."""
        if self._process is not None:
            self._process.terminate()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()
        self.wait()

    def wait(self) -> None:
        """Wait until the pod has ended; kill it if it does not."""
        if self._process is None:
            return
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()


def _wait_until_served(
    deployment: Deployment, processes: Mapping[str, PodProcess], folder: Path
) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    pause = threading.Event()
    with deployment.client() as client:
        while not any(model.trainable and model.sampleable for model in client.list_models()):
            for pod, process in processes.items():
                log = (folder / f"{pod}.log").read_text()
                assert process.poll() is None, f"{pod} ended: {log}"
            assert time.monotonic() < deadline_s, "the pods did not register in time"
            pause.wait(_POLL_S)


def create_key(deployment: Deployment, project: str) -> str:
    """Return a new key of a project, made by the operators."""
    request = keys_pb2.CreateKeyRequest(parent=f"projects/{project}", request_id=new_request_id())
    with deployment.key_stub() as stub:
        key = stub.CreateKey(request, metadata=bearer(deployment.api_key), timeout=TIMEOUT_S)
    return str(key.secret)


def new_request_id() -> str:
    """Return a request id."""
    return str(uuid.uuid4())


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    """Return the call metadata that carries a key."""
    return (("authorization", f"Bearer {key}"),)


def weight_files(checkpoint: tinsmith.Checkpoint) -> dict[str, bytes]:
    """Return the tensor files of a checkpoint, by name."""
    return {
        path.name: path.read_bytes() for path in checkpoint_folder(checkpoint).glob("*.safetensors")
    }


def checkpoint_folder(checkpoint: tinsmith.Checkpoint) -> Path:
    """Return where the files of a checkpoint are."""
    return Path(checkpoint.manifest_uri.removeprefix("file://")).parent


def _handle_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # grpc.aio has one wake-up socket for a process. With a second event loop in the process, both
    # wake and one finds the socket empty; that is harmless (github.com/grpc/grpc/issues/25364).
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
