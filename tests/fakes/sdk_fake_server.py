"""A small scheduler, trainer and sampler in one real gRPC server, with faults to order.

It keeps the contract of ordered calls: operations execute in sequence order however they arrive, a
repeated request id gives the same operation, a refused request consumes its number. State lives in
`FakeState`, so a server can be stopped and another started on it, as a pod restarts.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import numpy as np
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from tests.fakes.run_metrics import RUN, add_run_metrics

from tinsmith import tensors
from tinsmith.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    environment_pb2,
    environment_pb2_grpc,
    keys_pb2,
    keys_pb2_grpc,
    sampler_pb2,
    sampler_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    trajectories_pb2,
)


def make_status(
    code: int, reason: str, message: str, *, retry_after_s: float | None = None, **metadata: str
) -> status_pb2.Status:
    status = status_pb2.Status(code=code, message=message)
    info = error_details_pb2.ErrorInfo(reason=reason, domain="fake.tinsmith", metadata=metadata)
    status.details.add().Pack(info)
    if "field" in metadata:
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=metadata["field"], description=message)
        status.details.add().Pack(bad)
    if retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(retry_after_s * 1e9))
        status.details.add().Pack(retry)
    return status


def unavailable() -> status_pb2.Status:
    return make_status(code_pb2.UNAVAILABLE, "DRAINING", "draining")


@dataclass
class FakeOperation:
    number: int
    kind: str
    request: Any
    state: Any = trainer_pb2.OperationMetadata.STATE_QUEUED
    response: Any = None
    error: status_pb2.Status | None = None
    revision: int = 0


@dataclass
class FakeState:
    """What survives a restart, and the faults that tests order."""

    operations: dict[int, FakeOperation] = field(default_factory=dict)
    requests: list[tuple[str, Any]] = field(default_factory=list)
    """Every request that arrived at an ordered call, with the method, repeats included."""
    refusals: list[status_pb2.Status] = field(default_factory=list)
    """Taken one by one by ordered calls that arrive; nothing is accepted."""
    refuse_number: dict[int, status_pb2.Status] = field(default_factory=dict)
    """Refused for good: the number is consumed."""
    drop_replies: int = 0
    """So many accepted calls are answered with UNAVAILABLE although they were accepted."""
    fail_operation: dict[int, status_pb2.Status] = field(default_factory=dict)
    submit_delay_s: dict[int, float] = field(default_factory=dict)
    in_flight: list[int] = field(default_factory=list)
    paused: bool = False
    """Operations are accepted and not executed."""
    waiting_for: str = ""
    queue_position: int = 0
    hide_from_list: set[int] = field(default_factory=set)
    expired: set[int] = field(default_factory=set)
    version: int = 0
    executed: list[int] = field(default_factory=list)
    revision: int = 0
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    fail_calls: dict[str, list[status_pb2.Status]] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    trainer_address: str = ""
    is_orphaned: bool = False
    checkpoint_address: str = ""
    session_state: str = "active"
    outcome: str = ""
    create_polls: int = 0
    logprob: Callable[[int], float] = lambda token: -0.1 * (token + 1)
    tokenizer_files: dict[str, bytes] = field(default_factory=dict)
    tokenizer_digest: str = "ab" * 32
    files: dict[str, bytes] = field(default_factory=dict)
    """Of every checkpoint."""
    file_url: str = ""
    cut_streams: int = 0
    """So many streams of files, or of tokens, break off after their first piece."""
    hold_streams: bool = False
    """Streams of tokens stop after their first message and wait to be cancelled."""
    cancelled_streams: int = 0
    offsets: list[int] = field(default_factory=list)
    """Where streams of files began."""
    heartbeat_s: float = 0.2
    key_project: str = "default"
    """Of the caller's key; empty for a server that does not say."""

    def execute(self) -> None:
        """Run what can run, in sequence order."""
        number = len(self.executed) + 1
        while not self.paused and number in self.operations:
            operation = self.operations[number]
            if operation.response is None and operation.error is None:
                self._run(operation)
            self.executed.append(number)
            number += 1

    def finish(self, operation: FakeOperation) -> None:
        self.revision += 1
        operation.revision = self.revision
        succeeded = operation.error is None
        metadata = trainer_pb2.OperationMetadata
        operation.state = metadata.STATE_SUCCEEDED if succeeded else metadata.STATE_FAILED

    def _run(self, operation: FakeOperation) -> None:
        request = operation.request
        if operation.number in self.fail_operation:
            operation.error = self.fail_operation[operation.number]
        elif operation.kind in ("forward", "forward_backward"):
            response: Any = (
                trainer_pb2.ForwardResponse()
                if operation.kind == "forward"
                else trainer_pb2.ForwardBackwardResponse()
            )
            loss = 0.0
            for datum in request.data:
                targets = tensors.decode_tensor(datum.loss_inputs["target_tokens"])
                weights = tensors.decode_tensor(datum.loss_inputs["weights"]).astype(np.float32)
                logprobs = np.vectorize(self.logprob, otypes=[np.float32])(targets)
                loss -= float((weights * logprobs).sum())
                response.outputs.add(logprobs=tensors.encode_tensor(logprobs))
            response.metrics["loss:sum"] = loss
            operation.response = response
        elif operation.kind == "optim_step":
            self.version += 1
            operation.response = trainer_pb2.OptimStepResponse(
                version=self.version, metrics={"grad_norm:mean": 1.0}
            )
        elif operation.kind == "save_checkpoint":
            operation.response = checkpoint_pb2.Checkpoint(
                name=f"{request.parent}/checkpoints/{request.checkpoint_id}",
                kind=request.kind,
                base_model="tiny",
                version=self.version,
                sequence_number=operation.number,
            )
        else:
            operation.response = trainer_pb2.LoadCheckpointResponse(version=0)
        self.finish(operation)

    def encode(self, operation: FakeOperation) -> operations_pb2.Operation:
        message = operations_pb2.Operation(name=f"{RUN}/operations/{operation.number}")
        message.metadata.Pack(
            trainer_pb2.OperationMetadata(
                run=RUN,
                sequence_number=operation.number,
                kind=operation.kind,
                state=operation.state,
                waiting_for="" if operation.revision else self.waiting_for,
                queue_position=0 if operation.revision else self.queue_position,
                num_attempts=1,
                revision=operation.revision,
            )
        )
        if operation.revision:
            message.done = True
            if operation.error is not None:
                message.error.CopyFrom(operation.error)
            else:
                message.response.Pack(operation.response)
        return message


