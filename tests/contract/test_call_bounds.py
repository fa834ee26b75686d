"""What a pod's callers can make grow: calls, bytes in flight, requests that never arrive."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from google.longrunning import operations_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.fakes.gateway_harness import RUN, TIMEOUT_S, refusal
from tests.fakes.hostile_bodies import varint
from tests.fakes.scheduler import FakeScheduler, bearer
from tests.support.memory import num_kept_by_errors, without_collector
from tests.support.pod_keys import POD_KEY, credentials
from tests.support.wait import eventually

from tinsmith.v1 import trainer_pb2, trainer_pb2_grpc
from tinsmith_runtime.rpc import message_parts
from tinsmith_runtime.rpc.auth import Authenticator, Caller
from tinsmith_runtime.rpc.pod_identity import PodRole
from tinsmith_runtime.rpc.server import PodServer, ServerConfig

PATH = "/tinsmith.v1.TrainerService/GetRunStatus"
SMALL, LARGE = 1000, 16 * 2**20
STATUS = trainer_pb2.GetRunStatusRequest(run=RUN).SerializeToString()


class CountingAuthenticator(Authenticator):
    """Counts the calls of each project that got past it."""

    def __init__(self, verifier: FakeScheduler, *, roots: Sequence[str]) -> None:
        super().__init__(verifier, roots=roots)
        self.num_calls: Counter[str] = Counter()

    async def authenticate(self, authorization: str | None) -> Caller:
        caller = await super().authenticate(authorization)
        self.num_calls[caller.project] += 1
        return caller


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Holds calls until it is told to let them go."""

    def __init__(self, **settings: Any) -> None:
        self.keys = FakeScheduler()
        self.key = self.keys.new_key("p")
        self.other = self.keys.new_key("q")
        self.hold = asyncio.Event()
        self.num_entered = 0
        self.authenticator = CountingAuthenticator(self.keys, roots=[POD_KEY])
        self.server = PodServer(
            ServerConfig(drain_timeout_s=0.01, **settings),
            domain="trainer.tinsmith",
            authenticator=self.authenticator,
        )
        self.server.add(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, self)
        self.channel: grpc.aio.Channel

    async def GetRunStatus(self, request: Any, context: Any) -> trainer_pb2.RunStatus:
        self.num_entered += 1
        await self.hold.wait()
        return trainer_pb2.RunStatus(run=request.run)

    async def LoadCheckpoint(self, request: Any, context: Any) -> operations_pb2.Operation:
        self.num_entered += 1
        await self.hold.wait()
        return operations_pb2.Operation(name=request.run)

    def call(self, size: int = 0, *, key: str | None = None) -> Any:
        """Ask for the status of a run, in a message of about some size."""
        # Field 1000, bytes: a later release may add it.
        padding = b"\xc2\x3e" + varint(size) + bytes(size) if size else b""
        return self.channel.unary_unary(PATH)(
            STATUS + padding,
            metadata=bearer(self.key if key is None else key),
            timeout=TIMEOUT_S,
        )

    async def entered(self, number: int) -> None:
        await eventually(lambda: self.num_entered == number)


@contextlib.asynccontextmanager
async def trainer(**settings: Any) -> AsyncIterator[Trainer]:
    pod = Trainer(**settings)
    await pod.server.start()
    pod.channel = grpc.aio.insecure_channel(pod.server.address)
    try:
        yield pod
    finally:
        pod.hold.set()
        await pod.channel.close()
        await pod.server.stop()


async def test_calls_of_a_key_are_bounded_and_of_all_keys() -> None:
    async with trainer(max_calls_per_project=3, max_calls=5) as pod:
        calls = [pod.call() for _ in range(3)]
        await pod.entered(3)
        error = await refusal(pod.call())
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "RATE_LIMITED")
        assert error.retry_after_s is not None
        assert error.metadata == {"what": "requests", "limit": "3"}
        calls += [pod.call(key=pod.other) for _ in range(2)]
        await pod.entered(5)
        error = await refusal(pod.call(key=pod.other))
        assert error.metadata == {"what": "requests of all projects", "limit": "5"}
        pod.hold.set()
        assert len(await asyncio.gather(*calls)) == 5
        await pod.call()


async def test_a_pod_calls_for_everybody_and_has_no_bound_of_a_key() -> None:
    scheduler = bearer(str(credentials(PodRole.SCHEDULER).key))
    async with trainer(max_calls_per_project=1) as pod:
        stub: Any = trainer_pb2_grpc.TrainerServiceStub(pod.channel)
        request = trainer_pb2.LoadCheckpointRequest(run=RUN)
        calls = [
            stub.LoadCheckpoint(request, metadata=scheduler, timeout=TIMEOUT_S) for _ in range(4)
        ]
        await pod.entered(4)
        pod.hold.set()
        await asyncio.gather(*calls)


