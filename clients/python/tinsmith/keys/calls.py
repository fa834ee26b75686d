"""API keys of a project. Coroutines that run in the background loop."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from tinsmith.names import KeyName, ProjectName
from tinsmith.rpc import codec
from tinsmith.rpc.core import ClientCore
from tinsmith.types import ApiKey, NewApiKey
from tinsmith.v1 import scheduler_pb2

_PAGE_SIZE = 1000


async def create_key(
    core: ClientCore, *, project: str, scopes: Sequence[str], display_name: str
) -> NewApiKey:
    """Create a key; its secret is in the answer and nowhere else."""
    request = scheduler_pb2.CreateKeyRequest(
        parent=_project_name(core, project),
        request_id=str(uuid.uuid4()),
        scopes=scopes,
        display_name=display_name,
    )
    key = await core.transport.call(core.scheduler, lambda c: c.scheduler.CreateKey, request)
    return codec.decode_new_key(key)


async def list_keys(core: ClientCore, *, project: str) -> list[ApiKey]:
    """Return the keys of a project, newest first."""
    found: list[ApiKey] = []
    token = ""
    while True:
        request = scheduler_pb2.ListKeysRequest(
            parent=_project_name(core, project), page_size=_PAGE_SIZE, page_token=token
        )
        answer = await core.transport.call(core.scheduler, lambda c: c.scheduler.ListKeys, request)
        found.extend(codec.decode_key(message) for message in answer.keys)
        token = answer.next_page_token
        if not token:
            return found


async def revoke_key(core: ClientCore, name: str, *, project: str) -> ApiKey:
    """Refuse a key from now on."""
    if "/" not in name:
        name = f"{_project_name(core, project)}/keys/{name}"
    request = scheduler_pb2.RevokeKeyRequest(name=str(KeyName.parse(name)))
    key = await core.transport.call(core.scheduler, lambda c: c.scheduler.RevokeKey, request)
    return codec.decode_key(key)


def _project_name(core: ClientCore, project: str) -> str:
    return str(ProjectName(project)) if project else core.project
