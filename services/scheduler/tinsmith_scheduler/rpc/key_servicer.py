"""KeyService: one method for each call, which decodes, checks the caller, calls, encodes."""

from __future__ import annotations

from typing import Any

import grpc.aio

from tinsmith.names import KeyName, ProjectName
from tinsmith.v1 import keys_pb2, keys_pb2_grpc
from tinsmith_runtime.rpc.auth import current_caller
from tinsmith_runtime.rpc.requests import check_text, decode_identity, parse_name
from tinsmith_scheduler.auth.api_keys import Keys
from tinsmith_scheduler.rpc import codec
from tinsmith_scheduler.store.records import Key

Context = grpc.aio.ServicerContext[Any, Any]


class KeyServicer(keys_pb2_grpc.KeyServiceServicer):
    """Maps KeyService onto the keys of projects, which check what a caller may do with them."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def CreateKey(self, request: keys_pb2.CreateKeyRequest, context: Context) -> keys_pb2.Key:
        """Create a key."""
        project = parse_name(ProjectName, request.parent, "parent").project
        key, api_key = await self._keys.create(
            current_caller(),
            project=project,
            role=codec.decode_key_role(request.role),
            ttl_s=codec.decode_key_ttl_s(request),
            display_name=check_text(request.display_name, "display_name"),
            request=decode_identity(request, project),
        )
        return codec.encode_key(key, name=_key_name(key), api_key=api_key)

    async def ListKeys(
        self, request: keys_pb2.ListKeysRequest, context: Context
    ) -> keys_pb2.ListKeysResponse:
        """List the keys of a project."""
        project = parse_name(ProjectName, request.parent, "parent").project
        page = codec.decode_page(request.page_size, request.page_token)
        keys, next_page_token = await self._keys.list(current_caller(), project, page)
        return keys_pb2.ListKeysResponse(
            keys=[codec.encode_key(key, name=_key_name(key)) for key in keys],
            next_page_token=next_page_token,
        )

    async def RevokeKey(self, request: keys_pb2.RevokeKeyRequest, context: Context) -> keys_pb2.Key:
        """Refuse a key from now on."""
        name = parse_name(KeyName, request.name, "name")
        key = await self._keys.revoke(current_caller(), name)
        return codec.encode_key(key, name=_key_name(key))

    async def GetCallerKey(
        self, request: keys_pb2.GetCallerKeyRequest, context: Context
    ) -> keys_pb2.Key:
        """Return the key of the call itself."""
        key = self._keys.of_caller(current_caller())
        return codec.encode_key(key, name=_key_name(key))

    async def VerifyKey(
        self, request: keys_pb2.VerifyKeyRequest, context: Context
    ) -> keys_pb2.VerifyKeyResponse:
        """Check a key for another pod."""
        owner = await self._keys.verify(*codec.decode_key_lookup(request))
        return keys_pb2.VerifyKeyResponse(
            project=owner.project,
            role=owner.role or "",
            pool=owner.pool,
            is_pod=owner.is_pod,
            check_secrets=self._keys.check_secrets() if owner.is_pod else (),
        )


def _key_name(key: Key) -> str:
    return str(KeyName(key.project, key.key_id))
