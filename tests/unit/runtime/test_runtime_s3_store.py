"""One behaviour of all stores, and what an S3 store makes of a bad network and a bad server."""

from __future__ import annotations

import hashlib
import os
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from tests.fakes.s3_server import CREDENTIALS, S3Server, running_s3_server
from tests.faults.proxy import Fault, HttpFaultProxy, Request

from tinsmith_runtime import storage
from tinsmith_runtime.errors import (
    CheckpointCorruptError,
    ConfigError,
    DataLossError,
    ResourceExhaustedError,
    StorageFullError,
    StorageRefusedError,
    StorageUnavailableError,
)
from tinsmith_runtime.storage import ObjectStore
from tinsmith_runtime.storage.checkpoint_manifests import (
    MANIFEST_NAME,
    abandoned_folders,
    copy_checkpoint,
    fetch_checkpoint,
    find_folder,
    read_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)
from tinsmith_runtime.storage.objects import FileEntry, ObjectExistsError, ObjectNotFoundError
from tinsmith_runtime.storage.s3.store import S3Store

PART_BYTES = 5 * 2**20
FOLDER = "projects/p/trainingRuns/r/checkpoints/training/a-1"
LARGE = os.urandom(2 * PART_BYTES + 1000)
QUICK = {"timeout_s": 0.6, "attempt_timeout_s": 0.4, "min_bytes_per_s": 2**30}
"""For outages, which are to be found out soon."""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with running_s3_server() as server:
        server.create_bucket("bucket")
        yield server


@pytest.fixture
def proxy(server: S3Server) -> Iterator[HttpFaultProxy]:
    with HttpFaultProxy("127.0.0.1", server.port) as proxy:
        yield proxy


prefixes = iter(f"prefix-{number}" for number in range(10_000))


def open_s3(server: S3Server, **settings: Any) -> S3Store:
    """Return a new store; each has a prefix of its own."""
    prefix = settings.pop("prefix", None) or next(prefixes)
    uri = server.uri("bucket", prefix, **{"part_bytes": PART_BYTES, **settings})
    store = storage.open(uri, environment=CREDENTIALS)
    assert isinstance(store, S3Store)
    return store


def through(proxy: HttpFaultProxy, server: S3Server, **settings: Any) -> S3Store:
    """Return a new store that is reached through a proxy and was probed."""
    store = open_s3(server, endpoint=proxy.endpoint, num_parallel_parts=1, **settings)
    store.probe()
    return store


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


def paths(store: ObjectStore, folder: str = "") -> list[str]:
    return [each.path for each in store.list_folder(folder)]


def asks(method: str, ending: str) -> Callable[[Request], bool]:
    """Match requests for an object, whatever their parameters."""
    return lambda request: (
        request.method == method and request.target.partition("?")[0].endswith(ending)
    )


def is_part(number: int) -> Callable[[Request], bool]:
    return lambda request: request.method == "PUT" and f"partNumber={number}&" in request.target


# One behaviour of all stores.


def test_objects_are_written_replaced_read_and_deleted(store: ObjectStore) -> None:
    store.probe()
    store.write("a/b/one", b"1")
    store.write("a/b/one", b"22")
    store.write("a/two", b"")
    store.write("ab", b"not below a")
    assert store.read("a/b/one") == b"22"
    assert list(store.read_chunks("a/b/one", max_bytes=2)) == [b"22"]
    assert store.read("a/two", max_bytes=0) == b""
    assert [(each.path, each.size_bytes) for each in store.list_folder("a")] == [
        ("a/b/one", 2),
        ("a/two", 0),
    ]
    assert paths(store) == ["a/b/one", "a/two", "ab"]
    found = store.stat("a/b/one")
    assert (found.path, found.size_bytes) == ("a/b/one", 2)
    assert abs(found.modified_time_s - time.time()) < 60
    store.delete("a/two")
    store.delete("a/two")
    store.delete_folder("a/b")
    store.delete_folder("a/none")
    assert paths(store) == ["ab"]


