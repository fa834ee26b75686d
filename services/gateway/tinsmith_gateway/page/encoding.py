"""What the page reads: messages of the contract as JSON, curves as columns of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from starlette.responses import JSONResponse, Response

from tinsmith.tensors import decode_tensor
from tinsmith.v1 import episode_pb2, run_metrics_pb2, trajectories_pb2
from tinsmith_runtime.errors import TinsmithError

Json = dict[str, Any]


def encode_message(message: Message) -> Json:
    """Return a message in protobuf's JSON mapping, with the names of the contract."""
    encoded: Json = MessageToDict(message, preserving_proto_field_name=True)
    return encoded


def encode_curves(answer: run_metrics_pb2.QueryRunMetricsResponse) -> Json:
    """Return curves; null stands for what is no number."""
    return {
        "bucket_steps": answer.bucket_steps,
        "revision": answer.revision,
        "curves": [
            {
                "name": curve.name,
                "steps": list(curve.steps),
                "means": _numbers(curve.means),
                "minima": _numbers(curve.minima),
                "maxima": _numbers(curve.maxima),
                "times": _numbers(curve.times),
            }
            for curve in answer.curves
        ],
    }


def encode_metric(metric: run_metrics_pb2.RunMetric) -> Json:
    """Return a metric of a run as a list shows it."""
    return {
        "run": metric.run,
        "name": metric.name,
        "num_points": metric.num_points,
        "last_step": metric.last_step,
        "last_value": _number(metric.last_value),
        "update_time": metric.update_time.ToJsonString(),
    }


def encode_trajectory(recorded: episode_pb2.RecordedTrajectory) -> Json:
    """Return what was read and written as columns by token, the prompt first."""
    prompt = _prompt_tokens(recorded.prompt)
    tokens = decode_tensor(recorded.tokens).tolist()
    context = len(prompt)
    return {
        "tokens": prompt + tokens,
        "mask": [0.0] * context + decode_tensor(recorded.mask).tolist(),
        "logprobs": [0.0] * context + decode_tensor(recorded.logprobs).tolist(),
        "versions": [0] * context + decode_tensor(recorded.versions).tolist(),
        "call_ends": [context + end for end in recorded.call_ends],
    }


def _prompt_tokens(prompt: trajectories_pb2.ModelInput) -> list[int]:
    """Return the tokens of a prompt; an image is a token of no number."""
    found: list[int] = []
    for chunk in prompt.chunks:
        found += [-1] if chunk.HasField("image") else decode_tensor(chunk.tokens).tolist()
    return found


def _numbers(values: Iterable[float]) -> list[float | None]:
    return [_number(value) for value in values]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def render_error(error: TinsmithError, status_code: int, headers: dict[str, str]) -> Response:
    """Return an error as the page reads it."""
    return JSONResponse({"error": encode_error(error)}, status_code=status_code, headers=headers)


def encode_error(error: TinsmithError) -> Json:
    """Return the part of an error that people read."""
    return {"reason": error.reason, "message": error.message}
