"""What a refusal says about trying again."""

from __future__ import annotations

import pytest

from tinsmith_gateway.endpoint import retry_headers, status_of
from tinsmith_runtime.errors import (
    InvalidFieldError,
    QueueFullError,
    TinsmithError,
    WorkerUnavailableError,
)


@pytest.mark.parametrize(
    ("error", "status", "seconds", "milliseconds"),
    [
        pytest.param(QueueFullError("", retry_after_s=2.3), 429, "3", "2300", id="a-delay"),
        pytest.param(QueueFullError("", retry_after_s=0.2), 429, "1", "200", id="a-short-one"),
        pytest.param(QueueFullError("", retry_after_s=1e-6), 429, "1", "1", id="none-is-zero"),
        pytest.param(WorkerUnavailableError(""), 503, "1", "1000", id="none-is-known"),
    ],
)
def test_a_refusal_that_passes_says_when_to_try_again(
    error: TinsmithError, status: int, seconds: str, milliseconds: str
) -> None:
    assert status_of(error) == status
    assert retry_headers(error) == {"retry-after": seconds, "retry-after-ms": milliseconds}


@pytest.mark.parametrize("error", [InvalidFieldError("a", "b"), QueueFullError("")])
def test_a_refusal_that_stays_says_nothing_of_it(error: TinsmithError) -> None:
    assert status_of(error) == 400
    assert retry_headers(error) == {}
