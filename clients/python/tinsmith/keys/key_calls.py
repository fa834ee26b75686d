"""Calls on API keys, as coroutines of the background loop; `key_forms.py` has the forms."""

from __future__ import annotations

import uuid

from tinsmith.names import KeyName, ProjectName
from tinsmith.rpc import codec
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.durations import encode_duration
from tinsmith.rpc.forms import call
from tinsmith.rpc.lists import read_pages
from tinsmith.types import ApiKey, NewApiKey
from tinsmith.v1 import keys_pb2


class KeyCalls:
    """The API keys of a project, that of the client unless told otherwise.

    Every call needs a key of the role `admin`, but to revoke the key that the client itself uses.

    Example:
        >>> key = client.keys.create(display_name="nightly evaluation")
        >>> print(key.secret)
    """

    def __init__(self, core: ClientCore) -> None:
        self._core = core

    @call
    async def _create(
        self,
        *,
        role: str = "member",
        ttl_seconds: float | None = None,
        display_name: str = "",
        project: str = "",
    ) -> NewApiKey:
        """Create a key, and its project with the first one.

        Args:
            role: What it may do: `viewer` reads, `agent` samples and plays, `member` trains,
                `admin` manages keys besides.
            ttl_seconds: It is refused so long from now on; None for never.
            display_name: What it is for, for people.
            project: Id of another project, whose keys operators may manage.

        Returns:
            The key with its secret, which is not kept anywhere.

        Raises:
            PermissionDeniedError: If the client's key may not manage keys.

        Example:
            >>> key = client.keys.create(role="agent", ttl_seconds=3600)
        """
        request = keys_pb2.CreateKeyRequest(
            parent=self._project_name(project),
            request_id=str(uuid.uuid4()),
            role=role,
            display_name=display_name,
        )
        if ttl_seconds is not None:
            request.ttl.CopyFrom(encode_duration(ttl_seconds))
        key = await self._core.transport.call(
            self._core.scheduler, lambda c: c.keys.CreateKey, request
        )
        return codec.decode_new_key(key)

    @call
    async def _list(self, *, project: str = "") -> list[ApiKey]:
        """Return the keys of a project, newest first, revoked ones included.

        Returns:
            The keys, without their secrets.

        Raises:
            PermissionDeniedError: If the client's key may not manage keys.

        Example:
            >>> names = [key.name for key in client.keys.list()]
        """
        pages = read_pages(
            self._core.transport,
            self._core.scheduler,
            lambda c: c.keys.ListKeys,
            keys_pb2.ListKeysRequest(parent=self._project_name(project)),
        )
        return [codec.decode_key(message) async for page in pages for message in page.keys]

    @call
    async def _revoke(self, name: str, *, project: str = "") -> ApiKey:
        """Refuse a key, given by resource name or id, from now on; repeating it succeeds.

        Returns:
            The key, revoked.

        Raises:
            NotFoundError: If the project has no such key.

        Example:
            >>> client.keys.revoke(key.name)
        """
        if "/" not in name:
            name = f"{self._project_name(project)}/keys/{name}"
        request = keys_pb2.RevokeKeyRequest(name=str(KeyName.parse(name)))
        key = await self._core.transport.call(
            self._core.scheduler, lambda c: c.keys.RevokeKey, request
        )
        return codec.decode_key(key)

    def _project_name(self, project: str) -> str:
        return str(ProjectName(project)) if project else self._core.project
