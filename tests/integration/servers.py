"""The two ways to run the services in tests: in one process, and as one process for each pod."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
from tests.support.pods import PodDeployment, PodProcess
from tests.support.wait import TIMEOUT_S

import tinsmith
from tinsmith.v1 import keys_pb2, keys_pb2_grpc, scheduler_pb2_grpc
from tinsmith_local.embedded import EmbeddedConfig, EmbeddedServer
from tinsmith_local.process import free_port

BASE_MODEL = "tiny"
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
def pods(
    folder: Path,
    model_dir: Path,
    *more: str,
    settings: Mapping[str, Mapping[str, object]] | None = None,
    certificates: Path | None = None,
) -> Iterator[tuple[Deployment, dict[str, PodProcess]]]:
    """Run scheduler, trainer, sampler and more pods; see `PodDeployment` for the arguments."""
    names = ("scheduler", "trainer", "sampler", *more)
    patient = {"gateway": {"long_poll_s": 2}, **(settings or {})}
    with PodDeployment(
        folder, {BASE_MODEL: model_dir}, names, settings=patient, certificates=certificates
    ) as running:
        yield Deployment(running.address, running.api_key, model_dir), running.processes


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
