"""A run: the handle that a training loop works with."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tinsmith import names
from tinsmith.rpc import codec, operations
from tinsmith.rpc.futures import OperationFuture
from tinsmith.rpc.operations import OperationStream
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.training.custom_loss import CustomLoss, evaluate_loss, forward_data, linear_data
from tinsmith.types import (
    AdamParams,
    Checkpoint,
    Datum,
    FloatArray,
    ForwardResult,
    LoadResult,
    OptimStepResult,
    RunInfo,
)
from tinsmith.v1 import scheduler_pb2, trainer_pb2

if TYPE_CHECKING:
    from tinsmith.rpc.core import ClientCore
    from tinsmith.sampling.sampler import Sampler

_DEFAULT_LOSS = "cross_entropy"

OperationResult = ForwardResult | OptimStepResult | Checkpoint | LoadResult
"""What an operation may end with, by its kind."""


class TrainingRun:
    """One trainable model on the server.

    Each method that changes or reads weights submits an operation and returns its future at once;
    operations execute in the order of the calls, whatever order their futures are awaited in.

    Args:
        core: What the client shares.
        message: The run.
        status: Where a run that was used before stands; a new one has none.
    """

    def __init__(
        self,
        core: ClientCore,
        message: scheduler_pb2.TrainingRun,
        status: trainer_pb2.RunStatus | None = None,
    ) -> None:
        self._core = core
        self.info: RunInfo = codec.decode_run(message)
        status = status or trainer_pb2.RunStatus(next_sequence_number=1)
        self._version = status.version
        # What waits may be above the first free number, behind one that has not arrived.
        highest = max((each.sequence_number for each in status.pending_operations), default=0)
        self._stream = OperationStream(
            core.background,
            core.transport,
            core.trainer_endpoint(message),
            message.name,
            next_sequence_number=max(status.next_sequence_number, highest + 1),
            revision=status.latest_revision,
        )
        core.streams.add(self._stream)
        self._resumed = [
            self._stream.resume(each.sequence_number, each.kind, self._decode_pending)
            for each in status.pending_operations
        ]

    @property
    def name(self) -> str:
        """Resource name, `projects/{project}/trainingRuns/{run}`."""
        return self.info.name

    @property
    def base_model(self) -> str:
        """Name of the base model."""
        return self.info.base_model

    @property
    def version(self) -> int:
        """Version of the weights, as far as results have arrived; samplers see it or newer."""
        return self._version

    @property
    def pending_operations(self) -> list[OperationFuture[OperationResult]]:
        """Futures of what was acknowledged to an earlier client and had not ended, by number.

        Empty for a run that this client created. What was sent as `forward_backward_custom` comes
        back as the plain result of its linear pass.
        """
        return list(self._resumed)

    def operation(self, sequence_number: int) -> OperationFuture[OperationResult]:
        """Return a future of any operation of the run, whoever sent it.

        Its `result()` raises `NotFoundError` if there is no operation of this number, and
        `FailedPreconditionError` with the reason `OPERATION_EXPIRED` if it ended so long ago that
        its result is not kept.

        Args:
            sequence_number: Its number, as `OperationFuture.sequence_number` has it.
        """
        return self._stream.look_up(sequence_number, _decode_result)

    def __repr__(self) -> str:
        return f"TrainingRun({self.name!r}, base_model={self.base_model!r})"

    def forward(
        self,
        data: Sequence[Datum],
        loss: str = _DEFAULT_LOSS,
        config: Mapping[str, float] | None = None,
    ) -> OperationFuture[ForwardResult]:
        """Compute the loss and log-probabilities of a batch, and no gradient."""
        request = trainer_pb2.ForwardRequest(
            run=self.name,
            data=codec.encode_data(data),
            loss=codec.encode_loss(loss, config),
        )
        return self._stream.submit(operations.FORWARD, request, codec.decode_forward)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: str = _DEFAULT_LOSS,
        config: Mapping[str, float] | None = None,
    ) -> OperationFuture[ForwardResult]:
        """Accumulate the gradient of a batch.

        Args:
            data: The batch.
            loss: Name of the loss, a sum over tokens and datums: `cross_entropy`,
                `importance_sampling`, `ppo`, `cispo`, `dro` or `gspo`.
            config: Its settings, such as `clip_low_threshold` of `ppo` or `beta` of `dro`.
        """
        return self._stream.submit(
            operations.FORWARD_BACKWARD,
            self._forward_backward_request(data, loss, config),
            codec.decode_forward,
        )

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: CustomLoss
    ) -> OperationFuture[ForwardResult]:
        """Accumulate the gradient of a loss that is computed here.

        Runs a forward pass and waits for it, computes the loss and its gradient by log-probability
        in the calling thread, then submits a pass that is linear in the log-probabilities and has
        this gradient. In the result, `loss:sum` is the custom loss.

        Args:
            data: The batch; each datum needs `target_tokens`.
            loss_fn: Called with the batch and a list of log-probabilities, each [T] or, for so
                many targets, [T, K]. It
                returns `(value, metrics)` if written with torch, `(value, gradients, metrics)`
                if with numpy: see `tinsmith.CustomLoss`.
        """
        outputs = self.forward(forward_data(data), _DEFAULT_LOSS).result().outputs
        return self._linear_pass(data, loss_fn, [output.logprobs for output in outputs])

    async def forward_backward_custom_async(
        self, data: Sequence[Datum], loss_fn: CustomLoss
    ) -> OperationFuture[ForwardResult]:
        """Do as `forward_backward_custom`; only `loss_fn` itself blocks the event loop."""
        outputs = (await self.forward(forward_data(data), _DEFAULT_LOSS)).outputs
        return self._linear_pass(data, loss_fn, [output.logprobs for output in outputs])

    def optim_step(self, adam: AdamParams | None = None) -> OperationFuture[OptimStepResult]:
        """Apply the accumulated gradient with AdamW and clear it."""
        request = trainer_pb2.OptimStepRequest(
            run=self.name, adam=codec.encode_adam(adam or AdamParams())
        )
        return self._stream.submit(operations.OPTIM_STEP, request, self._decode_optim_step)

    def save_state(
        self, name: str, *, labels: Mapping[str, str] | None = None, ttl_s: float | None = None
    ) -> OperationFuture[Checkpoint]:
        """Save weights and optimizer state under a name, to go on training from.

        Args:
            name: Id within the run.
            labels: Labels of the checkpoint.
            ttl_s: It is deleted so long after the save; None keeps it.
        """
        return self._save(name, trainer_pb2.Checkpoint.KIND_TRAINING, labels, ttl_s)

    def save_weights_for_sampler(
        self, name: str, *, labels: Mapping[str, str] | None = None, ttl_s: float | None = None
    ) -> OperationFuture[Checkpoint]:
        """Save weights under a name, to sample from; the arguments are those of `save_state`."""
        return self._save(name, trainer_pb2.Checkpoint.KIND_SAMPLER, labels, ttl_s)

    def load_state(self, checkpoint: str | Checkpoint) -> OperationFuture[LoadResult]:
        """Replace the weights by those of a checkpoint; the optimizer starts anew.

        Args:
            checkpoint: A checkpoint, its resource name, or its id within this run.
        """
        return self._load(checkpoint, include_optimizer=False)

    def load_state_with_optimizer(
        self, checkpoint: str | Checkpoint
    ) -> OperationFuture[LoadResult]:
        """Replace weights and optimizer state by those of a checkpoint of `save_state`."""
        return self._load(checkpoint, include_optimizer=True)

    def sampler(self) -> Sampler:
        """Return a sampler of the live weights.

        Each request uses weights at least as new as the last `optim_step` whose result arrived.
        """
        return self._core.background.call(self._create_sampler(run=self))

    async def sampler_async(self) -> Sampler:
        """Do as `sampler`, in the caller's event loop."""
        return await self._core.background.acall(self._create_sampler(run=self))

    def save_weights_and_get_sampler(self, name: str) -> Sampler:
        """Save weights under a name, and return a sampler that stays at them."""
        checkpoint = self.save_weights_for_sampler(name).result()
        return self._core.background.call(self._create_sampler(checkpoint=checkpoint.name))

    async def save_weights_and_get_sampler_async(self, name: str) -> Sampler:
        """Do as `save_weights_and_get_sampler`, in the caller's event loop."""
        checkpoint = await self.save_weights_for_sampler(name)
        coroutine = self._create_sampler(checkpoint=checkpoint.name)
        return await self._core.background.acall(coroutine)

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the base model."""
        return self._core.background.call(self._core.get_tokenizer(self.base_model))

    async def get_tokenizer_async(self) -> Tokenizer:
        """Do as `get_tokenizer`, in the caller's event loop."""
        return await self._core.background.acall(self._core.get_tokenizer(self.base_model))

    async def _create_sampler(
        self, *, run: TrainingRun | None = None, checkpoint: str = ""
    ) -> Sampler:
        from tinsmith.sampling.sampler import create_sampler

        return await create_sampler(self._core, run=run, checkpoint=checkpoint)

    def _forward_backward_request(
        self, data: Sequence[Datum], loss: str, config: Mapping[str, float] | None
    ) -> trainer_pb2.ForwardBackwardRequest:
        return trainer_pb2.ForwardBackwardRequest(
            run=self.name,
            data=codec.encode_data(data),
            loss=codec.encode_loss(loss, config),
        )

    def _linear_pass(
        self, data: Sequence[Datum], loss_fn: CustomLoss, logprobs: list[FloatArray]
    ) -> OperationFuture[ForwardResult]:
        evaluated = evaluate_loss(loss_fn, data, logprobs)
        weighted = linear_data(data, evaluated.gradients)

        def decode(message: trainer_pb2.ForwardBackwardResponse) -> ForwardResult:
            result = codec.decode_forward(message)
            metrics = {**result.metrics, **evaluated.metrics}
            metrics["surrogate_loss:sum"] = result.loss
            metrics["loss:sum"] = evaluated.value
            return ForwardResult(outputs=result.outputs, metrics=metrics)

        request = self._forward_backward_request(weighted, _DEFAULT_LOSS, None)
        return self._stream.submit(operations.FORWARD_BACKWARD, request, decode)

    def _save(
        self,
        name: str,
        kind: trainer_pb2.Checkpoint.Kind.ValueType,
        labels: Mapping[str, str] | None,
        ttl_s: float | None,
    ) -> OperationFuture[Checkpoint]:
        request = trainer_pb2.SaveCheckpointRequest(
            parent=self.name, checkpoint_id=name, kind=kind, labels=dict(labels or {})
        )
        if ttl_s is not None:
            request.ttl.FromTimedelta(datetime.timedelta(seconds=ttl_s))
        return self._stream.submit(operations.SAVE_CHECKPOINT, request, codec.decode_checkpoint)

    def _load(
        self, checkpoint: str | Checkpoint, *, include_optimizer: bool
    ) -> OperationFuture[LoadResult]:
        name = checkpoint if isinstance(checkpoint, str) else checkpoint.name
        if "/" not in name:
            run = names.RunName.parse(self.name)
            name = str(names.CheckpointName(run.project, run.run, name))
        request = trainer_pb2.LoadCheckpointRequest(
            run=self.name, checkpoint=name, include_optimizer=include_optimizer
        )
        return self._stream.submit(operations.LOAD_CHECKPOINT, request, self._decode_load)

    def _decode_pending(self, message: Any) -> OperationResult:
        if isinstance(message, trainer_pb2.OptimStepResponse | trainer_pb2.LoadCheckpointResponse):
            self._version = message.version
        return _decode_result(message)

    def _decode_optim_step(self, message: trainer_pb2.OptimStepResponse) -> OptimStepResult:
        # Results arrive in the order of execution, so the last one is the state of the run.
        self._version = message.version
        return codec.decode_optim_step(message)

    def _decode_load(self, message: trainer_pb2.LoadCheckpointResponse) -> LoadResult:
        self._version = message.version
        return codec.decode_load(message)


def _decode_result(message: Any) -> OperationResult:
    """Return the result of an operation from its response message."""
    match message:
        case trainer_pb2.ForwardResponse() | trainer_pb2.ForwardBackwardResponse():
            return codec.decode_forward(message)
        case trainer_pb2.OptimStepResponse():
            return codec.decode_optim_step(message)
        case trainer_pb2.LoadCheckpointResponse():
            return codec.decode_load(message)
        case trainer_pb2.Checkpoint():
            return codec.decode_checkpoint(message)
        case _:
            raise TypeError(f"{type(message).__name__} is not the response of an operation")
