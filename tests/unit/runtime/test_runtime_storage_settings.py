"""Where the settings and credentials of an S3 store come from, and what is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from tests.support.clock import Clock

from tinsmith.backoff import backoff_s
from tinsmith_runtime import storage
from tinsmith_runtime.errors import ConfigError, StorageUnavailableError
from tinsmith_runtime.storage.retries import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    TRIAL_PAUSE_S,
    Availability,
    Deadline,
)
from tinsmith_runtime.storage.settings import StorageSettings, parse_s3_uri

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "very-secret"}


def test_parameters_win_over_variables_and_variables_over_defaults() -> None:
    variables = {"TINSMITH_S3_ENDPOINT": "http://one:1", "TINSMITH_S3_TIMEOUT_S": "7"}
    location, settings = parse_s3_uri(
        "s3://bucket/a%20b/c/?endpoint=http://two:2&path_style=true", variables
    )
    assert (location.bucket, location.prefix) == ("bucket", "a b/c")
    assert location.uri == "s3://bucket/a%20b/c"
    assert settings == StorageSettings(
        endpoint="http://two:2", timeout_s=7.0, path_style=True, region="us-east-1"
    )


def test_the_region_is_that_of_the_environment() -> None:
    variables = {"AWS_DEFAULT_REGION": "eu-west-1"}
    assert parse_s3_uri("s3://bucket", variables)[1].region == "eu-west-1"
    variables["AWS_REGION"] = "eu-west-2"
    assert parse_s3_uri("s3://bucket", variables)[1].region == "eu-west-2"
    assert parse_s3_uri("s3://bucket?region=eu-west-3", variables)[1].region == "eu-west-3"


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("s3://", "is not a bucket"),
        ("s3://B_", "is not a bucket"),
        ("s3://bucket/a/../b", "is not a prefix"),
        ("s3://bucket/a//b", "is not a prefix"),
        ("s3://key:very-secret@bucket/a", "holds credentials"),
        ("s3://bucket?secret_key=very-secret", "unknown parameters of the storage URI: secret_key"),
        ("s3://bucket?endpoint=http://key:very-secret@host", "holds credentials"),
        ("s3://bucket?endpoint=host:9000", "must be http"),
        ("s3://bucket?endpoint=http://host/path", "must be http"),
        ("s3://bucket?endpoint=http://host:99999", "must be http"),
        ("s3://bucket?endpoint=", "must be http"),
        ("s3://bucket?timeout_s=0", "must be positive"),
        ("s3://bucket?timeout_s=soon", "timeout_s must be of type float"),
        ("s3://bucket?part_bytes=1000", "part_bytes must be between"),
        ("s3://bucket?path_style=perhaps", "path_style must be of type bool"),
        ("s3://bucket?credentials=magic", "must be one of auto"),
        ("s3://bucket?ca_file=/does/not/exist", "does not exist"),
        ("s3://bucket?region=Not a region", "invalid region"),
    ],
)
def test_wrong_settings_are_refused_without_quoting_secrets(uri: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as failure:
        storage.open(uri, environment=KEYS)
    assert "very-secret" not in str(failure.value)


def test_a_misspelt_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="TINSMITH_S3_ENDPIONT"):
        storage.open("s3://bucket", environment={**KEYS, "TINSMITH_S3_ENDPIONT": "http://a"})


# Credentials.


def test_no_credentials_says_what_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"AWS_ACCESS_KEY_ID .*AWS_WEB_IDENTITY_TOKEN"):
        storage.open("s3://bucket", environment={"HOME": str(tmp_path)})


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"AWS_ACCESS_KEY_ID": "key"}, "one is not set"),
        ({"MINIO_SECRET_KEY": "secret"}, "one is not set"),
        ({"AWS_WEB_IDENTITY_TOKEN_FILE": "/does/not/exist"}, "mount the token"),
    ],
)
def test_half_of_the_credentials_is_refused(
    tmp_path: Path, variables: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        storage.open("s3://bucket", environment={"HOME": str(tmp_path), **variables})


def test_a_source_that_is_asked_for_must_be_configured(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), **KEYS}
    storage.open("s3://bucket?credentials=environment", environment=environment)
    for source in ("file", "web_identity", "container"):
        with pytest.raises(ConfigError, match=f"credentials={source} is not configured"):
            storage.open(f"s3://bucket?credentials={source}", environment=environment)


def test_a_shared_credentials_file_is_read_by_profile(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.write_text("[team]\naws_access_key_id = file-key\naws_secret_access_key = very-secret\n")
    environment = {"AWS_SHARED_CREDENTIALS_FILE": str(path)}
    with pytest.raises(ConfigError, match="profile default"):
        storage.open("s3://bucket", environment=environment)
    store = storage.open("s3://bucket?profile=team", environment=environment)
    assert "file-key" in (store.presigned_url("a", expires_s=60) or "")


def test_minio_variables_are_credentials_as_well() -> None:
    environment = {"MINIO_ACCESS_KEY": "minio-key", "MINIO_SECRET_KEY": "very-secret"}
    url = storage.open("s3://bucket", environment=environment).presigned_url("a", expires_s=60)
    assert "minio-key" in (url or "")


@pytest.mark.parametrize(
    ("settings", "begins"),
    [
        ("", "https://bucket.s3.us-east-1.amazonaws.com/a"),
        ("?region=eu-west-1", "https://bucket.s3.eu-west-1.amazonaws.com/a"),
        ("?endpoint=http://minio:9000", "http://minio:9000/bucket/a"),
        ("?endpoint=https://minio:9000&path_style=false", "https://bucket.minio:9000/a"),
    ],
)
def test_the_bucket_is_in_the_path_or_in_the_host(settings: str, begins: str) -> None:
    store = storage.open(f"s3://bucket{settings}", environment=KEYS)
    assert (store.presigned_url("a", expires_s=60) or "").startswith(begins)


# Retries.


def test_pauses_grow_to_a_limit() -> None:
    assert 0 < backoff_s(1, FIRST_PAUSE_S, LONGEST_PAUSE_S) <= 0.05
    assert 0.1 <= backoff_s(3, FIRST_PAUSE_S, LONGEST_PAUSE_S) <= 0.2
    assert 1.0 <= backoff_s(10_000, FIRST_PAUSE_S, LONGEST_PAUSE_S) <= 2.0


def test_a_deadline_moves_with_what_is_to_be_done() -> None:
    clock = Clock()
    deadline = Deadline(5.0, clock=clock)
    clock.now_s += 6.0
    assert deadline.left_s == -1.0
    deadline.extend(10.0)
    assert deadline.left_s == 9.0


def give_up(known: Availability) -> None:
    with contextlib.suppress(StorageUnavailableError), known.request():
        raise StorageUnavailableError("away")


def is_refused(known: Availability) -> bool:
    """Whether a request is refused before it is sent."""
    try:
        with known.request():
            return False
    except StorageUnavailableError:
        return True


def test_a_store_that_is_away_is_tried_by_one_call_at_a_time() -> None:
    clock = Clock()
    known = Availability(clock=clock)
    give_up(known)
    assert is_refused(known)
    clock.now_s += TRIAL_PAUSE_S
    with known.request() as may_retry:
        assert not may_retry
        assert is_refused(known)
    with known.request() as may_retry:
        assert may_retry


def test_any_answer_means_that_the_store_is_there() -> None:
    clock = Clock()
    known = Availability(clock=clock)
    give_up(known)
    clock.now_s += TRIAL_PAUSE_S
    with pytest.raises(KeyError), known.request():
        raise KeyError("not found")
    with known.request() as may_retry:
        assert may_retry
