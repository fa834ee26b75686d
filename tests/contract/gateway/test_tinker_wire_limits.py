"""Limits by key on the Tinker wire, and the age of what a key asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.tinker_wire import Wire
from tests.integration.servers import BASE_MODEL, Deployment, EmbeddedThread, create_key

from tinsmith_gateway.tinker import routes


def _connected(deployment: Deployment, key: str) -> Wire:
    return Wire(f"http://{deployment.address}", {"x-api-key": key}, BASE_MODEL)


@pytest.fixture
def small(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EmbeddedThread]:
    """A server that gives little and forgets soon."""
    monkeypatch.setenv("TINSMITH_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(routes, "SWEEP_INTERVAL_S", 0.05)
    settings = {
        "max_waits_per_project": 1,
        "max_tokens_per_project": 4,
        "long_poll_s": 5.0,
        "sample_retention_s": 0.01,
    }
    made = EmbeddedThread(tmp_path / "data", tiny_model, {"gateway": settings})
    yield made
    made.stop()


def test_a_key_that_asks_for_too_much_is_told_when_to_come_again(small: EmbeddedThread) -> None:
    deployment = small.start()
    with closing(_connected(deployment, deployment.api_key)) as client:
        handle = client.sampler()
        target = {"type": "sampling_session", "sampling_session_id": handle}
        with ThreadPoolExecutor(1) as pool:
            polling = pool.submit(_first_completion, client, target)
            refused = None
            # Each may find the one place taken by the other; the short one ends up without.
            while refused is None or (refused.status_code == 200 and not polling.done()):
                refused = client.post("retrieve_futures", target=target, timeout=0)
            assert refused.status_code == 429
            assert refused.json()["reason"] == "RATE_LIMITED"
            assert int(refused.headers["retry-after"]) >= 1
            assert int(refused.headers["retry-after-ms"]) >= 1
            # Another key is not affected.
            other = create_key(deployment, "other")
            with closing(_connected(deployment, other)) as neighbour:
                assert neighbour.post("session_heartbeat", session_id="x").status_code == 410
            done = client.sample(handle, 0)["request_id"]
            assert done in polling.result(30)["request_id"]


def _first_completion(client: Wire, target: dict[str, str]) -> Any:
    """Waits for the first answer of the target, as often as it is refused or nothing has come."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        answer = client.post("retrieve_futures", target=target, timeout=5)
        if answer.status_code == 200 and answer.json()["completions"]:
            return answer.json()["completions"][0]
    raise TimeoutError(f"no answer of {target} within 60 s")


def test_a_future_that_was_swept_is_gone(small: EmbeddedThread) -> None:
    deployment = small.start()
    with closing(_connected(deployment, deployment.api_key)) as client:
        future = client.sample(client.sampler(), 0)["request_id"]
        assert client.retrieve(future).status_code == 200
        while (answer := client.retrieve(future)).status_code == 200:
            pass
        assert answer.status_code == 410
        assert "not known" in answer.json()["error"]
