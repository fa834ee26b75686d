"""How a pod talks to the scheduler: keys, sampling sessions, and its own registration.

Calls carry the pod key. Each has a deadline; a scheduler that cannot be reached is
`WorkerUnavailableError`, which clients retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from tinsmith.addresses import normalize_address
from tinsmith.rpc.error_codec import decode_status, status_of
from tinsmith.v1 import (
    keys_pb2,
    keys_pb2_grpc,
    run_metrics_pb2,
    run_metrics_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    usage_pb2,
    usage_pb2_grpc,
    workers_pb2,
    workers_pb2_grpc,
)
from tinsmith_runtime.errors import (
    BatchTooLargeError,
    InternalError,
    KeyExpiredError,
    KeyInvalidError,
    KeyRevokedError,
    TinsmithError,
    WorkerUnavailableError,
)
from tinsmith_runtime.rpc.auth import Authenticator, CachingKeyVerifier, Caller
from tinsmith_runtime.rpc.key_checks import KeyChecks, check_secret
from tinsmith_runtime.rpc.permissions import KeyRole
from tinsmith_runtime.rpc.pod_identity import PodCredentials, PodRole

logger = logging.getLogger(__name__)

ResponseT = TypeVar("ResponseT")
Metadata = tuple[tuple[str, str], ...]

_CALL_TIMEOUT_S = 10.0
_RETRY_DELAY_S = 0.5


@contextlib.asynccontextmanager
async def typed_errors(peer: str, *, may_move: bool = False) -> AsyncIterator[None]:
    """Turn the status of a failed call to another pod back into a `TinsmithError`.

    Args:
        peer: The role of the other pod.
        may_move: Whether its address changes when it restarts: one that does not know the call is
            then taken for another pod on the port that this one had.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        status = status_of(error)
        if status is not None:
            raise decode_status(status) from error
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (
            error.details() or ""
        ):
            # Too large for this connection; sent again it would be no smaller.
            raise BatchTooLargeError(
                f"the request to the {peer}, or its answer, is larger than a message may be; send "
                "it in parts"
            ) from error
        is_unknown = error.code() is grpc.StatusCode.UNIMPLEMENTED
        if is_unknown and not may_move:
            raise InternalError(
                f"the {peer} does not know the call; is it of another release?"
            ) from error
        raise WorkerUnavailableError(
            f"the {peer} cannot be reached ({error.code().name}); send the request again",
            peer=peer,
        ) from error


class SchedulerClient:
    """A pod's connection to the scheduler.

    Args:
        address: `host:port` of the scheduler.
        credentials: Of the pod.

    Raises:
        ConfigurationError: If the address is none.
    """

    def __init__(self, address: str, credentials: PodCredentials) -> None:
        address = normalize_address(address, name="scheduler_address")
        self._channel = credentials.open_channel(address, PodRole.SCHEDULER)
        self._stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._keys: Any = keys_pb2_grpc.KeyServiceStub(self._channel)
        self._workers: Any = workers_pb2_grpc.WorkerServiceStub(self._channel)
        self._run_metrics: Any = run_metrics_pb2_grpc.RunMetricsServiceStub(self._channel)
        self._usage: Any = usage_pb2_grpc.UsageServiceStub(self._channel)
        self._credentials = credentials

    def authenticator(self) -> Authenticator:
        """Return what finds the callers of a pod whose user keys the scheduler knows."""
        verifier = CachingKeyVerifier(self.verify_key, checks=KeyChecks(self._check_secrets))
        return Authenticator(verifier, roots=self._credentials.roots)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def verify_key(self, key_id: str, secret_sha256: bytes) -> Caller:
        """Return the caller behind a key.

        Raises:
            KeyInvalidError: If the key is unknown.
            KeyRevokedError: If it was revoked.
            KeyExpiredError: If it has expired.
            WorkerUnavailableError: If the scheduler cannot be reached.
        """
        response = await self._verify(key_id, secret_sha256)
        role = PodRole(response.role) if response.is_pod else KeyRole(response.role)
        return Caller(response.project, role, key_id, response.pool)

    async def _check_secrets(self) -> Sequence[str]:
        """Return what the checks of keys are made with; see `KeyChecks`."""
        if self._credentials.roots:
            return [check_secret(root) for root in self._credentials.roots]
        own = self._credentials.key
        return (await self._verify(own.identity.key_id, own.secret_sha256)).check_secrets

    async def _verify(self, key_id: str, secret_sha256: bytes) -> keys_pb2.VerifyKeyResponse:
        request = keys_pb2.VerifyKeyRequest(key_id=key_id, secret_sha256=secret_sha256)
        try:
            return await self._call(self._keys.VerifyKey, request)
        except TinsmithError as error:
            for known in (KeyInvalidError, KeyRevokedError, KeyExpiredError):
                if error.reason == known.reason:
                    metadata: dict[str, Any] = dict(error.metadata)
                    raise known(error.message, **metadata) from error
            raise

    async def get_sampling_session(self, name: str) -> scheduler_pb2.SamplingSession:
        """Return a sampling session."""
        request = scheduler_pb2.GetSamplingSessionRequest(name=name)
        return await self._call(self._stub.GetSamplingSession, request)

    async def register(
        self,
        worker: workers_pb2.Worker,
        tokenizers: Mapping[str, scheduler_pb2.Tokenizer] | None = None,
    ) -> workers_pb2.Worker:
        """Add a worker, or renew it after a restart."""
        request = workers_pb2.RegisterWorkerRequest(worker=worker, tokenizers=tokenizers or {})
        return await self._call(self._workers.RegisterWorker, request)

    async def heartbeat(
        self, worker: workers_pb2.Worker, load: scheduler_pb2.SamplerLoad | None = None
    ) -> None:
        """Keep a worker listed, and say what it has to do."""
        request = workers_pb2.HeartbeatWorkerRequest(
            name=worker.name, incarnation=worker.incarnation, load=load
        )
        await self._call(self._workers.HeartbeatWorker, request)

    async def record_run_metrics(self, request: run_metrics_pb2.RecordRunMetricsRequest) -> None:
        """Record what was measured of a run."""
        await self._call(self._run_metrics.RecordRunMetrics, request)

    async def report_usage(
        self, request: usage_pb2.ReportUsageRequest
    ) -> usage_pb2.ReportUsageResponse:
        """Report totals of what was used, and return the budgets."""
        return await self._call(self._usage.ReportUsage, request)

    async def deregister(self, worker: workers_pb2.Worker) -> None:
        """Take a worker off the list, so that its runs move at once."""
        request = workers_pb2.DeregisterWorkerRequest(
            name=worker.name, incarnation=worker.incarnation
        )
        await self._call(self._workers.DeregisterWorker, request)

    async def _call(
        self, method: Callable[..., Awaitable[ResponseT]], request: object
    ) -> ResponseT:
        async with typed_errors("scheduler"):
            return await method(
                request, timeout=_CALL_TIMEOUT_S, metadata=self._credentials.metadata
            )


