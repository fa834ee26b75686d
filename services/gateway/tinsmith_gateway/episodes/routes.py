"""The endpoints of episodes.

Clients of AgentJet hold an episode by its id alone. Here an id that is given out with a claim holds
the token of the lease as well, `<episode>.<token>`: a client that lost the lease has an id
that is refused, although it knows of no tokens. A refusal is an answer with an HTTP
status and `success: false`; no reward is ever taken and then dropped.

    AgentJet                                EpisodeService
    /register_episode                       CreateEpisodes
    /claim_episode                          ClaimEpisode
    /heartbeat_episode, /can_continue_...   HeartbeatEpisode
    /end_episode                            SubmitEpisode
    /abort_episode                          AbortEpisode
    /is_episode_claimed                     GetEpisode, CancelEpisodes
    /get_episode_buffer, .../pool_infor...  ListEpisodes
"""

from __future__ import annotations

import contextlib
import json
import math
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from google.protobuf import timestamp_pb2
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from tinsmith.names import EpisodeName, InvalidNameError, SamplingSessionName
from tinsmith.rpc.durations import encode_duration
from tinsmith.rpc.lists import pages
from tinsmith.v1 import episode_pb2
from tinsmith_gateway.access.permissions import access_of
from tinsmith_gateway.endpoint import Call, Handler, endpoint
from tinsmith_gateway.episodes import bodies
from tinsmith_gateway.openai.streaming import until_disconnect
from tinsmith_gateway.services import Services
from tinsmith_gateway.upstream.routing import EPISODE_SERVICE
from tinsmith_runtime.errors import (
    EpisodeNotFoundError,
    InvalidFieldError,
    NotFiniteInputError,
    TinsmithError,
)

_PAGE_SIZE = 1000
_ENDED = frozenset({"LEASE_LOST", "EPISODE_ENDED", "EPISODE_NOT_FOUND"})
_TYPES = {
    "train": episode_pb2.Episode.TYPE_TRAIN,
    "eval": episode_pb2.Episode.TYPE_EVAL,
}
_TYPE_WORDS = {number: word for word, number in _TYPES.items()}
_STATES = {
    episode_pb2.Episode.STATE_QUEUED: "registered",
    episode_pb2.Episode.STATE_CLAIMED: "claimed",
    episode_pb2.Episode.STATE_SUBMITTED: "submitted",
    episode_pb2.Episode.STATE_DEAD: "dead",
    episode_pb2.Episode.STATE_CANCELLED: "cancelled",
}
_OPEN_STATES = (episode_pb2.Episode.STATE_QUEUED, episode_pb2.Episode.STATE_CLAIMED)
_LOOP_HINT = (
    "training is begun by a loop and not over this address; run 'tinsmith run rl_episodes', or "
    "register episodes from a loop of your own"
)


def routes(services: Services) -> list[BaseRoute]:
    """Return the routes of episodes."""

    def route(method: str, path: str, handler: Handler, *, is_wait: bool = False) -> Route:
        serve = endpoint(
            services,
            handler,
            render_error,
            access=access_of(method, path),
            is_wait=is_wait,
            max_body_bytes=services.config.max_text_body_bytes,
        )
        return Route(path, serve, methods=[method])

    refused = [
        route("POST", path, _begun_by_loops)
        for path in ("/sync_train_config", "/start_engine", "/stop_engine", "/update_engine_status")
    ]
    return [
        route("POST", "/register_episode", register),
        route("POST", "/claim_episode", claim, is_wait=True),
        route("POST", "/heartbeat_episode", heartbeat, is_wait=True),
        route("POST", "/can_continue_episode", can_continue, is_wait=True),
        route("POST", "/end_episode", end),
        route("POST", "/submit_episode", end),
        route("POST", "/abort_episode", abort),
        route("POST", "/is_episode_claimed", is_claimed),
        route("GET", "/episodes/{episode}", status),
        route("POST", "/get_episode_buffer", buffer),
        route("GET", "/get_current_batch_rollout_pool_information", pool),
        route("GET", "/get_engine_status", engine_status),
        *refused,
    ]


