"""Fields that requests of every service have, and the bytes that identify a request."""

from __future__ import annotations

import asyncio
import math
import uuid

import pytest
from google.longrunning import operations_pb2
from google.protobuf import duration_pb2
from google.protobuf.message import Message

from tinsmith.names import RunName
from tinsmith.rpc import durations
from tinsmith.rpc.channels import serialize_deterministically
from tinsmith.v1 import scheduler_pb2, trainer_pb2
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_runtime.records import HISTORY_RETENTION_S
from tinsmith_runtime.rpc import requests

ID = str(uuid.uuid4())


def test_the_bytes_of_a_request_are_known_while_it_is_served() -> None:
    with pytest.raises(RuntimeError, match="outside"):
        requests.current_body()
    with requests.bind_body(b"body"):
        assert requests.current_body() == b"body"


async def test_a_task_that_outlives_the_call_does_not_keep_its_bytes() -> None:
    ended = asyncio.Event()

    async def later() -> None:
        await ended.wait()
        requests.current_body()

    with requests.bind_body(b"body"):
        task = asyncio.create_task(later())
        await asyncio.sleep(0)
    ended.set()
    with pytest.raises(RuntimeError, match="outside"):
        await task


def test_an_identity_is_made_of_the_id_and_the_bytes() -> None:
    request = scheduler_pb2.CreateSessionRequest(request_id=ID.upper())
    with requests.bind_body(b"one"):
        first = requests.decode_identity(request, "p")
        assert first == requests.decode_identity(request, "p")
    with requests.bind_body(b"two"):
        assert requests.decode_identity(request, "p").digest != first.digest
    assert (first.project, first.request_id, first.method) == ("p", ID, "CreateSession")


async def test_channels_write_maps_in_one_order() -> None:
    written = []

    class Recorder:
        def unary_unary(self, method: str, request_serializer: object, **_: object) -> object:
            return request_serializer

        unary_stream = stream_unary = stream_stream = unary_unary

    channel: object = serialize_deterministically(Recorder())  # type: ignore[arg-type]
    encode = channel.unary_unary("/m", request_serializer=Message.SerializeToString)  # type: ignore[attr-defined]
    keys = [f"k{index}" for index in range(20)]
    for order in (keys, keys[::-1]):
        request = trainer_pb2.ForwardBackwardRequest()
        for key in order:
            request.loss.config[key] = 1.0
        written.append(encode(request))
    assert written[0] == written[1]
    assert channel.unary_unary("/m", request_serializer=None) is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "value",
    ["", "x", ID + "\n", "0" * 32, ID[:-1], "{" + ID + "}"],
    ids=["empty", "a-letter", "trailing-newline", "no-hyphens", "too-short", "braces"],
)
def test_a_request_id_is_a_uuid(value: str) -> None:
    for decode in (requests.decode_request_id, requests.decode_name_part):
        with pytest.raises(InvalidFieldError, match="UUID"):
            decode(value)


def test_an_id_in_a_name_is_in_lower_case() -> None:
    for value in (ID, str(uuid.uuid1()), str(uuid.uuid5(uuid.NAMESPACE_DNS, "a"))):
        assert requests.decode_name_part(value) == value
    for value in (ID.upper(), "00000000-0000-0000-0000-000000000000"):
        requests.decode_request_id(value)
        with pytest.raises(InvalidFieldError, match="lower case"):
            requests.decode_name_part(value)


def test_names_are_parsed_or_refused_with_a_short_quotation() -> None:
    name = "projects/p/trainingRuns/r"
    assert str(requests.parse_name(RunName, name, "run")) == name
    with pytest.raises(InvalidFieldError, match="run must be projects/") as caught:
        requests.parse_name(RunName, "x" * 10_000, "run")
    assert len(caught.value.message) < 300


def test_pages_have_sizes_and_tokens_of_their_list() -> None:
    assert [requests.decode_page_size(value) for value in (0, 7, 1000)] == [100, 7, 1000]
    for value in (-1, 1001):
        with pytest.raises(InvalidFieldError, match="page_size"):
            requests.decode_page_size(value)
    assert requests.encode_page_token("a", None) == ""
    assert requests.decode_page_token("a", "") is None
    token = requests.encode_page_token("a", 12)
    assert requests.decode_page_token("a", token) == 12
    for other, text in (("b", token), ("a", token + "A"), ("a", "?"), ("a", "\u00e9")):
        with pytest.raises(InvalidFieldError, match="page_token"):
            requests.decode_page_token(other, text)


