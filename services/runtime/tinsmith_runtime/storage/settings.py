"""Settings of object stores: `TINSMITH_S3_*` variables, and parameters of the URI, which win."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from tinsmith_runtime.config import load_config
from tinsmith_runtime.errors import ConfigError

_VARIABLE_PREFIX = "TINSMITH_S3_"
_BUCKET_PATTERN = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_MIN_PART_BYTES = 5 * 2**20
_MAX_PART_BYTES = 5 * 2**30
CREDENTIAL_SOURCES = ("auto", "environment", "file", "web_identity", "container", "instance")


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageSettings:
    """How an S3 store is reached; `endpoint` is read from `TINSMITH_S3_ENDPOINT` or the URI."""

    endpoint: str = "https://s3.amazonaws.com"
    """Scheme, host and port; `http://` switches TLS off."""
    public_endpoint: str = ""
    """What presigned URLs name, where clients reach the store under another address."""
    region: str = ""
    """`AWS_REGION`, `AWS_DEFAULT_REGION` or us-east-1 by default."""
    path_style: bool | None = None
    """Whether the bucket is a part of the path, not of the host; so by default but at AWS."""
    ca_file: Path | None = None
    """Certificates that sign the endpoint's, where the system does not know them."""
    credentials: str = "auto"
    """Where they come from: environment, file, web_identity, container, instance, or auto: the
    first of these that is configured, instance excepted."""
    profile: str = ""
    """Of the shared credentials file; `AWS_PROFILE` or default by default."""
    sts_endpoint: str = ""
    """Where a web identity is exchanged for credentials, if not at AWS."""
    timeout_s: float = 30.0
    """How long one call may take with all its retries, plus the time of `min_bytes_per_s`."""
    attempt_timeout_s: float = 10.0
    """How long the store may be silent before a request is sent again."""
    min_bytes_per_s: int = 2**20
    """What a transfer must reach: a call for n bytes has n / min_bytes_per_s more seconds."""
    part_bytes: int = 16 * 2**20
    """Larger objects are uploaded in parts of this size."""
    num_parallel_parts: int = 4
    """Parts of one object that are uploaded at once; so many are in memory."""

    def __post_init__(self) -> None:
        for name in ("endpoint", "public_endpoint", "sts_endpoint"):
            value = getattr(self, name)
            if value or name == "endpoint":
                _check_endpoint(name, value)
        for name in ("timeout_s", "attempt_timeout_s", "min_bytes_per_s", "num_parallel_parts"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"s3 {name} must be positive, got {getattr(self, name)}")
        if not _MIN_PART_BYTES <= self.part_bytes <= _MAX_PART_BYTES:
            raise ConfigError(
                f"s3 part_bytes must be between {_MIN_PART_BYTES} and {_MAX_PART_BYTES}, got "
                f"{self.part_bytes}"
            )
        if self.credentials not in CREDENTIAL_SOURCES:
            raise ConfigError(
                f"s3 credentials must be one of {', '.join(CREDENTIAL_SOURCES)}, got "
                f"{self.credentials!r}"
            )
        if self.ca_file is not None and not self.ca_file.is_file():
            raise ConfigError(f"s3 ca_file {self.ca_file} does not exist")


@dataclass(frozen=True, slots=True)
class S3Location:
    """A bucket, and the path in it that a store begins at; empty or without slashes at its ends."""

    bucket: str
    prefix: str

    @property
    def uri(self) -> str:
        """The location as a URI."""
        return f"s3://{self.bucket}" + (f"/{quote(self.prefix)}" if self.prefix else "")


def parse_s3_uri(uri: str, environment: Mapping[str, str]) -> tuple[S3Location, StorageSettings]:
    """Return where an S3 store begins, and its settings.

    Raises:
        ConfigError: If a setting is unknown or wrong. It never quotes what may be a secret.
    """
    parsed = urlsplit(uri)
    if "@" in parsed.netloc:
        raise ConfigError(
            "the storage URI holds credentials; take them out and set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        )
    bucket, path = parsed.netloc, unquote(parsed.path).strip("/")
    if _BUCKET_PATTERN.fullmatch(bucket) is None:
        raise ConfigError(f"storage URI: {bucket!r} is not a bucket; use s3://bucket/prefix")
    if parsed.fragment or any(part in ("", ".", "..") for part in path.split("/") if path):
        raise ConfigError(f"storage URI: {path!r} is not a prefix; use s3://bucket/prefix")
    parameters = parse_qsl(parsed.query, keep_blank_values=True)
    known = {field.name for field in dataclasses.fields(StorageSettings)}
    values = {
        name.removeprefix(_VARIABLE_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(_VARIABLE_PREFIX)
    }
    _refuse_unknown(values, known, "variables", lambda name: _VARIABLE_PREFIX + name.upper())
    _refuse_unknown(dict(parameters), known, "parameters of the storage URI", str)
    values |= dict(parameters)
    values.setdefault(
        "region", environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or ""
    )
    # `load_config` converts the values and names those that are wrong.
    settings = load_config(
        StorageSettings, environment={f"TINSMITH_{name.upper()}": v for name, v in values.items()}
    )
    if not settings.region:
        settings = dataclasses.replace(settings, region="us-east-1")
    return S3Location(bucket, path), settings


def _check_endpoint(name: str, value: str) -> None:
    try:
        parsed = urlsplit(value)
        is_wrong = parsed.scheme not in ("http", "https") or not parsed.hostname
        is_wrong = is_wrong or parsed.path not in ("", "/") or bool(parsed.query or parsed.fragment)
        is_wrong = is_wrong or (parsed.port is not None and not parsed.port)
        holds_credentials = "@" in parsed.netloc
    except ValueError:
        is_wrong, holds_credentials = True, "@" in value
    if holds_credentials:
        raise ConfigError(f"s3 {name} holds credentials; set AWS_ACCESS_KEY_ID and its secret")
    if is_wrong:
        raise ConfigError(f"s3 {name} must be http://host:port or https://host, got {value!r}")


def _refuse_unknown(
    values: Mapping[str, str], known: set[str], what: str, name_of: Callable[[str], str]
) -> None:
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(
            f"unknown {what}: {', '.join(map(name_of, unknown))}; known are "
            f"{', '.join(map(name_of, sorted(known)))}"
        )
