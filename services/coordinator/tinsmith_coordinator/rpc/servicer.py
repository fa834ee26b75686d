"""EpisodeService: one method for each call, which decodes, checks the tenant, calls, encodes.

Every name belongs to a project, and `require_project` answers a foreign one as if nothing had that
name. Pods pass it. JSON and recorded calls are decoded in threads: they may be large.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tinsmith.names import EpisodeName
from tinsmith.v1 import episode_pb2, episode_pb2_grpc
from tinsmith_coordinator.episodes.episodes import Episodes
from tinsmith_coordinator.episodes.leases import Leases
from tinsmith_coordinator.rpc import call_codec, codec
from tinsmith_coordinator.rpc.projects import own_project
from tinsmith_coordinator.store import episode_store
from tinsmith_coordinator.store.records import Episode, StoredCall
from tinsmith_runtime.rpc.auth import current_caller
from tinsmith_runtime.rpc.requests import (
    check_text,
    decode_identity,
    decode_page_size,
    decode_page_token,
    encode_page_token,
    parse_name,
)

Context = Any


class EpisodeServicer(episode_pb2_grpc.EpisodeServiceServicer):
    """Maps EpisodeService onto the domain."""

    def __init__(self, episodes: Episodes, leases: Leases) -> None:
        self._episodes = episodes
        self._leases = leases

    async def CreateEpisodes(
        self, request: episode_pb2.CreateEpisodesRequest, context: Context
    ) -> episode_pb2.CreateEpisodesResponse:
        project = own_project(request.parent)
        identity = await asyncio.to_thread(decode_identity, request, project)
        new = await asyncio.to_thread(codec.decode_new_episodes, request, project)
        created = await self._episodes.create(new, identity)
        return episode_pb2.CreateEpisodesResponse(
            episodes=[codec.encode_episode(episode) for episode in created]
        )

    async def ClaimEpisode(
        self, request: episode_pb2.ClaimEpisodeRequest, context: Context
    ) -> episode_pb2.ClaimEpisodeResponse:
        project = own_project(request.parent)
        claim = codec.decode_claim(request, project)
        answer = await self._leases.claim(claim, decode_identity(request, project))
        return codec.encode_claimed(answer, timeout_s=claim.timeout_s)

    async def HeartbeatEpisode(
        self, request: episode_pb2.HeartbeatEpisodeRequest, context: Context
    ) -> episode_pb2.Episode:
        name = _own_episode(request.name)
        token = codec.decode_token(request.lease_token)
        return codec.encode_episode(await self._leases.heartbeat(name, token))

    async def SubmitEpisode(
        self, request: episode_pb2.SubmitEpisodeRequest, context: Context
    ) -> episode_pb2.Episode:
        name = _own_episode(request.name)
        token = codec.decode_token(request.lease_token)
        outcome = codec.decode_outcome(request)
        return codec.encode_episode(await self._leases.submit(name, token, outcome))

    async def AbortEpisode(
        self, request: episode_pb2.AbortEpisodeRequest, context: Context
    ) -> episode_pb2.Episode:
        name = _own_episode(request.name)
        token = codec.decode_token(request.lease_token)
        reason = check_text(request.reason, "reason")
        return codec.encode_episode(await self._leases.abort(name, token, reason))

    async def CancelEpisodes(
        self, request: episode_pb2.CancelEpisodesRequest, context: Context
    ) -> episode_pb2.CancelEpisodesResponse:
        project = own_project(request.parent)
        names = codec.decode_cancelled(request, project)
        queue = codec.decode_queue(request.queue)
        num_cancelled, revision = await self._episodes.cancel(project, names, queue)
        return episode_pb2.CancelEpisodesResponse(num_cancelled=num_cancelled, revision=revision)

    async def GetEpisode(
        self, request: episode_pb2.GetEpisodeRequest, context: Context
    ) -> episode_pb2.Episode:
        name = _own_episode(request.name)
        episode, calls = await self._episodes.get(name, include_calls=request.include_trajectories)
        return await _with_trajectories(episode, calls)

    async def ListEpisodes(
        self, request: episode_pb2.ListEpisodesRequest, context: Context
    ) -> episode_pb2.ListEpisodesResponse:
        page = await self._episodes.list_page(
            own_project(request.parent),
            page_size=decode_page_size(request.page_size),
            before_serial=decode_page_token(request.parent, request.page_token),
            queue=codec.decode_queue(request.queue) if request.queue else "",
            states=codec.decode_states(request.states),
        )
        return episode_pb2.ListEpisodesResponse(
            episodes=[codec.encode_episode(episode) for episode in page.episodes],
            next_page_token=encode_page_token(request.parent, page.next_serial),
        )

    async def WatchEpisodes(
        self, request: episode_pb2.WatchEpisodesRequest, context: Context
    ) -> AsyncIterator[episode_pb2.Episode]:
        project = own_project(request.parent)
        queue = codec.decode_queue(request.queue)
        after_revision = codec.decode_revision(request.after_revision)
        async for episode, calls in self._episodes.watch(project, queue, after_revision):
            yield await _with_trajectories(episode, calls)

    async def RecordModelCall(
        self, request: episode_pb2.RecordModelCallRequest, context: Context
    ) -> episode_pb2.RecordModelCallResponse:
        name = _own_episode(request.name)
        key = codec.decode_key(request.api_key)
        call = await asyncio.to_thread(call_codec.decode_call, request)
        first_index = await self._leases.record_call(name, key, call)
        return episode_pb2.RecordModelCallResponse(call_index=first_index)

    async def VerifyEpisodeKey(
        self, request: episode_pb2.VerifyEpisodeKeyRequest, context: Context
    ) -> episode_pb2.Episode:
        key = codec.decode_key(request.api_key)
        return codec.encode_episode(await self._leases.verify_key(key))


def _own_episode(value: str) -> EpisodeName:
    name = parse_name(EpisodeName, value, "name")
    current_caller().require_project(name.project, lambda: episode_store.episode_not_found(name))
    return name


async def _with_trajectories(episode: Episode, calls: Sequence[StoredCall]) -> episode_pb2.Episode:
    message = codec.encode_episode(episode)
    if calls:
        trajectories = await asyncio.to_thread(call_codec.encode_trajectories, calls)
        message.trajectories.extend(trajectories)
    return message
