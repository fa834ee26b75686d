"""Requests to any object store are counted by outcome, and bytes by direction."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from tinsmith_runtime import storage
from tinsmith_runtime.storage.objects import ObjectExistsError, ObjectNotFoundError


def _requests(operation: str, outcome: str) -> float:
    name = "tinsmith_object_store_request_duration_seconds_count"
    return REGISTRY.get_sample_value(name, {"operation": operation, "outcome": outcome}) or 0.0


def _bytes(direction: str) -> float:
    name = "tinsmith_object_store_bytes_total"
    return REGISTRY.get_sample_value(name, {"direction": direction}) or 0.0


def test_outcomes_and_bytes_are_counted(tmp_path: Path) -> None:
    store = storage.open(f"file://{tmp_path}")
    kinds = (("write", "ok"), ("read", "missing"), ("write_new", "exists"), ("read_chunks", "ok"))
    before = {kind: _requests(*kind) for kind in kinds}
    written, read = _bytes("written"), _bytes("read")
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
    assert {kind: _requests(*kind) - before[kind] for kind in kinds} == dict(
        zip(kinds, (1, 1, 1, 2), strict=True)
    )
    assert (_bytes("written") - written, _bytes("read") - read) == (5, 10)