class WorkerRegistration:
    """Keeps a pod listed at the scheduler, through restarts of either.

    Args:
        client: The connection.
        worker: What the pod is.
        tokenizers: Tokenizer files by base model.
        load: Says what the pod has to do, with each heartbeat.
    """

    def __init__(
        self,
        client: SchedulerClient,
        worker: workers_pb2.Worker,
        tokenizers: Mapping[str, scheduler_pb2.Tokenizer] | None = None,
        load: Callable[[], scheduler_pb2.SamplerLoad | None] = lambda: None,
    ) -> None:
        self._client = client
        self._worker = worker
        self._tokenizers = tokenizers
        self._load = load
        self._task: asyncio.Task[None] | None = None
        self._is_listed = asyncio.Event()

    def start(self) -> None:
        """Register, and renew until `stop`."""
        self._task = asyncio.create_task(self._keep_listed())

    async def wait_listed(self, timeout_s: float) -> None:
        """Return once the scheduler lists the worker.

        Raises:
            WorkerUnavailableError: If it does not within this time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_listed.wait()
        except TimeoutError as error:
            raise WorkerUnavailableError(
                f"{self._worker.name} is not listed at the scheduler after {timeout_s:g} s; its "
                "log says why"
            ) from error

    async def stop(self) -> None:
        """Stop renewing; the scheduler forgets the worker after a while."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def leave(self) -> None:
        """Say that the process is about to end; a scheduler that is away finds out by itself."""
        try:
            await self._client.deregister(self._worker)
        except TinsmithError as error:
            logger.warning(
                "left without a word to the scheduler",
                extra={"worker": self._worker.name, "reason": error.reason},
            )

    async def _keep_listed(self) -> None:
        interval_s: float | None = None
        while True:
            try:
                if interval_s is None:
                    listed = await self._client.register(self._worker, self._tokenizers)
                    interval_s = listed.heartbeat_interval.ToTimedelta().total_seconds()
                    self._is_listed.set()
                    logger.info("registered", extra={"worker": self._worker.name})
                await asyncio.sleep(interval_s)
                await self._client.heartbeat(self._worker, self._load())
            except TinsmithError as error:
                logger.warning(
                    "not listed at the scheduler",
                    extra={"worker": self._worker.name, "reason": error.reason},
                )
                interval_s = None
                await asyncio.sleep(_RETRY_DELAY_S)
            except Exception:
                logger.exception("registration failed by a bug")
                interval_s = None
                await asyncio.sleep(_RETRY_DELAY_S)
