"""Files for other tools: exported by the trainer, fetched with a URL that needs no key.

Where the store signs URLs, clients fetch from the store itself. Else, and wherever files are to be
encrypted, the URL leads here: it holds the trainer's own token for the file, which is the proof of
the right to it, so that nothing about it is kept.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import hashlib
import hmac
import json
import os
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import pyrage
from google.longrunning import operations_pb2
from starlette.responses import JSONResponse, Response, StreamingResponse

from tinsmith.rpc.error_codec import decode_status
from tinsmith.v1 import checkpoint_pb2
from tinsmith_gateway.endpoint import Call
from tinsmith_gateway.services import Services
from tinsmith_gateway.tinker.wire import age_encryption, ids
from tinsmith_gateway.tinker.wire.contract_calls import Native, iso_time, user_native
from tinsmith_gateway.upstream.routing import CHECKPOINT_SERVICE
from tinsmith_runtime.errors import DownloadTokenInvalidError, UnauthenticatedError

DOWNLOADS_PATH = "/api/v1/downloads"

_DOWNLOAD_TIMEOUT_S = 3600.0
_EXPORT_TIMEOUT_S = 600.0
_PIPE_BYTES = 2**16
_PURPOSE = b"tinsmith gateway link v1"
_FILE = "file"
_LINK_LIFETIME_S = 900.0


@dataclass(frozen=True, slots=True)
class DownloadLink:
    """What a link is good for.

    Attributes:
        name: Resource name of the export.
        token: The trainer's permission to read one file of it.
        recipients: Keys that the file is encrypted for; none for a plain file.
    """

    name: str
    token: str
    recipients: tuple[str, ...]


async def export(
    native: Native, checkpoint: checkpoint_pb2.Checkpoint, timeout_s: float
) -> checkpoint_pb2.CheckpointExport | None:
    """Return a checkpoint in the layout of other tools, made if need be; None if it lasts longer.

    Raises:
        TinsmithError: If it cannot be made.
    """
    is_full = checkpoint.adapter.WhichOneof("kind") == "full"
    layouts = checkpoint_pb2.CheckpointExport
    layout = layouts.FORMAT_MERGED if is_full else layouts.FORMAT_PEFT
    request = checkpoint_pb2.ExportCheckpointRequest(
        name=checkpoint.name,
        # An export lives for a day; asked for again it is the same, or made anew.
        request_id=ids.request_id(checkpoint.name, "export", _today()),
        format=layout,
    )
    operation = await native.checkpoint_service(
        "ExportCheckpoint", request, operations_pb2.Operation
    )
    if not operation.done:
        operation = await native.wait(operation.name, timeout_s)
    if not operation.done:
        return None
    if operation.HasField("error"):
        raise decode_status(operation.error)
    made = checkpoint_pb2.CheckpointExport()
    operation.response.Unpack(made)
    return made


class Downloads:
    """The endpoints of files."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._key = hmac.new(services.config.pod_key.encode(), _PURPOSE, hashlib.sha256).digest()

    async def urls(self, call: Call, path: ids.TinkerPath) -> Response:
        """Say from where the files of a checkpoint can be fetched."""
        native = user_native(call)
        checkpoint = await native.checkpoint(path)
        made = None
        async with asyncio.timeout(_EXPORT_TIMEOUT_S):
            while made is None:
                made = await export(native, checkpoint, self._services.config.long_poll_s)
        recipients = age_encryption.decode_labels(checkpoint.labels)
        request = checkpoint_pb2.CreateCheckpointDownloadRequest(
            name=made.name, without_urls=bool(recipients)
        )
        download = await native.checkpoint_service(
            "CreateCheckpointDownload", request, checkpoint_pb2.CheckpointDownload
        )
        urls = {}
        for source in download.sources:
            link = self.link(call, DOWNLOADS_PATH, _FILE, made.name, source.token, *recipients)
            urls[source.file.file + (age_encryption.SUFFIX if recipients else "")] = (
                source.url or link
            )
        return JSONResponse({"urls": urls, "expires": iso_time(download.expire_time)})

    async def fetch(self, call: Call) -> Response:
        """Stream a file to the holder of its URL."""
        name, token, *names = await self.opened(call.request.path_params["link"], _FILE)
        link = DownloadLink(name, token, tuple(names))
        chunks = self._read(link)
        # The first piece before the status: an expired token is an error and no empty file.
        first = await anext(chunks, b"")
        body = _chain(first, chunks)
        if link.recipients:
            recipients = [age_encryption.parse_recipient(text) for text in link.recipients]
            body = _encrypted(body, recipients)
        return StreamingResponse(body, media_type="application/octet-stream")

    async def _read(self, link: DownloadLink) -> AsyncGenerator[bytes]:
        request = checkpoint_pb2.DownloadCheckpointFileRequest(name=link.name, token=link.token)
        async for piece in self._services.upstream.stream(
            CHECKPOINT_SERVICE,
            "DownloadCheckpointFile",
            request,
            checkpoint_pb2.DownloadCheckpointFileResponse,
            self._services.callers.for_pods(link.name.split("/")[1]),
            timeout_s=_DOWNLOAD_TIMEOUT_S,
        ):
            yield piece.data

    def link(self, call: Call, path: str, purpose: str, *content: str) -> str:
        """Return a link for a quarter of an hour, or until the caller's key is no good any more.

        Only this deployment can have written its words.

        Args:
            call: Whose client is to fetch it.
            path: Of the endpoint.
            purpose: What it is for; links of one purpose are no good for another.
            *content: What the endpoint is to know.
        """
        base = self._services.config.public_url or str(call.request.base_url)
        key_id = call.credential.caller.key_id
        words = [purpose, str(int(time.time() + _LINK_LIFETIME_S)), key_id, *content]
        body = base64.urlsafe_b64encode(json.dumps(words).encode()).decode()
        return f"{base.rstrip('/')}{path}/{body}.{self._signature(body)}"

    async def opened(self, link: str, purpose: str) -> list[str]:
        """Return the content of a link; see `link`.

        Raises:
            DownloadTokenInvalidError: If it is not of this deployment, for something else, or too
                old, or its key is no good any more.
        """
        body, _, signature = link.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(body).encode()):
            raise DownloadTokenInvalidError(
                "the link is not one of this deployment; ask for a new one"
            )
        content: list[str]
        meant, expire_time_s, key_id, *content = json.loads(base64.urlsafe_b64decode(body))
        if meant != purpose or int(expire_time_s) <= time.time():
            raise DownloadTokenInvalidError(
                "the link is for something else, or too old; ask for a new one"
            )
        try:
            await self._services.callers.require_good(key_id)
        except UnauthenticatedError as error:
            raise DownloadTokenInvalidError(
                "the link was given to a key that is no good any more; ask for a new one"
            ) from error
        return content

    def _signature(self, body: str) -> str:
        # Signed as a whole: a link for age recipients must not yield the plain file.
        return hmac.new(self._key, body.encode(), hashlib.sha256).hexdigest()


