"""Requests to any object store are counted by outcome, and bytes by direction."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from tinsmith_runtime.storage.file import FileStore
from tinsmith_runtime.storage.measured import MeasuredStore
from tinsmith_runtime.storage.objects import ObjectExistsError, ObjectNotFoundError

_WAYS = ("written", "read")


def test_outcomes_and_bytes_are_counted(tmp_path: Path) -> None:
    # A registry of its own: the process may have other stores, which write at any time.
    registry = CollectorRegistry()
    seconds = Histogram("seconds", "Time", ["operation", "outcome"], registry=registry)
    num_bytes = Counter("bytes", "Bytes", ["direction"], registry=registry)
    store = MeasuredStore(FileStore(tmp_path), seconds=seconds, num_bytes=num_bytes)
    store.write("a/b", b"12345")
    with pytest.raises(ObjectNotFoundError):
        store.read("a/c")
    with pytest.raises(ObjectExistsError):
        store.write_new("a/b", b"1")
    assert b"".join(store.read_chunks("a/b")) == b"12345"
    # A reader that has enough did not fail.
    chunks = store.read_chunks("a/b")
    next(iter(chunks))
    del chunks
    requests = {
        (sample.labels["operation"], sample.labels["outcome"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "seconds_count"
    }
    assert requests == {
        ("write", "ok"): 1,
        ("read", "missing"): 1,
        ("write_new", "exists"): 1,
        ("read_chunks", "ok"): 2,
    }
    moved = {way: registry.get_sample_value("bytes_total", {"direction": way}) for way in _WAYS}
    assert moved == {"written": 5, "read": 10}
