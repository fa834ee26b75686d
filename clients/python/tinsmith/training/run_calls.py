"""Calls of one run; `run_forms.py` has all forms of them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith import names
from tinsmith.errors import ConfigurationError
from tinsmith.rpc import codec, operations
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.durations import encode_duration
from tinsmith.rpc.forms import call, submits
from tinsmith.rpc.futures import OperationFuture, Ready
from tinsmith.rpc.operations import OperationStream
from tinsmith.sampling.opening import open_sampler
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.settings import Origin, RetryPolicy
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.training.custom_loss import CustomLoss, evaluate_loss, forward_data, linear_data
from tinsmith.types import (
    AdamParams,
    Checkpoint,
    Datum,
    FloatArray,
    ForwardBackwardOutput,
    LoadWeightsResponse,
    OptimStepResponse,
    TrainingRunInfo,
)
from tinsmith.v1 import checkpoint_pb2, scheduler_pb2, trainer_pb2

DEFAULT_LOSS = "cross_entropy"

OperationResult = ForwardBackwardOutput | OptimStepResponse | Checkpoint | LoadWeightsResponse
"""What an operation may end with, by its kind."""


class TrainingRunCalls(Ready):
    """One trainable model on the server: the handle that a training loop works with.

    Each method that changes or reads weights submits an operation and returns its future at once;
    operations execute in the order of the calls, whatever order their futures are awaited in.

    Example:
        >>> gradient = run.forward_backward(batch, "cross_entropy")
        >>> update = run.optim_step(AdamParams(learning_rate=1e-4))
        >>> print(gradient.result().loss, update.result().version)
    """

    def __init__(
        self,
        core: ClientCore,
        message: scheduler_pb2.TrainingRun,
        status: trainer_pb2.RunStatus | None = None,
    ) -> None:
        """Take a run over.

        Args:
            core: What the client shares.
            message: The run.
            status: State of a run that was used before; a new one has none.
        """
        self._core = core
        self.info: TrainingRunInfo = codec.decode_run(message)
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
    def origin(self) -> Origin:
        """The server and the project that it is of."""
        return self._core.origin

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
        """Return a future of any operation of the run, of this or an earlier client.

        Its `result()` raises `NotFoundError` if there is no operation of this number. If it ended
        so long ago that its result is not kept, that is `FailedPreconditionError`
        (`OPERATION_EXPIRED`).

        Args:
            sequence_number: Its number, as `OperationFuture.sequence_number` has it.

        Returns:
            A future of its result, of the type that the operation has.

        Raises:
            NotFoundError: From `result()`, if there is no operation of this number.
            FailedPreconditionError: From `result()`, if it ended so long ago that its result is
                not kept (`OPERATION_EXPIRED`).
        """
        return self._stream.look_up(sequence_number, _decode_result)

    def __repr__(self) -> str:
        return f"TrainingRun({self.name!r}, base_model={self.base_model!r})"

    def log_metrics(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        """Have the server keep metrics of a step, for the gateway's page and `runs.get_metrics`.

        Returns at once and raises nothing: what cannot be recorded is told once by a warning. A
        value for a step and name that was logged before is replaced.

        Args:
            metrics: Values by name, such as `reward` or `eval/accuracy`. Loss, gradient norm, KL
                and entropy of each step are there without it, as `trainer/...`.
            step: The step that they are of, from 0; the version of the weights if None.

        Example:
            >>> run.log_metrics({"reward": 0.5, "response_tokens": 210.0}, step=3)
        """
        self._core.metric_log.add(self.name, metrics, self._version if step is None else step)

    @submits
    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: str = DEFAULT_LOSS,
        loss_fn_config: Mapping[str, float] | None = None,
    ) -> OperationFuture[ForwardBackwardOutput]:
        """Compute the loss and log-probabilities of a batch, and no gradient.

        The arguments, the result and the errors are those of `forward_backward`.

        Returns:
            A future of the loss, its metrics, and log-probabilities by datum, float32 [T].

        Raises:
            InvalidArgumentError: As `forward_backward`.
            ResourceExhaustedError: As `forward_backward`.

        Example:
            >>> loss = run.forward(batch).result().loss
        """
        request = trainer_pb2.ForwardRequest(
            run=self.name,
            data=codec.encode_data(data),
            loss=codec.encode_loss(loss_fn, loss_fn_config),
        )
        return self._stream.submit(operations.FORWARD, request, codec.decode_forward)

    @submits
    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str = DEFAULT_LOSS,
        loss_fn_config: Mapping[str, float] | None = None,
    ) -> OperationFuture[ForwardBackwardOutput]:
        """Accumulate the gradient of a batch.

        Args:
            data: The batch.
            loss_fn: Name of the loss, a sum over tokens and datums: `cross_entropy`,
                `importance_sampling`, `ppo`, `cispo`, `dro`, `gspo` or `stable_reinforce`.
            loss_fn_config: Its settings, such as `clip_low_threshold` of `ppo` or `beta` of `dro`.

        Returns:
            A future of the loss, its metrics, and log-probabilities by datum, float32 [T].

        Raises:
            InvalidArgumentError: At once, if `data` is no list of datums; from `result()`, if the
                server refuses the batch.
            ResourceExhaustedError: From `result()`, if the batch is too large or the queue full.

        Example:
            >>> gradient = run.forward_backward(batch, "ppo", {"clip_low_threshold": 0.8})
            >>> loss = gradient.result().loss
        """
        return self._stream.submit(
            operations.FORWARD_BACKWARD,
            self._forward_backward_request(data, loss_fn, loss_fn_config),
            codec.decode_forward,
        )

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: CustomLoss
    ) -> OperationFuture[ForwardBackwardOutput]:
        """Accumulate the gradient of a loss that is computed here.

        Runs a forward pass and waits for it. Computes the loss and its gradient by log-probability
        in the calling thread. Then submits a pass that is linear in the log-probabilities and has
        this gradient. In the result, `loss:sum` is the custom loss.

        Args:
            data: The batch; each datum needs `target_tokens`.
            loss_fn: Called with the batch and a list of log-probabilities, each [T] or, for so
                many targets, [T, K]. It returns `(value, metrics)` if written with torch,
                `(value, gradients, metrics)` if with numpy: see `tinsmith.CustomLoss`.

        Returns:
            A future of the linear pass.

        Raises:
            TinsmithError: If the forward pass fails.

        Example:
            >>> gradient = run.forward_backward_custom(batch, my_loss)
        """
        outputs = self.forward(forward_data(data), DEFAULT_LOSS).result().outputs
        return self._linear_pass(data, loss_fn, [output.logprobs for output in outputs])

    async def forward_backward_custom_async(
        self, data: Sequence[Datum], loss_fn: CustomLoss
    ) -> OperationFuture[ForwardBackwardOutput]:
        """Do as `forward_backward_custom`; only `loss_fn` itself blocks the event loop."""
        outputs = (await self.forward(forward_data(data), DEFAULT_LOSS)).outputs
        return self._linear_pass(data, loss_fn, [output.logprobs for output in outputs])

    @submits
    def optim_step(
        self, adam_params: AdamParams | None = None
    ) -> OperationFuture[OptimStepResponse]:
        """Apply the accumulated gradient with AdamW and clear it.

        Args:
            adam_params: Hyper-parameters of this step; the defaults of `AdamParams` if None.

        Returns:
            A future of the version that the step made, and its metrics.

        Raises:
            FailedPreconditionError: From `result()`, if there is no gradient.
            AbortedError: From `result()`, if a part of the gradient failed.

        Example:
            >>> version = run.optim_step(AdamParams(learning_rate=1e-4)).result().version
        """
        request = trainer_pb2.OptimStepRequest(
            run=self.name, adam=codec.encode_adam(adam_params or AdamParams())
        )
        return self._stream.submit(operations.OPTIM_STEP, request, self._decode_optim_step)

    @submits
    def save_state(
        self,
        name: str,
        ttl_seconds: float | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> OperationFuture[Checkpoint]:
        """Save weights and optimizer state under a name, to go on training from.

        Args:
            name: Id within the run.
            ttl_seconds: It is deleted so long after the save; None keeps it.
            overwrite: Refused if True: a checkpoint is never replaced, so what was saved under a
                name stays what it was.
            user_metadata: Labels of the checkpoint.

        Returns:
            A future of the checkpoint.

        Raises:
            ConfigurationError: At once, if `overwrite` is True.
            AlreadyExistsError: From `result()`, if the run has a checkpoint of this name.

        Example:
            >>> saved = run.save_state("step-100", ttl_seconds=7 * 24 * 3600).result()
        """
        if overwrite:
            raise ConfigurationError(
                f"overwrite=True: checkpoint {name} would be replaced, which no server does",
                remedy="save under another name, or delete the old one first with "
                f"Client.checkpoints.delete({self.name + '/checkpoints/' + name!r})",
            )
        return self._save(name, checkpoint_pb2.Checkpoint.KIND_TRAINING, user_metadata, ttl_seconds)

    @submits
    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: float | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> OperationFuture[Checkpoint]:
        """Save weights under a name, to sample from.

        Arguments, result and errors are those of `save_state`.

        Returns:
            A future of the checkpoint.

        Raises:
            AlreadyExistsError: From `result()`, if the run has a checkpoint of this name.

        Example:
            >>> saved = run.save_weights_for_sampler("step-100").result()
        """
        return self._save(name, checkpoint_pb2.Checkpoint.KIND_SAMPLER, user_metadata, ttl_seconds)

    @submits
    def load_state(self, path: str | Checkpoint) -> OperationFuture[LoadWeightsResponse]:
        """Replace the weights by those of a checkpoint; the optimizer starts anew.

        Args:
            path: A checkpoint, its resource name, or its id within this run.

        Returns:
            A future of the version that the run has now.

        Raises:
            NotFoundError: From `result()`, if there is no such checkpoint.

        Example:
            >>> run.load_state(saved).result()
        """
        return self._load(path, include_optimizer=False)

    @submits
    def load_state_with_optimizer(
        self, path: str | Checkpoint
    ) -> OperationFuture[LoadWeightsResponse]:
        """Replace weights and optimizer state by those of a checkpoint of `save_state`.

        Arguments, result and errors are those of `load_state`.

        Returns:
            A future of the version that the run has now.

        Raises:
            NotFoundError: From `result()`, if there is no such checkpoint.
            FailedPreconditionError: From `result()`, if it has no optimizer state.

        Example:
            >>> run.load_state_with_optimizer(saved).result()
        """
        return self._load(path, include_optimizer=True)

    @call
    async def _finish(self) -> None:
        """Say that the training is done: from now on lists show the run as `finished`.

        Nothing else changes: the run takes operations and can be sampled as before. Another
        optimizer step undoes it, as `reopen` does. Operations that are still under way belong to
        the training. Repeating it changes nothing.

        Raises:
            NotFoundError: If the run was deleted.
            UnimplementedError: If the server is of an earlier release.

        Example:
            >>> run.save_state("final").result()
            >>> run.finish()
        """
        request = scheduler_pb2.FinishTrainingRunRequest(
            run=self.name, sequence_number=self._stream.last_number
        )
        await self._core.transport.call(
            self._core.scheduler, lambda c: c.scheduler.FinishTrainingRun, request
        )

    @call
    async def _reopen(self) -> None:
        """Say that the training goes on here: lists show the run as `training`.

        For a loop that continues a run by name. `finish` is undone at once, not only by the next
        step. The run then also counts as `training` between its operations, for as long as this
        client lives. Repeating it changes nothing.

        Raises:
            NotFoundError: If the run was deleted.
            UnimplementedError: If the server is of an earlier release.

        Example:
            >>> run = client.runs.get("run-1")
            >>> run.reopen()
        """
        request = scheduler_pb2.ReopenTrainingRunRequest(
            run=self.name, session=self._core.session.name
        )
        await self._core.transport.call(
            self._core.scheduler, lambda c: c.scheduler.ReopenTrainingRun, request
        )

    @call
    async def _sampler(self, *, max_staleness: int = 0) -> Sampler:
        """Return a sampler of the live weights.

        Each request uses weights at least as new as the last `optim_step` whose result arrived.

        Args:
            max_staleness: Steps that they may be older, while the trainer is away and cannot be
                asked for newer ones. Each token carries its version.

        Returns:
            The sampler.

        Raises:
            TinsmithError: If the server cannot be reached or refuses the key.

        Example:
            >>> sampler = run.sampler()
        """
        return await open_sampler(
            self._core,
            run=self.name,
            min_version=lambda: self._version,
            max_staleness=max_staleness,
        )

    @call
    async def _save_weights_and_get_sampling_client(
        self, name: str | None = None, retry_config: RetryPolicy | None = None
    ) -> Sampler:
        """Save the weights, and return a sampler that stays at them.

        Args:
            name: Id of the checkpoint within the run; drawn if None.
            retry_config: How requests of the sampler are sent again; as the client's calls if None.

        Returns:
            The sampler; it serves the weights of this moment, whatever the run does later.

        Raises:
            AlreadyExistsError: If the run has a checkpoint of this name.
            ConfigurationError: If `retry_config` is no `RetryPolicy`.

        Example:
            >>> sampler = run.save_weights_and_get_sampling_client("step-100")
        """
        saved = await self.save_weights_for_sampler(name or f"sampler-{secrets.token_hex(6)}")
        return await open_sampler(self._core, checkpoint=saved.name, retry_config=retry_config)

    @call
    async def _get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the base model.

        Returns:
            The tokenizer.

        Raises:
            NotFoundError: If no worker serves the model any more.

        Example:
            >>> tokens = run.get_tokenizer().encode("hello")
        """
        return await self._core.get_tokenizer(self.base_model, self.info.chat_template)

    def get_info(self) -> TrainingRunInfo:
        """Return what the run is: its model, adapter and labels.

        Returns:
            The run as it was when this handle was made.
        """
        return self.info

    def _forward_backward_request(
        self, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float] | None
    ) -> trainer_pb2.ForwardBackwardRequest:
        return trainer_pb2.ForwardBackwardRequest(
            run=self.name,
            data=codec.encode_data(data),
            loss=codec.encode_loss(loss_fn, config),
        )

    def _linear_pass(
        self, data: Sequence[Datum], loss_fn: CustomLoss, logprobs: list[FloatArray]
    ) -> OperationFuture[ForwardBackwardOutput]:
        evaluated = evaluate_loss(loss_fn, data, logprobs)
        weighted = linear_data(data, evaluated.gradients)

        def decode(message: trainer_pb2.ForwardBackwardResponse) -> ForwardBackwardOutput:
            result = codec.decode_forward(message)
            metrics = {**result.metrics, **evaluated.metrics}
            metrics["surrogate_loss:sum"] = result.loss
            metrics["loss:sum"] = evaluated.value
            return ForwardBackwardOutput(outputs=result.outputs, metrics=metrics)

        request = self._forward_backward_request(weighted, DEFAULT_LOSS, None)
        return self._stream.submit(operations.FORWARD_BACKWARD, request, decode)

    def _save(
        self,
        name: str,
        kind: checkpoint_pb2.Checkpoint.Kind.ValueType,
        labels: Mapping[str, str] | None,
        ttl_seconds: float | None,
    ) -> OperationFuture[Checkpoint]:
        request = trainer_pb2.SaveCheckpointRequest(
            parent=self.name, checkpoint_id=name, kind=kind, labels=dict(labels or {})
        )
        if ttl_seconds is not None:
            request.ttl.CopyFrom(encode_duration(ttl_seconds))
        return self._stream.submit(operations.SAVE_CHECKPOINT, request, codec.decode_checkpoint)

    def _load(
        self, checkpoint: str | Checkpoint, *, include_optimizer: bool
    ) -> OperationFuture[LoadWeightsResponse]:
        run = names.RunName.parse(self.name)
        name = names.name_of(checkpoint)
        if "/" not in name:
            name = str(names.CheckpointName(run.project, run.run, name))
        name = names.whole_checkpoint(name, run.project)
        request = trainer_pb2.LoadCheckpointRequest(
            run=self.name, checkpoint=name, include_optimizer=include_optimizer
        )
        return self._stream.submit(operations.LOAD_CHECKPOINT, request, self._decode_load)

    def _decode_pending(self, message: Any) -> OperationResult:
        if isinstance(message, trainer_pb2.OptimStepResponse | trainer_pb2.LoadCheckpointResponse):
            self._version = message.version
        return _decode_result(message)

    def _decode_optim_step(self, message: trainer_pb2.OptimStepResponse) -> OptimStepResponse:
        # Results arrive in the order of execution, so the last one is the state of the run.
        self._version = message.version
        return codec.decode_optim_step(message)

    def _decode_load(self, message: trainer_pb2.LoadCheckpointResponse) -> LoadWeightsResponse:
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
        case checkpoint_pb2.Checkpoint():
            return codec.decode_checkpoint(message)
        case _:
            raise TypeError(f"{type(message).__name__} is not the response of an operation")
