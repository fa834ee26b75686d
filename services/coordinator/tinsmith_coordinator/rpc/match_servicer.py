"""Matches of CoordinatorService: each method decodes, checks the tenant, calls, encodes.

A match of another project is answered as if there were none of its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from tinsmith.names import MatchName
from tinsmith.v1 import coordinator_pb2, coordinator_pb2_grpc
from tinsmith_coordinator.matches.matches import Matches
from tinsmith_coordinator.matches.seats import Seats
from tinsmith_coordinator.rpc import codec, match_codec
from tinsmith_coordinator.rpc.projects import own_project
from tinsmith_coordinator.store import match_store
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_runtime.rpc.auth import current_caller
from tinsmith_runtime.rpc.requests import (
    check_text,
    decode_identity,
    decode_page_size,
    decode_page_token,
    decode_request_id,
    encode_page_token,
    parse_name,
)

Context = Any


class MatchServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Maps the matches of CoordinatorService onto the domain."""

    def __init__(self, matches: Matches, seats: Seats) -> None:
        self._matches = matches
        self._seats = seats

    async def CreateMatch(
        self, request: coordinator_pb2.CreateMatchRequest, context: Context
    ) -> coordinator_pb2.Match:
        project = own_project(request.parent)
        identity = decode_identity(request, project)
        rules = await asyncio.to_thread(match_codec.decode_rules, request.match)
        return match_codec.encode_match(await self._matches.create(rules, identity))

    async def JoinMatch(
        self, request: coordinator_pb2.JoinMatchRequest, context: Context
    ) -> coordinator_pb2.JoinMatchResponse:
        name = _own_match(request.name)
        if not request.client_id:
            raise InvalidFieldError("client_id", "is required")
        seat = await self._seats.join(
            name,
            check_text(request.agent, "agent"),
            check_text(request.client_id, "client_id"),
            decode_request_id(request.request_id),
        )
        return match_codec.encode_seat(seat)

    async def HeartbeatMember(
        self, request: coordinator_pb2.HeartbeatMemberRequest, context: Context
    ) -> coordinator_pb2.Match:
        name = _own_match(request.name)
        token = codec.decode_token(request.lease_token)
        return match_codec.encode_match(await self._seats.heartbeat(name, token))

    async def LeaveMatch(
        self, request: coordinator_pb2.LeaveMatchRequest, context: Context
    ) -> coordinator_pb2.Match:
        name = _own_match(request.name)
        token = codec.decode_token(request.lease_token)
        reason = check_text(request.reason, "reason")
        return match_codec.encode_match(await self._seats.leave(name, token, reason))

    async def TakeTurn(
        self, request: coordinator_pb2.TakeTurnRequest, context: Context
    ) -> coordinator_pb2.Game:
        name = _own_match(request.name)
        token = codec.decode_token(request.lease_token)
        move = match_codec.decode_move(request)
        return match_codec.encode_game(await self._seats.take_turn(name, token, move))

    async def AbandonGame(
        self, request: coordinator_pb2.AbandonGameRequest, context: Context
    ) -> coordinator_pb2.Game:
        name = _own_match(request.name)
        token = codec.decode_token(request.lease_token)
        epoch, game = match_codec.decode_game(request)
        reason = check_text(request.reason, "reason")
        abandoned = await self._seats.abandon_game(
            name, token, epoch=epoch, game=game, reason=reason
        )
        return match_codec.encode_game(abandoned)

    async def ArriveAtBarrier(
        self, request: coordinator_pb2.ArriveAtBarrierRequest, context: Context
    ) -> coordinator_pb2.ArriveAtBarrierResponse:
        name = _own_match(request.name)
        token = codec.decode_token(request.lease_token)
        epoch, point = match_codec.decode_barrier(request.barrier)
        timeout_s = match_codec.decode_wait(request)
        is_open, match = await self._seats.arrive(name, token, epoch, point, timeout_s=timeout_s)
        return coordinator_pb2.ArriveAtBarrierResponse(
            is_open=is_open, match=match_codec.encode_match(match)
        )

    async def CancelMatch(
        self, request: coordinator_pb2.CancelMatchRequest, context: Context
    ) -> coordinator_pb2.Match:
        return match_codec.encode_match(await self._matches.cancel(_own_match(request.name)))

    async def GetMatch(
        self, request: coordinator_pb2.GetMatchRequest, context: Context
    ) -> coordinator_pb2.Match:
        match, movers = await self._matches.get(_own_match(request.name))
        return match_codec.encode_match(match, movers)

    async def ListMatches(
        self, request: coordinator_pb2.ListMatchesRequest, context: Context
    ) -> coordinator_pb2.ListMatchesResponse:
        page = await self._matches.list_page(
            own_project(request.parent),
            page_size=decode_page_size(request.page_size),
            before_serial=decode_page_token(request.parent, request.page_token),
        )
        return coordinator_pb2.ListMatchesResponse(
            matches=[match_codec.encode_match(match) for match in page.matches],
            next_page_token=encode_page_token(request.parent, page.next_serial),
        )

    async def WatchMatch(
        self, request: coordinator_pb2.WatchMatchRequest, context: Context
    ) -> AsyncIterator[coordinator_pb2.MatchUpdate]:
        name = _own_match(request.name)
        after_revision = codec.decode_revision(request.after_revision)
        async for update, movers in self._matches.watch(name, after_revision):
            yield match_codec.encode_update(update, movers)


def _own_match(value: str) -> MatchName:
    name = parse_name(MatchName, value, "name")
    current_caller().require_project(name.project, lambda: match_store.match_not_found(name))
    return name
