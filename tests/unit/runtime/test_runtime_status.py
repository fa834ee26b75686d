from __future__ import annotations

import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from tinsmith.errors import CLASSES
from tinsmith.rpc.error_codec import decode_status, encode_status
from tinsmith.v1 import errors_pb2
from tinsmith_runtime import errors
from tinsmith_runtime.errors import ErrorCode, InvalidFieldError, TinsmithError, internal_error
from tinsmith_runtime.ledger.records import FencedError

PREFIX = "ERROR_REASON_"
OF_PARENTS = ""
"""Reason of a class that only others derive from."""


def error_classes() -> list[type[TinsmithError]]:
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    of_pods = [each for each in found if issubclass(each, TinsmithError)]
    return [each for each in of_pods if each is not TinsmithError] + [FencedError]


def make(error_class: type[TinsmithError]) -> TinsmithError:
    if issubclass(error_class, InvalidFieldError):
        return error_class("data[0].weights", "is wrong", limit=3)
    return error_class("it happened to run r; do this", run="r", number=3)


@pytest.mark.parametrize("error_class", error_classes(), ids=lambda c: c.__name__)
def test_every_error_survives_the_wire(error_class: type[TinsmithError]) -> None:
    error = make(error_class)
    wire = encode_status(error, domain="trainer.tinsmith").SerializeToString()
    found = decode_status(status_pb2.Status.FromString(wire))
    for attribute in ("code", "reason", "message", "metadata", "field_violations", "retry_after_s"):
        assert getattr(found, attribute) == getattr(error, attribute), attribute


def test_reasons_are_those_of_the_contract() -> None:
    declared = {
        name.removeprefix(PREFIX) for name in errors_pb2.ErrorReason.DESCRIPTOR.values_by_name
    }
    raised = {error_class.reason for error_class in error_classes()}
    assert raised - {OF_PARENTS} == declared - {"UNSPECIFIED"}


def test_codes_are_those_of_google_rpc() -> None:
    assert {code.value for code in ErrorCode} == set(code_pb2.Code.keys()) - {"OK", "OUT_OF_RANGE"}
    assert set(CLASSES) == set(ErrorCode)


def test_there_is_one_tree_and_clients_catch_what_pods_raise() -> None:
    for error_class in error_classes():
        assert issubclass(error_class, CLASSES[error_class.code]), error_class


def test_details_are_those_that_apply() -> None:
    def details(error: TinsmithError) -> list[str]:
        return [d.TypeName().rpartition(".")[2] for d in encode_status(error, domain="d").details]

    assert details(make(errors.RunNotFoundError)) == ["ErrorInfo"]
    assert details(make(errors.ShapeMismatchError)) == ["ErrorInfo", "BadRequest"]
    assert details(make(errors.BatchTooLargeError)) == ["ErrorInfo", "QuotaFailure"]
    assert details(make(errors.StorageFullError)) == ["ErrorInfo", "QuotaFailure", "RetryInfo"]
    assert details(make(errors.DrainingError)) == ["ErrorInfo", "RetryInfo"]
    info = error_details_pb2.ErrorInfo()
    encode_status(make(errors.RunNotFoundError), domain="trainer.tinsmith").details[0].Unpack(info)
    assert (info.domain, info.reason) == ("trainer.tinsmith", "RUN_NOT_FOUND")


def test_a_bug_tells_nothing_of_itself() -> None:
    assert internal_error().metadata == {}
    assert "log of the pod" in internal_error().message


def test_a_status_of_somebody_else_is_read_as_far_as_it_goes() -> None:
    found = decode_status(status_pb2.Status(code=2, message="what?"))
    assert (found.code, found.reason, found.message) == (ErrorCode.UNKNOWN, "", "what?")


@pytest.mark.parametrize("letter", ["x", "é", "\U0001f9e8"])
def test_a_text_that_quotes_much_fits_into_the_trailers_of_a_call(letter: str) -> None:
    error = InvalidFieldError(
        f"data[0].{letter * 50_000}", f"is {letter * 50_000}", more=letter * 50_000
    )
    wire = encode_status(error, domain="trainer.tinsmith").SerializeToString()
    # gRPC takes 8 KiB, and writes bytes as base64.
    assert len(wire) * 4 / 3 < 8000
    found = decode_status(status_pb2.Status.FromString(wire))
    assert found.message.startswith("data[0].")
    assert found.message.endswith("...")
    assert (found.reason, found.code) == (error.reason, error.code)


def test_a_delay_is_known_only_if_the_status_has_one() -> None:
    # The class that pods raise has a delay by default; what a status does not say is not made up.
    assert errors.UnavailableError("away").retry_after_s == 1.0
    assert decode_status(status_pb2.Status(code=14, message="away")).retry_after_s is None
