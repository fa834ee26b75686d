"""Fields that requests of every service have: names, ids, labels, pages, times and texts.

Each decoder checks one field and raises `InvalidFieldError` with its path, so that all pods refuse
the same mistake in the same words. No message quotes a value at full length, because an error
travels in HTTP/2 headers, which are short.

A request is identified by its request id and by the hash of the bytes that came. The interceptor
binds these bytes for the length of the call, so nothing is serialised a second time. Two requests
are therefore the same if their bytes are. Protobuf does not fix the order of map entries, so
clients serialise deterministically and repeat a call with the same release of protobuf.
`tinsmith.rpc.channels` does that for every client and pod of this project.
"""

from __future__ import annotations

import base64
import hashlib
import math
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf import timestamp_pb2

from tinsmith.names import InvalidNameError, ResourceName, is_valid_id
from tinsmith.rpc.durations import decode_duration
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_runtime.records import HISTORY_RETENTION_S, RequestIdentity

NameT = TypeVar("NameT", bound=ResourceName)

_MAX_TEXT = 1024
_MAX_LABELS = 64
_DEFAULT_PAGE_SIZE = 100
_MAX_PAGE_SIZE = 1000
_MAX_TTL_S = 10 * 366 * 24 * 3600.0
_QUOTED_CHARACTERS = 128
_DIGEST_BYTES = 8
_MAX_SERIAL_DIGITS = 18


@dataclass(slots=True)
class _Body:
    content: bytes | None


_body: ContextVar[_Body] = ContextVar("tinsmith_request_body")


@contextmanager
def bind_body(content: bytes) -> Iterator[None]:
    """Make the bytes of a request known to the code that serves it.

    Tasks started by the call copy its context and may outlive it. The bytes are therefore dropped
    at the end of the call, so that such a task does not keep up to 64 MiB in memory.
    """
    body = _Body(content)
    _body.set(body)
    try:
        yield
    finally:
        body.content = None


def current_body() -> bytes:
    """Return the bytes of the request that is being served.

    Raises:
        RuntimeError: Outside of a served call.
    """
    body = _body.get(None)
    if body is None or body.content is None:
        raise RuntimeError("no request: this code runs outside of a served call")
    return body.content


def digest_of(content: bytes) -> bytes:
    """Return the SHA-256 hash of the bytes of a request."""
    return hashlib.sha256(content).digest()


def decode_identity(request: Any, project: str) -> RequestIdentity:
    """Return what makes the request that is being served repeatable.

    Args:
        request: A request that has the field `request_id`.
        project: The project that the request is about, whose request ids are its own.

    Raises:
        InvalidFieldError: If the request id is not a UUID.
    """
    method = request.DESCRIPTOR.name.removesuffix("Request")
    request_id = decode_request_id(request.request_id)
    return RequestIdentity(project, request_id, method, digest_of(current_body()))


def decode_request_id(value: str) -> str:
    """Return a request id, in lower case.

    Raises:
        InvalidFieldError: If it is not a UUID of the form 8-4-4-4-12.
    """
    try:
        request_id = str(uuid.UUID(value))
    except ValueError:
        request_id = ""
    if not request_id or request_id != value.lower():
        raise InvalidFieldError("request_id", f"must be a UUID of 8-4-4-4-12, got {value!r:.64}")
    return request_id


def decode_name_part(value: str) -> str:
    """Return a request id that becomes part of a resource name, which is compared byte by byte.

    Raises:
        InvalidFieldError: If it is not a random or name-based UUID in lower case.
    """
    request_id = decode_request_id(value)
    if request_id != value or (uuid.UUID(request_id).version or 0) not in range(1, 9):
        raise InvalidFieldError("request_id", f"must be a UUID in lower case, got {value!r:.64}")
    return request_id


def parse_name(kind: type[NameT], value: str, field: str) -> NameT:
    """Return a resource name.

    Raises:
        InvalidFieldError: If the field holds no name of this kind.
    """
    try:
        return kind.parse(value)
    except InvalidNameError as error:
        quoted = value[:_QUOTED_CHARACTERS]
        raise InvalidFieldError(field, f"must be {error.pattern}, got {quoted!r}") from error


def decode_chosen_id(value: str, field: str, *, is_required: bool = False) -> str:
    """Return the last part of a name that a client chose; empty if the server is to choose.

    Raises:
        InvalidFieldError: If it cannot be part of a name.
    """
    if (value or is_required) and not is_valid_id(value):
        raise InvalidFieldError(
            field,
            "must be 1 to 63 letters, digits, '-', '_' or '.', beginning with a letter or digit",
        )
    return value


def check_text(value: str, field: str) -> str:
    """Return a text that is meant for people.

    Raises:
        InvalidFieldError: If it is too long, or holds U+0000, which PostgreSQL cannot store.
    """
    if len(value) > _MAX_TEXT:
        raise InvalidFieldError(field, f"must be at most {_MAX_TEXT} characters")
    if "\0" in value:
        raise InvalidFieldError(field, "must not hold the character U+0000")
    return value