def make_sequence(tokens: list[int], *, is_last: bool) -> trajectories_pb2.SampledSequence:
    """Return a sequence, with one likeliest token in each place."""
    count = len(tokens)
    logprobs = np.full(count, -0.5, dtype=np.float32)
    ends = trajectories_pb2.SampledSequence
    return trajectories_pb2.SampledSequence(
        tokens=tensors.encode_tokens(tokens),
        logprobs=tensors.encode_tensor(logprobs),
        versions=tensors.encode_tensor(np.full(count, 4, dtype=np.int64)),
        stop_reason=ends.STOP_REASON_LENGTH if is_last else ends.STOP_REASON_UNSPECIFIED,
        topk_logprobs=trajectories_pb2.TopkLogprobs(
            token_ids=tensors.encode_tensor(np.array(tokens, dtype=np.int32)[:, None]),
            logprobs=tensors.encode_tensor(logprobs[:, None]),
        ),
    )


async def abort(context: Any, status: status_pb2.Status) -> None:
    await context.abort_with_status(rpc_status.to_status(status))


class FakeServer:
    """Serves a `FakeState` in a thread of its own."""

    def __init__(self, state: FakeState | None = None, port: int = 0) -> None:
        self.state = state or FakeState()
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda loop, context: None)
        self._changed: asyncio.Condition
        self._server: grpc.aio.Server
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(10)
        self.address = f"127.0.0.1:{self._port}"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._started.set()
        self._loop.run_forever()
        self._loop.close()

    async def _start(self) -> None:
        self._changed = asyncio.Condition()
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        scheduler: Any = Scheduler(self)  # type: ignore[abstract]
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, self._server)
        keys_pb2_grpc.add_KeyServiceServicer_to_server(scheduler, self._server)
        trainer: Any = Trainer(self)  # type: ignore[abstract]
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(trainer, self._server)
        checkpoint_pb2_grpc.add_CheckpointServiceServicer_to_server(trainer, self._server)
        sampler_pb2_grpc.add_SamplerServiceServicer_to_server(Sampler(self), self._server)  # type: ignore[abstract]
        environments: Any = Environments
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(
            environments(self), self._server
        )
        operations_pb2_grpc.add_OperationsServicer_to_server(Operations(self), self._server)
        add_run_metrics(self._server, self.count)
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        await self._server.start()

    def training_run(self) -> scheduler_pb2.TrainingRun:
        state = self.state
        run = scheduler_pb2.TrainingRun(
            name=RUN,
            state=scheduler_pb2.TrainingRun.STATE_ACTIVE,
            base_model="tiny",
            trainer_address=state.trainer_address or self.address,
        )
        if state.is_orphaned:
            run.state = scheduler_pb2.TrainingRun.STATE_MOVING
            run.trainer_address = ""
            run.checkpoint_address = state.checkpoint_address
        run.adapter.lora.rank = 32
        return run

    def run_status(self) -> trainer_pb2.RunStatus:
        state = self.state
        return trainer_pb2.RunStatus(
            run=RUN,
            version=state.version,
            next_sequence_number=len(state.operations) + 1,
            pending_operations=[
                trainer_pb2.PendingOperation(sequence_number=number, kind=operation.kind)
                for number, operation in sorted(state.operations.items())
                if not operation.revision
            ],
            latest_revision=state.revision,
        )

    async def operation(self, name: str, context: Any) -> FakeOperation:
        number = int(name.rpartition("/")[2])
        if number in self.state.expired:
            await abort(
                context,
                make_status(code_pb2.FAILED_PRECONDITION, "OPERATION_EXPIRED", f"{number} expired"),
            )
        if number not in self.state.operations:
            await abort(
                context, make_status(code_pb2.NOT_FOUND, "OPERATION_NOT_FOUND", f"no {number}")
            )
        return self.state.operations[number]

    @property
    def port(self) -> int:
        return self._port

    def update(self, **changes: Any) -> None:
        """Change the state from a test, then execute what can run."""

        async def apply() -> None:
            for name, value in changes.items():
                setattr(self.state, name, value)
            await self.advance()

        asyncio.run_coroutine_threadsafe(apply(), self._loop).result(10)

    def stop(self) -> None:
        """Die at once: open calls break."""
        asyncio.run_coroutine_threadsafe(self._server.stop(None), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def advance(self) -> None:
        self.state.execute()
        async with self._changed:
            self._changed.notify_all()

    async def wait(self, ready: Callable[[], bool], timeout_s: float) -> None:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(ready), timeout_s)
            except TimeoutError:
                return

    async def count(self, context: Any, method: str, request: Any) -> None:
        self.state.calls[method] += 1
        self.state.last[method] = request
        metadata = dict(context.invocation_metadata() or ())
        if metadata.get("authorization") != "Bearer tsk_test":
            await abort(
                context, make_status(code_pb2.UNAUTHENTICATED, "KEY_INVALID", "the key is unknown")
            )
        if self.state.fail_calls.get(method):
            await abort(context, self.state.fail_calls[method].pop(0))


