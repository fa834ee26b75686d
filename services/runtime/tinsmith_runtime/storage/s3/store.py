"""Objects below a prefix of a bucket."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

from minio.datatypes import parse_list_objects
from minio.deleteobjects import DeleteObject, DeleteRequest
from minio.time import from_http_header
from minio.xml import marshal
from urllib3 import BaseHTTPResponse
from urllib3.exceptions import HTTPError

from tinsmith_runtime.errors import (
    ConfigError,
    DataLossError,
    StorageRefusedError,
    StorageUnavailableError,
)
from tinsmith_runtime.storage.objects import (
    CHUNK_BYTES,
    FileEntry,
    ObjectExistsError,
    ObjectNotFoundError,
    Progress,
    StoredObject,
    check_size,
    ignore_progress,
    split_path,
)
from tinsmith_runtime.storage.retries import Deadline
from tinsmith_runtime.storage.s3.client import AnswerError, S3Client
from tinsmith_runtime.storage.s3.sources import BytesSource, FileSource
from tinsmith_runtime.storage.s3.uploads import Uploader, begun_time_s, md5_header
from tinsmith_runtime.storage.settings import S3Location, StorageSettings

_NONCE_HEADER = "x-amz-meta-tinsmith-nonce"
_CONFLICT_CODES = frozenset({"PreconditionFailed"})
_CONDITION_CODES = _CONFLICT_CODES | {"NotImplemented", "InvalidArgument", "InvalidRequest"}
_REPLACED_CODES = frozenset({"PreconditionFailed", "InvalidRange"})
_MAX_URL_S = 7 * 24 * 3600.0
_DELETED_AT_ONCE = 1000


class S3Store:
    """Objects of an S3-compatible server.

    Args:
        location: Where the store begins.
        settings: How it is reached.
        environment: Where credentials are looked for.

    Raises:
        ConfigError: If there are no credentials, or the endpoint cannot be used.
    """

    def __init__(
        self, location: S3Location, settings: StorageSettings, environment: Mapping[str, str]
    ) -> None:
        self._location = location
        self._beginning = f"{location.prefix}/" if location.prefix else ""
        self._settings = settings
        self._client = S3Client(location, settings, environment)
        self._uploader = Uploader(self._client, settings)
        self.honours_conditions: bool | None = None
        """Whether the server refuses a conditional write of what exists; None before a try."""

    @property
    def uri(self) -> str:
        """`s3://bucket/prefix`."""
        return self._location.uri

    def probe(self, *, writable: bool = True) -> None:
        """Use the store; see `ObjectStore.probe`."""
        try:
            deadline = self._client.new_deadline()
            self._list_page(self._beginning, deadline, max_keys=1)
            if writable:
                self._probe_writes(deadline)
        except StorageRefusedError as error:
            raise ConfigError(error.message) from error

    def _probe_writes(self, deadline: Deadline) -> None:
        nonce = uuid.uuid4().hex
        path, content = f".probe/{nonce}", nonce.encode()
        key = self._key(path)
        self._uploader.put_once(key, content, deadline)
        try:
            if self.read(path) != content:
                raise ConfigError(
                    f"{self._client.where} does not return what was written; use a store that is "
                    "consistent"
                )
            try:
                self._uploader.put_once(
                    key,
                    b"again",
                    deadline,
                    headers={"If-None-Match": "*"},
                    expected=_CONDITION_CODES,
                )
            except AnswerError as error:
                self.honours_conditions = error.code in _CONFLICT_CODES
            else:
                self.honours_conditions = False
        finally:
            with contextlib.suppress(StorageUnavailableError):
                self.delete(path)

    def write(self, path: str, data: bytes) -> None:
        """Store an object; see `ObjectStore.write`."""
        self._uploader.put(self._key(path), BytesSource(data))

    def write_new(self, path: str, data: bytes) -> None:
        """Store an object unless there is one; see `ObjectStore.write_new`.

        A nonce in the object's metadata says whose it is. Where conditions are not honoured, each
        writer first puts a claim beside the object, and gives up if it sees another's: of two
        writers at least the second one to put its claim sees both.
        """
        key, nonce = self._key(path), uuid.uuid4().hex
        deadline = self._client.new_deadline(len(data))
        headers = {_NONCE_HEADER: nonce}
        if self.honours_conditions is None:
            self._probe_writes(deadline)
        if self.honours_conditions:
            headers["If-None-Match"] = "*"
            self._put_mine(path, data, headers, deadline)
            return
        claim = f"{key}.claims/{nonce}"
        self._uploader.put_once(claim, b"", deadline)
        try:
            claims, _ = self._list_page(f"{key}.claims/", deadline)
            mine = next((each for each in claims if each.path == claim), None)
            # A claim whose writer died ends with the longest time that a write can take.
            lifetime_s = 2 * (self._settings.timeout_s + self._client.transfer_s(len(data)))
            if mine is None or any(
                each.path != claim and each.modified_time_s > mine.modified_time_s - lifetime_s
                for each in claims
            ):
                raise StorageUnavailableError(
                    f"{self.uri}/{path} is being written by another process, or was when that "
                    "ended; send the request again later",
                    retry_after_s=lifetime_s / 10,
                    path=path,
                )
            if self._head(key, deadline) is not None:
                raise ObjectExistsError(f"{self.uri}/{path} exists", path=path)
            self._put_mine(path, data, headers, deadline)
        finally:
            with contextlib.suppress(StorageUnavailableError):
                self._client.send(self._client.new_deadline(), "DELETE", claim)

    def _put_mine(
        self, path: str, data: bytes, headers: Mapping[str, str], deadline: Deadline
    ) -> None:
        """Put an object and read back whose it is: an answer may be lost, and a put be overtaken.

        Raises:
            ObjectExistsError: If it is another writer's.
        """
        key = self._key(path)
        with contextlib.suppress(AnswerError):
            self._uploader.put_once(key, data, deadline, headers=headers, expected=_CONFLICT_CODES)
        there = self._head(key, deadline)
        if there is not None and _NONCE_HEADER not in there.headers:
            # Its writer gave it none, or this answer was cut amid its head.
            there = self._head(key, deadline)
        if there is None or there.headers.get(_NONCE_HEADER) != headers[_NONCE_HEADER]:
            raise ObjectExistsError(f"{self.uri}/{path} is another writer's", path=path)

    def write_file(
        self, path: str, local: Path, *, progress: Progress = ignore_progress
    ) -> FileEntry:
        """Store a file; see `ObjectStore.write_file`."""
        with local.open("rb") as file:
            source = FileSource(file, os.fstat(file.fileno()).st_size)
            return self._uploader.put(self._key(path), source, progress=progress)

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Return an object; see `ObjectStore.read`."""
        return b"".join(self.read_chunks(path, max_bytes=max_bytes))

    def read_chunks(
        self, path: str, *, offset: int = 0, max_bytes: int | None = None
    ) -> Iterator[bytes]:
        """Yield an object in chunks; see `ObjectStore.read_chunks`."""
        key = self._key(path)
        deadline = self._client.new_deadline()
        num_done, num_failures = offset, 0
        size_bytes: int | None = None
        etag = ""
        while size_bytes is None or num_done < size_bytes:
            headers = {"If-Match": etag} if etag else {}
            if num_done:
                headers["Range"] = f"bytes={num_done}-"
            try:
                response = self._client.send(
                    deadline,
                    "GET",
                    key,
                    headers=headers,
                    is_streamed=True,
                    expected=_REPLACED_CODES,
                )
            except AnswerError as error:
                raise self._replaced(path) from error
            try:
                if size_bytes is None:
                    # Of a part, the length is that of the part.
                    size_bytes = num_done + int(response.headers.get("content-length", -1))
                    etag = response.headers.get("etag", "")
                    if size_bytes < 0:
                        raise StorageRefusedError(
                            f"{self._client.where} does not say how large {path} is"
                        )
                    check_size(self.uri, path, size_bytes, max_bytes)
                    deadline.extend(self._client.transfer_s(size_bytes))
                if num_done and response.status != 206:
                    raise self._replaced(path)
                # A chunk is what arrived: a store that trickles cannot outlast the deadline.
                while chunk := response.read1(CHUNK_BYTES, decode_content=False):
                    num_done += len(chunk)
                    num_failures = 0
                    yield chunk
                    if deadline.left_s <= 0:
                        raise HTTPError("slower than min_bytes_per_s")
                if num_done != size_bytes:
                    raise HTTPError(f"{num_done} of {size_bytes} bytes")
            except (HTTPError, OSError) as error:
                num_failures += 1
                self._client.wait(deadline, num_failures, error)
            finally:
                # An answer that was read to its end gave its connection back before.
                response.close()

    def _replaced(self, path: str) -> DataLossError:
        return DataLossError(
            f"{self.uri}/{path} was replaced while it was read; read it again", path=path
        )

    def stat(self, path: str) -> StoredObject:
        """Return what is known of an object; see `ObjectStore.stat`."""
        answer = self._head(self._key(path), self._client.new_deadline())
        if answer is None:
            raise ObjectNotFoundError(f"{self.uri}/{path} does not exist", path=path)
        modified = answer.headers.get("last-modified")
        return StoredObject(
            "/".join(split_path(path)),
            int(answer.headers.get("content-length", 0)),
            from_http_header(modified).timestamp() if modified else 0.0,
        )

    def list_folder(self, path: str) -> list[StoredObject]:
        """Return all objects below a path; see `ObjectStore.list_folder`."""
        skipped = len(self._beginning)
        return [
            StoredObject(each.path[skipped:], each.size_bytes, each.modified_time_s)
            for each in sorted(self._list(self._folder(path)), key=lambda each: each.path)
        ]

    def copy(self, source: str, target: str) -> None:
        """Have the server copy an object; see `ObjectStore.copy`."""
        size_bytes = self.stat(source).size_bytes
        self._client.copy(
            self._client.new_deadline(size_bytes), self._key(source), self._key(target), size_bytes
        )
        # A copy may fail after its status was sent.
        if self.stat(target).size_bytes != size_bytes:
            raise StorageUnavailableError(
                f"{self._client.where} did not copy {source} wholly; send the request again"
            )

    def delete(self, path: str) -> None:
        """Remove an object."""
        with contextlib.suppress(ObjectNotFoundError):
            self._client.send(self._client.new_deadline(), "DELETE", self._key(path))

    def delete_folder(self, path: str) -> None:
        """Remove all objects below a path, and end uploads to it."""
        keys = [each.path for each in self._list(f"{self._key(path)}/")]
        for begin in range(0, len(keys), _DELETED_AT_ONCE):
            self._delete_keys(keys[begin : begin + _DELETED_AT_ONCE])
        self.delete_interrupted(path, min_age_s=0.0)

    def delete_interrupted(self, path: str, *, min_age_s: float) -> int:
        """End old uploads; see `ObjectStore.delete_interrupted`."""
        deadline = self._client.new_deadline()
        old = [
            each
            for each in self._uploader.uploads_below(self._folder(path), deadline)
            if min_age_s <= 0 or time.time() - begun_time_s(each) >= min_age_s
        ]
        for upload in old:
            self._uploader.abort(
                upload.object_name, upload.upload_id or "", self._client.new_deadline()
            )
        return len(old)

    def presigned_url(self, path: str, *, expires_s: float) -> str | None:
        """Return a URL that downloads an object; see `ObjectStore.presigned_url`."""
        if not 1 <= expires_s <= _MAX_URL_S:
            raise ValueError(f"expires_s must be between 1 and {_MAX_URL_S:.0f}, got {expires_s}")
        return self._client.presigned_url(self._key(path), timedelta(seconds=int(expires_s)))

    def _delete_keys(self, keys: list[str]) -> None:
        body = marshal(DeleteRequest([DeleteObject(key) for key in keys], quiet=True))
        response = self._client.send(
            self._client.new_deadline(),
            "POST",
            body=body,
            headers={"Content-MD5": md5_header(body)},
            query={"delete": ""},
        )
        if b"<Error>" in response.data:
            # One by one: each failure is then classified, and sent again if that may help.
            for key in keys:
                self._client.send(self._client.new_deadline(), "DELETE", key)

    def _head(self, key: str, deadline: Deadline) -> BaseHTTPResponse | None:
        try:
            return self._client.send(deadline, "HEAD", key)
        except ObjectNotFoundError:
            return None

    def _list(self, prefix: str) -> Iterator[StoredObject]:
        token: str | None = ""
        while token is not None:
            found, token = self._list_page(prefix, self._client.new_deadline(), token=token)
            yield from found

    def _list_page(
        self, prefix: str, deadline: Deadline, *, token: str = "", max_keys: int = 1000
    ) -> tuple[list[StoredObject], str | None]:
        """Return objects by their keys, and where the next page begins."""
        query = {
            "list-type": "2",
            "prefix": prefix,
            "max-keys": str(max_keys),
            "encoding-type": "url",
        }
        if token:
            query["continuation-token"] = token
        objects, is_truncated, next_token, _ = self._client.ask(
            deadline, parse_list_objects, query=query
        )
        found = [
            StoredObject(
                each.object_name or "",
                each.size or 0,
                each.last_modified.timestamp() if each.last_modified else 0.0,
            )
            for each in objects
        ]
        return found, (next_token or None) if is_truncated else None

    def _key(self, path: str) -> str:
        return self._beginning + "/".join(split_path(path))

    def _folder(self, path: str) -> str:
        """Return what the keys below a path begin with; below an empty one, those of the store."""
        return f"{self._key(path)}/" if path else self._beginning
