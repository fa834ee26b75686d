"""One behaviour of all stores, and what an S3 store makes of a bad network and a bad server."""

from __future__ import annotations

import hashlib
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
from tests.support.s3_stores import (
    FOLDER,
    LARGE,
    QUICK,
    open_s3,
    paths,
    prefixes,
    through,
)

from tinsmith_runtime import storage
from tinsmith_runtime.errors import (
    CheckpointCorruptError,
    ConfigError,
    DataLossError,
    StorageRefusedError,
    StorageUnavailableError,
)
from tinsmith_runtime.storage import ObjectStore
from tinsmith_runtime.storage.checkpoint_manifests import (
    MANIFEST_NAME,
    copy_checkpoint,
    fetch_files,
    find_folder,
    read_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)
from tinsmith_runtime.storage.objects import FileEntry, ObjectExistsError, ObjectNotFoundError
from tinsmith_runtime.storage.s3.store import S3Store

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
    fetch_files(store, FOLDER, manifest, local)
    assert {path.name: path.read_bytes() for path in local.iterdir()} == files
    # What is there and right is kept, what is damaged is fetched again.
    before_s = (local / "weights.safetensors").stat().st_mtime_ns
    (local / "config.json").write_bytes(b"[]")
    fetch_files(store, FOLDER, manifest, local)
    assert (local / "config.json").read_bytes() == b"{}"
    assert (local / "weights.safetensors").stat().st_mtime_ns == before_s

    store.write(f"{FOLDER}/weights.safetensors", LARGE[:-1] + b"x")
    for call in (verify_checkpoint, read_checkpoint):
        with pytest.raises(CheckpointCorruptError, match="SHA-256"):
            call(store, FOLDER)
    with pytest.raises(CheckpointCorruptError, match="SHA-256"):
        fetch_files(store, FOLDER, manifest, tmp_path / "other")
    assert not (tmp_path / "other" / "weights.safetensors").exists()


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
