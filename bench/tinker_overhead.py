"""What the Tinker wire costs beside native calls: the real packages, the same work, in turns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tinker
from tests.support.pods import PodDeployment
from tinker import types

import tinsmith
from bench import report
from tinsmith import SamplingParams
from tinsmith_gateway.tinker import wire_pb2
from tinsmith_gateway.tinker.wire import tensor_codec

_STEPS, _REPEATS = 20, 5
_SAMPLES, _SAMPLE_TOKENS = 16, 64
_PROMPT = list(range(5, 13))
_POLL_TIMEOUT_S = 60.0
_HELD_NUMBER = 2


def tinker_rows(pods: PodDeployment, base_model: str, num_polls: int) -> list[report.Row]:
    """Return steps and samples by the `tinker` package beside our own, and its long polls held."""
    with (
        _tinker_client(pods) as service,
        tinsmith.Client(pods.scheduler_address, pods.api_key) as client,
    ):
        model = service.create_lora_training_client(base_model, rank=1).result()
        run = client.create_lora_training_run(base_model, rank=1)
        rows = _pairs(
            "a step (forward_backward and optim_step at once) to its results, p50",
            lambda: _median([_timed(lambda: _native_step(run)) for _ in range(_STEPS)]),
            lambda: _median([_timed(lambda: _tinker_step(model)) for _ in range(_STEPS)]),
            "ms",
            "lower",
        )
        sampler = client.create_sampler(base_model=base_model)
        sampling = service.create_sampling_client(base_model=base_model).result()
        rows += _pairs(
            f"{_SAMPLES} requests x {_SAMPLE_TOKENS} tokens",
            lambda: _SAMPLES * _SAMPLE_TOKENS / _timed(lambda: _native_samples(sampler)) * 1000,
            lambda: _SAMPLES * _SAMPLE_TOKENS / _timed(lambda: _tinker_samples(sampling)) * 1000,
            "tokens/s",
            "higher",
        )
        held = service.create_lora_training_client(base_model, rank=1).result()
        rows += asyncio.run(_polls(pods, held.model_id, num_polls))
    return rows


@contextlib.contextmanager
def _tinker_client(pods: PodDeployment) -> Iterator[tinker.ServiceClient]:
    os.environ["TINKER_BASE_URL"] = f"http://{pods.gateway_address}"
    os.environ["TINKER_API_KEY"] = pods.api_key.replace("tsk_", "tml-", 1)
    with tinker.ServiceClient() as service:
        yield service


def _pairs(
    name: str,
    native: Callable[[], float],
    by_wire: Callable[[], float],
    unit: str,
    better: report.Better,
) -> list[report.Row]:
    """Measure both ways in turns."""
    native(), by_wire()
    pairs = [(native(), by_wire()) for _ in range(_REPEATS)]
    return [
        report.Row.of(f"{name}: tinsmith, direct", [one for one, _ in pairs], unit, better),
        report.Row.of("... tinker, through the gateway", [two for _, two in pairs], unit, better),
        report.Row.of("... ratio", [two / one for one, two in pairs], "ratio", better),
    ]


def _native_step(run: tinsmith.TrainingRun) -> None:
    datum = tinsmith.Datum(
        model_input=tinsmith.ModelInput.from_ints(_PROMPT[:-1]),
        loss_fn_inputs={"target_tokens": _PROMPT[1:], "weights": [1.0] * (len(_PROMPT) - 1)},
    )
    gradient = run.forward_backward([datum], "cross_entropy")
    update = run.optim_step(tinsmith.AdamParams(learning_rate=1e-5))
    gradient.result(), update.result()


def _tinker_step(model: tinker.TrainingClient) -> None:
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(_PROMPT[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(_PROMPT[1:])),
            "weights": types.TensorData.from_numpy(np.ones(len(_PROMPT) - 1, dtype=np.float32)),
        },
    )
    gradient = model.forward_backward([datum], "cross_entropy")
    update = model.optim_step(types.AdamParams(learning_rate=1e-5))
    gradient.result(), update.result()


def _native_samples(sampler: tinsmith.Sampler) -> None:
    params = SamplingParams(max_tokens=_SAMPLE_TOKENS, seed=1, stop=[])
    prompt = tinsmith.ModelInput.from_ints(_PROMPT)
    futures = [
        sampler.sample(prompt, sampling_params=params, num_samples=1) for _ in range(_SAMPLES)
    ]
    for future in futures:
        future.result()


def _tinker_samples(sampling: tinker.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=_SAMPLE_TOKENS, seed=1, stop=[])
    prompt = types.ModelInput.from_ints(_PROMPT)
    futures = [sampling.sample(prompt, 1, params) for _ in range(_SAMPLES)]
    for future in futures:
        future.result()


async def _polls(pods: PodDeployment, model_id: str, num_polls: int) -> list[report.Row]:
    """Hold `retrieve_future` of a call that waits for the number before it, many times at once."""
    future = await asyncio.to_thread(_submit_held, pods, model_id)
    idle = [await _request(pods, "/client/dynamic_config", {}) for _ in range(50)]
    polls = [
        asyncio.create_task(_request(pods, "/retrieve_future", {"request_id": future}))
        for _ in range(num_polls)
    ]
    await asyncio.sleep(5.0)
    busy = [await _request(pods, "/client/dynamic_config", {}) for _ in range(50)]
    is_early = [poll.done() for poll in polls]
    answers = await asyncio.gather(*polls, return_exceptions=True)
    num_lost = sum(
        early or isinstance(answer, BaseException) or answer[0] != 408
        for early, answer in zip(is_early, answers, strict=True)
    )
    name = f"{num_polls} retrieve_future held"
    return [
        report.Row.of(f"{name}: failed or answered early", [num_lost], "count", "lower", target=0),
        report.Row.of(f"{name}: another call, p50", [_median_ms(busy)], "ms", "lower"),
        report.Row.of("... without them", [_median_ms(idle)], "ms", "lower"),
    ]


def _submit_held(pods: PodDeployment, model_id: str) -> str:
    """Send call 2 of a model whose call 1 does not come."""
    request = wire_pb2.ForwardBackwardRequest(
        model_id=model_id, seq_id=_HELD_NUMBER, loss_fn="cross_entropy"
    )
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(_PROMPT[:-1], dtype="<i4").tobytes()
    for name, values in (("target_tokens", _PROMPT[1:]), ("weights", [1.0] * (len(_PROMPT) - 1))):
        datum.loss_fn_inputs[name].CopyFrom(tensor_codec.encode_dense(np.array(values)))
    url = f"http://{pods.gateway_address}/api/v1/forward_backward"
    headers = {"X-API-Key": pods.api_key, "Content-Type": "application/x-protobuf"}
    body = urllib.request.Request(url, request.SerializeToString(), headers)
    with urllib.request.urlopen(body, timeout=30) as answer:
        future: str = json.loads(answer.read())["request_id"]
    return future


async def _request(pods: PodDeployment, path: str, body: dict[str, Any]) -> tuple[int, float]:
    """Post on a connection of its own; return the status and the seconds it took."""
    host, _, port = pods.gateway_address.rpartition(":")
    content = json.dumps(body).encode()
    head = (
        f"POST /api/v1{path} HTTP/1.1\r\nhost: {host}\r\nx-api-key: {pods.api_key}\r\n"
        f"content-type: application/json\r\nconnection: close\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    begin_s = time.perf_counter()
    async with asyncio.timeout(_POLL_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + content)
        answer = await reader.read()
        writer.close()
    return int(answer.split(b" ", 2)[1]), time.perf_counter() - begin_s


def _timed(work: Callable[[], object]) -> float:
    """Return how many milliseconds something takes."""
    begin_s = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - begin_s)


def _median(values: list[float]) -> float:
    return float(np.median(values))


def _median_ms(answers: list[tuple[int, float]]) -> float:
    return 1000 * _median([seconds for _, seconds in answers])
