"""Requests to an S3 store: signed by minio, sent again while that may help, with typed failures.

Of minio only public names are used: its signer, its URLs, and its copy of large objects. Its own
`put_object` and `get_object` know no deadline, and cannot go on with what was interrupted.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlunsplit
from xml.etree import ElementTree

import certifi
import urllib3
from minio import Minio
from minio.commonconfig import CopySource
from minio.error import MinioException
from minio.helpers import BaseURL, sha256_hash
from minio.signer import sign_v4_s3
from minio.time import to_amz_date, utcnow
from urllib3 import BaseHTTPResponse
from urllib3.exceptions import HTTPError, SSLError

from tinsmith.backoff import backoff_s
from tinsmith_runtime.errors import (
    ConfigError,
    StorageFullError,
    StorageRefusedError,
    StorageUnavailableError,
    TinsmithError,
)
from tinsmith_runtime.storage.objects import ObjectNotFoundError
from tinsmith_runtime.storage.retries import FIRST_PAUSE_S, LONGEST_PAUSE_S, Availability, Deadline
from tinsmith_runtime.storage.s3.credentials import CredentialsError, find_credentials
from tinsmith_runtime.storage.settings import S3Location, StorageSettings

ResultT = TypeVar("ResultT")

_TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_TRANSIENT_CODES = frozenset(
    {
        # What a cut or damaged request is answered with: the same one may arrive whole.
        "BadDigest",
        "IncompleteBody",
        "XAmzContentSHA256Mismatch",
        "RequestTimeout",
        # Another writer puts the same object at the same time.
        "ConditionalRequestConflict",
        "OperationAborted",
        "InternalError",
        "ServiceUnavailable",
        "SlowDown",
        "SlowDownRead",
        "SlowDownWrite",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
    }
)
_FULL_CODES = frozenset(
    {
        "QuotaExceeded",
        "XMinioAdminBucketQuotaExceeded",
        "XMinioStorageFull",
        "InsufficientStorage",
        "InsufficientCapacity",
    }
)
_HEAD_ENDINGS = frozenset({"content-length", "transfer-encoding"})
_FULL_STATUS = 507
_DONE_STATUSES = frozenset({200, 204, 206})
_HEAD_CODES = {
    301: "PermanentRedirect",
    307: "Redirect",
    400: "BadRequest",
    403: "AccessDenied",
    404: "NoSuchKey",
}
"""Of answers to HEAD, which have no body that names a code."""
_NO_OBJECT_CODES = frozenset({"NoSuchKey", "NoSuchObject"})

_attempt: ContextVar[tuple[Deadline, float]] = ContextVar("attempt")
"""When the call of this thread ends, and how long its request may take to be answered."""


class AnswerError(Exception):
    """The store answered that it did not do what was asked.

    Attributes:
        status: HTTP status.
        code: What S3 calls it; empty if the answer is not that of an S3 store.
        message: What the store says of it.
    """

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(code or f"HTTP status {status}")
        self.status = status
        self.code = code
        self.message = message

    @classmethod
    def of(cls, method: str, response: BaseHTTPResponse) -> AnswerError:
        """Return what an answer says; reads its body.

        Raises:
            ParseError: If the body was cut.
        """
        if method == "HEAD":
            code = _HEAD_CODES.get(response.status, "")
            region = response.headers.get("x-amz-bucket-region")
            return cls(response.status, code, f"use region {region}" if region else "")
        content = response.data
        if not content or "xml" not in response.headers.get("content-type", ""):
            return cls(response.status)
        root = ElementTree.fromstring(content)
        found = {each.tag.rpartition("}")[2]: each.text or "" for each in root}
        return cls(response.status, found.get("Code", ""), found.get("Message", ""))


class _Pool(urllib3.PoolManager):
    """Connections whose timeouts end with the deadline of the call, and which never retry.

    minio gives no way to set a timeout for one request.
    """

    def __init__(self, settings: StorageSettings) -> None:
        super().__init__(
            maxsize=16,
            cert_reqs="CERT_REQUIRED",
            ca_certs=str(settings.ca_file) if settings.ca_file else certifi.where(),
            retries=False,
        )
        self._attempt_timeout_s = settings.attempt_timeout_s

    def urlopen(  # type: ignore[override]
        self, method: str, url: str, **options: Any
    ) -> BaseHTTPResponse:
        deadline, attempt_s = _attempt.get((None, self._attempt_timeout_s))
        timeout_s = max(0.001, attempt_s if deadline is None else min(deadline.left_s, attempt_s))
        options["timeout"] = urllib3.Timeout(connect=timeout_s, read=timeout_s)
        # A redirect means another region, for which the request has to be signed again.
        return super().urlopen(method, url, **{**options, "redirect": False})


class _StorePool(_Pool):
    """Connections to the store itself: what is no whole answer, or no success, is raised."""

    def urlopen(  # type: ignore[override]
        self, method: str, url: str, **options: Any
    ) -> BaseHTTPResponse:
        response = super().urlopen(method, url, **options)
        if response.status not in _DONE_STATUSES:
            try:
                # A streamed answer is read here, and its connection given back.
                error = AnswerError.of(method, response)
            finally:
                response.release_conn()
            raise error
        if response.status != 204 and not _HEAD_ENDINGS & set(map(str.lower, response.headers)):
            # A connection that ends amid the head looks like an answer with an empty body.
            response.close()
            raise HTTPError("the head of the answer was cut")
        return response


class S3Client:
    """Requests to one bucket.

    Args:
        location: Bucket, and the prefix that messages name.
        settings: How it is reached.
        environment: Where credentials are looked for.

    Raises:
        ConfigError: If there are no credentials, or the endpoint cannot be used.
    """

    def __init__(
        self, location: S3Location, settings: StorageSettings, environment: Mapping[str, str]
    ) -> None:
        self._provider = find_credentials(settings, environment, _Pool(settings))
        self._pool = _StorePool(settings)
        self._minio = self._at(settings.endpoint, settings)
        self._signer = self._at(settings.public_endpoint or settings.endpoint, settings)
        self._urls = BaseURL(settings.endpoint.rstrip("/"), settings.region)
        if settings.path_style is not None:
            self._urls.virtual_style_flag = not settings.path_style
        self._location = location
        self._settings = settings
        self._availability = Availability()

    @property
    def bucket(self) -> str:
        """The bucket."""
        return self._location.bucket

    @property
    def where(self) -> str:
        """The store as messages name it."""
        return f"{self._location.uri} at {self._settings.endpoint}"

    def new_deadline(self, size_bytes: int = 0) -> Deadline:
        """Return the end of a call that begins now and moves so many bytes."""
        return Deadline(self._settings.timeout_s + self.transfer_s(size_bytes))

    def transfer_s(self, size_bytes: int) -> float:
        """Return how much longer a call may take that moves so many bytes."""
        return size_bytes / self._settings.min_bytes_per_s

    def send(
        self,
        deadline: Deadline,
        method: str,
        key: str = "",
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        is_streamed: bool = False,
        expected: frozenset[str] = frozenset(),
    ) -> BaseHTTPResponse:
        """Send a request until it is answered, and return the answer.

        Args:
            deadline: When to give up.
            method: HTTP method.
            key: Object; empty for the bucket.
            body: Content.
            headers: Further headers.
            query: Parameters.
            is_streamed: Whether to leave the content of the answer to the caller, which closes it.
            expected: Error codes that the caller deals with: raised as `AnswerError`.

        Raises:
            ObjectNotFoundError: If the object does not exist.
            StorageFullError: If there is no room.
            StorageRefusedError: If the store refuses the request.
            StorageUnavailableError: If it was not answered in time.
        """
        return self.retrying(
            deadline,
            f"{method} {key or self.bucket}",
            lambda: self._send_once(
                method, key, body=body, headers=headers, query=query, is_streamed=is_streamed
            ),
            expected=expected,
            size_bytes=len(body or b""),
        )

    def ask(
        self,
        deadline: Deadline,
        parse: Callable[[BaseHTTPResponse], ResultT],
        key: str = "",
        *,
        query: Mapping[str, str],
        expected: frozenset[str] = frozenset(),
    ) -> ResultT:
        """Send a question, and return what its answer says; see `send`."""
        what = f"GET {key or self.bucket}"

        def attempt() -> ResultT:
            response = self._send_once("GET", key, query=query)
            try:
                return parse(response)
            except ValueError as error:
                raise StorageRefusedError(
                    f"{self.where} gave no S3 answer to {what}; check endpoint and path_style",
                    store=self._location.uri,
                ) from error

        return self.retrying(deadline, what, attempt, expected=expected)

    def copy(self, deadline: Deadline, source: str, target: str, size_bytes: int) -> None:
        """Have the store copy an object: in one request up to 5 GiB, else by parts; see `send`."""
        self.retrying(
            deadline,
            f"COPY {source}",
            lambda: self._minio.copy_object(self.bucket, target, CopySource(self.bucket, source)),
            size_bytes=size_bytes,
        )

    def presigned_url(self, key: str, expires: timedelta) -> str:
        """Return a URL that downloads an object; it is made here, and the store is not asked.

        Raises:
            StorageUnavailableError: If the source of credentials does not answer.
        """
        try:
            return self._signer.presigned_get_object(self.bucket, key, expires)
        except CredentialsError as error:
            raise StorageUnavailableError(str(error), store=self._location.uri) from error

    def _at(self, endpoint: str, settings: StorageSettings) -> Minio:
        """Return a client of the store at the address by which we, or others, reach it."""
        scheme, _, host = endpoint.rstrip("/").partition("://")
        try:
            client = Minio(
                host,
                secure=scheme == "https",
                region=settings.region,
                http_client=self._pool,
                credentials=self._provider,
            )
        except ValueError as error:
            raise ConfigError(f"s3 endpoint {endpoint}: {error}") from error
        if settings.path_style is not None:
            choose = "disable" if settings.path_style else "enable"
            getattr(client, f"{choose}_virtual_style_endpoint")()
        return client

    def _send_once(
        self,
        method: str,
        key: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        is_streamed: bool = False,
    ) -> BaseHTTPResponse:
        url = self._urls.build(
            method=method,
            region=self._settings.region,
            bucket_name=self.bucket,
            object_name=key or None,
            query_params=dict(query or {}),
        )
        credentials, date = self._provider.retrieve(), utcnow()
        # With TLS the body cannot be changed on its way, and is not read once more for a digest.
        digest = "UNSIGNED-PAYLOAD" if url.scheme == "https" else sha256_hash(body)
        signed: dict[str, Any] = {
            **(headers or {}),
            "Host": url.netloc,
            "x-amz-content-sha256": digest,
            "x-amz-date": to_amz_date(date),
        }
        if body:
            signed["Content-Length"] = str(len(body))
        if credentials.session_token:
            signed["X-Amz-Security-Token"] = credentials.session_token
        sign_v4_s3(
            method=method,
            url=url,
            region=self._settings.region,
            headers=signed,
            credentials=credentials,
            content_sha256=digest,
            date=date,
        )
        response = self._pool.urlopen(
            method, urlunsplit(url), body=body, headers=signed, preload_content=not is_streamed
        )
        if not is_streamed and method in ("PUT", "POST") and _is_error(response.data):
            # Copies and completed uploads may fail after the status was sent.
            raise AnswerError.of(method, response)
        return response

    def retrying(
        self,
        deadline: Deadline,
        what: str,
        attempt: Callable[[], ResultT],
        *,
        expected: frozenset[str] = frozenset(),
        size_bytes: int = 0,
    ) -> ResultT:
        """Call `attempt`, which moves so many bytes, until it is answered; see `send`."""
        # The time to send a body counts as time without an answer.
        attempt_s = self._settings.attempt_timeout_s + self.transfer_s(size_bytes)
        with self._availability.request() as may_retry:
            num_failures = 0
            while True:
                token = _attempt.set((deadline, attempt_s))
                try:
                    return attempt()
                except (
                    AnswerError,
                    MinioException,
                    HTTPError,
                    OSError,
                    ElementTree.ParseError,
                    CredentialsError,
                ) as error:
                    if isinstance(error, AnswerError) and error.code in expected:
                        raise
                    typed = self._typed(error, what)
                    if typed is not None:
                        raise typed from error
                    num_failures += 1
                    self.wait(deadline, num_failures, error, may_retry=may_retry)
                finally:
                    _attempt.reset(token)

    def wait(
        self, deadline: Deadline, num_failures: int, error: Exception, *, may_retry: bool = True
    ) -> None:
        """Pause before the next attempt.

        Raises:
            StorageUnavailableError: If there is no time for another one.
        """
        wait_s = backoff_s(num_failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        if not may_retry or wait_s >= deadline.left_s:
            raise StorageUnavailableError(
                f"the object store {self.where} does not answer ({_name_of(error)}); send the "
                "request again later",
                store=self._location.uri,
            ) from error
        time.sleep(wait_s)

    def _typed(self, error: Exception, what: str) -> TinsmithError | None:
        """Return what an error means, or None if another attempt may help."""
        if isinstance(error, SSLError) and _is_untrusted(error):
            return StorageRefusedError(
                f"the certificate of {self.where} is not trusted; set TINSMITH_S3_CA_FILE",
                store=self._location.uri,
            )
        status, code = _status_and_code(error)
        if status == _FULL_STATUS or code in _FULL_CODES:
            return StorageFullError(
                f"the object store {self.where} is full ({code or status}); free space or raise "
                "the quota, then send the request again",
                store=self._location.uri,
            )
        if status is None or status in _TRANSIENT_STATUSES or code in _TRANSIENT_CODES:
            return None
        if code in _NO_OBJECT_CODES:
            return ObjectNotFoundError(f"{what.partition(' ')[2]} does not exist in {self.where}")
        return StorageRefusedError(
            f"the object store {self.where} refused {what}: {_refusal(status, code, error)}",
            store=self._location.uri,
        )


def _is_untrusted(error: SSLError) -> bool:
    """Whether a certificate was looked at and refused; else the connection broke."""
    return any(isinstance(each, ssl.SSLCertVerificationError) for each in error.args)


def _is_error(content: bytes | None) -> bool:
    if not content or b"<Error" not in content[:1024]:
        return False
    return ElementTree.fromstring(content).tag.rpartition("}")[2] == "Error"


def _status_and_code(error: Exception) -> tuple[int | None, str]:
    """Return the HTTP status and the S3 code of an answer; None if there was no whole answer."""
    if isinstance(error, AnswerError):
        return error.status, error.code
    return None, ""


def _name_of(error: Exception) -> str:
    """Return a short text: an error of a connection quotes objects of no interest."""
    status, code = _status_and_code(error)
    if isinstance(error, CredentialsError):
        return str(error)
    return code or (f"HTTP status {status}" if status else type(error).__name__)


def _refusal(status: int, code: str, error: Exception) -> str:
    """Return why a request was refused, and what the operator is to do."""
    if code == "NoSuchBucket":
        return "the bucket does not exist; create it, or correct the storage URI"
    if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"):
        return f"{code}; check the credentials"
    if code == "RequestTimeTooSkewed":
        return f"{code}; set the clock of this machine"
    if status == 403:
        return f"{code or 'access denied'}; allow these credentials to list, read, write and delete"
    if code in ("PermanentRedirect", "Redirect", "AuthorizationHeaderMalformed", "BadRequest"):
        message = getattr(error, "message", "") or ""
        return f"{code} ({message:.100}); check region and endpoint"
    return f"{code or 'no S3 answer'}, HTTP status {status}; check endpoint and path_style"