class Trainer(
    trainer_pb2_grpc.TrainerServiceServicer, checkpoint_pb2_grpc.CheckpointServiceServicer
):
    def __init__(self, server: FakeServer) -> None:
        self._server = server

    async def _submit(self, kind: str, request: Any, context: Any) -> operations_pb2.Operation:
        state = self._server.state
        await self._server.count(context, kind, request)
        state.requests.append((kind, request))
        number = request.sequence_number
        state.in_flight.append(len(state.requests) - len(state.operations))
        await asyncio.sleep(state.submit_delay_s.get(number, 0))
        if state.refusals:
            await abort(context, state.refusals.pop(0))
        known = state.operations.get(number)
        if known is not None and known.request.request_id != request.request_id:
            taken = make_status(code_pb2.ABORTED, "SEQUENCE_NUMBER_REUSED", f"{number} is taken")
            await abort(context, taken)
        if known is None:
            known = state.operations[number] = FakeOperation(number, kind, request)
            refusal = state.refuse_number.get(number)
            if refusal is not None:
                known.error = refusal
                state.finish(known)
            await self._server.advance()
        if number in state.refuse_number:
            await abort(context, state.refuse_number[number])
        if state.drop_replies > 0:
            state.drop_replies -= 1
            await abort(context, unavailable())
        return state.encode(known)

    async def Forward(self, request: Any, context: Any) -> Any:
        return await self._submit("forward", request, context)

    async def ForwardBackward(self, request: Any, context: Any) -> Any:
        return await self._submit("forward_backward", request, context)

    async def OptimStep(self, request: Any, context: Any) -> Any:
        return await self._submit("optim_step", request, context)

    async def SaveCheckpoint(self, request: Any, context: Any) -> Any:
        return await self._submit("save_checkpoint", request, context)

    async def LoadCheckpoint(self, request: Any, context: Any) -> Any:
        return await self._submit("load_checkpoint", request, context)

    async def WaitOperations(self, request: Any, context: Any) -> Any:
        state = self._server.state
        await self._server.count(context, "WaitOperations", request)

        def finished() -> list[FakeOperation]:
            found = [
                operation
                for operation in state.operations.values()
                if operation.revision > request.after_revision
                and operation.number not in state.hide_from_list
            ]
            return sorted(found, key=lambda operation: operation.revision)[:3]

        await self._server.wait(lambda: bool(finished()), min(1.0, request.timeout.seconds))
        operations = finished()
        return trainer_pb2.WaitOperationsResponse(
            operations=[state.encode(operation) for operation in operations],
            revision=operations[-1].revision if operations else request.after_revision,
        )

    async def GetRunStatus(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "GetRunStatus", request)
        return self._server.run_status()

    async def ListCheckpoints(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "ListCheckpoints", request)
        found = [
            operation.response
            for operation in self._server.state.operations.values()
            if operation.kind == "save_checkpoint" and operation.response is not None
        ]
        start = int(request.page_token or 0)
        token = str(start + 1) if start + 1 < len(found) else ""
        return checkpoint_pb2.ListCheckpointsResponse(
            checkpoints=found[start : start + 1], next_page_token=token
        )

    async def CreateCheckpointDownload(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "CreateCheckpointDownload", request)
        sources = [
            checkpoint_pb2.CheckpointDownload.Source(
                file=checkpoint_pb2.CheckpointFile(
                    file=name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()
                ),
                url=self._server.state.file_url,
                token=name,
            )
            for name, content in self._server.state.files.items()
        ]
        return checkpoint_pb2.CheckpointDownload(name=request.name, sources=sources)

    async def DownloadCheckpointFile(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "DownloadCheckpointFile", request)
        state = self._server.state
        content, offset = state.files[request.token], request.offset_bytes
        state.offsets.append(offset)
        while offset < len(content):
            piece = content[offset : offset + 10]
            yield checkpoint_pb2.DownloadCheckpointFileResponse(offset_bytes=offset, data=piece)
            offset += len(piece)
            if state.cut_streams:
                state.cut_streams -= 1
                await abort(context, unavailable())

    async def DeleteCheckpoint(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "DeleteCheckpoint", request)
        return checkpoint_pb2.DeleteCheckpointResponse()


