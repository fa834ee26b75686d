"""Puts one object: in one request, or in parts that a later attempt takes up again."""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from xml.etree import ElementTree

from minio.datatypes import ListMultipartUploadsResult, ListPartsResult, Upload

from tinsmith_runtime.errors import (
    StorageRefusedError,
    StorageUnavailableError,
    TinsmithError,
)
from tinsmith_runtime.storage.objects import (
    FileEntry,
    ObjectNotFoundError,
    Progress,
    ignore_progress,
)
from tinsmith_runtime.storage.retries import Deadline
from tinsmith_runtime.storage.s3.client import AnswerError, S3Client
from tinsmith_runtime.storage.s3.sources import Source
from tinsmith_runtime.storage.settings import StorageSettings

logger = logging.getLogger(__name__)

_MAX_PARTS = 10_000
_MAX_STARTS = 3
_NOT_KNOWN_CODES = frozenset({"NotImplemented", "MethodNotAllowed", "NotSupported"})
_GONE_CODES = frozenset({"NoSuchUpload", "InvalidPart", "InvalidPartOrder", "EntityTooSmall"})


@dataclass(frozen=True, slots=True)
class _Part:
    size_bytes: int
    etag: str


class _UploadGoneError(Exception):
    """The upload that parts were sent to does not exist, or not as it was left."""