def decode_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of a resource.

    Raises:
        InvalidFieldError: If there are too many, or one is too long.
    """
    if len(labels) > _MAX_LABELS:
        raise InvalidFieldError("labels", f"must be at most {_MAX_LABELS}, got {len(labels)}")
    for key, value in labels.items():
        if not key or max(len(key), len(value)) > _MAX_TEXT:
            raise InvalidFieldError(
                "labels", f"must have keys and values of at most {_MAX_TEXT} characters"
            )
    return dict(labels)


def decode_page_size(value: int) -> int:
    """Return how many entries a page of a list may have.

    Raises:
        InvalidFieldError: If the field is out of range.
    """
    if not 0 <= value <= _MAX_PAGE_SIZE:
        raise InvalidFieldError("page_size", f"must be 1 to {_MAX_PAGE_SIZE}, got {value}")
    return value or _DEFAULT_PAGE_SIZE


def encode_page_token(list_name: str, serial: int | None) -> str:
    """Return the token that continues a list after an entry; empty at the end of the list."""
    return "" if serial is None else encode_key_token(list_name, str(serial))


def decode_page_token(list_name: str, token: str) -> int | None:
    """Return the serial in a token, None for an empty token.

    Raises:
        InvalidFieldError: If the token was not made for this list.
    """
    key = decode_key_token(list_name, token)
    return None if key is None else parse_serial(key)


def parse_serial(key: str) -> int:
    """Return the serial that the key of a token holds.

    Raises:
        InvalidFieldError: If it holds none.
    """
    if not (key.isascii() and key.isdigit() and len(key) <= _MAX_SERIAL_DIGITS):
        raise _foreign_token()
    return int(key)


def encode_key_token(list_name: str, key: str) -> str:
    """Return the token that continues a list after the entry of a key.

    The digest ties a token to its list. It is no secret: every list shows only what its caller may
    see, whatever the token says.
    """
    body = key.encode()
    return base64.urlsafe_b64encode(_page_digest(list_name, body) + body).decode().rstrip("=")


def decode_key_token(list_name: str, token: str) -> str | None:
    """Return the key in a token, None for an empty token.

    Raises:
        InvalidFieldError: If the token was not made for this list.
    """
    if not token:
        return None
    try:
        content = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        key = body.decode()
    except ValueError:
        digest, body, key = b"", b"", ""
    if digest != _page_digest(list_name, body):
        raise _foreign_token()
    return key


def encode_position_token(list_name: str, time_s: float, key: str) -> str:
    """Return the token that continues a list in the order of time after an entry."""
    return encode_key_token(list_name, f"{time_s!r}:{key}")


def decode_position_token(list_name: str, token: str) -> tuple[float, str] | None:
    """Return the time and the key in a token, None for an empty token.

    Raises:
        InvalidFieldError: If the token was not made for this list.
    """
    found = decode_key_token(list_name, token)
    if found is None:
        return None
    time_s, _, key = found.partition(":")
    try:
        return float(time_s), key
    except ValueError as error:
        raise _foreign_token() from error


def _foreign_token() -> InvalidFieldError:
    return InvalidFieldError(
        "page_token", "is not a next_page_token of this list; start without one"
    )


def _page_digest(list_name: str, body: bytes) -> bytes:
    return digest_of(list_name.encode() + b"\0" + body)[:_DIGEST_BYTES]


def decode_history_retention(request: Any, *, max_s: float = math.inf) -> float:
    """Return for how long the past of a run is to be kept; the default if that is left out.

    Raises:
        InvalidFieldError: If it is shorter than requests are answered again, or above `max_s`.
    """
    if not request.HasField("history_retention"):
        return HISTORY_RETENTION_S
    wanted_s = decode_duration(request.history_retention)
    if not HISTORY_RETENTION_S <= wanted_s <= max_s:
        most = "" if math.isinf(max_s) else f", at most {max_s / 3600.0:g} h"
        raise InvalidFieldError(
            "history_retention",
            f"must be at least {HISTORY_RETENTION_S / 3600.0:g} h{most}; got "
            f"{wanted_s / 3600.0:g} h",
        )
    return wanted_s


def decode_ttl(request: Any) -> float | None:
    """Return how long something is kept, in seconds; None if the request does not say.

    Raises:
        InvalidFieldError: If the time is too short or too long.
    """
    if not request.HasField("ttl"):
        return None
    ttl_s = decode_duration(request.ttl)
    if not 1.0 <= ttl_s <= _MAX_TTL_S:
        raise InvalidFieldError("ttl", f"must be 1 s to 10 years, got {ttl_s:g} s")
    return ttl_s


def decode_timeout(request: Any, max_s: float) -> float:
    """Return how long a long poll may wait: what the request says, at most `max_s`.

    Raises:
        InvalidFieldError: If the time is negative.
    """
    if not request.HasField("timeout"):
        return max_s
    timeout_s = decode_duration(request.timeout)
    if timeout_s < 0:
        raise InvalidFieldError("timeout", "must be at least 0")
    return min(timeout_s, max_s)


def encode_time(time_s: float) -> timestamp_pb2.Timestamp:
    """Return a point in time, given in seconds since the epoch; reads back as the same number."""
    message = timestamp_pb2.Timestamp()
    seconds = math.floor(time_s)
    # Of the fraction alone: the product of the whole would be off by more than a nanosecond.
    message.FromNanoseconds(seconds * 10**9 + round((time_s - seconds) * 1e9))
    return message


def decode_time(message: timestamp_pb2.Timestamp) -> float:
    """Return a point in time in seconds since the epoch."""
    # One division of whole numbers: a time that was encoded reads back as the same number.
    time_s: float = (message.seconds * 10**9 + message.nanos) / 10**9
    return time_s


def given_fields(message: Any) -> dict[str, Any]:
    """Return the optional fields that a message sets; the domain has the defaults of the rest."""
    return {
        field.name: getattr(message, field.name)
        for field in message.DESCRIPTOR.fields
        if field.has_presence and message.HasField(field.name)
    }