@pytest.mark.parametrize("name", ["with space", "plus+and%25", "naïve-ü", "a=b&c?d#e", "'q'(1)!*~"])
def test_names_are_taken_as_they_are(store: ObjectStore, name: str) -> None:
    store.write(f"f/{name}", b"1")
    store.copy(f"f/{name}", f"g/{name}")
    assert store.read(f"g/{name}") == b"1"
    assert paths(store) == [f"f/{name}", f"g/{name}"]
    store.delete_folder("f")
    assert paths(store) == [f"g/{name}"]


@pytest.mark.parametrize("path", ["none", "a", "a/one/deeper"])
def test_what_does_not_exist_is_not_found(store: ObjectStore, path: str) -> None:
    store.write("a/one", b"1")
    calls: list[Callable[[], Any]] = [
        lambda: store.read(path),
        lambda: list(store.read_chunks(path)),
        lambda: store.stat(path),
        lambda: store.copy(path, "b"),
    ]
    for call in calls:
        with pytest.raises(ObjectNotFoundError, match="does not exist"):
            call()
    assert paths(store) == ["a/one"]


def test_an_object_that_is_too_large_is_not_read(store: ObjectStore) -> None:
    store.write("one", b"123")
    with pytest.raises(DataLossError, match="3 bytes, at most 2"):
        store.read("one", max_bytes=2)


@pytest.mark.parametrize("path", ["", ".", "/etc/passwd", "../up", "a/../../up"])
def test_paths_stay_inside(store: ObjectStore, path: str) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: store.write(path, b""),
        lambda: store.write_new(path, b""),
        lambda: store.read(path),
        lambda: store.stat(path),
        lambda: store.delete(path),
        lambda: store.delete_folder(path),
        lambda: store.copy("a", path),
        lambda: store.presigned_url(path, expires_s=60),
    ]
    store.write("a", b"")
    for call in calls:
        with pytest.raises(ValueError, match="not a relative object path"):
            call()


def test_a_large_file_goes_in_and_out_in_pieces(
    store: ObjectStore, large_file: Path, tmp_path: Path
) -> None:
    told: list[tuple[int, int]] = []
    entry = store.write_file("a/large", large_file, progress=lambda *done: told.append(done))
    assert entry == FileEntry(len(LARGE), hashlib.sha256(LARGE).hexdigest())
    assert told == sorted(told)
    assert told[-1] == (len(LARGE), len(LARGE))
    chunks = list(store.read_chunks("a/large"))
    assert b"".join(chunks) == LARGE
    assert max(map(len, chunks)) <= 2**20
    store.copy("a/large", "b/large")
    assert store.read("b/large") == LARGE
    empty = tmp_path / "empty"
    empty.touch()
    assert store.write_file("a/empty", empty) == FileEntry(0, hashlib.sha256(b"").hexdigest())
    assert store.read("a/empty") == b""