@pytest.mark.parametrize("time_s", [0.0, 0.1, 1_700_000_000.123456, 1e9 + 1 / 3])
def test_times_read_back_as_the_same_number(time_s: float) -> None:
    decoded = requests.decode_time(requests.encode_time(time_s))
    assert math.isclose(decoded, time_s, rel_tol=0, abs_tol=1e-9)
    assert requests.decode_time(requests.encode_time(decoded)) == decoded
    assert durations.decode_duration(durations.encode_duration(2.5)) == 2.5


def test_labels_texts_and_ttl_are_bounded() -> None:
    assert requests.decode_labels({"a": ""}) == {"a": ""}
    for labels in ({"": "x"}, {"a": "x" * 1025}, {str(n): "" for n in range(65)}):
        with pytest.raises(InvalidFieldError, match="labels"):
            requests.decode_labels(labels)
    for text in ("x" * 1025, "a\0"):
        with pytest.raises(InvalidFieldError, match="reason"):
            requests.check_text(text, "reason")
    request = trainer_pb2.SaveCheckpointRequest()
    assert requests.decode_ttl(request) is None
    for seconds in (0, 11 * 366 * 86400, 2**60):
        request.ttl.CopyFrom(duration_pb2.Duration(seconds=seconds))
        with pytest.raises(InvalidFieldError, match="ttl"):
            requests.decode_ttl(request)


def test_what_is_at_a_bound_is_taken() -> None:
    longest = "x" * 1024
    assert requests.check_text(longest, "reason") == longest
    most = {"k" * 1024: longest} | {str(n): "" for n in range(63)}
    assert requests.decode_labels(most) == most
    with pytest.raises(InvalidFieldError, match="labels"):
        requests.decode_labels({"k" * 1025: ""})
    request = trainer_pb2.SaveCheckpointRequest()
    for ttl_s in (1.0, 10 * 366 * 86_400.0):
        request.ttl.CopyFrom(durations.encode_duration(ttl_s))
        assert requests.decode_ttl(request) == ttl_s


@pytest.mark.parametrize(
    ("asked_s", "waits_s"), [(None, 20.0), (0.0, 0.0), (7.5, 7.5), (20.0, 20.0), (21.0, 20.0)]
)
def test_a_long_poll_waits_as_long_as_it_may(asked_s: float | None, waits_s: float) -> None:
    request = operations_pb2.WaitOperationRequest()
    if asked_s is not None:
        request.timeout.CopyFrom(durations.encode_duration(asked_s))
    assert requests.decode_timeout(request, 20.0) == waits_s
    request.timeout.CopyFrom(durations.encode_duration(-0.5))
    with pytest.raises(InvalidFieldError, match="timeout"):
        requests.decode_timeout(request, 20.0)


def test_a_past_is_kept_as_long_as_requests_are_answered_again_and_no_longer_than_allowed() -> None:
    def kept_s(asked_s: float, max_s: float = math.inf) -> float:
        request = scheduler_pb2.UpdateTrainingRunRequest()
        request.history_retention.CopyFrom(durations.encode_duration(asked_s))
        return requests.decode_history_retention(request, max_s=max_s)

    least_s = HISTORY_RETENTION_S
    unsaid = scheduler_pb2.UpdateTrainingRunRequest()
    assert requests.decode_history_retention(unsaid) == least_s
    assert kept_s(least_s, max_s=least_s) == least_s
    assert kept_s(1e8) == 1e8
    with pytest.raises(InvalidFieldError, match=r"must be at least [\d.]+ h; got"):
        kept_s(least_s - 1)
    with pytest.raises(InvalidFieldError, match=r"at most 100 h; got 101 h"):
        kept_s(101 * 3600.0, max_s=100 * 3600.0)


def test_positions_in_time_are_tokens_of_their_list() -> None:
    token = requests.encode_position_token("a", 0.1, "key:of\nmine")
    assert requests.decode_position_token("a", token) == (0.1, "key:of\nmine")
    assert requests.decode_position_token("a", "") is None
    for other, text in (("b", token), ("a", requests.encode_key_token("a", "never:key"))):
        with pytest.raises(InvalidFieldError, match="page_token"):
            requests.decode_position_token(other, text)
    assert requests.parse_serial("9" * 18) == 10**18 - 1
    for key in ("9" * 19, "-1", "", "\u0663", "1.0"):
        with pytest.raises(InvalidFieldError, match="page_token"):
            requests.parse_serial(key)


def test_an_id_that_a_client_chose_is_one() -> None:
    assert requests.decode_chosen_id("", "id") == ""
    assert requests.decode_chosen_id("a" * 63, "id", is_required=True) == "a" * 63
    with pytest.raises(InvalidFieldError, match="id must be"):
        requests.decode_chosen_id("", "id", is_required=True)
    for value in ("a" * 64, "-a", "a/b", "a:b", "ü", "."):
        with pytest.raises(InvalidFieldError, match="id must be"):
            requests.decode_chosen_id(value, "id")
