"""User values to and from protobuf messages. Nothing here talks to a server."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from tinsmith import tensors
from tinsmith import types as t
from tinsmith.errors import InvalidArgumentError
from tinsmith.images import ImageRules
from tinsmith.rpc.durations import decode_duration
from tinsmith.rpc.input_codec import encode_model_input
from tinsmith.rpc.sampler_choice import choice_name
from tinsmith.sampling_stops import read_stops
from tinsmith.v1 import (
    checkpoint_pb2,
    keys_pb2,
    models_pb2,
    run_metrics_pb2,
    sampler_pb2,
    scheduler_pb2,
    tensors_pb2,
    trainer_pb2,
    trajectories_pb2,
)


def encode_data(data: Sequence[t.Datum]) -> list[trajectories_pb2.Datum]:
    """Return the messages of a batch.

    Raises:
        InvalidArgumentError: If it is no list of datums.
    """
    if isinstance(data, t.Datum):
        raise InvalidArgumentError("data is one Datum", remedy="give a list of them: [datum]")
    for index, datum in enumerate(data):
        if not isinstance(datum, t.Datum):
            raise InvalidArgumentError(
                f"data[{index}] is a {type(datum).__name__}", remedy="give a list of tinsmith.Datum"
            )
    return [encode_datum(datum) for datum in data]


def encode_datum(value: t.Datum) -> trajectories_pb2.Datum:
    """Return the message of a datum."""
    return trajectories_pb2.Datum(
        model_input=encode_model_input(value.model_input),
        loss_inputs={
            name: tensors.encode_tensor(array) for name, array in value.loss_fn_inputs.items()
        },
    )


def encode_loss(name: str, config: Mapping[str, float] | None) -> trainer_pb2.Loss:
    """Return the message of a loss."""
    return trainer_pb2.Loss(name=name, config=dict(config or {}))


def encode_adam(value: t.AdamParams) -> trainer_pb2.AdamParams:
    """Return the message of optimizer settings; every field is set."""
    return trainer_pb2.AdamParams(
        learning_rate=value.learning_rate,
        beta1=value.beta1,
        beta2=value.beta2,
        eps=value.eps,
        weight_decay=value.weight_decay,
        grad_clip_norm=value.grad_clip_norm,
    )


def encode_sampling_params(
    value: t.SamplingParams, *, seed: int
) -> trajectories_pb2.SamplingParams:
    """Return the message of sampling settings.

    Args:
        value: What the user gave.
        seed: Used if `value` has none.
    """
    message = trajectories_pb2.SamplingParams(
        temperature=value.temperature,
        top_k=value.top_k,
        top_p=value.top_p,
        seed=seed if value.seed is None else value.seed,
        min_p=value.min_p,
        frequency_penalty=value.frequency_penalty,
        presence_penalty=value.presence_penalty,
        repetition_penalty=value.repetition_penalty,
        logit_bias=value.logit_bias,
    )
    schema = value.json_schema
    if schema is not None and value.regex is not None:
        raise InvalidArgumentError("json_schema and regex exclude each other; give one")
    if schema is not None:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        message.output_format.json_schema = text
    if value.regex is not None:
        message.output_format.regex = value.regex
    if value.max_tokens is not None:
        message.max_tokens = value.max_tokens
    stops, has_turn_end = read_stops(value)
    token_ids = [int(stop) for stop in stops if not isinstance(stop, str)]
    message.stop_strings.extend(stop for stop in stops if isinstance(stop, str))
    if token_ids or not has_turn_end:
        message.stop_tokens.token_ids.extend(token_ids)
        message.stop_tokens.includes_those_of_model = has_turn_end
        message.stop_tokens.SetInParent()
    return message


def encode_lora(
    *,
    rank: int,
    seed: int,
    alpha: float | None,
    train_attention: bool,
    train_mlp: bool,
    train_unembedding: bool,
) -> models_pb2.AdapterConfig:
    """Return the message of a LoRA adapter."""
    lora = models_pb2.LoraConfig(
        rank=rank,
        seed=seed,
        train_attention=train_attention,
        train_mlp=train_mlp,
        train_unembedding=train_unembedding,
    )
    if alpha is not None:
        lora.alpha = alpha
    return models_pb2.AdapterConfig(lora=lora)


def decode_forward(
    message: trainer_pb2.ForwardResponse | trainer_pb2.ForwardBackwardResponse,
) -> t.ForwardBackwardOutput:
    """Return the result of a pass."""
    outputs = [
        t.DatumOutput(logprobs=tensors.decode_tensor(output.logprobs).astype(np.float32))
        for output in message.outputs
    ]
    return t.ForwardBackwardOutput(outputs=outputs, metrics=dict(message.metrics))


def decode_optim_step(message: trainer_pb2.OptimStepResponse) -> t.OptimStepResponse:
    """Return the result of an optimizer step."""
    return t.OptimStepResponse(version=message.version, metrics=dict(message.metrics))


def decode_load(message: trainer_pb2.LoadCheckpointResponse) -> t.LoadWeightsResponse:
    """Return the result of a load."""
    return t.LoadWeightsResponse(version=message.version)


def decode_checkpoint(message: checkpoint_pb2.Checkpoint) -> t.Checkpoint:
    """Return a checkpoint."""
    return t.Checkpoint(
        name=message.name,
        kind=_enum_word(checkpoint_pb2.Checkpoint.Kind.Name(message.kind), "KIND_"),
        base_model=message.base_model,
        version=message.version,
        sequence_number=message.sequence_number,
        size_bytes=message.size_bytes,
        manifest_uri=message.manifest_uri,
        create_time=_decode_time(message),
        labels=dict(message.labels),
        is_published=message.state == checkpoint_pb2.Checkpoint.STATE_PUBLISHED,
        expire_time=_decode_expiry(message),
        files=[_decode_file(file) for file in message.files],
        source_checkpoint=message.source_checkpoint,
    )


def decode_export(message: checkpoint_pb2.CheckpointExport) -> t.CheckpointExport:
    """Return an export."""
    return t.CheckpointExport(
        name=message.name,
        format=_enum_word(checkpoint_pb2.CheckpointExport.Format.Name(message.format), "FORMAT_"),
        files=[_decode_file(file) for file in message.files],
        size_bytes=message.size_bytes,
        manifest_uri=message.manifest_uri,
        create_time=_decode_time(message),
        expire_time=_decode_expiry(message),
    )


def _decode_file(message: checkpoint_pb2.CheckpointFile) -> t.CheckpointFile:
    return t.CheckpointFile(message.file, message.size_bytes, message.sha256)


def decode_operation_metadata(message: trainer_pb2.OperationMetadata) -> t.OperationMetadata:
    """Return how an operation stands."""
    state = trainer_pb2.OperationMetadata.State.Name(message.state)
    return t.OperationMetadata(
        kind=message.kind,
        state=_enum_word(state, "STATE_"),
        waiting_for=message.waiting_for,
        num_attempts=message.num_attempts,
        revision=message.revision,
        queue_position=message.queue_position,
        num_tokens_ahead=message.num_tokens_ahead,
    )


def decode_curve(message: run_metrics_pb2.MetricCurve) -> t.MetricCurve:
    """Return one metric over steps."""
    return t.MetricCurve(
        name=message.name,
        steps=np.array(message.steps, dtype=np.int64),
        means=np.array(message.means, dtype=np.float64),
        minima=np.array(message.minima, dtype=np.float64),
        maxima=np.array(message.maxima, dtype=np.float64),
        times=np.array(message.times, dtype=np.float64),
    )


def decode_last_metric(message: run_metrics_pb2.RunMetric) -> t.LastMetric:
    """Return the newest point of a metric."""
    return t.LastMetric(
        run=message.run,
        name=message.name,
        step=message.last_step,
        value=message.last_value,
        update_time=message.update_time.ToDatetime(datetime.UTC),
    )


def decode_run(message: scheduler_pb2.TrainingRun) -> t.TrainingRunInfo:
    """Return what the scheduler knows of a run; a list says what goes on in it, too."""
    is_full = message.adapter.WhichOneof("kind") == "full"
    return t.TrainingRunInfo(
        name=message.name,
        state=_enum_word(scheduler_pb2.TrainingRun.State.Name(message.state), "STATE_"),
        base_model=message.base_model,
        adapter="full" if is_full else "lora",
        rank=0 if is_full else message.adapter.lora.rank,
        chat_template=message.adapter.chat_template,
        display_name=message.display_name,
        labels=dict(message.labels),
        session=message.session,
        create_time=_decode_time(message),
        worker=message.worker,
        waiting_for=message.waiting_for,
        activity=_decode_activity(message),
        num_pending_operations=message.num_pending_operations,
        replay_diverged=message.replay_diverged,
        source_run=message.source_run,
        source_step=message.source_step,
        history_retention_seconds=decode_duration(message.history_retention),
        finish_time=(
            message.finish_time.ToDatetime(datetime.UTC)
            if message.HasField("finish_time")
            else None
        ),
    )


def _decode_activity(message: scheduler_pb2.TrainingRun) -> str:
    if message.activity == scheduler_pb2.TrainingRun.ACTIVITY_UNSPECIFIED:
        return ""
    return _enum_word(scheduler_pb2.TrainingRun.Activity.Name(message.activity), "ACTIVITY_")


def decode_key(message: keys_pb2.Key) -> t.ApiKey:
    """Return a key without its secret."""
    return t.ApiKey(
        name=message.name,
        state=_enum_word(keys_pb2.Key.State.Name(message.state), "STATE_"),
        role=message.role,
        expire_time=_decode_expiry(message),
        display_name=message.display_name,
        create_time=_decode_time(message),
    )


def decode_new_key(message: keys_pb2.Key) -> t.NewApiKey:
    """Return a key with its secret."""
    return t.NewApiKey(
        name=message.name,
        role=message.role,
        expire_time=_decode_expiry(message),
        display_name=message.display_name,
        secret=message.secret,
        tinker_secret=message.tinker_secret,
    )


def decode_served_model(message: scheduler_pb2.ServedModel) -> t.ModelInfo:
    """Return a base model and what can be done with it."""
    model = message.model
    exactness = models_pb2.ModelCapabilities.Exactness.Name(model.exactness)
    return t.ModelInfo(
        base_model=model.base_model,
        trainable=message.trainable,
        sampleable=message.sampleable,
        vocabulary_size=model.vocabulary_size,
        max_context_tokens=model.max_context_tokens,
        num_parameters=model.num_parameters,
        exactness=_enum_word(exactness, "EXACTNESS_"),
        stop_token_ids=list(model.stop_token_ids),
        numerics_fingerprint=model.numerics_fingerprint,
        reads_images=model.reads_images,
        dtype=model.dtype,
        images=_decode_image_rules(model.images) if model.HasField("images") else None,
        layers_without_adapters=tuple(model.layers_without_adapters),
    )


def _decode_image_rules(message: models_pb2.ImageRules) -> ImageRules:
    return ImageRules(
        token_id=message.token_id,
        token_side_pixels=message.token_side_pixels,
        min_pixels=message.min_pixels,
        max_pixels=message.max_pixels,
    )


def decode_sample(message: sampler_pb2.SampleResponse) -> t.SampleResponse:
    """Return completions."""
    topk: list[list[tuple[int, float]] | None] | None = None
    if message.HasField("topk_prompt_logprobs"):
        topk = [listed or None for listed in _decode_topk(message.topk_prompt_logprobs)]
    alternatives: t.PromptAltTokens | None = None
    if message.HasField("prompt_alternatives"):
        drawn = message.prompt_alternatives
        alternatives = t.PromptAltTokens(
            tokens=tensors.decode_tensor(drawn.tokens).astype(np.int64),
            logprobs=tensors.decode_tensor(drawn.logprobs).astype(np.float32),
        )
    return t.SampleResponse(
        sequences=[_decode_sequence(sequence) for sequence in message.sequences],
        seed=message.seed,
        prompt_logprobs=decode_logprobs(message.prompt_logprobs)
        if message.HasField("prompt_logprobs")
        else None,
        topk_prompt_logprobs=topk,
        target_prompt_logprobs=tensors.decode_tensor(message.target_prompt_logprobs).astype(
            np.float32
        )
        if message.HasField("target_prompt_logprobs")
        else None,
        prompt_alt_tokens=alternatives,
        prompt_cache_hit_tokens=message.num_cached_prompt_tokens,
        version=message.version,
        sampler=message.sampler,
        sampler_choice=choice_name(message.sampler_choice),
    )


def decode_piece(message: sampler_pb2.StreamSampleResponse) -> t.SampleChunk:
    """Return a piece of a stream."""
    sequence = _decode_sequence(message.piece)
    return t.SampleChunk(
        sample_index=message.sample_index,
        token_index=message.token_index,
        tokens=sequence.tokens,
        logprobs=sequence.logprobs,
        versions=sequence.versions,
        stop_reason="" if sequence.stop_reason == "unspecified" else sequence.stop_reason,
        topk_logprobs=sequence.topk_logprobs,
    )


def _decode_sequence(message: trajectories_pb2.SampledSequence) -> t.SampledSequence:
    reason = trajectories_pb2.SampledSequence.StopReason.Name(message.stop_reason)
    topk: list[list[tuple[int, float]]] | None = None
    if message.HasField("topk_logprobs"):
        topk = _decode_topk(message.topk_logprobs)
    return t.SampledSequence(
        tokens=cast(list[int], tensors.decode_tensor(message.tokens).tolist()),
        logprobs=cast(list[float], tensors.decode_tensor(message.logprobs).tolist()),
        versions=cast(list[int], tensors.decode_tensor(message.versions).tolist()),
        stop_reason=_enum_word(reason, "STOP_REASON_"),
        topk_logprobs=topk,
    )


def _decode_topk(message: trajectories_pb2.TopkLogprobs) -> list[list[tuple[int, float]]]:
    ids = tensors.decode_tensor(message.token_ids).tolist()
    logprobs = tensors.decode_tensor(message.logprobs).tolist()
    return [
        [(token, logprob) for token, logprob in zip(row, values, strict=True) if token >= 0]
        for row, values in zip(ids, logprobs, strict=True)
    ]


def decode_logprobs(message: tensors_pb2.Tensor) -> list[float | None]:
    """Return log-probabilities by position; None where nothing was scored."""
    values: list[float] = tensors.decode_tensor(message).astype(np.float32).tolist()
    return [None if math.isnan(value) else value for value in values]


def _enum_word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()


def _decode_time(
    message: checkpoint_pb2.Checkpoint
    | checkpoint_pb2.CheckpointExport
    | scheduler_pb2.TrainingRun
    | keys_pb2.Key,
) -> datetime.datetime | None:
    if not message.HasField("create_time"):
        return None
    return message.create_time.ToDatetime(tzinfo=datetime.UTC)


def _decode_expiry(
    message: checkpoint_pb2.Checkpoint | checkpoint_pb2.CheckpointExport | keys_pb2.Key,
) -> datetime.datetime | None:
    if not message.HasField("expire_time"):
        return None
    return message.expire_time.ToDatetime(tzinfo=datetime.UTC)
