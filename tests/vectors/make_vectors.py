"""Conformance vectors: messages as bytes, as JSON, and as the values that they stand for.

Run `python tests/vectors/make_vectors.py` after a change of the contract. The messages are made by
the encoders of the SDK and of the pods where these have one; `tests/unit/test_vectors.py` holds the
committed files against this module and against the decoders of both sides.
"""

from __future__ import annotations

import hashlib
import json
import math
import pathlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.longrunning import operations_pb2
from google.protobuf import json_format
from google.protobuf.message import Message

from tinsmith import names, tensors
from tinsmith import types as t
from tinsmith.rpc import codec
from tinsmith.rpc.error_codec import encode_status
from tinsmith.rpc.input_codec import encode_model_input
from tinsmith.v1 import (
    sampler_pb2,
    tensors_pb2,
    trainer_pb2,
    trajectories_pb2,
)
from tinsmith_runtime import errors

FOLDER = pathlib.Path(__file__).parent
RUN = "projects/p/trainingRuns/r"
SESSION = "projects/p/samplingSessions/s"
REQUEST_ID = "6fa459ea-ee8a-4ca4-894e-db77e160355e"
OUTPUT_LOGPROBS = np.array([-0.25, -1.5, 0.0], np.float32)


@dataclass(frozen=True)
class Vector:
    """A message, what it stands for, and what a server says to it."""

    message: Message
    values: Any = None
    """What a decoder has to find; None where the JSON of the message says it all."""
    refused: dict[str, str] = field(default_factory=dict)
    """Reason and field of the refusal; empty if a server accepts the message, or sends it."""


