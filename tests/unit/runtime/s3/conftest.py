"""A server of S3, a proxy before it, and stores of both kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.s3_server import S3Server, running_s3_server
from tests.faults.proxy import HttpFaultProxy
from tests.support.s3_stores import (
    LARGE,
    open_s3,
)

from tinsmith_runtime import storage
from tinsmith_runtime.storage import ObjectStore


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with running_s3_server() as server:
        server.create_bucket("bucket")
        yield server


@pytest.fixture
def proxy(server: S3Server) -> Iterator[HttpFaultProxy]:
    with HttpFaultProxy("127.0.0.1", server.port) as proxy:
        yield proxy


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, server: S3Server) -> ObjectStore:
    if request.param == "file":
        return storage.open(f"file://{tmp_path}/store")
    return open_s3(server)


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(LARGE)
    return path