class Operations(operations_pb2_grpc.OperationsServicer):  # type: ignore[misc]
    def __init__(self, server: FakeServer) -> None:
        self._server = server

    async def GetOperation(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "GetOperation", request)
        return self._server.state.encode(await self._server.operation(request.name, context))

    async def WaitOperation(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "WaitOperation", request)
        state = self._server.state
        if request.name.endswith("/create"):
            state.create_polls += 1
            operation = operations_pb2.Operation(name=request.name, done=state.create_polls >= 2)
            operation.metadata.Pack(
                scheduler_pb2.CreateTrainingRunMetadata(run=RUN, waiting_for="a trainer")
            )
            if operation.done:
                operation.response.Pack(self._server.training_run())
            return operation
        operation = await self._server.operation(request.name, context)
        await self._server.wait(lambda: operation.revision > 0, 1.0)
        return state.encode(operation)


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer, keys_pb2_grpc.KeyServiceServicer):
    def __init__(self, server: FakeServer) -> None:
        self._server = server

    async def CreateSession(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "CreateSession", request)
        session = scheduler_pb2.Session(name="projects/default/sessions/s1")
        session.heartbeat_interval.FromNanoseconds(int(self._server.state.heartbeat_s * 1e9))
        return session

    async def HeartbeatSession(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "HeartbeatSession", request)
        if self._server.state.session_state != "active":
            await abort(
                context,
                make_status(
                    code_pb2.FAILED_PRECONDITION, "SESSION_FINISHED", "it lost its heartbeat"
                ),
            )
        return scheduler_pb2.Session(name=request.session)

    async def ResumeSession(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "ResumeSession", request)
        session = scheduler_pb2.Session(name=request.session)
        session.heartbeat_interval.FromNanoseconds(int(self._server.state.heartbeat_s * 1e9))
        resumed = scheduler_pb2.ResumedRun(
            run=self._server.training_run(), status=self._server.run_status()
        )
        return scheduler_pb2.ResumeSessionResponse(session=session, runs=[resumed])

    async def FinishSession(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "FinishSession", request)
        self._server.state.outcome = request.outcome
        return scheduler_pb2.Session(name=request.session)

    async def CreateTrainingRun(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "CreateTrainingRun", request)
        return operations_pb2.Operation(name=f"{RUN}/operations/create")

    async def GetTrainingRun(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "GetTrainingRun", request)
        if request.name != RUN:
            await abort(
                context,
                make_status(code_pb2.NOT_FOUND, "RUN_NOT_FOUND", f"no run {request.name}"),
            )
        return self._server.training_run()

    async def ListTrainingRuns(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "ListTrainingRuns", request)
        return scheduler_pb2.ListTrainingRunsResponse(training_runs=[self._server.training_run()])

    async def UpdateTrainingRun(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "UpdateTrainingRun", request)
        run = self._server.training_run()
        run.history_retention.CopyFrom(request.history_retention)
        return run

    async def DeleteTrainingRun(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "DeleteTrainingRun", request)
        return self._server.training_run()

    async def CreateKey(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "CreateKey", request)
        return keys_pb2.Key(
            name=f"{request.parent}/keys/k1",
            state=keys_pb2.Key.STATE_ACTIVE,
            role=request.role,
            display_name=request.display_name,
            secret="tsk_k1_secret",
            tinker_secret="tml-k1_secret",
        )

    async def ListKeys(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "ListKeys", request)
        key = keys_pb2.Key(name=f"{request.parent}/keys/k1", role="member")
        return keys_pb2.ListKeysResponse(keys=[key])

    async def RevokeKey(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "RevokeKey", request)
        return keys_pb2.Key(name=request.name, state=keys_pb2.Key.STATE_REVOKED)

    async def GetCapabilities(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "GetCapabilities", request)
        answer = scheduler_pb2.Capabilities(environment_address=self._server.address)
        tiny = {"base_model": "tiny", "max_context_tokens": 4096}
        answer.models.add(trainable=True, sampleable=True, model=tiny)
        return answer

    async def GetCallerKey(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "GetCallerKey", request)
        return keys_pb2.Key(name=f"projects/{self._server.state.key_project}/keys/k1")

    async def CreateSamplingSession(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "CreateSamplingSession", request)
        return scheduler_pb2.SamplingSession(
            name="projects/default/samplingSessions/x",
            base_model="tiny",
            checkpoint=request.checkpoint,
            run=request.run,
            sampler_addresses=[self._server.address],
        )

    async def GetSamplingSession(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "GetSamplingSession", request)
        return scheduler_pb2.SamplingSession(
            name=request.name, sampler_addresses=[self._server.address]
        )

    async def GetTokenizer(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "GetTokenizer", request)
        state = self._server.state
        known = request.known_digest == state.tokenizer_digest
        return scheduler_pb2.Tokenizer(
            digest=state.tokenizer_digest, files={} if known else state.tokenizer_files
        )