def plain(value: Any) -> Any:
    """Return nested lists as JSON: numbers that JSON lacks are the words of protobuf's JSON."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _tensor(array: np.ndarray[Any, Any]) -> Vector:
    return Vector(tensors.encode_tensor(array), plain(array.tolist()))


def _refused_tensor(dtype: int, shape: list[int], data: bytes) -> Vector:
    message = tensors_pb2.Tensor(dtype=dtype, shape=shape, data=data)  # type: ignore[arg-type]
    return Vector(message, refused={"reason": "SHAPE_MISMATCH", "field": "tensor"})


def tensor_vectors() -> dict[str, Vector]:
    """Return a tensor of each dtype and shape, and such as are refused."""
    bfloat16 = tensors_pb2.Tensor(
        dtype=tensors_pb2.DTYPE_BFLOAT16, shape=[2], data=bytes.fromhex("803f 20c0")
    )
    float32, int32 = tensors_pb2.DTYPE_FLOAT32, tensors_pb2.DTYPE_INT32
    return {
        "float32": _tensor(np.array([[1.5, -0.0, 1e-45], [np.inf, -np.inf, np.nan]], np.float32)),
        "int64": _tensor(np.array([-(2**63), -1, 2**63 - 1], np.int64)),
        "int32": _tensor(np.array([[-(2**31)], [2**31 - 1]], np.int32)),
        "bfloat16": Vector(bfloat16, [1.0, -2.5]),
        "scalar": _tensor(np.array(0.5, np.float32)),
        "empty": _tensor(np.zeros(0, np.int32)),
        "empty_rows": _tensor(np.zeros((2, 0), np.float32)),
        "no_dtype": _refused_tensor(0, [1], bytes(4)),
        "short_data": _refused_tensor(float32, [2], bytes(7)),
        "long_data": _refused_tensor(int32, [1], bytes(8)),
        "negative_extent": _refused_tensor(float32, [-1], b""),
    }


def input_vectors() -> dict[str, Vector]:
    """Return prompts of text and images, and such as are refused."""
    text = t.ModelInput.from_ints([1, 2, 151_643])
    image = t.ImageChunk(data=b"\x89PNG\r\n\x1a\n", format="png")
    mixed = text.append(image).append_tokens([7])
    floats = trajectories_pb2.ModelInput()
    floats.chunks.add(tokens=tensors.encode_tensor(np.ones(2, np.float32)))
    hollow = trajectories_pb2.ModelInput()
    hollow.chunks.add()
    return {
        "text": Vector(encode_model_input(text), {"tokens": [1, 2, 151_643], "images": []}),
        "text_and_image": Vector(
            encode_model_input(mixed),
            {"tokens": [1, 2, 151_643, 7], "images": [{"position": 3, "format": "png"}]},
        ),
        "no_chunk": Vector(
            trajectories_pb2.ModelInput(), refused={"reason": "EMPTY_BATCH", "field": "prompt"}
        ),
        "hollow_chunk": Vector(
            hollow, refused={"reason": "INVALID_FIELD", "field": "prompt.chunks[0]"}
        ),
        "float_tokens": Vector(
            floats, refused={"reason": "SHAPE_MISMATCH", "field": "prompt.chunks[0].tokens"}
        ),
    }


def _batch(*data: t.Datum, loss: str, **config: float) -> trainer_pb2.ForwardBackwardRequest:
    return trainer_pb2.ForwardBackwardRequest(
        run=RUN,
        request_id=REQUEST_ID,
        sequence_number=1,
        data=codec.encode_data(data),
        loss=codec.encode_loss(loss, config),
    )


def batch_vectors() -> dict[str, Vector]:
    """Return batches of datums with the loss that they are for."""
    prompt = t.ModelInput.from_ints([1, 2, 3])
    supervised = t.Datum(prompt, {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, -0.5]})
    policy = t.Datum(
        prompt,
        {"target_tokens": [2, 3, 4], "logprobs": [0.0, -1.5, -2.0], "advantages": [0.0, 1.0, -1.0]},
    )
    several = t.Datum(
        prompt,
        {
            "target_tokens": [[2, 3], [3, 4], [4, 5]],
            "weights": [[0.5, 0.5], [1.0, 0.0], [0.0, 0.0]],
        },
    )
    untargeted = _batch(supervised, loss="cross_entropy")
    del untargeted.data[0].loss_inputs["target_tokens"]
    return {
        "cross_entropy": Vector(_batch(supervised, supervised, loss="cross_entropy")),
        "several_targets": Vector(_batch(several, loss="cross_entropy")),
        "ppo": Vector(
            _batch(policy, loss="ppo", clip_low_threshold=0.75, clip_high_threshold=1.25)
        ),
        "no_datum": Vector(
            _batch(loss="cross_entropy"), refused={"reason": "EMPTY_BATCH", "field": "data"}
        ),
        "no_target": Vector(
            untargeted,
            refused={
                "reason": "MISSING_LOSS_INPUT",
                "field": 'data[0].loss_inputs["target_tokens"]',
            },
        ),
    }


def step_vectors() -> dict[str, Vector]:
    """Return optimizer steps."""

    def step(adam: trainer_pb2.AdamParams) -> trainer_pb2.OptimStepRequest:
        return trainer_pb2.OptimStepRequest(
            run=RUN, request_id=REQUEST_ID, sequence_number=2, adam=adam
        )

    def refused(reason: str, name: str) -> dict[str, str]:
        return {"reason": reason, "field": f"adam.{name}"}

    return {
        "given": Vector(step(codec.encode_adam(t.AdamParams(learning_rate=3e-4)))),
        "defaults": Vector(step(trainer_pb2.AdamParams(learning_rate=0.0))),
        "no_rate": Vector(
            step(trainer_pb2.AdamParams(beta1=0.9)),
            refused=refused("INVALID_FIELD", "learning_rate"),
        ),
        "rate_not_finite": Vector(
            step(trainer_pb2.AdamParams(learning_rate=float("nan"))),
            refused=refused("NOT_FINITE", "learning_rate"),
        ),
        "beta_of_one": Vector(
            step(trainer_pb2.AdamParams(learning_rate=1.0, beta2=1.0)),
            refused=refused("INVALID_FIELD", "beta2"),
        ),
    }


def sample_request_vectors() -> dict[str, Vector]:
    """Return requests for completions."""

    def request(params: t.SamplingParams, **fields: Any) -> sampler_pb2.SampleRequest:
        return sampler_pb2.SampleRequest(
            sampling_session=SESSION,
            prompt=encode_model_input(t.ModelInput.from_ints([1, 2, 3])),
            params=codec.encode_sampling_params(params, seed=2**64 - 1),
            **fields,
        )

    def refused(name: str, reason: str = "INVALID_FIELD") -> dict[str, str]:
        return {"reason": reason, "field": name}

    full = t.SamplingParams(
        max_tokens=16, temperature=0.0, top_k=5, top_p=0.5, seed=7, stop=["\n\n", "é"]
    )
    return {
        "least": Vector(request(t.SamplingParams())),
        "full": Vector(
            request(
                full,
                num_samples=4,
                prompt_logprobs=True,
                topk_prompt_logprobs=2,
                prompt_logprobs_last_n=1,
                topk_sample_logprobs=3,
                min_version=9,
                weight_updates=sampler_pb2.WEIGHT_UPDATES_IN_FLIGHT,
            )
        ),
        "stop_at_nothing": Vector(request(t.SamplingParams(stop=[]))),
        "stop_tokens": Vector(request(t.SamplingParams(stop=[2, 3]))),
        "cold": Vector(
            request(t.SamplingParams(temperature=-1.0)), refused=refused("params.temperature")
        ),
        "top_p_of_zero": Vector(
            request(t.SamplingParams(top_p=0.0)), refused=refused("params.top_p")
        ),
        "top_p_not_finite": Vector(
            request(t.SamplingParams(top_p=float("nan"))),
            refused=refused("params.top_p", "NOT_FINITE"),
        ),
        "empty_stop": Vector(
            request(t.SamplingParams(stop=[""])), refused=refused("params.stop_strings")
        ),
        "samples_below_zero": Vector(
            request(t.SamplingParams(), num_samples=-1), refused=refused("num_samples")
        ),
    }


def _sequence(tokens: list[int], reason: int) -> trajectories_pb2.SampledSequence:
    return trajectories_pb2.SampledSequence(
        tokens=tensors.encode_tokens(tokens),
        logprobs=tensors.encode_tensor(np.array([-0.5] * len(tokens), np.float32)),
        versions=tensors.encode_tensor(np.array([3] * len(tokens), np.int64)),
        stop_reason=reason,  # type: ignore[arg-type]
    )


def sample_vectors() -> dict[str, Vector]:
    """Return completions."""
    stop = trajectories_pb2.SampledSequence.STOP_REASON_STOP
    length = trajectories_pb2.SampledSequence.STOP_REASON_LENGTH
    message = sampler_pb2.SampleResponse(
        sequences=[_sequence([5, 6, 2], stop), _sequence([5], length)],
        prompt_logprobs=tensors.encode_tensor(np.array([np.nan, -0.25, -4.0], np.float32)),
        seed=2**64 - 1,
        num_cached_prompt_tokens=3,
        version=3,
    )
    values = {
        "sequences": [
            {
                "tokens": [5, 6, 2],
                "logprobs": [-0.5, -0.5, -0.5],
                "versions": [3, 3, 3],
                "stop_reason": "stop",
            },
            {"tokens": [5], "logprobs": [-0.5], "versions": [3], "stop_reason": "length"},
        ],
        "prompt_logprobs": ["NaN", -0.25, -4.0],
        "seed": 2**64 - 1,
        "version": 3,
    }
    return {"two_samples": Vector(message, values)}


def stream_vectors() -> dict[str, Vector]:
    """Return requests for a stream: its beginning, and what goes on after a lost connection."""
    least = sample_request_vectors()["least"].message
    assert isinstance(least, sampler_pb2.SampleRequest)
    least.ClearField("sampling_session")

    def stream(received: list[int], session: str = SESSION) -> sampler_pb2.StreamSampleRequest:
        return sampler_pb2.StreamSampleRequest(
            sampling_session=session, request=least, received_tokens=received
        )

    other = stream([])
    other.request.sampling_session = f"{SESSION}2"
    return {
        "begin": Vector(stream([]), {"received_tokens": []}),
        "resume": Vector(stream([4, 0, 9]), {"received_tokens": [4, 0, 9]}),
        "received_below_zero": Vector(
            stream([-1]), refused={"reason": "INVALID_FIELD", "field": "received_tokens"}
        ),
        "two_sessions": Vector(
            other, refused={"reason": "INVALID_FIELD", "field": "request.sampling_session"}
        ),
    }


def error_vectors() -> dict[str, Vector]:
    """Return errors with their details."""
    raised: dict[str, errors.TinsmithError] = {
        "field": errors.InvalidFieldError("adam.beta1", "must be in [0, 1), got 1.0"),
        "not_found": errors.RunNotFoundError(f"{RUN} does not exist", run=RUN),
        "gap": errors.AbortedError("sequence number 3 is missing", missing=3),
        "limit": errors.ResourceExhaustedError("too many operations wait", retry_after_s=1.5),
        "draining": errors.UnavailableError("the pod is draining", retry_after_s=2.0),
        "scope": errors.PermissionDeniedError("the caller is not a pod"),
        "bug": errors.InternalError("internal error; the log of the pod has the trace"),
    }
    return {
        name: Vector(
            encode_status(error, domain="trainer.tinsmith"),
            {
                "code": error.code.name,
                "reason": error.reason,
                "message": error.message,
                "retry_after_seconds": error.retry_after_s,
            },
        )
        for name, error in raised.items()
    }


def operation_vectors() -> dict[str, Vector]:
    """Return operations that wait, that succeeded, and that failed."""
    kinds = {
        "queued": trainer_pb2.OperationMetadata.STATE_QUEUED,
        "succeeded": trainer_pb2.OperationMetadata.STATE_SUCCEEDED,
        "failed": trainer_pb2.OperationMetadata.STATE_FAILED,
    }
    found = {}
    for number, (name, state) in enumerate(kinds.items(), 1):
        operation = operations_pb2.Operation(
            name=f"{RUN}/operations/{number}", done=name != "queued"
        )
        metadata = trainer_pb2.OperationMetadata(
            run=RUN, sequence_number=number, kind="forward_backward", state=state
        )
        metadata.submit_time.FromSeconds(1_700_000_000)
        operation.metadata.Pack(metadata)
        values: dict[str, Any] = {"state": name, "sequence_number": number}
        if name == "succeeded":
            # One metric: inside of an `Any`, the entries of a map have no order to rely on.
            response = trainer_pb2.ForwardBackwardResponse(metrics={"loss:sum": 1.75})
            response.outputs.add(logprobs=tensors.encode_tensor(OUTPUT_LOGPROBS))
            operation.response.Pack(response)
            values |= {"metrics": dict(response.metrics), "logprobs": [OUTPUT_LOGPROBS.tolist()]}
        elif name == "failed":
            error = errors.NotFiniteInputError("data[0]", "gives a loss that is not finite")
            operation.error.CopyFrom(encode_status(error, domain="trainer.tinsmith"))
            values |= {"code": "INVALID_ARGUMENT", "reason": "NOT_FINITE"}
        found[name] = Vector(operation, values)
    return found


GROUPS = {
    "tensor": tensor_vectors,
    "model_input": input_vectors,
    "forward_backward": batch_vectors,
    "optim_step": step_vectors,
    "sample_request": sample_request_vectors,
    "sample_response": sample_vectors,
    "stream_request": stream_vectors,
    "error": error_vectors,
    "operation": operation_vectors,
}


def resource_names() -> dict[str, Any]:
    """Return each pattern with names that fit it, and such as do not."""
    found = {}
    for kind in sorted(names.ResourceName.__subclasses__(), key=lambda kind: kind.pattern):
        ids = [f"Id.{number}_-" for number in range(kind.pattern.count("{"))]
        name = str(kind(*ids))
        found[kind.pattern] = {
            "valid": [{"name": name, "ids": ids}],
            "invalid": [
                {"name": "", "why": "is empty"},
                {"name": f"/{name}", "why": "begins with a slash"},
                {"name": f"{name}/", "why": "ends with a slash"},
                {"name": f"{name}\n", "why": "ends with a line break"},
                {"name": name.replace(ids[-1], ""), "why": "has an empty id"},
                {"name": name.replace(ids[-1], ".."), "why": "an id begins with a dot"},
                {"name": name.replace(ids[-1], "é"), "why": "an id has a letter beyond ASCII"},
                {
                    "name": name.replace(ids[-1], "x" * (kind.max_id_length + 1)),
                    "why": f"an id is longer than {kind.max_id_length}",
                },
            ],
        }
    return found


def request_ids() -> dict[str, list[str]]:
    """Return request ids that servers take, and such as they refuse."""
    return {
        "valid": [REQUEST_ID],
        # A trainer makes the name of an operation of it, and names tell upper from lower case.
        "refused_by_trainers": [REQUEST_ID.upper()],
        "invalid": ["", REQUEST_ID.replace("-", ""), f"{{{REQUEST_ID}}}"],
    }


def _json(value: Any) -> bytes:
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()


def make() -> dict[str, bytes]:
    """Return the content of every file by its path in this folder."""
    files = {
        "resource_names.json": _json(resource_names()),
        "request_ids.json": _json(request_ids()),
    }
    for group, vectors_of in GROUPS.items():
        cases = {}
        for name, vector in vectors_of().items():
            # Maps have no order of their own: by key is what clients should send.
            content = vector.message.SerializeToString(deterministic=True)
            files[f"{group}/{name}.binpb"] = content
            cases[name] = {
                "file": f"{group}/{name}.binpb",
                "json": json_format.MessageToDict(vector.message),
                "message": vector.message.DESCRIPTOR.full_name,
                "refused": vector.refused or None,
                "sha256": hashlib.sha256(content).hexdigest(),
                "values": vector.values,
            }
        files[f"{group}.json"] = _json(cases)
    return files


def main() -> None:
    """Write the files."""
    for path, content in make().items():
        (FOLDER / path).parent.mkdir(exist_ok=True)
        (FOLDER / path).write_bytes(content)


if __name__ == "__main__":
    main()
