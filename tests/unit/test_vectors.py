"""The conformance vectors, held against the code that makes them and the decoders of both sides."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.longrunning import operations_pb2
from google.protobuf import descriptor_pool, json_format, message_factory
from google.rpc import status_pb2

from tinsmith import names, tensors
from tinsmith.rpc import codec
from tinsmith.rpc import error_codec as client_error_codec
from tinsmith.v1 import trainer_pb2
from tinsmith_engine.contract.codec import decode_array, decode_input
from tinsmith_runtime.errors import InvalidFieldError, TinsmithError
from tinsmith_runtime.rpc.requests import decode_name_part, decode_request_id
from tinsmith_sampler.rpc import codec as sampler_codec
from tinsmith_trainer.rpc import training_codec
from tinsmith_trainer.runs.operations import Kind

FOLDER = Path(__file__).parents[1] / "vectors"
sys.path.insert(0, str(FOLDER))
import make_vectors  # noqa: E402
from make_vectors import plain  # noqa: E402

CASES: dict[str, dict[str, Any]] = {
    f"{group}/{name}": case
    for group in make_vectors.GROUPS
    for name, case in json.loads((FOLDER / f"{group}.json").read_text()).items()
}


def of_group(*groups: str) -> dict[str, dict[str, Any]]:
    return {name: case for name, case in CASES.items() if name.split("/")[0] in groups}


def message_of(case: dict[str, Any]) -> Any:
    found = descriptor_pool.Default().FindMessageTypeByName(case["message"])
    return message_factory.GetMessageClass(found).FromString((FOLDER / case["file"]).read_bytes())


def test_the_files_are_what_the_code_makes() -> None:
    written = {
        str(path.relative_to(FOLDER)): path.read_bytes()
        for pattern in ("*.json", "*/*.binpb")
        for path in FOLDER.glob(pattern)
    }
    assert written == make_vectors.make()


@pytest.mark.parametrize("name", CASES)
def test_bytes_and_json_are_one_message(name: str) -> None:
    case = CASES[name]
    message = message_of(case)
    assert json_format.MessageToDict(message) == case["json"]
    parsed = json_format.ParseDict(case["json"], type(message)())
    assert parsed.SerializeToString(deterministic=True) == (FOLDER / case["file"]).read_bytes()


@pytest.mark.parametrize("name", of_group("tensor"))
def test_tensors_decode_to_their_values(name: str) -> None:
    case = CASES[name]
    message = message_of(case)
    if not case["refused"]:
        array = tensors.decode_tensor(message)
        assert (list(array.shape), plain(array.tolist())) == (list(message.shape), case["values"])
        return
    with pytest.raises(tensors.TensorFormatError):
        tensors.decode_tensor(message)


def decode_by_server(group: str, message: Any) -> Any:
    match group:
        case "tensor":
            return decode_array(message, "tensor", np.int64)
        case "model_input":
            return decode_input(message, field="prompt")
        case "forward_backward":
            return training_codec.decode_work(Kind.FORWARD_BACKWARD, message)
        case "optim_step":
            return training_codec.decode_work(Kind.OPTIM_STEP, message)
        case "sample_request":
            return sampler_codec.decode_prompt(message)
        case "stream_request":
            return sampler_codec.decode_stream(message)
    raise AssertionError(group)


REQUESTS = of_group(
    "model_input", "forward_backward", "optim_step", "sample_request", "stream_request"
)
REFUSED_TENSORS = {name: case for name, case in of_group("tensor").items() if case["refused"]}


@pytest.mark.parametrize("name", [*REQUESTS, *REFUSED_TENSORS])
def test_servers_take_and_refuse_what_the_vectors_say(name: str) -> None:
    case = CASES[name]
    group, message = name.split("/")[0], message_of(case)
    if not case["refused"]:
        decode_by_server(group, message)
        return
    with pytest.raises(TinsmithError) as caught:
        decode_by_server(group, message)
    found = {"reason": caught.value.reason, "field": caught.value.field_violations[0].field}
    assert found == case["refused"]


def test_servers_read_prompts_as_the_vectors_say() -> None:
    for case in of_group("model_input").values():
        if not case["refused"]:
            tokens_T, images = decode_input(message_of(case), field="prompt")
            assert tokens_T.tolist() == case["values"]["tokens"]
            found = [{"position": each.position, "format": each.format} for each in images]
            assert found == case["values"]["images"]


def test_a_stream_goes_on_where_the_vectors_say() -> None:
    for case in of_group("stream_request").values():
        if not case["refused"]:
            _, received = sampler_codec.decode_stream(message_of(case))
            assert received == case["values"]["received_tokens"]


@pytest.mark.parametrize("name", of_group("sample_response"))
def test_clients_read_completions(name: str) -> None:
    found = codec.decode_sample(message_of(CASES[name]))
    values = CASES[name]["values"]
    assert (found.seed, found.version) == (values["seed"], values["version"])
    # The Python client says None where the wire says NaN, as Tinker's does.
    assert found.prompt_logprobs is not None
    scored = ["NaN" if each is None else each for each in found.prompt_logprobs]
    assert scored == values["prompt_logprobs"]
    assert [
        {
            "tokens": list(each.tokens),
            "logprobs": list(each.logprobs),
            "versions": list(each.versions),
            "stop_reason": each.stop_reason,
        }
        for each in found.sequences
    ] == values["sequences"]


@pytest.mark.parametrize("name", of_group("error"))
def test_clients_read_errors(name: str) -> None:
    message, values = message_of(CASES[name]), CASES[name]["values"]
    assert isinstance(message, status_pb2.Status)
    error = client_error_codec.decode_status(message)
    assert (error.code, error.reason, error.retry_after_s) == (
        values["code"],
        values["reason"],
        values["retry_after_seconds"],
    )
    assert values["message"] in str(error)


@pytest.mark.parametrize("name", of_group("operation"))
def test_clients_read_operations(name: str) -> None:
    operation, values = message_of(CASES[name]), CASES[name]["values"]
    assert isinstance(operation, operations_pb2.Operation)
    metadata = trainer_pb2.OperationMetadata()
    assert operation.metadata.Unpack(metadata)
    found = codec.decode_operation_metadata(metadata)
    assert (found.state, metadata.sequence_number) == (values["state"], values["sequence_number"])
    assert operation.done == (values["state"] != "queued")
    if values["state"] == "succeeded":
        response = trainer_pb2.ForwardBackwardResponse()
        assert operation.response.Unpack(response)
        output = codec.decode_forward(response)
        assert output.metrics == values["metrics"]
        assert [each.logprobs.tolist() for each in output.outputs] == values["logprobs"]
    elif values["state"] == "failed":
        error = client_error_codec.decode_status(operation.error)
        assert (error.code, error.reason) == (values["code"], values["reason"])


KINDS = {kind.pattern: kind for kind in names.ResourceName.__subclasses__()}
NAMES = json.loads((FOLDER / "resource_names.json").read_text())


@pytest.mark.parametrize("pattern", KINDS)
def test_names_fit_their_patterns(pattern: str) -> None:
    for entry in NAMES[pattern]["valid"]:
        assert KINDS[pattern].parse(entry["name"]) == KINDS[pattern](*entry["ids"])
    for entry in NAMES[pattern]["invalid"]:
        with pytest.raises(names.InvalidNameError):
            KINDS[pattern].parse(entry["name"])


def test_request_ids() -> None:
    ids = json.loads((FOLDER / "request_ids.json").read_text())
    for value in ids["valid"]:
        assert decode_request_id(value) == decode_name_part(value) == value
    for value in ids["refused_by_trainers"]:
        assert decode_request_id(value) == value.lower()
        with pytest.raises(InvalidFieldError, match="request_id"):
            decode_name_part(value)
    for value in ids["invalid"]:
        for decode in (decode_request_id, decode_name_part):
            with pytest.raises(InvalidFieldError, match="request_id"):
                decode(value)


@pytest.mark.parametrize("name", of_group("forward_backward", "optim_step"))
def test_servers_hash_a_request_as_the_vectors_say(name: str) -> None:
    message = message_of(CASES[name])
    run = names.RunName.parse(message.run)
    body = (FOLDER / CASES[name]["file"]).read_bytes()
    submission = training_codec.decode_submission(Kind.FORWARD_BACKWARD, run, message, body)
    assert submission.digest.hex() == CASES[name]["sha256"]
