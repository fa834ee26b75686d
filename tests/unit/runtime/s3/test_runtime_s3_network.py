"""S3 over a bad network: cut requests, lost answers and outages make no wrong object."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.s3_server import S3Server
from tests.faults.proxy import Fault, HttpFaultProxy, Request
from tests.support.s3_stores import (
    FOLDER,
    LARGE,
    PART_BYTES,
    QUICK,
    open_s3,
    paths,
    through,
)

from tinsmith_runtime.errors import (
    CheckpointCorruptError,
    DataLossError,
    StorageFullError,
    StorageUnavailableError,
)
from tinsmith_runtime.storage import ObjectStore
from tinsmith_runtime.storage.checkpoint_manifests import (
    MANIFEST_NAME,
    read_checkpoint,
    write_checkpoint,
)
from tinsmith_runtime.storage.objects import ObjectExistsError
from tinsmith_runtime.storage.s3 import client

GIVES_UP_S = 60.0
"""As the first pause, longer than any call: a refusal is not waited out."""


def asks(method: str, ending: str) -> Callable[[Request], bool]:
    """Match requests for an object, whatever their parameters."""
    return lambda request: (
        request.method == method and request.target.partition("?")[0].endswith(ending)
    )


def is_part(number: int) -> Callable[[Request], bool]:
    return lambda request: request.method == "PUT" and f"partNumber={number}&" in request.target


def test_busy_answers_are_waited_for(proxy: HttpFaultProxy, server: S3Server) -> None:
    store = through(proxy, server)
    for status, code in [(503, "SlowDown"), (500, "InternalError"), (400, "RequestTimeout")]:
        proxy.add(Fault(status=status, code=code, times=2))
        store.write("a", code.encode())
        assert store.read("a") == code.encode()
        proxy.clear()
    proxy.add(Fault(status=503, times=1, matches=lambda request: "list-type" in request.target))
    assert paths(store) == ["a"]


def test_a_request_that_is_cut_is_sent_again(
    proxy: HttpFaultProxy, server: S3Server, large_file: Path
) -> None:
    store = through(proxy, server)
    proxy.add(Fault(cut_request_after=100_000, times=2, matches=asks("PUT", "/a")))
    data = os.urandom(300_000)
    store.write("a", data)
    assert store.read("a") == data
    proxy.add(Fault(cut_request_after=200_000, times=1, matches=is_part(2)))
    store.write_file("large", large_file)
    assert store.read("large") == LARGE


def test_an_answer_that_is_cut_is_taken_up_where_it_ended(
    proxy: HttpFaultProxy, server: S3Server
) -> None:
    store = through(proxy, server)
    store.write("a", LARGE)
    proxy.add(Fault(cut_response_after=3_000_000, times=2, matches=asks("GET", "/a")))
    assert store.read("a") == LARGE
    ranges = [request.headers.get("range", "") for request in proxy.requests]
    begins = [int(text[6:-1]) for text in ranges if text]
    assert len(begins) == 2
    assert 0 < begins[0] < begins[1] < len(LARGE)


def test_an_object_that_is_replaced_while_it_is_read_is_not_mixed(
    proxy: HttpFaultProxy, server: S3Server
) -> None:
    store = through(proxy, server)
    store.write("a", LARGE)
    proxy.add(Fault(cut_response_after=3_000_000, times=1, matches=asks("GET", "/a")))
    chunks = store.read_chunks("a")
    next(chunks)
    store.write("a", bytes(len(LARGE)))
    with pytest.raises(DataLossError, match="replaced"):
        list(chunks)


class KilledError(Exception):
    """Ends a call as the death of its process would: nothing is tidied up."""


def upload_two_parts(store: ObjectStore, large_file: Path) -> None:
    def die(done_bytes: int, _: int) -> None:
        if done_bytes >= 2 * PART_BYTES:
            raise KilledError

    with pytest.raises(KilledError):
        store.write_file("large", large_file, progress=die)


def test_an_upload_goes_on_with_the_parts_that_are_there(
    proxy: HttpFaultProxy, server: S3Server, large_file: Path
) -> None:
    store = through(proxy, server)
    upload_two_parts(store, large_file)
    assert paths(store) == []
    already = len(proxy.requests)
    entry = store.write_file("large", large_file)
    assert entry.sha256 == hashlib.sha256(LARGE).hexdigest()
    sent = [request for request in proxy.requests[already:] if "partNumber=" in request.target]
    assert [is_part(3)(request) for request in sent] == [True]
    assert store.read("large") == LARGE
    assert store.delete_interrupted("", min_age_s=0) == 0


def test_an_upload_of_other_content_is_not_gone_on_with(
    proxy: HttpFaultProxy, server: S3Server, large_file: Path
) -> None:
    store = through(proxy, server)
    upload_two_parts(store, large_file)
    other = bytes(PART_BYTES) + LARGE[PART_BYTES:]
    large_file.write_bytes(other)
    already = len(proxy.requests)
    store.write_file("large", large_file)
    sent = [request for request in proxy.requests[already:] if "partNumber=" in request.target]
    assert [is_part(1)(request) for request in sent] == [True, False]
    assert store.read("large") == other


def test_interrupted_uploads_are_deleted(
    proxy: HttpFaultProxy, server: S3Server, large_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_S", GIVES_UP_S)
    store = through(proxy, server, **QUICK)
    again = open_s3(server, prefix=store.uri.rpartition("/")[2])
    for remove in (
        lambda: again.delete_interrupted("", min_age_s=0),
        lambda: again.delete_folder("f"),
    ):
        proxy.add(Fault(refuse=True, matches=is_part(2)))
        with pytest.raises(StorageUnavailableError):
            open_s3(
                server, prefix=store.uri.rpartition("/")[2], endpoint=proxy.endpoint, **QUICK
            ).write_file("f/large", large_file)
        proxy.clear()
        remove()
        assert again.delete_interrupted("f", min_age_s=0) == 0


def test_a_store_that_is_full_ends_the_upload(
    proxy: HttpFaultProxy, server: S3Server, large_file: Path
) -> None:
    store = through(proxy, server)
    for status, code in [(507, "InsufficientStorage"), (403, "QuotaExceeded")]:
        with proxy.fault(Fault(status=status, code=code, matches=is_part(2))):
            with pytest.raises(StorageFullError, match="free space") as failure:
                store.write_file("large", large_file)
            assert failure.value.retry_after_s is not None
        assert store.delete_interrupted("", min_age_s=0) == 0
        assert paths(store) == []


@pytest.mark.parametrize("kind", ["refuse", "stall"])
def test_an_outage_is_typed_found_out_once_and_over_when_it_is_over(
    proxy: HttpFaultProxy, server: S3Server, kind: str
) -> None:
    prefix = through(proxy, server).uri.rpartition("/")[2]
    store = open_s3(server, endpoint=proxy.endpoint, prefix=prefix, **QUICK)
    open_s3(server, prefix=prefix).write("a", b"1")
    with proxy.fault(Fault(refuse=kind == "refuse", stall=kind == "stall")):
        with pytest.raises(StorageUnavailableError, match="does not answer") as failure:
            store.write("a", b"2")
        assert failure.value.retry_after_s is not None
        already = proxy.num_connections
        for _ in range(20):
            with pytest.raises(StorageUnavailableError):
                store.read("a")
        # What is made here does not need the store, and says nothing of it.
        assert store.presigned_url("a", expires_s=60)
        # Not each of them waits for the store once it is known to be away.
        assert proxy.num_connections - already < 10
    deadline_s = time.monotonic() + 10
    while True:
        try:
            store.write("a", b"3")
            break
        except StorageUnavailableError:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    assert store.read("a") == b"3"


def test_a_put_whose_answer_is_lost_is_no_conflict(proxy: HttpFaultProxy, server: S3Server) -> None:
    store = through(proxy, server)
    assert store.honours_conditions
    for honours in (True, False):
        store.honours_conditions = honours
        path = f"new-{honours}"
        proxy.add(Fault(cut_response_after=0, times=2, matches=asks("PUT", path)))
        store.write_new(path, b"mine")
        assert store.read(path) == b"mine"
        with pytest.raises(ObjectExistsError):
            store.write_new(path, b"theirs")
        assert store.read(path) == b"mine"


def test_a_completed_upload_whose_answer_is_lost_is_not_repeated(
    proxy: HttpFaultProxy, server: S3Server, large_file: Path
) -> None:
    store = through(proxy, server)
    proxy.add(
        Fault(
            cut_response_after=0,
            times=1,
            matches=lambda request: request.method == "POST" and "uploadId=" in request.target,
        )
    )
    store.write_file("large", large_file)
    assert store.read("large") == LARGE
    assert sum("partNumber=" in request.target for request in proxy.requests) == 3


FAULTS = {
    "busy": {"status": 503},
    "cut-request": {"cut_request_after": 0},
    "cut-answer": {"cut_response_after": 20},
    "lost-answer": {"cut_response_after": 0},
    "refused": {"refuse": True},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_at_any_request_of_a_checkpoint_makes_a_wrong_one(
    proxy: HttpFaultProxy, server: S3Server, fault: str
) -> None:
    store = through(proxy, server)
    folder = FOLDER
    for number in range(7):
        left = iter(range(number, -1, -1))
        proxy.add(
            Fault(
                **FAULTS[fault],
                times=1,
                matches=lambda _, left=left: next(left, -1) == 0,
            )
        )
        files = {"a": b"%d" % number, "b": os.urandom(1000)}
        written = write_checkpoint(store, folder, files, {"number": number})
        proxy.clear()
        assert read_checkpoint(store, folder, sha256=written.sha256)[1] == files


def test_an_outage_amid_a_checkpoint_leaves_none_and_the_next_try_makes_it_whole(
    proxy: HttpFaultProxy, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_S", GIVES_UP_S)
    files = {"a": b"1", "b": b"2"}
    for ending in ("a", "b", MANIFEST_NAME):
        # Each begins with an empty store: what fails before the outage leaves no checkpoint either.
        store = open_s3(server, endpoint=proxy.endpoint, **QUICK)
        prefix = store.uri.rpartition("/")[2]
        with (
            proxy.fault(Fault(refuse=True, matches=asks("PUT", f"/{ending}"))),
            pytest.raises(StorageUnavailableError),
        ):
            write_checkpoint(store, FOLDER, files, {})
        direct = open_s3(server, prefix=prefix)
        with pytest.raises(CheckpointCorruptError, match="is missing"):
            read_checkpoint(direct, FOLDER)
        written = write_checkpoint(direct, FOLDER, files, {})
        assert read_checkpoint(direct, FOLDER, sha256=written.sha256)[1] == files