class Sampler(sampler_pb2_grpc.SamplerServiceServicer):
    def __init__(self, server: FakeServer) -> None:
        self._server = server

    async def Sample(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "Sample", request)
        self._server.state.requests.append(("sample", request))
        count = 3
        sequence = trajectories_pb2.SampledSequence(
            tokens=tensors.encode_tokens(range(count)),
            logprobs=tensors.encode_tensor(np.full(count, -0.5, dtype=np.float32)),
            versions=tensors.encode_tensor(np.full(count, request.min_version, dtype=np.int64)),
            stop_reason=trajectories_pb2.SampledSequence.STOP_REASON_STOP,
        )
        answer = sampler_pb2.SampleResponse(seed=request.params.seed)
        answer.sequences.extend([sequence] * request.num_samples)
        answer.version = request.min_version
        if request.HasField("target_prompt_tokens"):
            asked = tensors.decode_tensor(request.target_prompt_tokens)
            answer.target_prompt_logprobs.CopyFrom(
                tensors.encode_tensor(np.where(asked < 0, 0, -1).astype(np.float32))
            )
        if request.num_prompt_alternatives:
            drawn = np.full((2, request.num_prompt_alternatives), 7, dtype=np.int64)
            answer.prompt_alternatives.tokens.CopyFrom(tensors.encode_tensor(drawn))
            answer.prompt_alternatives.logprobs.CopyFrom(
                tensors.encode_tensor(np.full(drawn.shape, -2.0, dtype=np.float32))
            )
        return answer

    async def StreamSample(self, request: Any, context: Any) -> Any:
        """Stream tokens 0, 1, 2... of `max_tokens` for each sample, one for each message."""
        await self._server.count(context, "StreamSample", request)
        state, wanted = self._server.state, request.request
        state.requests.append(("stream", request))
        received = list(request.received_tokens) or [0] * wanted.num_samples
        is_first = True
        for token in range(wanted.params.max_tokens):
            is_last = token + 1 == wanted.params.max_tokens
            for index in range(wanted.num_samples):
                is_known = token < received[index]
                if is_known and not is_last:
                    continue
                message = sampler_pb2.StreamSampleResponse(
                    sample_index=index,
                    token_index=token + is_known,
                    piece=make_sequence([] if is_known else [token], is_last=is_last),
                )
                if is_first:
                    message.prompt.seed = wanted.params.seed
                    message.prompt.version = wanted.min_version
                yield message
                if is_first and state.hold_streams:
                    try:
                        await asyncio.Event().wait()
                    finally:
                        state.cancelled_streams += 1
                if state.cut_streams and not is_known:
                    state.cut_streams -= 1
                    await abort(context, unavailable())
                is_first = False

    async def ComputeLogprobs(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "ComputeLogprobs", request)
        array = np.array([np.nan, -1.0], dtype=np.float32)
        return sampler_pb2.ComputeLogprobsResponse(logprobs=tensors.encode_tensor(array))


class Environments(environment_pb2_grpc.EnvironmentServiceServicer):
    def __init__(self, server: FakeServer) -> None:
        self._server = server

    async def ListEnvironments(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "ListEnvironments", request)
        # A page holds one environment: a caller that reads a single page misses the other.
        name = "mirror" if request.page_token else "echo"
        answer = environment_pb2.ListEnvironmentsResponse(
            next_page_token="" if request.page_token else "after echo"
        )
        answer.environments.add(name=f"projects/default/environments/{name}", description="echoes")
        return answer

    async def CreateInstance(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "CreateInstance", request)
        instance = environment_pb2.EnvironmentInstance(name=f"{request.parent}/instances/1")
        instance.observation.messages.add(role="user", content="hello")
        return instance

    async def StepInstance(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "StepInstance", request)
        answer = environment_pb2.StepInstanceResponse(
            reward=float(request.step_index), done=request.step_index == 1
        )
        answer.observation.messages.add(role="user", content=request.action.text)
        return answer

    async def DeleteInstance(self, request: Any, context: Any) -> Any:
        await self._server.count(context, "DeleteInstance", request)
        return environment_pb2.DeleteInstanceResponse()
