"""An object of a store as a file, as the pod of a driver gets its data."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.s3_server import CREDENTIALS, S3Server
from tests.faults.proxy import Fault, HttpFaultProxy

from tinsmith_runtime import storage
from tinsmith_runtime.errors import DataLossError
from tinsmith_runtime.pod.fetch import fetch, main
from tinsmith_runtime.storage.objects import ObjectTooLargeError

LIMIT = "10000000"
# Nothing listens on port 1 of loopback.
AWAY = "s3://bucket/data.jsonl?endpoint=http://127.0.0.1:1&timeout_s=1"


@pytest.fixture(autouse=True)
def reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Set the variables of the container; return where its cluster looks for why it ended."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TINSMITH_S3_CREDENTIALS", "environment")
    path = tmp_path / "termination-log"
    monkeypatch.setenv("TINSMITH_TERMINATION_LOG", str(path))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "job-data"
    folder.mkdir()
    return folder / "train.jsonl"


def put(server: S3Server, path: str, content: bytes) -> None:
    storage.open(server.uri("bucket"), environment=CREDENTIALS).write(path, content)


def why_not(reason: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return why a fetch failed, which its log and its cluster are told in one line."""
    told = reason.read_text()
    assert capsys.readouterr().err == f"{told}\n"
    beginning = "spec.data.name cannot be fetched with the keys of spec.checkpoint: "
    assert told.startswith(beginning)
    return told.removeprefix(beginning)


@pytest.mark.parametrize(
    ("path", "written"),
    [("of-a-root.jsonl", "of-a-root.jsonl"), ("some/train set.jsonl", "some/train%20set.jsonl")],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_an_object_becomes_a_file(
    server: S3Server, file: Path, reason: Path, path: str, written: str, is_there: bool
) -> None:
    content = b"a line\n" * 500_000
    put(server, path, content)
    if is_there:
        file.write_bytes(b"of a start before this one")

    assert main([server.uri("bucket", written), str(file), str(len(content))]) == 0

    assert file.read_bytes() == content
    assert [each.name for each in file.parent.iterdir()] == ["train.jsonl"]
    assert not reason.exists()


def test_an_object_that_is_too_large_is_typed_and_told(
    server: S3Server, file: Path, reason: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(server, "data/large.jsonl", b"12345")
    uri = server.uri("bucket", "data/large.jsonl")

    with pytest.raises(ObjectTooLargeError):
        fetch(uri, file, 4)
    assert main([uri, str(file), "4"]) == 2

    assert why_not(reason, capsys) == (
        "s3://bucket/data/large.jsonl has 5 bytes, at most 4 are expected; give it as a file on a "
        "volume (spec.data.pvc), or ask the operators for more (setting volume_size)"
    )
    assert not file.exists()


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        pytest.param("s3://", "'' is not a bucket; use s3://bucket/prefix", id="no-bucket"),
        pytest.param("s3://bucket", "'' is not a relative object path", id="no-path"),
        pytest.param("s3://bucket/a/../b", "'a/../b' is not a relative", id="another-path"),
        pytest.param("s3://bucket/%2e%2e/b", "'../b' is not a relative", id="its-code"),
        pytest.param("s3://bucket/a?retries=1", "unknown parameters", id="setting"),
        pytest.param("file:///etc/passwd", "is not supported", id="file"),
    ],
)
def test_a_uri_that_names_no_object_is_told(
    file: Path, reason: Path, capsys: pytest.CaptureFixture[str], uri: str, told: str
) -> None:
    assert main([uri, str(file), LIMIT]) == 2

    assert told in why_not(reason, capsys)


@pytest.mark.parametrize(
    ("bucket", "told"),
    [
        (
            "bucket",
            "no/such.jsonl does not exist in s3://bucket at {}; put it there, or correct "
            "spec.data.name",
        ),
        (
            "missing",
            "the object store s3://missing at {} refused GET no/such.jsonl: the bucket does not "
            "exist; create it, or correct the storage URI",
        ),
    ],
)
def test_what_is_not_there_is_told(
    server: S3Server,
    file: Path,
    reason: Path,
    capsys: pytest.CaptureFixture[str],
    bucket: str,
    told: str,
) -> None:
    assert main([server.uri(bucket, "no/such.jsonl"), str(file), LIMIT]) == 2

    assert why_not(reason, capsys) == told.format(server.endpoint)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("AccessDenied", "AccessDenied; allow these credentials to list, read, write and delete"),
        ("InvalidAccessKeyId", "InvalidAccessKeyId; check the credentials"),
        ("SignatureDoesNotMatch", "SignatureDoesNotMatch; check the credentials"),
    ],
)
def test_keys_that_are_refused_are_told(
    server: S3Server,
    proxy: HttpFaultProxy,
    file: Path,
    reason: Path,
    capsys: pytest.CaptureFixture[str],
    code: str,
    told: str,
) -> None:
    uri = server.uri("bucket", "a.jsonl", endpoint=proxy.endpoint)

    with proxy.fault(Fault(status=403, code=code)):
        assert main([uri, str(file), LIMIT]) == 2

    assert why_not(reason, capsys) == (
        f"the object store s3://bucket at {proxy.endpoint} refused GET a.jsonl: {told}"
    )


def test_keys_that_a_secret_does_not_have_are_told(
    monkeypatch: pytest.MonkeyPatch,
    file: Path,
    reason: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name)

    assert main([AWAY, str(file), LIMIT]) == 2

    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in why_not(reason, capsys)


def test_a_store_that_is_away_may_come_back(
    file: Path, reason: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([AWAY, str(file), LIMIT]) == 3

    assert "s3://bucket at http://127.0.0.1:1 does not answer" in why_not(reason, capsys)


def test_of_an_answer_that_is_cut_for_good_there_is_no_file(
    server: S3Server,
    proxy: HttpFaultProxy,
    file: Path,
    reason: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    put(server, "cut.jsonl", b"a line\n" * 100_000)
    uri = server.uri("bucket", "cut.jsonl", endpoint=proxy.endpoint, timeout_s=1)

    with proxy.fault(Fault(cut_response_after=2000)):
        assert main([uri, str(file), LIMIT]) == 3

    assert "does not answer" in why_not(reason, capsys)
    assert not file.exists()


def test_an_object_that_is_replaced_meanwhile_may_be_read_again(
    monkeypatch: pytest.MonkeyPatch,
    file: Path,
    reason: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def replaced(*_: object) -> None:
        raise DataLossError("s3://bucket/a was replaced while it was read; read it again")

    monkeypatch.setattr("tinsmith_runtime.pod.fetch.fetch", replaced)

    assert main(["s3://bucket/a", str(file), LIMIT]) == 3
    assert "read it again" in why_not(reason, capsys)


def test_a_file_that_cannot_be_written_is_told(
    server: S3Server, file: Path, reason: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(server, "a.jsonl", b"a line")
    uri = server.uri("bucket", "a.jsonl")

    assert main([uri, str(file.parent / "no" / "file"), LIMIT]) == 3

    assert "No such file or directory" in why_not(reason, capsys)