def render_error(error: TinsmithError, status_code: int, headers: dict[str, str]) -> Response:
    """Return an error as these clients read it."""
    content = {
        "success": False,
        "fail_cause": error.message,
        "error": error.message,
        "detail": error.message,
        "reason": error.reason,
    }
    return JSONResponse(content, status_code=status_code, headers=headers)


async def register(call: Call) -> Response:
    """Register episodes."""
    body = await call.parse(bodies.RegisterEpisodes)
    request = episode_pb2.CreateEpisodesRequest(
        parent=_project(call),
        request_id=body.request_id or str(uuid.uuid4()),
        episodes=[
            episode_pb2.Episode(
                queue=body.queue,
                type=_TYPES[new.episode_type],
                task_id=new.task_id,
                task_json=json.dumps(new.task),
                sampling_session=_sampling_session(call, body.sampling_session),
                model=body.model,
                max_attempts=new.max_attempts,
            )
            for new in body.episodes
        ],
    )
    created = await _send(call, "CreateEpisodes", request, episode_pb2.CreateEpisodesResponse)
    return JSONResponse(
        {"success": True, "episode_uuids": [_id(episode) for episode in created.episodes]}
    )


async def claim(call: Call) -> Response:
    """Give an episode to the caller, or say why there is none."""
    body = await call.parse(bodies.ClaimEpisode)
    request = episode_pb2.ClaimEpisodeRequest(
        parent=_project(call),
        request_id=body.request_id or str(uuid.uuid4()),
        client_id=body.client_uuid,
        queue=body.queue,
        type=_TYPES[body.episode_type],
        lease_duration=encode_duration(body.discard_timeout_s),
        timeout=encode_duration(body.timeout_s),
        max_held=_max_held(body.throttle_policy),
    )
    # An episode for a client that is gone would stay claimed, unplayed, until its lease ran out.
    claimed = await until_disconnect(
        call.request,
        _send(call, "ClaimEpisode", request, episode_pb2.ClaimEpisodeResponse),
    )
    if not claimed.HasField("episode"):
        retry_s = claimed.retry_after.ToTimedelta().total_seconds()
        return JSONResponse(
            {
                "success": False,
                "client_uuid": body.client_uuid,
                "episode_uuid": "",
                "openai_base_url": "",
                "openai_api_key": "",
                "fail_cause": claimed.waiting_for,
                "retry_after_s": retry_s,
            }
        )
    episode = claimed.episode
    fields = {
        "success": True,
        "client_uuid": body.client_uuid,
        "episode_uuid": f"{_id(episode)}.{claimed.lease_token}",
        "openai_base_url": f"{_base_url(call)}/v1",
        "openai_api_key": claimed.api_key,
        "model": episode.model,
        "task_id": episode.task_id,
        "lease_expire_time": _iso(episode.lease_expire_time),
        "fail_cause": "",
    }
    # The task is JSON as it was registered, to the letter: not all of JSON survives being read.
    content = f'{json.dumps(fields)[:-1]}, "task": {episode.task_json or "null"}}}'
    return Response(content, media_type="application/json")


async def heartbeat(call: Call) -> Response:
    """Renew the lease of an episode."""
    body = await call.parse(bodies.HeldEpisode)
    episode = await _renew(call, body.episode_uuid)
    return JSONResponse({"success": True, "lease_expire_time": _iso(episode.lease_expire_time)})


async def can_continue(call: Call) -> Response:
    """Renew the lease of an episode, and say whether it is still held."""
    body = await call.parse(bodies.HeldEpisode)
    try:
        await _renew(call, body.episode_uuid)
    except TinsmithError as error:
        if error.reason not in _ENDED:
            raise
        return JSONResponse({"can_continue": False, "fail_cause": error.message})
    return JSONResponse({"can_continue": True})


