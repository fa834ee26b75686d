"""Faults of a server that are planted, and the finding that names each."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.rpc import code_pb2
from tests.fakes.sdk_fake_server import FakeServer, make_status

import tinsmith
from tinsmith.cli.connection import connect
from tinsmith.doctor.findings import Level
from tinsmith.doctor.server import check_server

NOW = datetime.datetime.now(datetime.UTC)
MODEL = tinsmith.ModelInfo(
    base_model="tiny",
    trainable=True,
    sampleable=True,
    max_context_tokens=512,
    exactness="exact",
    num_parameters=1000,
    reads_images=False,
    vocabulary_size=100,
    stop_token_ids=[2],
    numerics_fingerprint="f",
)
RUN = tinsmith.TrainingRunInfo(
    name="projects/default/trainingRuns/run-1",
    state="active",
    base_model="tiny",
    adapter="lora",
    rank=8,
    display_name="",
    labels={},
    session="",
    create_time=NOW,
    worker="trainer-0",
    waiting_for="",
)
KEY = tinsmith.ApiKey("k1", "active", "member", "ci", NOW, NOW + datetime.timedelta(days=1))


class Answers(SimpleNamespace):
    """A client of made up answers."""

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def served(**parts: Any) -> Any:
    """Return a client of a server with the given models, runs, environments and keys."""
    values = {"models": [MODEL], "runs": [RUN], "environments": ["math"], "keys": []} | parts

    def lists(name: str) -> SimpleNamespace:
        def read() -> Any:
            if isinstance(values[name], Exception):
                raise values[name]
            return values[name]

        return SimpleNamespace(list=read)

    client = Answers()
    client.address, client.project = "gpu1:7077", "default"
    client.list_models = lists("models").list
    client.runs, client.environments, client.keys = map(lists, ("runs", "environments", "keys"))
    return client


def findings(**parts: Any) -> list[str]:
    """Return what does not work on such a server, each with its remedy on the same line."""
    client = served(**parts)
    return [
        f"{finding.check}: {finding.text}; {finding.remedy}"
        for finding in check_server(lambda: client)
        if finding.level is not Level.GOOD
    ]


def test_a_server_that_works_has_no_findings() -> None:
    assert findings() == []


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        pytest.param({"models": []}, "no base model is served", id="no-models"),
        pytest.param(
            {"models": [dataclasses.replace(MODEL, trainable=False)]},
            "tiny has no trainer; start a trainer",
            id="no-trainer",
        ),
        pytest.param(
            {"models": [dataclasses.replace(MODEL, sampleable=False)]},
            "tiny has no sampler; start a sampler",
            id="no-sampler",
        ),
        pytest.param(
            {"models": [dataclasses.replace(MODEL, exactness="fast")]},
            "--exact true says why",
            id="not-exact",
        ),
        pytest.param(
            {"runs": [dataclasses.replace(RUN, replay_diverged=True)]},
            "gave other bits than its first execution; begin anew from a checkpoint",
            id="diverged",
        ),
        pytest.param(
            {"runs": [dataclasses.replace(RUN, waiting_for="a trainer of tiny")]},
            "run-1 waits for a trainer of tiny; tinsmith runs list --watch",
            id="waits",
        ),
        pytest.param(
            {"environments": tinsmith.FailedPreconditionError("none")},
            "no environment service",
            id="no-environments",
        ),
        pytest.param(
            {"keys": [KEY]},
            "k1 (ci) expires",
            id="key-expires",
        ),
        pytest.param(
            {"runs": tinsmith.DeadlineExceededError("no answer", remedy="look at the log")},
            "runs: no answer; look at the log",
            id="silent",
        ),
    ],
)
def test_a_fault_of_a_server_is_named(parts: dict[str, Any], named: str) -> None:
    [found] = findings(**parts)
    assert named in found


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.stop()


@pytest.mark.parametrize(
    ("code", "reason", "check"),
    [
        pytest.param(code_pb2.UNAUTHENTICATED, "KEY_INVALID", "key", id="key"),
        pytest.param(code_pb2.NOT_FOUND, "RESOURCE_NOT_FOUND", "project", id="project"),
        pytest.param(code_pb2.PERMISSION_DENIED, "ROLE_MISSING", "project", id="role"),
        pytest.param(code_pb2.INTERNAL, "INTERNAL", "connection", id="bug"),
    ],
)
def test_a_server_that_refuses_is_asked_once(
    server: FakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    reason: str,
    check: str,
) -> None:
    monkeypatch.setenv("TINSMITH_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("TINSMITH_ADDRESS", server.address)
    monkeypatch.setenv("TINSMITH_API_KEY", "tsk_test")
    server.state.fail_calls["CreateSession"] = [make_status(code, reason, "it is refused")]
    [found] = check_server(lambda: connect("test"))
    assert found.check == check
    assert found.level is Level.PROBLEM
    assert "it is refused" in found.text
    assert found.remedy or check == "connection"
