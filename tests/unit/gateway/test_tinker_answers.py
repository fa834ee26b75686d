"""Answers of the Tinker wire, as its SDK tells a failure from a wait and from an end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.responses import Response

from tinsmith_gateway.tinker.wire import rendering
from tinsmith_runtime.errors import (
    AbortedError,
    DataLossError,
    InternalError,
    InvalidFieldError,
    QueueFullError,
    TinsmithError,
    UnavailableError,
)


def content(answer: Response) -> Any:
    return json.loads(bytes(answer.body))


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (InvalidFieldError("a", "is wrong"), "user"),
        (AbortedError("given up"), "user"),
        (QueueFullError("full"), "user"),
        (InternalError("a bug"), "server"),
        (UnavailableError("away"), "server"),
        (DataLossError("lost"), "server"),
    ],
)
def test_an_error_says_whose_mistake_it_is(error: TinsmithError, category: str) -> None:
    answer = rendering.render_error(error, 418, {"retry-after": "2"})
    assert (answer.status_code, answer.headers["retry-after"]) == (418, "2")
    assert content(answer) == {
        "error": error.message,
        "detail": error.message,
        "reason": error.reason,
        "category": category,
    }
    failed = rendering.failed(error)
    assert failed.status_code == 200
    assert content(failed) == {"error": f"{error.message} ({error.reason})", "category": category}


def test_a_future_names_its_model_if_it_has_one() -> None:
    assert content(rendering.future("f")) == {"request_id": "f"}
    assert content(rendering.future("f", "m", size=1)) == {
        "request_id": "f",
        "model_id": "m",
        "size": 1,
    }


@pytest.mark.parametrize(
    ("waiting_for", "is_queued", "state"),
    [
        ("a free place", True, "paused_capacity"),
        ("a free place", False, "active"),
        ("", True, "active"),
        ("", False, "active"),
    ],
)
def test_a_future_that_is_pending_says_why(waiting_for: str, is_queued: bool, state: str) -> None:
    answer = rendering.try_again("f", waiting_for=waiting_for, is_queued=is_queued)
    reason = {"queue_state_reason": waiting_for} if waiting_for else {}
    assert answer.status_code == 408
    assert content(answer) == {
        "type": "try_again",
        "request_id": "f",
        "queue_state": state,
        **reason,
    }


def test_what_is_there_is_told_by_its_size_or_as_it_is_and_what_is_gone_for_good() -> None:
    assert content(rendering.metadata_only(9)) == {
        "status": "complete_metadata",
        "response_payload_size": 9,
    }
    whole = rendering.protobuf(b"\x0a\x00")
    assert (whole.status_code, whole.media_type) == (200, "application/x-protobuf")
    assert bytes(whole.body) == b"\x0a\x00"
    gone = rendering.gone("too late")
    assert (gone.status_code, content(gone)["error"]) == (410, "too late")