def test_of_many_writers_of_a_new_object_one_wins(store: ObjectStore) -> None:
    contents = [f"{number}".encode() for number in range(4)]
    won: list[bytes] = []

    def write(content: bytes) -> None:
        try:
            store.write_new("new", content)
        except (ObjectExistsError, StorageUnavailableError):
            return
        won.append(content)

    store.probe()
    threads = [threading.Thread(target=write, args=[content]) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [store.read("new")]
    with pytest.raises(ObjectExistsError):
        # The same content is another writer's all the same.
        store.write_new("new", won[0])
    assert paths(store) == ["new"]


def test_without_conditional_writes_at_most_one_writer_wins(server: S3Server) -> None:
    for number in range(4):
        won: list[int] = []
        stores = [open_s3(server, prefix=f"claims-{number}") for _ in range(3)]

        def write(index: int, stores: list[S3Store] = stores, won: list[int] = won) -> None:
            stores[index].honours_conditions = False
            try:
                stores[index].write_new("new", b"%d" % index)
            except (ObjectExistsError, StorageUnavailableError):
                return
            won.append(index)

        threads = [threading.Thread(target=write, args=[index]) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) <= 1
        if won:
            assert stores[0].read("new") == b"%d" % won[0]
        else:
            write(0)
            assert won == [0]
        assert paths(stores[0]) == ["new"]


def test_checkpoints_of_files_and_bytes(
    store: ObjectStore, large_file: Path, tmp_path: Path
) -> None:
    told: list[tuple[int, int]] = []
    store.write(f"{FOLDER}/left-behind", b"x")
    written = write_checkpoint(
        store,
        FOLDER,
        {"config.json": b"{}", "weights.safetensors": large_file},
        {"version": 3},
        progress=lambda *done: told.append(done),
    )
    total = len(LARGE) + 2
    assert told == sorted(told)
    assert told[-1] == (total, total)
    assert paths(store) == [
        f"{FOLDER}/config.json",
        f"{FOLDER}/{MANIFEST_NAME}",
        f"{FOLDER}/weights.safetensors",
    ]
    assert find_folder(store, written.uri, sha256=written.sha256) == FOLDER
    manifest, files = read_checkpoint(store, FOLDER, sha256=written.sha256)
    assert manifest == written.manifest
    assert files == {"config.json": b"{}", "weights.safetensors": LARGE}
    assert verify_checkpoint(store, FOLDER, sha256=written.sha256) == manifest
    copy_checkpoint(store, FOLDER, "copy")
    assert verify_checkpoint(store, "copy", sha256=written.sha256) == manifest

    local = tmp_path / "local"
    with pytest.raises(ResourceExhaustedError, match="at most 10"):
        fetch_checkpoint(store, FOLDER, local, max_bytes=10)
    assert fetch_checkpoint(store, FOLDER, local, sha256=written.sha256) == manifest
    assert {path.name: path.read_bytes() for path in local.iterdir()} == files
    # What is there and right is kept, what is damaged is fetched again.
    before_s = (local / "weights.safetensors").stat().st_mtime_ns
    (local / "config.json").write_bytes(b"[]")
    fetch_checkpoint(store, FOLDER, local)
    assert (local / "config.json").read_bytes() == b"{}"
    assert (local / "weights.safetensors").stat().st_mtime_ns == before_s

    store.write(f"{FOLDER}/weights.safetensors", LARGE[:-1] + b"x")
    for call in (verify_checkpoint, read_checkpoint):
        with pytest.raises(CheckpointCorruptError, match="SHA-256"):
            call(store, FOLDER)
    with pytest.raises(CheckpointCorruptError, match="SHA-256"):
        fetch_checkpoint(store, FOLDER, tmp_path / "other")
    assert not (tmp_path / "other" / "weights.safetensors").exists()


def test_folders_without_a_manifest_are_found_once_they_are_old(store: ObjectStore) -> None:
    parent = "projects/p/trainingRuns/r/checkpoints"
    write_checkpoint(store, f"{parent}/training/whole", {"a": b"1"}, {})
    store.write(f"{parent}/training/abandoned/a", b"1")
    now_s = time.time()
    assert abandoned_folders(store, parent, min_age_s=3600, now_s=now_s) == []
    found = abandoned_folders(store, parent, min_age_s=3600, now_s=now_s + 4000)
    assert found == [f"{parent}/training/abandoned"]


def test_a_store_of_its_own_uri_is_the_same_store(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, server: S3Server
) -> None:
    written = write_checkpoint(store, FOLDER, {"a": b"1"}, {})
    variables = {**CREDENTIALS, "TINSMITH_S3_ENDPOINT": server.endpoint}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    again = storage.open(store.uri)
    assert again.uri == store.uri
    assert "?" not in again.uri
    folder = find_folder(again, written.uri, sha256=written.sha256)
    assert read_checkpoint(again, folder)[1] == {"a": b"1"}


# URLs.


def test_a_presigned_url_downloads_without_credentials(store: ObjectStore) -> None:
    store.write("a/with space", b"content")
    url = store.presigned_url("a/with space", expires_s=60)
    if store.uri.startswith("file:"):
        assert url is None
        return
    assert url is not None
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in url
    with urllib.request.urlopen(url, timeout=5) as answer:
        assert answer.read() == b"content"


def test_a_presigned_url_names_the_public_endpoint(server: S3Server) -> None:
    store = open_s3(server, public_endpoint="https://store.example.org")
    url = store.presigned_url("a", expires_s=60) or ""
    assert url.startswith("https://store.example.org/bucket/")
    with pytest.raises(ValueError, match="expires_s"):
        store.presigned_url("a", expires_s=8 * 24 * 3600)


# A bad network.


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
    proxy: HttpFaultProxy, server: S3Server, large_file: Path
) -> None:
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
    store = through(proxy, server, **QUICK)
    store.write("a", b"1")
    with proxy.fault(Fault(refuse=kind == "refuse", stall=kind == "stall")):
        begin_s = time.monotonic()
        with pytest.raises(StorageUnavailableError, match="does not answer") as failure:
            store.write("a", b"2")
        assert time.monotonic() - begin_s < 5.0
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
    proxy: HttpFaultProxy, server: S3Server
) -> None:
    files = {"a": b"1", "b": b"2"}
    prefix = through(proxy, server).uri.rpartition("/")[2]
    for ending in ("a", "b", MANIFEST_NAME):
        store = open_s3(server, endpoint=proxy.endpoint, prefix=prefix, **QUICK)
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


