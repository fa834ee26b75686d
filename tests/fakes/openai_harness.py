"""A gateway in front of real pods and of scripted ones, in a thread; for HTTP clients."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Awaitable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
import openai
from tests.fakes.scheduler import bearer
from tests.fakes.scripted_sampler import SCRIPTED_MODEL, FakeCoordinator, ScriptedSampler

from tinsmith.v1 import episode_pb2, scheduler_pb2, scheduler_pb2_grpc
from tinsmith_local.embedded import EmbeddedConfig, EmbeddedServer

MESSAGES: Any = [{"role": "user", "content": "Pig Latin: hello"}]
EXACT = {"return_token_ids": True}
BASE_MODEL = "tiny"
ALIAS = "gpt-tiny"
TIMEOUT_S = 60.0

ResultT = TypeVar("ResultT")


PLAIN_MODEL = "plain"
"""A base model whose chat template knows no tools."""


class OpenAiRig:
    """Scheduler, trainer and sampler with the real engine; a scripted sampler; a gateway.

    Args:
        folder: For the data of the pods.
        model_dir: Of the base model.
        models: Further base models.
        gateway: Settings of the gateway.
    """

    def __init__(
        self,
        folder: Path,
        model_dir: Path,
        *,
        models: Mapping[str, Path] | None = None,
        **gateway: Any,
    ) -> None:
        self._gateway = {"model_aliases": f"{ALIAS}={BASE_MODEL}", **gateway}
        self._folder = folder
        self._models = {BASE_MODEL: model_dir, **(models or {})}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openai-rig")
        self.pods: EmbeddedServer
        self.sampler: ScriptedSampler
        self.coordinator: FakeCoordinator
        self._ends = contextlib.AsyncExitStack()

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self.run(self._start())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run(self._ends.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(TIMEOUT_S)
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def run(self, work: Awaitable[ResultT]) -> ResultT:
        """Return the result of a coroutine that runs beside the pods."""

        async def awaited() -> ResultT:
            async with asyncio.timeout(TIMEOUT_S):
                return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result(2 * TIMEOUT_S)

    @property
    def url(self) -> str:
        """Where the gateway is."""
        return f"http://{self.pods.address}"

    @property
    def key(self) -> str:
        """A key of the project."""
        return self.pods.api_key

    def client(self, key: str = "", **options: Any) -> openai.OpenAI:
        """Return a client that does not try again."""
        return openai.OpenAI(**self._options(key), **options)

    def async_client(self, key: str = "", **options: Any) -> openai.AsyncOpenAI:
        """Return a client that does not try again."""
        return openai.AsyncOpenAI(**self._options(key), **options)

    def episode_key(self, sampling_session: str, model: str = "policy") -> str:
        """Register an episode, and return its key."""
        key = f"tse-{uuid.uuid4().hex}"
        self.coordinator.episodes[key] = episode_pb2.Episode(
            name=f"projects/default/episodes/e-{uuid.uuid4().hex[:8]}",
            sampling_session=sampling_session,
            model=model,
        )
        return key

    def sampling_session(self, **source: str) -> str:
        """Open a sampling session natively, and return its name."""
        with self.scheduler() as (stub, metadata):
            session = stub.CreateSession(
                scheduler_pb2.CreateSessionRequest(
                    parent="projects/default", request_id=str(uuid.uuid4())
                ),
                metadata=metadata,
                timeout=TIMEOUT_S,
            )
            request = scheduler_pb2.CreateSamplingSessionRequest(
                parent=session.name, request_id=str(uuid.uuid4()), **source
            )
            return str(
                stub.CreateSamplingSession(request, metadata=metadata, timeout=TIMEOUT_S).name
            )

    @contextlib.contextmanager
    def scheduler(self) -> Iterator[tuple[Any, Any]]:
        """Open a stub of the scheduler, and what its calls carry."""
        with grpc.insecure_channel(self.pods.address) as channel:
            yield scheduler_pb2_grpc.SchedulerServiceStub(channel), bearer(self.key)

    def _options(self, key: str) -> dict[str, Any]:
        return {
            "base_url": f"{self.url}/v1",
            "api_key": key or self.key,
            "max_retries": 0,
            "timeout": TIMEOUT_S,
        }

    async def _start(self) -> None:
        self._loop.set_exception_handler(_handle_exception)
        self.pods = EmbeddedServer(
            EmbeddedConfig(
                data_dir=self._folder,
                models={name: str(path) for name, path in self._models.items()},
                port=0,
                num_threads=1,
                overrides={"gateway": self._gateway},
            )
        )
        await self.pods.start()
        self._ends.push_async_callback(self.pods.stop)
        scheduler_address, pod_key = self.pods._scheduler_address, self.pods._pod_key
        self.sampler = ScriptedSampler(scheduler_address, pod_key)
        self._ends.push_async_callback(self.sampler.stop)
        await self.sampler.start()
        self.coordinator = FakeCoordinator(scheduler_address, pod_key)
        self._ends.push_async_callback(self.coordinator.stop)
        await self.coordinator.start()


def _handle_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # grpc.aio has one wake-up socket for a process. With a second event loop in the process, both
    # wake and one finds the socket empty; that is harmless (github.com/grpc/grpc/issues/25364).
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)


def scripted(client: openai.OpenAI, **options: Any) -> Any:
    """Complete a conversation by the script."""
    return client.chat.completions.create(
        model=SCRIPTED_MODEL, messages=options.pop("messages", MESSAGES), **options
    )


def text_of_stream(chunks: Any, index: int = 0) -> str:
    return "".join(
        choice.delta.content or ""
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == index
    )