async def end(call: Call) -> Response:
    """End an episode with what it was worth."""
    body = await call.parse(bodies.EndEpisode)
    name, token = _held(call, body.episode_uuid)
    request = episode_pb2.SubmitEpisodeRequest(
        name=name, lease_token=token, outcome=_outcome(body.workflow_output)
    )
    await _send(call, "SubmitEpisode", request, episode_pb2.Episode)
    return JSONResponse({"success": True})


async def abort(call: Call) -> Response:
    """Give an episode up."""
    body = await call.parse(bodies.AbortEpisode)
    name, token = _held(call, body.episode_uuid)
    request = episode_pb2.AbortEpisodeRequest(name=name, lease_token=token, reason=body.reason)
    await _send(call, "AbortEpisode", request, episode_pb2.Episode)
    return JSONResponse({"success": True})


async def is_claimed(call: Call) -> Response:
    """Say whether an agent holds an episode; if asked, take an unclaimed one out of the queue."""
    body = await call.parse(bodies.IsClaimed)
    name = _name(call, body.episode_uuid)
    request = episode_pb2.GetEpisodeRequest(name=name)
    episode = await _send(call, "GetEpisode", request, episode_pb2.Episode)
    is_queued = episode.state == episode_pb2.Episode.STATE_QUEUED
    if is_queued and body.unregister_if_not_claimed:
        cancel = episode_pb2.CancelEpisodesRequest(parent=_project(call), names=[name])
        await _send(call, "CancelEpisodes", cancel, episode_pb2.CancelEpisodesResponse)
    return JSONResponse({"success": episode.state == episode_pb2.Episode.STATE_CLAIMED})


async def status(call: Call) -> Response:
    """Describe an episode."""
    name = _name(call, call.request.path_params["episode"])
    request = episode_pb2.GetEpisodeRequest(name=name)
    return JSONResponse(_encode(await _send(call, "GetEpisode", request, episode_pb2.Episode)))


async def buffer(call: Call) -> Response:
    """List the episodes that have not ended."""
    body = await call.parse(bodies.Queue) if call.body else bodies.Queue()
    found = [_encode(episode) async for episode in _open_episodes(call, body.queue)]
    return JSONResponse({"buffer": found})


async def pool(call: Call) -> Response:
    """Count the episodes that have not ended, by state and task."""
    tasks: dict[str, int] = {}
    counts = {_STATES[state]: 0 for state in _OPEN_STATES}
    async for episode in _open_episodes(call, call.request.query_params.get("queue", "")):
        tasks[episode.task_id] = tasks.get(episode.task_id, 0) + 1
        counts[_STATES[episode.state]] += 1
    return JSONResponse(
        {"num_episodes": sum(counts.values()), "by_state": counts, "by_task": tasks}
    )


async def engine_status(call: Call) -> Response:
    """Say whether a loop has episodes to play."""
    queue = call.request.query_params.get("queue", "")
    async with contextlib.aclosing(_open_episodes(call, queue, page_size=1)) as found:
        is_rolling = await anext(found, None) is not None
    return JSONResponse({"engine_status": "ENGINE.ROLLING" if is_rolling else "ENGINE.OFFLINE"})


async def _begun_by_loops(call: Call) -> Response:
    raise InvalidFieldError(call.request.url.path, f"is not offered: {_LOOP_HINT}")


async def _renew(call: Call, episode_uuid: str) -> episode_pb2.Episode:
    name, token = _held(call, episode_uuid)
    request = episode_pb2.HeartbeatEpisodeRequest(name=name, lease_token=token)
    renewed: episode_pb2.Episode = await _send(
        call, "HeartbeatEpisode", request, episode_pb2.Episode
    )
    return renewed


