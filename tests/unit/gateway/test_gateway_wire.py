"""Field 1 of a message is read as protobuf itself reads it, from any bytes at all."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.v1 import scheduler_pb2, trainer_pb2
from tinsmith_gateway.proxy.protobuf_scan import MAX_FIELDS, MAX_NAME_BYTES, read_text_field
from tinsmith_gateway.proxy.proxied_methods import METHODS
from tinsmith_runtime.errors import MalformedRequestError


@given(name=st.text(max_size=300), number=st.integers(0, 2**63 - 1), timeout_s=st.integers(0, 99))
def test_a_message_that_protobuf_wrote(name: str, number: int, timeout_s: int) -> None:
    request = trainer_pb2.WaitOperationsRequest(run=name, after_revision=number)
    request.timeout.seconds = timeout_s
    assert read_text_field(request.SerializeToString()) == name


@given(body=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    try:
        found = read_text_field(body)
    except MalformedRequestError:
        return
    # Where nothing is wrong protobuf agrees, unless it is stricter further inside.
    try:
        message = scheduler_pb2.GetTrainingRunRequest.FromString(body)
    except DecodeError:
        return
    assert found == message.name


@given(body=st.binary(max_size=60))
def test_what_protobuf_takes_is_not_refused(body: bytes) -> None:
    try:
        message = scheduler_pb2.GetTrainingRunRequest.FromString(body)
        # Groups, which proto3 does not have, and a field 1 of another type are unknown fields to
        # protobuf and wrong here.
        is_plain = message.SerializeToString() == body
    except DecodeError:
        return
    if is_plain and message.name:
        assert read_text_field(body) == message.name


def test_the_last_of_several_wins() -> None:
    body = b"\x0a\x01a" + b"\x10\x05" + b"\x0a\x01b"
    assert read_text_field(body) == "b"
    assert scheduler_pb2.GetTrainingRunRequest.FromString(body).name == "b"


def test_a_field_is_found_behind_others_of_every_type() -> None:
    others = b"\x15" + bytes(4) + b"\x19" + bytes(8) + b"\x20\x80\x01" + b"\x2a\x02\x0a\x01"
    assert read_text_field(others + b"\x0a\x01a" + others) == "a"
    assert read_text_field(others + b"\x0a\x01a", 5) == "\n\x01"
    assert read_text_field(others, 6) == ""


def test_a_name_has_a_largest_size() -> None:
    longest = "a" * MAX_NAME_BYTES
    message = scheduler_pb2.GetTrainingRunRequest(name=longest)
    assert read_text_field(message.SerializeToString()) == longest
    message.name += "a"
    with pytest.raises(MalformedRequestError, match="more than 4096 bytes"):
        read_text_field(message.SerializeToString())
    # What it is not routed by may be of any size.
    assert read_text_field(message.SerializeToString(), 2) == ""


def test_a_message_of_nothing() -> None:
    assert read_text_field(b"") == ""


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x0a", id="no-length"),
        pytest.param(b"\x0a\x05abc", id="too-long"),
        pytest.param(b"\x0a" + b"\xff" * 9 + b"\x01", id="absurdly-long"),
        pytest.param(b"\x0a\x01\xff", id="not-utf8"),
        pytest.param(b"\x09" + bytes(8), id="a-double-for-a-name"),
        pytest.param(b"\x00\x01", id="field-zero"),
        pytest.param(b"\x13\x14", id="a-group"),
        pytest.param(b"\x17", id="no-wire-type"),
        pytest.param(b"\x10" + b"\x80" * 10, id="a-number-without-an-end"),
        pytest.param(b"\x15\x00\x00", id="half-a-float"),
    ],
)
def test_malformed(body: bytes) -> None:
    with pytest.raises(MalformedRequestError):
        read_text_field(body)


def test_no_message_is_looked_at_for_ever() -> None:
    many = b"\x10\x00" * MAX_FIELDS
    assert read_text_field(b"\x0a\x01a" + many) == "a"
    assert read_text_field(many + b"\x0a\x01a") == ""


def test_the_methods_are_those_of_the_contract() -> None:
    sample = METHODS["/tinsmith.v1.SamplerService/Sample"]
    assert (sample.is_named, sample.streams_requests, sample.streams_responses) == (
        True,
        False,
        False,
    )
    assert METHODS["/tinsmith.v1.SamplerService/StreamSample"].streams_responses
    steps = METHODS["/tinsmith.v1.EnvironmentService/StepInstances"]
    assert (steps.streams_requests, steps.streams_responses) == (True, True)
    assert METHODS["/google.longrunning.Operations/WaitOperation"].is_wait
    # The gateway does not serve itself.
    assert not any("Gateway" in path for path in METHODS)


def test_no_method_takes_a_stream_for_one_answer() -> None:
    assert not [
        method.path
        for method in METHODS.values()
        if method.streams_requests and not method.streams_responses
    ]
