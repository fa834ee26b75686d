"""Downloads: signed permissions to read one file each, as URLs of the store or as tokens.

A token says which object it is good for, until when, and whose key asked for it. Any trainer on the
ledger can check its signature and serve it. It ends with the key, and with the checkpoint. A URL of
the store does not: it lives a quarter of an hour.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass

from tinsmith_runtime.errors import (
    DownloadTokenInvalidError,
    InvalidFieldError,
    UnauthenticatedError,
)
from tinsmith_runtime.ledger import StoredFile
from tinsmith_trainer.checkpoints.files import CheckpointFiles

LIFETIME_S = 900.0
_PURPOSE = b"tinsmith checkpoint download v1"
_MAX_TOKEN_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class Source:
    """Where to fetch a file: exactly one of `url` and `token` is set."""

    file: StoredFile
    url: str
    token: str


@dataclass(frozen=True, slots=True)
class Grant:
    """What a token is good for."""

    name: str
    path: str
    size_bytes: int
    expire_time_s: float
    key_id: str


class Downloads:
    """Signs permissions and serves those that are tokens.

    Args:
        files: Where the objects are.
        secret: What the trainers of a pool share.
        clock: Seconds since the epoch.
        verify_key: Raises unless the key of an id is still good.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        secret: str,
        clock: Callable[[], float],
        verify_key: Callable[[str], Awaitable[object]],
    ) -> None:
        self._files = files
        self._verify_key = verify_key
        self._key = hmac.new(secret.encode(), _PURPOSE, hashlib.sha256).digest()
        self._clock = clock

    def sources(
        self,
        name: str,
        folder: str,
        files: tuple[StoredFile, ...],
        *,
        key_id: str,
        without_urls: bool = False,
    ) -> tuple[list[Source], float]:
        """Return where the files of a folder can be fetched, and until when.

        Args:
            name: The checkpoint or export.
            folder: Where its files are.
            files: Which they are.
            key_id: The key that asks for them; empty for a pod.
            without_urls: Whether to give tokens although the store could sign URLs.
        """
        expire_time_s = self._clock() + LIFETIME_S
        found = []
        for file in files:
            path = f"{folder}/{file.name}"
            url = "" if without_urls else self._files.url(path, expires_s=LIFETIME_S)
            grant = Grant(name, path, file.size_bytes, expire_time_s, key_id)
            found.append(Source(file, url, "" if url else self._sign(grant)))
        return found, expire_time_s

    async def check(self, name: str, token: str) -> Grant:
        """Return what a token is good for.

        Raises:
            DownloadTokenInvalidError: If it is forged, for another resource, or too old, or its key
                is no good any more.
            WorkerUnavailableError: If the scheduler, which knows the keys, cannot be reached.
        """
        body, _, signature = token.partition(".")
        wanted = self._signature(body)
        is_signed = len(token) <= _MAX_TOKEN_CHARACTERS and hmac.compare_digest(
            signature.encode(), wanted.encode()
        )
        if not is_signed:
            raise _invalid(name, "is not one of this deployment")
        try:
            grant = Grant(*json.loads(base64.urlsafe_b64decode(body)))
        except (binascii.Error, ValueError, TypeError) as error:
            raise _invalid(name, "cannot be read") from error
        if grant.name != name:
            raise _invalid(name, "is for something else")
        if grant.expire_time_s <= self._clock():
            raise _invalid(name, "is too old")
        if grant.key_id:
            try:
                await self._verify_key(grant.key_id)
            except UnauthenticatedError as error:
                raise _invalid(name, "was given to a key that is no good any more") from error
        return grant

    def chunks(self, grant: Grant, offset: int) -> Generator[bytes, None, None]:
        """Yield the file of a grant from an offset on.

        Raises:
            InvalidFieldError: If the offset is not in the file.
            NotFoundError: If the file was deleted.
        """
        if not 0 <= offset <= grant.size_bytes:
            raise InvalidFieldError("offset_bytes", f"must be 0 to {grant.size_bytes}")
        with self._files.pinned(grant.path.rpartition("/")[0]):
            yield from self._files.chunks(grant.path, offset)

    def _sign(self, grant: Grant) -> str:
        content = [
            grant.name,
            grant.path,
            grant.size_bytes,
            grant.expire_time_s,
            grant.key_id,
        ]
        body = base64.urlsafe_b64encode(json.dumps(content).encode()).decode()
        return f"{body}.{self._signature(body)}"

    def _signature(self, body: str) -> str:
        return hmac.new(self._key, body.encode(), hashlib.sha256).hexdigest()


def _invalid(name: str, problem: str) -> DownloadTokenInvalidError:
    return DownloadTokenInvalidError(
        f"the download token for {name:.200} {problem}; ask for another one", name=name[:200]
    )
