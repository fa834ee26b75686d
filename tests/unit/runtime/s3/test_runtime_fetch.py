"""An object of a store as a file, as the pod of a driver gets its data."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.s3_server import CREDENTIALS, S3Server

from tinsmith_runtime import storage
from tinsmith_runtime.storage.fetch import main


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TINSMITH_S3_CREDENTIALS", "environment")


def uri_of(server: S3Server, path: str) -> str:
    place, _, settings = server.uri("bucket").partition("?")
    return f"{place.rstrip('/')}/{path}?{settings}"


@pytest.mark.parametrize("path", ["of-a-root.jsonl", "some/data/train set.jsonl"])
def test_an_object_becomes_a_file(server: S3Server, tmp_path: Path, path: str) -> None:
    content = b"a line\n" * 500_000
    storage.open(server.uri("bucket"), environment=CREDENTIALS).write(path, content)

    assert main([uri_of(server, path), str(tmp_path / "train.jsonl"), "10000000"]) == 0

    assert (tmp_path / "train.jsonl").read_bytes() == content


@pytest.mark.parametrize(
    ("uri", "code", "told"),
    [
        ("missing", 1, "no/such.jsonl does not exist"),
        ("s3://", 1, "is not a bucket"),
        ("away", 3, "does not answer"),
    ],
)
def test_what_cannot_be_fetched_is_told_in_one_sentence(
    server: S3Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    uri: str,
    code: int,
    told: str,
) -> None:
    uris = {
        "missing": uri_of(server, "no/such.jsonl"),
        # Nothing listens on port 1 of loopback.
        "away": "s3://bucket/data.jsonl?endpoint=http://127.0.0.1:1&timeout_s=1",
    }

    assert main([uris.get(uri, uri), str(tmp_path / "train.jsonl"), "10000000"]) == code

    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1
    assert "endpoint" not in said.partition(":")[0]