async def _open_episodes(
    call: Call, queue: str, *, page_size: int = _PAGE_SIZE
) -> AsyncGenerator[episode_pb2.Episode]:
    """Yield the episodes that have not ended; with their tasks they are too large to be held."""
    request = episode_pb2.ListEpisodesRequest(
        parent=_project(call), queue=queue, states=_OPEN_STATES
    )
    listed = pages(
        lambda each: _send(call, "ListEpisodes", each, episode_pb2.ListEpisodesResponse),
        request,
        page_size=page_size,
    )
    async for page in listed:
        for episode in page.episodes:
            yield episode


async def _send(call: Call, method: str, request: Any, response: type[Any]) -> Any:
    return await call.services.upstream.call(
        EPISODE_SERVICE, method, request, response, call.credential
    )


def _project(call: Call) -> str:
    call.credential.require_user()
    return call.credential.project


def _held(call: Call, episode_uuid: str) -> tuple[str, str]:
    """Return name and lease token of an episode that was claimed here."""
    episode, _, token = episode_uuid.partition(".")
    if not token:
        raise InvalidFieldError("episode_uuid", "is not one that a claim gave out")
    return _name(call, episode), token


def _name(call: Call, episode_uuid: str) -> str:
    project = _project(call).rpartition("/")[2]
    episode = episode_uuid.partition(".")[0]
    name = EpisodeName(project, episode)
    try:
        EpisodeName.parse(str(name))
    except InvalidNameError as error:
        raise EpisodeNotFoundError(
            f"episode {episode[:128]!r} does not exist", episode=episode[:128]
        ) from error
    return str(name)


def _sampling_session(call: Call, value: str) -> str:
    if "/" in value:
        return value
    return str(SamplingSessionName(_project(call).rpartition("/")[2], value))


def _outcome(output: bodies.WorkflowOutput) -> episode_pb2.EpisodeOutcome:
    rewards = output.reward if isinstance(output.reward, list) else []
    outcome = episode_pb2.EpisodeOutcome(
        step_rewards=rewards,
        is_success=output.is_success,
        metrics=_finite("log_metrics", output.log_metrics),
        metadata_json=json.dumps(output.metadata) if output.metadata else "",
    )
    if isinstance(output.reward, float | int):
        outcome.reward = output.reward
    return outcome


def _finite(field: str, numbers: Mapping[str, float]) -> Mapping[str, float]:
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise NotFiniteInputError(f"workflow_output.{field}.{name}", f"is {value}")
    return numbers


def _max_held(policy: bodies.ThrottlePolicy | None) -> int:
    if policy is None or not policy.expected_batch_size:
        return 0
    return max(int(policy.ratio * policy.expected_batch_size * policy.expected_num_repeat), 1)


def _encode(episode: episode_pb2.Episode) -> dict[str, Any]:
    outcome = episode.outcome if episode.HasField("outcome") else None
    return {
        "episode_uuid": _id(episode),
        "episode_status": _STATES.get(episode.state, "unknown"),
        "episode_type": _TYPE_WORDS.get(episode.type, "train"),
        "queue": episode.queue,
        "optional_task_id": episode.task_id,
        "client_uuid": episode.client_id,
        "llm_call_count": episode.num_model_calls,
        "num_attempts": episode.num_attempts,
        "max_attempts": episode.max_attempts,
        "failures": list(episode.failures),
        "waiting_for": episode.waiting_for,
        "reward": outcome.reward if outcome is not None and outcome.HasField("reward") else None,
        "lease_expire_time": (
            _iso(episode.lease_expire_time) if episode.HasField("lease_expire_time") else None
        ),
    }


def _base_url(call: Call) -> str:
    return (call.services.config.public_url or str(call.request.base_url)).rstrip("/")


def _id(episode: episode_pb2.Episode) -> str:
    return episode.name.rpartition("/")[2]


def _iso(stamp: timestamp_pb2.Timestamp) -> str:
    return stamp.ToJsonString()