class Uploader:
    """Puts objects."""

    def __init__(self, client: S3Client, settings: StorageSettings) -> None:
        self._client = client
        self._settings = settings

    def put(self, key: str, source: Source, *, progress: Progress = ignore_progress) -> FileEntry:
        """Store an object and return what it holds.

        Raises:
            StorageFullError: If there is no room.
            StorageUnavailableError: If the store does not answer; parts that it has are kept, for
                another call.
        """
        deadline = self._client.new_deadline(source.size_bytes)
        if source.size_bytes <= self._settings.part_bytes:
            [data] = list(source.parts(self._settings.part_bytes)) or [b""]
            self.put_once(key, data, deadline)
            progress(len(data), len(data))
            return FileEntry(len(data), hashlib.sha256(data).hexdigest())
        part_bytes = max(self._settings.part_bytes, -(-source.size_bytes // _MAX_PARTS))
        for _ in range(_MAX_STARTS):
            upload_id, there = self._find(key, deadline)
            if not upload_id:
                upload_id = self._begin(key, deadline)
            try:
                return self._put_parts(
                    key, source, upload_id, there, part_bytes, deadline, progress
                )
            except _UploadGoneError:
                # Another writer completed or aborted it, or writes to it as well.
                self._abort(key, upload_id)
            except StorageUnavailableError as error:
                if isinstance(error, StorageRefusedError):
                    self._abort(key, upload_id)
                raise
            except (TinsmithError, OSError):
                self._abort(key, upload_id)
                raise
        raise StorageUnavailableError(
            f"uploads of {key} to {self._client.where} are ended by another writer; send the "
            "request again"
        )

    def put_once(
        self,
        key: str,
        data: bytes,
        deadline: Deadline,
        *,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        expected: frozenset[str] = frozenset(),
    ) -> str:
        """Send an object or a part in one request, with its checksum; return its entity tag."""
        checked = {
            "Content-Type": "application/octet-stream",
            "Content-MD5": md5_header(data),
            **(headers or {}),
        }
        response = self._client.send(
            deadline, "PUT", key, body=data, headers=checked, query=query, expected=expected
        )
        return response.headers.get("etag", "").strip('"')

    def uploads_below(self, prefix: str, deadline: Deadline) -> Iterator[Upload]:
        """Yield the uploads that were begun and not ended, of all keys with a prefix.

        None if the store cannot say.
        """
        marker: str | None = ""
        while marker is not None:
            query = {"uploads": "", "prefix": prefix, "max-uploads": "1000", "encoding-type": "url"}
            if marker:
                query["key-marker"] = marker
            try:
                page = self._client.ask(
                    deadline, ListMultipartUploadsResult, query=query, expected=_NOT_KNOWN_CODES
                )
            except (AnswerError, StorageRefusedError) as error:
                logger.warning(
                    "interrupted uploads cannot be listed", extra={"problem": str(error)}
                )
                return
            yield from page.uploads
            marker = (page.next_key_marker or None) if page.is_truncated else None

    def abort(self, key: str, upload_id: str, deadline: Deadline) -> None:
        """End an upload and free what it holds; one that is gone is fine."""
        with suppress(AnswerError, ObjectNotFoundError):
            self._client.send(
                deadline, "DELETE", key, query={"uploadId": upload_id}, expected=_GONE_CODES
            )

    def _abort(self, key: str, upload_id: str) -> None:
        with suppress(StorageUnavailableError):
            self.abort(key, upload_id, self._client.new_deadline())

    def _begin(self, key: str, deadline: Deadline) -> str:
        headers = {"Content-Type": "application/octet-stream"}
        response = self._client.send(deadline, "POST", key, headers=headers, query={"uploads": ""})
        for element in ElementTree.fromstring(response.data).iter():
            if element.tag.rpartition("}")[2] == "UploadId" and element.text:
                return element.text
        raise StorageRefusedError(f"{self._client.where} gave no id for the upload of {key}")

    def _find(self, key: str, deadline: Deadline) -> tuple[str, dict[int, _Part]]:
        """Return the newest upload of a key that was interrupted, and its parts."""
        found = [each for each in self.uploads_below(key, deadline) if each.object_name == key]
        if not found:
            return "", {}
        newest = max(found, key=begun_time_s)
        upload_id = newest.upload_id or ""
        parts: dict[int, _Part] = {}
        marker: str | None = ""
        while marker is not None:
            query = {"uploadId": upload_id, "max-parts": "1000"}
            if marker:
                query["part-number-marker"] = marker
            try:
                page = self._client.ask(
                    deadline,
                    ListPartsResult,
                    key,
                    query=query,
                    expected=_GONE_CODES | _NOT_KNOWN_CODES,
                )
            except (AnswerError, StorageRefusedError):
                return "", {}
            for part in page.parts:
                parts[part.part_number] = _Part(part.size or 0, part.etag)
            marker = (page.next_part_number_marker or None) if page.is_truncated else None
        return upload_id, parts

    def _put_parts(
        self,
        key: str,
        source: Source,
        upload_id: str,
        there: Mapping[int, _Part],
        part_bytes: int,
        deadline: Deadline,
        progress: Progress,
    ) -> FileEntry:
        """Send the parts that are not there, and complete the upload."""
        digest, num_bytes, num_done = hashlib.sha256(), 0, 0
        md5s: list[bytes] = []
        etags: dict[int, str] = {}
        running: dict[Future[str], tuple[int, int]] = {}

        def settle(*, down_to: int) -> None:
            nonlocal num_done
            while len(running) > down_to:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    number, size = running.pop(future)
                    etags[number] = future.result()
                    num_done += size
                    progress(num_done, source.size_bytes)

        pool = ThreadPoolExecutor(self._settings.num_parallel_parts, "s3-parts")
        try:
            for number, data in enumerate(source.parts(part_bytes), start=1):
                digest.update(data)
                num_bytes += len(data)
                md5s.append(_md5(data))
                if there.get(number) == _Part(len(data), md5s[-1].hex()):
                    etags[number] = md5s[-1].hex()
                    num_done += len(data)
                    progress(num_done, source.size_bytes)
                    continue
                settle(down_to=self._settings.num_parallel_parts - 1)
                future = pool.submit(self._put_part, key, data, upload_id, number, deadline)
                running[future] = (number, len(data))
            settle(down_to=0)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        self._complete(key, upload_id, etags, md5s, num_bytes, deadline)
        return FileEntry(num_bytes, digest.hexdigest())

    def _put_part(
        self, key: str, data: bytes, upload_id: str, number: int, deadline: Deadline
    ) -> str:
        query = {"partNumber": str(number), "uploadId": upload_id}
        try:
            return self.put_once(key, data, deadline, query=query, expected=_GONE_CODES)
        except AnswerError as error:
            raise _UploadGoneError from error

    def _complete(
        self,
        key: str,
        upload_id: str,
        etags: Mapping[int, str],
        md5s: list[bytes],
        size_bytes: int,
        deadline: Deadline,
    ) -> None:
        root = ElementTree.Element("CompleteMultipartUpload")
        for number in sorted(etags):
            part = ElementTree.SubElement(root, "Part")
            ElementTree.SubElement(part, "PartNumber").text = str(number)
            ElementTree.SubElement(part, "ETag").text = f'"{etags[number]}"'
        body = ElementTree.tostring(root)
        headers = {
            "Content-Type": "application/xml",
            "Content-MD5": md5_header(body),
        }
        try:
            self._client.send(
                deadline,
                "POST",
                key,
                body=body,
                headers=headers,
                query={"uploadId": upload_id},
                expected=_GONE_CODES,
            )
        except AnswerError as error:
            # Perhaps an attempt before did it, and its answer was lost.
            wanted = f"{_md5(b''.join(md5s)).hex()}-{len(md5s)}"
            if self._tag_of(key, deadline) != (size_bytes, wanted):
                raise _UploadGoneError from error

    def _tag_of(self, key: str, deadline: Deadline) -> tuple[int, str] | None:
        try:
            answer = self._client.send(deadline, "HEAD", key)
        except ObjectNotFoundError:
            return None
        headers = answer.headers
        return int(headers.get("content-length", -1)), headers.get("etag", "").strip('"')


def begun_time_s(upload: Upload) -> float:
    """Return when an upload was begun, by the clock of the store."""
    return upload.initiated_time.timestamp() if upload.initiated_time else 0.0


def md5_header(data: bytes) -> str:
    """Return the value of `Content-MD5`, by which the store checks what arrived."""
    return base64.b64encode(_md5(data)).decode()


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()
