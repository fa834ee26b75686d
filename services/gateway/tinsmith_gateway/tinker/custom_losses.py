"""Loss functions of clients: kept as they came, checked and run by the trainer."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from starlette.responses import Response

from tinsmith.v1 import scheduler_pb2, trainer_pb2
from tinsmith_gateway.endpoint import Call
from tinsmith_gateway.tinker import bodies, ids
from tinsmith_gateway.tinker.contract_calls import user_native
from tinsmith_gateway.tinker.future_store import CUSTOM_LOSS, FutureStore
from tinsmith_gateway.tinker.numbered_calls import Prepared
from tinsmith_gateway.tinker.rendering import future
from tinsmith_runtime.errors import InvalidFieldError

Prepare = Callable[[str, int], Awaitable[Prepared]]

_MAX_LOSSES_PER_SESSION = 64
_MAX_LOSSES_PER_PROJECT = 4096
_MAX_GRAPH_BYTES = 256 * 1024


class CustomLosses:
    """The endpoint that takes them.

    Args:
        store: Where they are kept.
    """

    def __init__(self, store: FutureStore) -> None:
        self._store = store

    async def create(self, call: Call) -> Response:
        """Keep a loss; its future is its id."""
        body = await call.parse(bodies.CreateCustomLoss)
        native = user_native(call)
        session = ids.session_name(native.project, body.session_id)
        graph = json.dumps(body.graph, separators=(",", ":"))
        if len(graph) > _MAX_GRAPH_BYTES:
            raise InvalidFieldError("graph", f"is larger than {_MAX_GRAPH_BYTES} bytes")
        loss_id = f"loss.{body.session_id}.{body.custom_loss_seq_id}"
        loss = trainer_pb2.CustomLoss(
            name=body.name,
            inputs=[
                trainer_pb2.CustomLoss.Input(name=one.name, rank=one.rank) for one in body.inputs
            ],
            graph_json=graph,
        )
        await native.scheduler(
            "GetSession", scheduler_pb2.GetSessionRequest(name=session), scheduler_pb2.Session
        )
        await self._store.add_ended(
            native.project,
            loss_id,
            CUSTOM_LOSS,
            owner=session,
            limit=_MAX_LOSSES_PER_SESSION,
            limit_of_project=_MAX_LOSSES_PER_PROJECT,
            request=loss.SerializeToString(),
            result=json.dumps({"loss_id": loss_id, "type": "create_custom_loss"}).encode(),
        )
        return future(loss_id)


async def read(store: FutureStore, project: str, loss_id: str) -> trainer_pb2.CustomLoss:
    """Return a loss that was brought before.

    Raises:
        InvalidFieldError: If the project has none of this id.
    """
    record = await store.get(project, loss_id)
    if record is None or record.kind != CUSTOM_LOSS:
        raise InvalidFieldError(
            "loss_fn_config.loss_id", f"names no custom loss: {loss_id[:128]!r}; create it first"
        )
    store.note_used(project, loss_id)
    return trainer_pb2.CustomLoss.FromString(record.request)
