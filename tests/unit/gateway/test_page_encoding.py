"""What the page reads of curves, metrics, trajectories and errors."""

from __future__ import annotations

import json

import numpy as np

from tinsmith.tensors import encode_tensor, encode_tokens
from tinsmith.v1 import episode_pb2, run_metrics_pb2
from tinsmith_gateway.page import encoding
from tinsmith_runtime.errors import AbortedError


def test_what_is_no_number_is_null_in_a_curve() -> None:
    curve = run_metrics_pb2.MetricCurve(
        name="loss",
        steps=[1, 2],
        means=[0.5, float("nan")],
        minima=[0.25, float("-inf")],
        maxima=[1.0, float("inf")],
        times=[5.0, 6.0],
    )
    answer = run_metrics_pb2.QueryRunMetricsResponse(bucket_steps=4, revision=9, curves=[curve])
    told = encoding.encode_curves(answer)
    assert json.loads(json.dumps(told, allow_nan=False)) == {
        "bucket_steps": 4,
        "revision": 9,
        "curves": [
            {
                "name": "loss",
                "steps": [1, 2],
                "means": [0.5, None],
                "minima": [0.25, None],
                "maxima": [1.0, None],
                "times": [5.0, 6.0],
            }
        ],
    }


def test_a_metric_is_told_with_its_last_value() -> None:
    metric = run_metrics_pb2.RunMetric(
        run="r", name="loss", num_points=3, last_step=2, last_value=0.5
    )
    metric.update_time.FromSeconds(0)
    told = encoding.encode_metric(metric)
    assert told == {
        "run": "r",
        "name": "loss",
        "num_points": 3,
        "last_step": 2,
        "last_value": 0.5,
        "update_time": "1970-01-01T00:00:00Z",
    }
    metric.last_value = float("nan")
    assert encoding.encode_metric(metric)["last_value"] is None


def test_a_trajectory_is_told_by_token_with_its_prompt_first() -> None:
    recorded = episode_pb2.RecordedTrajectory(
        tokens=encode_tokens([7, 8]),
        mask=encode_tensor(np.array([1, 0], np.float32)),
        logprobs=encode_tensor(np.array([-0.5, 0], np.float32)),
        versions=encode_tensor(np.array([3, 4])),
        call_ends=[1, 2],
    )
    recorded.prompt.chunks.add(tokens=encode_tokens([5]))
    recorded.prompt.chunks.add().image.SetInParent()
    assert encoding.encode_trajectory(recorded) == {
        "tokens": [5, -1, 7, 8],
        "mask": [0.0, 0.0, 1.0, 0.0],
        "logprobs": [0.0, 0.0, -0.5, 0.0],
        "versions": [0, 0, 3, 4],
        "call_ends": [3, 4],
    }


def test_an_error_is_told_with_what_its_caller_needs() -> None:
    answer = encoding.render_error(AbortedError("given up"), 409, {"retry-after": "3"})
    assert (answer.status_code, answer.headers["retry-after"]) == (409, "3")
    assert json.loads(bytes(answer.body)) == {
        "error": {"reason": AbortedError.reason, "message": "given up"}
    }