def _today() -> str:
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


async def _chain(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    yield first
    async for chunk in rest:
        yield chunk


async def _encrypted(
    chunks: AsyncGenerator[bytes], recipients: Sequence[age_encryption.Recipient]
) -> AsyncGenerator[bytes]:
    """Yield an age file of what comes in, piece by piece; a source that breaks off raises."""
    plain_out, plain_in = os.pipe()
    sealed_out, sealed_in = os.pipe()
    feeding = asyncio.create_task(_feed(chunks, plain_in))
    encrypting = asyncio.create_task(asyncio.to_thread(_encrypt, plain_out, sealed_in, recipients))
    try:
        while data := await asyncio.to_thread(os.read, sealed_out, _PIPE_BYTES):
            yield data
        # Raised here, the answer is cut off: an age file of half a file would look whole.
        await feeding
        await encrypting
    finally:
        # A client that went away: the writers end at a broken pipe.
        os.close(sealed_out)
        feeding.cancel()
        await asyncio.gather(feeding, encrypting, return_exceptions=True)


async def _feed(chunks: AsyncGenerator[bytes], pipe: int) -> None:
    with os.fdopen(pipe, "wb", buffering=0) as file:
        async for chunk in chunks:
            view = memoryview(chunk)
            while view:
                view = view[await asyncio.to_thread(file.write, view) :]


def _encrypt(plain: int, sealed: int, recipients: Sequence[age_encryption.Recipient]) -> None:
    with os.fdopen(plain, "rb") as reader, os.fdopen(sealed, "wb") as writer:
        pyrage.encrypt_io(reader, writer, list(recipients))