async def test_bytes_in_flight_are_bounded_by_key_and_in_all() -> None:
    async with trainer(max_bytes_per_project=2500, max_bytes=3500) as pod:
        calls = [pod.call(SMALL) for _ in range(2)]
        await pod.entered(2)
        assert (await refusal(pod.call(SMALL))).metadata["what"] == "bytes"
        calls.append(pod.call(SMALL, key=pod.other))
        await pod.entered(3)
        error = await refusal(pod.call(SMALL, key=pod.keys.new_key("r")))
        assert error.metadata["what"] == "bytes of all projects"
        pod.hold.set()
        await asyncio.gather(*calls)
        await asyncio.gather(pod.call(SMALL), pod.call(SMALL, key=pod.other))


async def test_a_request_that_does_not_arrive_is_given_up() -> None:
    async with trainer(read_timeout_s=0.2) as pod:
        pod.hold.set()
        silent = pod.channel.stream_stream(PATH)(metadata=bearer(pod.key), timeout=TIMEOUT_S)
        error = await refusal(silent.read())
        assert error.reason == "DEADLINE_EXCEEDED"
        await pod.call()


async def test_a_call_without_a_request_is_refused() -> None:
    async with trainer() as pod:
        empty = pod.channel.stream_stream(PATH)(metadata=bearer(pod.key), timeout=TIMEOUT_S)
        await empty.done_writing()
        assert (await refusal(empty.read())).reason == "MALFORMED_REQUEST"


async def test_requests_that_do_not_arrive_hold_up_their_own_project_alone() -> None:
    async with trainer(max_reads=4) as pod:
        pod.hold.set()
        silent = [
            pod.channel.stream_stream(PATH)(metadata=bearer(pod.key), timeout=TIMEOUT_S)
            for _ in range(8)
        ]
        await eventually(lambda: pod.authenticator.num_calls["p"] == 8)
        waiting = asyncio.ensure_future(pod.call())
        for _ in range(20):
            await pod.call(key=pod.other)
        assert not waiting.done()
        for call in silent:
            call.cancel()
        await waiting


async def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    """The same code as for a message that is too large as it is."""
    async with trainer(max_message_bytes=2**20) as pod:
        call: Any = pod.channel.unary_unary(PATH)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(
                bytes(64 * 2**20),
                metadata=bearer(pod.key),
                compression=grpc.Compression.Gzip,
                timeout=TIMEOUT_S,
            )
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        pod.hold.set()
        await pod.call()


async def test_a_health_check_does_not_read_what_it_is_sent() -> None:
    """Anything is answered alike: a stranger's bytes are not parsed, nor waited for."""
    async with trainer(max_message_bytes=1000) as pod:
        check: Any = pod.channel.unary_unary("/grpc.health.v1.Health/Check")
        for body in (b"", b"\xff\xff", bytes(100_000)):
            answer = health_pb2.HealthCheckResponse.FromString(await check(body))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub: Any = health_pb2_grpc.HealthStub(pod.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await pod.server.report_unhealthy()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


async def test_an_old_connection_is_renewed_without_a_failed_call() -> None:
    async with trainer(max_connection_age_s=0.3) as pod:
        long = pod.call()
        await pod.entered(1)
        loop = asyncio.get_running_loop()
        pod.hold.set()
        end_s = loop.time() + 1.5
        while loop.time() < end_s:
            await pod.call()
        await long


async def test_a_request_of_many_empty_parts_is_refused_before_it_is_decoded() -> None:
    """It would take a hundred times its bytes."""
    async with trainer() as pod:
        pod.hold.set()
        body = b"\x22\x00" * (message_parts.MAX_PARTS + 1)
        path = "/tinsmith.v1.TrainerService/ForwardBackward"
        error = await refusal(
            pod.channel.unary_unary(path)(body, metadata=bearer(pod.key), timeout=TIMEOUT_S)
        )
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "BATCH_TOO_LARGE")
        assert error.metadata == {"limit": str(message_parts.MAX_PARTS)}
        assert (await pod.call()) is not None


async def test_a_refused_request_is_not_kept_until_the_garbage_collector_comes() -> None:
    """gRPC keeps the error of a refused call in a cycle, with all frames that it passed."""
    async with trainer() as pod:
        pod.hold.set()
        with without_collector():
            for _ in range(3):
                assert (await refusal(pod.call(LARGE))).reason == "BATCH_TOO_LARGE"
            assert num_kept_by_errors(LARGE) == 0
