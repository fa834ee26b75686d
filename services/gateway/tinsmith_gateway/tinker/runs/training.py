"""Models: created, described, trained, saved and loaded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import zstandard
from google.longrunning import operations_pb2
from starlette.responses import JSONResponse, Response

from tinsmith.rpc.durations import encode_optional_duration
from tinsmith.v1 import checkpoint_pb2, models_pb2, scheduler_pb2, trainer_pb2
from tinsmith_gateway.endpoint import Call, too_large
from tinsmith_gateway.project_threads import ProjectThreads
from tinsmith_gateway.tinker.promises import futures, usage
from tinsmith_gateway.tinker.promises.future_store import FutureStore
from tinsmith_gateway.tinker.promises.usage import HourlyUsage
from tinsmith_gateway.tinker.runs.numbered_calls import OrderedCalls, Prepared
from tinsmith_gateway.tinker.sampling.recordings import STABLE_REINFORCE, Recordings
from tinsmith_gateway.tinker.wire import age_encryption, bodies, ids, training_codec
from tinsmith_gateway.tinker.wire.base_models import BaseModels
from tinsmith_gateway.tinker.wire.contract_calls import Native, encode_labels, user_native
from tinsmith_gateway.tinker.wire.rendering import future
from tinsmith_runtime.errors import (
    AlreadyExistsError,
    BatchTooLargeError,
    InvalidFieldError,
    MalformedRequestError,
)

CLIENT_TTL_S = 7 * 24 * 3600
"""Life of weights that were saved for one sampling client, which are never deleted by a client."""


class Training:
    """The training endpoints.

    Args:
        calls: Submits what is numbered.
        store: Where recordings of samples are.
        models: Names of base models.
        usage_: Counts tokens.
        max_body_bytes: Limit of a body once it is unpacked.
    """

    def __init__(
        self,
        calls: OrderedCalls,
        store: FutureStore,
        models: BaseModels,
        usage_: HourlyUsage,
        threads: ProjectThreads,
        *,
        max_body_bytes: int,
    ) -> None:
        self._calls = calls
        self._recordings = Recordings(store, threads)
        self._models = models
        self._usage = usage_
        self._max_body_bytes = max_body_bytes

    async def create_model(self, call: Call) -> Response:
        """Create a model; its future is the placement of the run."""
        body = await call.parse(bodies.CreateModel)
        native = user_native(call)
        _check_optimizer(body.optimizer_config)
        lora = body.lora_config or bodies.LoraConfig()
        adapter = models_pb2.LoraConfig(
            rank=lora.rank,
            seed=lora.seed,
            train_attention=lora.train_attn,
            train_mlp=lora.train_mlp,
            train_unembedding=lora.train_unembed,
        )
        model_id = ids.new_model_id(body.session_id, body.model_seq_id)
        request = scheduler_pb2.CreateTrainingRunRequest(
            parent=ids.session_name(native.project, body.session_id),
            base_model=self._models.resolve(body.base_model),
            adapter=models_pb2.AdapterConfig(lora=adapter),
            labels=encode_labels(body.user_metadata),
        )
        return await self._create(native, model_id, request, futures.CREATE_MODEL)

    async def get_info(self, call: Call) -> Response:
        """Describe a model."""
        body = await call.parse(bodies.ModelReference)
        run = await user_native(call).run(body.model_id)
        is_lora = run.adapter.WhichOneof("kind") == "lora"
        return JSONResponse(
            {
                "type": "get_info",
                "model_data": {
                    "model_name": run.base_model,
                    "tokenizer_id": self._models.tokenizer_id(run.base_model),
                },
                "model_id": body.model_id,
                "is_lora": is_lora,
                "lora_rank": run.adapter.lora.rank if is_lora else None,
                "model_name": run.base_model,
            }
        )

    async def forward_backward(self, call: Call) -> Response:
        """Accept one chunk of a batch, with or without a gradient."""
        request, excess = await call.aside(self._parsed, call)
        if request.seq_id < 1:
            raise InvalidFieldError("seq_id", "must be at least 1")
        num_tokens = training_codec.count_tokens(request)
        call.admission.add_tokens(num_tokens)
        native = user_native(call)
        message = (
            trainer_pb2.ForwardRequest
            if request.forward_only
            else trainer_pb2.ForwardBackwardRequest
        )

        async def prepare(run: str, number: int) -> Prepared:
            del run, number
            if excess is not None:
                raise excess
            loss = trainer_pb2.Loss(
                name=request.loss_fn,
                config=training_codec.numeric_config(training_codec.decode_config(request)),
            )
            data = await call.aside(training_codec.decode_data, request.data, self._max_body_bytes)
            if request.loss_fn == STABLE_REINFORCE:
                await self._recordings.check(native.project, request, data)
            return Prepared(message(data=data, loss=loss), futures.FORWARD_BACKWARD)

        answer = await self._calls.submit(
            native,
            request.model_id,
            request.seq_id,
            Prepared(message(), futures.FORWARD_BACKWARD),
            prepare,
        )
        self._count(native, request.model_id, usage.TRAINING, num_tokens)
        return answer

    async def optim_step(self, call: Call) -> Response:
        """Accept an optimizer step."""
        reference = await call.parse(bodies.OrderedReference)
        native = user_native(call)

        async def prepare(run: str, number: int) -> Prepared:
            del run, number
            body = await call.parse(bodies.OptimStep)
            if body.adam_params is None:
                kind = body.optimizer_params.type if body.optimizer_params else "none"
                raise InvalidFieldError(
                    "optimizer_params",
                    f"asks for the optimizer {kind!r}; AdamW (AdamParams) is what is offered",
                )
            # What its client has looked at is not told: the SDK fetches results by itself. A batch
            # that failed is known from the moment its future was answered.
            request = trainer_pb2.OptimStepRequest(
                adam=trainer_pb2.AdamParams(**body.adam_params.model_dump()),
                observes_deliveries=True,
            )
            return Prepared(request, futures.OPTIM_STEP)

        empty = Prepared(trainer_pb2.OptimStepRequest(), futures.OPTIM_STEP)
        return await self._calls.submit(
            native, reference.model_id, reference.seq_id, empty, prepare
        )

    async def save_weights(self, call: Call) -> Response:
        """Accept a save of weights and optimizer."""
        reference = await call.parse(bodies.OrderedReference)
        native = user_native(call)

        async def prepare(run: str, number: int) -> Prepared:
            body = await call.parse(bodies.SaveWeights)
            name = body.path or f"state-{body.seq_id}"
            path = ids.TinkerPath(body.model_id, ids.TRAINING, name)
            checkpoint_id = ids.native_checkpoint_id(
                ids.TRAINING, name, save=number if body.overwrite else None
            )
            if not body.overwrite:
                known = ids.newest_match(path, await native.checkpoints(run))
                if known is not None and known.sequence_number != number:
                    raise AlreadyExistsError(
                        f"{path} exists; choose another name, or save with overwrite=True"
                    )
            request = trainer_pb2.SaveCheckpointRequest(
                checkpoint_id=checkpoint_id,
                kind=checkpoint_pb2.Checkpoint.KIND_TRAINING,
                labels=encode_labels(body.user_metadata),
                ttl=encode_optional_duration(body.ttl_seconds),
            )
            return Prepared(request, futures.SAVE_WEIGHTS)

        return await self._save(native, reference, futures.SAVE_WEIGHTS, prepare)

    async def save_weights_for_sampler(self, call: Call) -> Response:
        """Accept a save to sample from: under a name, or for one sampling client."""
        reference = await call.parse(bodies.OrderedReference)
        native = user_native(call)

        async def prepare(run: str, number: int) -> Prepared:
            del run
            body = await call.parse(bodies.SaveWeightsForSampler)
            kind, name, client, ttl_s = (
                futures.SAVE_FOR_SAMPLER,
                body.path,
                None,
                body.ttl_seconds,
            )
            if name is None:
                client = body.sampling_session_seq_id
                if client is None:
                    raise InvalidFieldError("path", "or sampling_session_seq_id is required")
                is_snapshot = body.kind == "snapshot"
                kind = futures.SNAPSHOT_CLIENT if is_snapshot else futures.INFLIGHT_CLIENT
                name, ttl_s = f"client-{number}", ttl_s or CLIENT_TTL_S
            request = trainer_pb2.SaveCheckpointRequest(
                checkpoint_id=ids.native_checkpoint_id(ids.SAMPLER, name),
                kind=checkpoint_pb2.Checkpoint.KIND_SAMPLER,
                labels=encode_labels(body.user_metadata),
                ttl=encode_optional_duration(ttl_s),
            )
            return Prepared(request, kind, client)

        return await self._save(native, reference, futures.SAVE_FOR_SAMPLER, prepare)

    async def save_weights_external(self, call: Call) -> Response:
        """Accept a save in the layout of other tools."""
        reference = await call.parse(bodies.OrderedReference)
        native = user_native(call)

        async def prepare(run: str, number: int) -> Prepared:
            del run, number
            body = await call.parse(bodies.SaveWeightsExternal)
            request = trainer_pb2.SaveCheckpointRequest(
                checkpoint_id=ids.native_checkpoint_id(ids.EXTERNAL, body.path),
                kind=checkpoint_pb2.Checkpoint.KIND_SAMPLER,
                labels=age_encryption.encode_labels(body.age_encryption_recipients or []),
                ttl=encode_optional_duration(body.ttl_seconds),
            )
            return Prepared(request, futures.SAVE_EXTERNAL)

        return await self._save(native, reference, futures.SAVE_EXTERNAL, prepare)

    async def load_weights(self, call: Call) -> Response:
        """Load weights into a model, or make a model of them."""
        target = await call.parse(bodies.LoadWeightsTarget)
        native = user_native(call)
        if target.model_id is not None or target.seq_id is not None:
            reference = await call.parse(bodies.OrderedReference)
            return await self._load_into(native, call, reference.model_id, reference.seq_id)
        return await self._load_new(native, call)

    async def _load_into(self, native: Native, call: Call, model_id: str, seq_id: int) -> Response:
        async def prepare(run: str, number: int) -> Prepared:
            del run, number
            body = await call.parse(bodies.LoadWeights)
            _check_access(body.weights_access_token)
            checkpoint = await native.checkpoint(ids.TinkerPath.parse(body.path))
            request = trainer_pb2.LoadCheckpointRequest(
                checkpoint=checkpoint.name, include_optimizer=body.optimizer
            )
            return Prepared(request, futures.LOAD_WEIGHTS)

        empty = Prepared(trainer_pb2.LoadCheckpointRequest(), futures.LOAD_WEIGHTS)
        return await self._calls.submit(native, model_id, seq_id, empty, prepare)

    async def _load_new(self, native: Native, call: Call) -> Response:
        body = await call.parse(bodies.LoadWeights)
        if body.session_id is None or body.model_seq_id is None:
            raise InvalidFieldError(
                "model_id", "and seq_id are required, or session_id and model_seq_id"
            )
        _check_access(body.weights_access_token)
        _check_optimizer(body.optimizer_config)
        path = ids.TinkerPath.parse(body.path)
        checkpoint = await native.checkpoint(path)
        model_id = ids.new_model_id(body.session_id, body.model_seq_id)
        request = scheduler_pb2.CreateTrainingRunRequest(
            parent=ids.session_name(native.project, body.session_id),
            base_model=self._models.resolve(body.base_model) if body.base_model else "",
            source_checkpoint=checkpoint.name,
            include_optimizer=body.optimizer,
            labels=encode_labels(body.user_metadata),
        )
        return await self._create(native, model_id, request, futures.CREATE_FROM_WEIGHTS)

    async def _create(
        self,
        native: Native,
        model_id: str,
        request: scheduler_pb2.CreateTrainingRunRequest,
        kind: str,
    ) -> Response:
        run_id = ids.run_id_of(model_id)
        request.training_run_id = run_id
        request.request_id = ids.request_id(native.project, model_id, "create")
        await native.scheduler("CreateTrainingRun", request, operations_pb2.Operation)
        return future(str(futures.OperationFuture(run_id, "create", kind)), model_id)

    async def _save(
        self,
        native: Native,
        reference: bodies.OrderedReference,
        kind: str,
        prepare: Callable[[str, int], Awaitable[Prepared]],
    ) -> Response:
        answer = await self._calls.submit(
            native,
            reference.model_id,
            reference.seq_id,
            Prepared(trainer_pb2.SaveCheckpointRequest(), kind),
            prepare,
        )
        self._count(native, reference.model_id, usage.CHECKPOINT, 1)
        return answer

    def _count(self, native: Native, model_id: str, kind: str, count: int) -> None:
        base_model = self._calls.base_model(native.project, model_id)
        self._usage.add(native.project, model_id.partition(":")[0], base_model, kind, count)

    def _parsed(
        self, call: Call
    ) -> tuple[training_codec.ForwardBackwardRequest, BatchTooLargeError | None]:
        """Return a batch; of one that is too large model and number alone, and the refusal."""
        body, excess = self._unpacked(call)
        if excess is None:
            try:
                return training_codec.parse_forward_backward(body), None
            except BatchTooLargeError as error:
                excess = error
        return training_codec.parse_reference(body), excess

    def _unpacked(self, call: Call) -> tuple[bytes, BatchTooLargeError | None]:
        """Return a body that may be compressed, or the beginning of one that is too large."""
        encoding = call.request.headers.get("content-encoding", "identity")
        if encoding == "identity":
            return call.body, call.excess
        if encoding != "zstd":
            raise MalformedRequestError(f"content-encoding {encoding!r} is not taken; use zstd")
        try:
            # A stream, so that a small body that claims to be huge is found out on the way.
            with zstandard.ZstdDecompressor().stream_reader(call.body) as reader:
                body = reader.read(self._max_body_bytes + 1)
        except zstandard.ZstdError as error:
            raise MalformedRequestError("the body is not zstd") from error
        if len(body) <= self._max_body_bytes:
            return body, call.excess
        return body, too_large("the unpacked body", self._max_body_bytes)


def _check_optimizer(config: bodies.OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        raise InvalidFieldError(
            "optimizer_config", f"asks for the optimizer {config.type!r}; 'adamw' is offered"
        )


def _check_access(token: str | None) -> None:
    if token:
        raise InvalidFieldError(
            "weights_access_token",
            "is not taken: publish the checkpoint in its own project, then load it without a token",
        )