# A server that says no.


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (403, "InvalidAccessKeyId", "check the credentials"),
        (403, "SignatureDoesNotMatch", "check the credentials"),
        (403, "AccessDenied", "allow these credentials"),
        (404, "NoSuchBucket", "create it"),
        (301, "PermanentRedirect", "check region and endpoint"),
        (405, "MethodNotAllowed", "check endpoint"),
    ],
)
def test_a_refusal_is_not_retried_and_says_what_to_do(
    proxy: HttpFaultProxy, server: S3Server, status: int, code: str, says: str
) -> None:
    store = through(proxy, server)
    already = len(proxy.requests)
    with proxy.fault(Fault(status=status, code=code)):
        with pytest.raises(StorageRefusedError, match=says) as failure:
            store.write("a", b"1")
        assert len(proxy.requests) == already + 1
        assert failure.value.code.name == "UNAVAILABLE"
        with pytest.raises(ConfigError, match=says) as at_start:
            open_s3(server, endpoint=proxy.endpoint).probe()
    assert "bucket" in str(at_start.value)
    assert proxy.endpoint in str(at_start.value)
    store.write("a", b"1")


def test_a_bucket_that_does_not_exist_is_found_at_start(server: S3Server) -> None:
    store = storage.open(server.uri("missing"), environment=CREDENTIALS)
    with pytest.raises(ConfigError, match=r"s3://missing at .*create it"):
        store.probe()


def test_a_server_that_is_no_object_store_is_found_at_start(
    proxy: HttpFaultProxy, server: S3Server
) -> None:
    with (
        proxy.fault(Fault(status=404, code="")),
        pytest.raises(ConfigError, match="check endpoint"),
    ):
        open_s3(server, endpoint=proxy.endpoint).probe()


def test_a_web_server_is_no_object_store(server: S3Server, sts: str) -> None:
    with pytest.raises(ConfigError, match="check endpoint"):
        open_s3(server, endpoint=sts).probe()


def test_a_store_that_is_away_at_start_is_no_wrong_setting(
    proxy: HttpFaultProxy, server: S3Server
) -> None:
    with proxy.outage(), pytest.raises(StorageUnavailableError):
        open_s3(server, endpoint=proxy.endpoint, **QUICK).probe()


