"""Stores of S3 for tests: each has its own prefix, and is reached directly or through a proxy."""

from __future__ import annotations

import os
from typing import Any

from tests.fakes.s3_server import CREDENTIALS, S3Server
from tests.faults.proxy import HttpFaultProxy

from tinsmith_runtime.storage import ObjectStore
from tinsmith_runtime.storage.s3.store import S3Store
from tinsmith_runtime.storage.settings import parse_s3_uri

PART_BYTES = 5 * 2**20
FOLDER = "projects/p/trainingRuns/r/checkpoints/training/a-1"
LARGE = os.urandom(2 * PART_BYTES + 1000)
QUICK = {"timeout_s": 1.5, "attempt_timeout_s": 1.0, "min_bytes_per_s": 2**30}
"""For outages, which are to be found out soon."""
prefixes = iter(f"prefix-{number}" for number in range(10_000))


def open_s3(server: S3Server, **settings: Any) -> S3Store:
    """Return a new store; each has a prefix of its own."""
    prefix = settings.pop("prefix", None) or next(prefixes)
    uri = server.uri("bucket", prefix, **{"part_bytes": PART_BYTES, **settings})
    location, parsed = parse_s3_uri(uri, CREDENTIALS)
    return S3Store(location, parsed, CREDENTIALS)


def through(proxy: HttpFaultProxy, server: S3Server, **settings: Any) -> S3Store:
    """Return a new store that is reached through a proxy and was probed."""
    store = open_s3(server, endpoint=proxy.endpoint, num_parallel_parts=1, **settings)
    store.probe()
    return store


def paths(store: ObjectStore, folder: str = "") -> list[str]:
    return [each.path for each in store.list_folder(folder)]
