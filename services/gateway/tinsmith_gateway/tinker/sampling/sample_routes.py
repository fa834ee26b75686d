"""Sampling sessions and samples."""

from __future__ import annotations

import asyncio
import json
import secrets

from starlette.responses import JSONResponse, Response

from tinsmith.v1 import scheduler_pb2
from tinsmith_gateway.endpoint import Call
from tinsmith_gateway.tinker.promises.future_store import FutureStore
from tinsmith_gateway.tinker.sampling import sample_futures
from tinsmith_gateway.tinker.sampling.sample_futures import Samples
from tinsmith_gateway.tinker.wire import bodies, ids
from tinsmith_gateway.tinker.wire.base_models import BaseModels
from tinsmith_gateway.tinker.wire.contract_calls import Native, user_native
from tinsmith_gateway.tinker.wire.rendering import future
from tinsmith_runtime.errors import InvalidFieldError, TinsmithError

_CLONE_NUMBERS = 1_000_000_000
"""Clones of a sampling client number their samples from multiples of this."""
_MAX_POLL_S = 30.0
_MAX_COMPLETIONS = 1000


class Sampling:
    """The sampling endpoints.

    Args:
        samples_: Draws in the background.
        store: Where samples are kept.
        models: Names of base models.
        default_poll_s: How long to wait for an end if the client does not say.
    """

    def __init__(
        self,
        samples_: Samples,
        store: FutureStore,
        models: BaseModels,
        *,
        default_poll_s: float,
    ) -> None:
        self._samples = samples_
        self._store = store
        self._models = models
        self._default_poll_s = default_poll_s
        self._num_clones: dict[str, int] = {}

    async def create_session(self, call: Call) -> Response:
        """Open a handle on a base model or a checkpoint."""
        body = await call.parse(bodies.CreateSamplingSession)
        native = user_native(call)
        request = scheduler_pb2.CreateSamplingSessionRequest()
        if body.model_path is not None:
            checkpoint = await native.checkpoint(
                ids.TinkerPath.parse(body.model_path, "model_path")
            )
            request.checkpoint = checkpoint.name
        elif body.base_model is not None:
            request.base_model = self._models.resolve(body.base_model)
        else:
            raise InvalidFieldError("base_model", "or model_path is required")
        name = await create_sampling_session(
            native, body.session_id, body.sampling_session_seq_id, request
        )
        return JSONResponse(
            {
                "type": "create_sampling_session",
                "sampling_session_id": name.rpartition("/")[2],
            }
        )

    async def join_session(self, call: Call) -> Response:
        """Give one more client of a handle a number of its own."""
        body = await call.parse(bodies.JoinSamplingSession)
        found = await _get_session(user_native(call), body.sampling_session_id)
        # Behind what any client of before the last restart may have been given.
        first = self._num_clones.setdefault(found.name, secrets.randbelow(_CLONE_NUMBERS // 2))
        self._num_clones[found.name] = first + 1
        return JSONResponse({"client_counter": first + 1})

    async def get_sampler(self, call: Call) -> Response:
        """Describe a handle."""
        native = user_native(call)
        found = await _get_session(native, call.request.path_params["sampling_session_id"])
        model_path = None
        if found.checkpoint:
            model_path = str(await native.path_of(found.checkpoint))
        return JSONResponse(
            {
                "sampler_id": found.name.rpartition("/")[2],
                "base_model": found.base_model,
                "model_path": model_path,
            }
        )

    async def sample(self, call: Call) -> Response:
        """Promise completions."""
        body = await call.parse(bodies.Sample)
        native = user_native(call)
        session = ids.sampling_session_name(native.project, body.sampling_session_id)
        call.admission.add_tokens(sample_futures.count_prompt_tokens(body))
        await call.aside(sample_futures.check, body, session)
        if body.sampling_params.seed is None:
            body.sampling_params.seed = secrets.randbits(63)
        promised = f"sample.{body.sampling_session_id}.{body.seq_id}"
        await self._samples.submit(native.project, session, promised, body, key_id=native.key_id)
        return future(
            promised,
            sample_sequence_ids=[f"{promised}.{index}" for index in range(body.num_samples)],
        )

    async def cancel(self, call: Call) -> Response:
        """Give a sample up."""
        body = await call.parse(bodies.CancelFuture)
        await self._samples.cancel(user_native(call).project, body.request_id)
        return JSONResponse({})

    async def retrieve_futures(self, call: Call) -> Response:
        """List which samples of a handle ended, waiting for the next one if there are none."""
        body = await call.parse(bodies.RetrieveFutures)
        native = user_native(call)
        session = ids.sampling_session_name(native.project, body.target.sampling_session_id)
        for retrieved in body.retrieved_request_ids:
            self._store.note_retrieved(native.project, retrieved)
        wanted_s = self._default_poll_s if body.timeout is None else body.timeout
        timeout_s = min(max(wanted_s, 0.0), _MAX_POLL_S)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        cursor = body.prev_cursor
        while True:
            waiting = asyncio.create_task(
                self._samples.wait_any(session, max(deadline_s - loop.time(), 0.0))
            )
            try:
                # Begun before the look, so that an end in between is not missed.
                await asyncio.sleep(0)
                ended = await self._store.ended(session, after=cursor, limit=_MAX_COMPLETIONS)
                cursor = ended[-1].revision if ended else cursor
                clone_id = body.target.cloned_sampler_id
                mine = [one for one in ended if _clone_of(one.future) == clone_id]
                if mine or loop.time() >= deadline_s:
                    break
                await waiting
            finally:
                waiting.cancel()
        completions = [
            {"state": "failed", "request_id": one.future}
            if one.num_bytes is None
            else {
                "state": "finished",
                "request_id": one.future,
                "response_payload_uncompressed_size": one.num_bytes,
            }
            for one in mine
        ]
        return Response(
            json.dumps({"completions": completions, "cursor": cursor}),
            media_type="application/json",
        )


async def create_sampling_session(
    native: Native,
    session_id: str,
    number: int,
    request: scheduler_pb2.CreateSamplingSessionRequest,
) -> str:
    """Open the handle that a client numbered, or return it; its name.

    Raises:
        TinsmithError: If it cannot be opened.
    """
    handle = ids.sampling_session_id(session_id, number)
    request.parent = ids.session_name(native.project, session_id)
    request.sampling_session_id = handle
    request.request_id = ids.request_id(native.project, handle)
    try:
        created = await native.scheduler(
            "CreateSamplingSession", request, scheduler_pb2.SamplingSession
        )
    except TinsmithError as error:
        if error.reason != "RESOURCE_ALREADY_EXISTS":
            raise
        # Opened by a request that is not remembered any more, if it is on the same weights.
        found = await _get_session(native, handle)
        if any(
            getattr(request, source) and getattr(request, source) != getattr(found, source)
            for source in ("base_model", "checkpoint", "run")
        ):
            raise
        return found.name
    name: str = created.name
    return name


async def _get_session(native: Native, sampling_session: str) -> scheduler_pb2.SamplingSession:
    request = scheduler_pb2.GetSamplingSessionRequest(
        name=ids.sampling_session_name(native.project, sampling_session)
    )
    found: scheduler_pb2.SamplingSession = await native.scheduler(
        "GetSamplingSession", request, scheduler_pb2.SamplingSession
    )
    return found


def _clone_of(future_id: str) -> int:
    return int(future_id.rpartition(".")[2]) // _CLONE_NUMBERS