def test_a_probe_leaves_nothing_and_may_be_without_writes(
    proxy: HttpFaultProxy, server: S3Server
) -> None:
    store = through(proxy, server)
    assert store.honours_conditions is True
    assert paths(store) == []
    with proxy.fault(Fault(status=403, matches=lambda request: request.method != "GET")):
        store.probe(writable=False)


def test_conditions_that_are_ignored_are_noticed(proxy: HttpFaultProxy, server: S3Server) -> None:
    def forget(request: Request) -> bool:
        return "if-none-match" in request.headers

    with proxy.fault(Fault(status=501, code="NotImplemented", matches=forget)):
        store = open_s3(server, endpoint=proxy.endpoint)
        store.probe()
        assert store.honours_conditions is False
        store.write_new("a", b"1")
        with pytest.raises(ObjectExistsError):
            store.write_new("a", b"2")


# The identity of the client, and that of the server.


class StsHandler(BaseHTTPRequestHandler):
    """Exchanges one token."""

    def do_GET(self) -> None:
        """Be a web server that knows every page."""
        self.send_response(200)
        self.send_header("Content-Length", "13")
        self.end_headers()
        self.wfile.write(b"<html></html>")

    def do_POST(self) -> None:
        fields = parse_qs(urlsplit(self.path).query)
        is_right = fields["WebIdentityToken"] == ["token"] and fields["RoleArn"] == ["role"]
        expiry = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = (
            "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>"
            "<AccessKeyId>from-sts</AccessKeyId><SecretAccessKey>secret</SecretAccessKey>"
            f"<SessionToken>session</SessionToken><Expiration>{expiry}</Expiration>"
            "</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
        ).encode()
        self.send_response(200 if is_right else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def sts() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), StsHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.02])
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_web_identity_is_exchanged_for_credentials(
    server: S3Server, sts: str, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("token")
    environment = {
        "HOME": str(tmp_path),
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(token_file),
        "AWS_ROLE_ARN": "role",
    }
    uri = server.uri("bucket", next(prefixes), sts_endpoint=sts)
    store = storage.open(uri, environment=environment)
    store.probe()
    store.write("a", b"1")
    assert store.read("a") == b"1"
    url = store.presigned_url("a", expires_s=60) or ""
    assert "from-sts" in url
    assert "X-Amz-Security-Token=session" in url


def test_an_exchange_that_fails_is_an_outage(
    proxy: HttpFaultProxy, server: S3Server, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.touch()
    environment = {"AWS_WEB_IDENTITY_TOKEN_FILE": str(token_file), "AWS_ROLE_ARN": "arn"}
    uri = server.uri("bucket", sts_endpoint=proxy.endpoint, **QUICK)
    store = storage.open(uri, environment=environment)
    with (
        proxy.fault(Fault(status=503)),
        pytest.raises(StorageUnavailableError, match="no credentials from the web identity"),
    ):
        store.write("a", b"1")


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate of 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = folder / "ca.pem", folder / "key.pem"
    certificate_file.write_bytes(certificate.public_bytes(Encoding.PEM))
    key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return certificate_file, key_file


def test_the_certificate_of_the_server_is_checked(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    with running_s3_server(certificate, key) as server:
        with pytest.raises(ConfigError, match="TINSMITH_S3_CA_FILE"):
            storage.open(server.uri("bucket"), environment=CREDENTIALS).probe()
        store = storage.open(server.uri("bucket", ca_file=certificate), environment=CREDENTIALS)
        with pytest.raises(ConfigError, match="the bucket does not exist"):
            store.probe()
        context = ssl.create_default_context(cafile=str(certificate))
        server.create_bucket("bucket", context)
        store.probe()
        store.write("a", b"1")
        assert store.read("a") == b"1"
