"""What tests of the Tinker wire share: plain HTTP with one key, and the futures of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from tinsmith_gateway.tinker import wire_pb2

TOKENS = [5, 6, 7, 8, 9, 10, 11, 12]
PROTOBUF = "application/x-protobuf"


class Wire:
    """A client that sends what it is told, and a session of its own.

    Args:
        url: Of the gateway.
        headers: Of every request: the key.
        base_model: Name of a base model.
    """

    def __init__(self, url: str, headers: dict[str, str], base_model: str) -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1", headers=headers, timeout=60.0)
        self.base_model = base_model
        self._num_models = 0
        self._num_samplers = 0
        self.session_id = str(self.json("create_session", sdk_version="0.38.0")["session_id"])

    def close(self) -> None:
        """Close the connections."""
        self.http.close()

    def post(self, call: str, /, **body: Any) -> httpx.Response:
        """Send JSON and return the answer, whatever it is."""
        return self.http.post(call, json=body)

    def json(self, call: str, /, **body: Any) -> dict[str, Any]:
        """Send JSON and return what came of it, which must be good."""
        answer = self.post(call, **body)
        assert answer.status_code == 200, answer.text
        content: dict[str, Any] = answer.json()
        return content

    def model(self, **lora: Any) -> Model:
        """Create a model."""
        number, self._num_models = self._num_models, self._num_models + 1
        created = self.json(
            "create_model",
            session_id=self.session_id,
            model_seq_id=number,
            base_model=self.base_model,
            lora_config={"rank": 4, "seed": 1, **lora},
        )
        return Model(self, str(self.result(created["request_id"])["model_id"]))

    def sampler(self, **source: Any) -> str:
        """Open a sampling session, on the base model unless told otherwise."""
        number, self._num_samplers = self._num_samplers, self._num_samplers + 1
        source = source or {"base_model": self.base_model}
        opened = self.json(
            "create_sampling_session",
            session_id=self.session_id,
            sampling_session_seq_id=number,
            **source,
        )
        return str(opened["sampling_session_id"])

    def sample(self, sampler: str, seq_id: int, **more: Any) -> dict[str, Any]:
        """Ask for samples and return the promise."""
        return self.json("asample", **sample_body(sampler, seq_id, **more))

    def retrieve(self, request_id: str, **more: Any) -> httpx.Response:
        """Ask for a future until it has ended."""
        while True:
            answer = self.post("retrieve_future", request_id=request_id, **more)
            if answer.status_code != 408:
                return answer

    def result(self, request_id: str) -> dict[str, Any]:
        """Return what came of a future that has JSON, failed or not."""
        answer = self.retrieve(request_id)
        assert answer.status_code == 200, answer.text
        content: dict[str, Any] = answer.json()
        return content

    def samples(self, request_id: str) -> wire_pb2.SampleResponse:
        """Return what came of a sample."""
        answer = self.retrieve(request_id)
        assert answer.headers["content-type"] == PROTOBUF, answer.text
        return wire_pb2.SampleResponse.FromString(answer.content)


class Model:
    """A model, and the numbers of its calls."""

    def __init__(self, wire: Wire, model_id: str) -> None:
        self.wire = wire
        self.id = model_id
        self.seq_id = 0

    def number(self) -> int:
        """Return the number of the next call."""
        self.seq_id += 1
        return self.seq_id

    def batch(self, **more: Any) -> wire_pb2.ForwardBackwardRequest:
        """Return a batch of one sequence, with the next number unless told otherwise."""
        more = {"seq_id": more.get("seq_id") or self.number(), **more}
        request = wire_pb2.ForwardBackwardRequest(
            model_id=self.id, **{"loss_fn": "cross_entropy", **more}
        )
        request.data.append(datum())
        return request

    def send(self, request: wire_pb2.ForwardBackwardRequest | bytes, **headers: str) -> Any:
        """Send a batch and return the answer, whatever it is."""
        body = request if isinstance(request, bytes) else request.SerializeToString()
        encoding = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.wire.http.post(
            "forward_backward", content=body, headers={"content-type": PROTOBUF, **encoding}
        )

    def submit(self, request: wire_pb2.ForwardBackwardRequest | bytes, **headers: str) -> str:
        """Send a batch and return its future."""
        answer = self.send(request, **headers)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["request_id"])

    def ask(self, call: str, /, seq_id: int | None = None, **body: Any) -> str:
        """Send one of the other numbered calls and return its future."""
        answer = self.wire.json(call, model_id=self.id, seq_id=seq_id or self.number(), **body)
        return str(answer["request_id"])

    def step(self, seq_id: int | None = None) -> str:
        """Ask for an optimizer step."""
        return self.ask("optim_step", seq_id, adam_params={"learning_rate": 1e-2})

    def output(self, request_id: str) -> wire_pb2.ForwardBackwardOutput:
        """Return what came of a batch."""
        answer = self.wire.retrieve(request_id)
        assert answer.headers["content-type"] == PROTOBUF, answer.text
        return wire_pb2.ForwardBackwardOutput.FromString(answer.content)

    def train(self, num_steps: int = 1) -> list[bytes]:
        """Train on one sequence; return the results of the batches, to the bit."""
        results = []
        for _ in range(num_steps):
            gradient, update = self.submit(self.batch()), self.step()
            answer = self.wire.retrieve(gradient)
            assert answer.headers["content-type"] == PROTOBUF, answer.text
            results.append(answer.content)
            done = self.wire.result(update)
            assert "metrics" in done, done
        return results


def sample_body(sampler: str, seq_id: int, **more: Any) -> dict[str, Any]:
    """Return a request for samples."""
    return {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:4]}]},
        "sampling_params": {"max_tokens": 4, "seed": 7, "stop": []},
        **more,
    }


def datum(tokens: Sequence[int] = TOKENS) -> wire_pb2.Datum:
    """Return a sequence to learn."""
    made = wire_pb2.Datum()
    made.model_input.add().encoded_text.tokens = np.array(tokens[:-1], "<i4").tobytes()
    made.loss_fn_inputs["target_tokens"].CopyFrom(dense(np.array(tokens[1:], "<i8")))
    made.loss_fn_inputs["weights"].CopyFrom(dense(np.ones(len(tokens) - 1, "<f4")))
    return made


def dense(array: NDArray[Any]) -> wire_pb2.Tensor:
    """Return an array as it goes over the wire; uint16 is bfloat16."""
    dtypes = {
        "<f4": wire_pb2.DTYPE_FLOAT32,
        "<i8": wire_pb2.DTYPE_INT64,
        "<i4": wire_pb2.DTYPE_INT32,
        "<u2": wire_pb2.DTYPE_BFLOAT16,
    }
    return wire_pb2.Tensor(dtype=dtypes[array.dtype.str], shape=array.shape, dense=array.tobytes())


def sparse(array: NDArray[Any]) -> wire_pb2.Tensor:
    """Return a matrix as rows of its cells that are not 0."""
    rows, columns = np.nonzero(array)
    starts = np.searchsorted(rows, np.arange(array.shape[0] + 1))
    message = dense(array)
    values = array[rows, columns]
    message.sparse_csr.values = values.tobytes()
    message.sparse_csr.crow_indices = starts.astype("<i8").tobytes()
    message.sparse_csr.col_indices = columns.astype("<i8").tobytes()
    return message
