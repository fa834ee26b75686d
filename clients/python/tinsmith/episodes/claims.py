"""How an agent gets an episode: by asking until there is one, of one type or of both.

The server gives out one type at a call. An agent of both looks at each. It then waits for the type
that it had before, and looks at the other every few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from tinsmith.episodes.types import STATES, TYPES, decode_episode, encode_type
from tinsmith.errors import OperationTimeoutError
from tinsmith.rpc.durations import decode_duration, encode_duration
from tinsmith.rpc.transport import Endpoint
from tinsmith.v1 import episode_pb2

if TYPE_CHECKING:
    from tinsmith.rpc.core import ClientCore

_LOG = logging.getLogger(__name__)

ANY_TYPE = "any"
"""Takes episodes of every type."""

_LONG_POLL_S = 20.0
_ALTERNATING_POLL_S = 3.0
"""How long one type is waited for before the other is looked at."""
_TOLD_AFTER_S = 10.0
_MAX_LISTED = 1000


class EpisodeClaims:
    """Claims episodes of one queue. Runs in the background loop.

    Args:
        core: Of the client.
        endpoint: Finds the coordinator.
        queue: What is claimed from.
        client_id: Names the agent; drawn if empty.
        max_held: Episodes that it may hold at once; 0 for no limit.
    """

    def __init__(
        self,
        core: ClientCore,
        endpoint: Callable[[], Awaitable[Endpoint]],
        *,
        queue: str,
        client_id: str,
        max_held: int,
    ) -> None:
        self.core = core
        self.endpoint = endpoint
        self.queue = queue
        self.client_id = client_id or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._max_held = max_held
        self._last_type = "train"

    async def claim(
        self, episode_type: str, *, lease_s: float, timeout_s: float
    ) -> episode_pb2.ClaimEpisodeResponse:
        """Wait for an episode, and return it with its lease.

        Args:
            episode_type: `train`, `eval` or `any`.
            lease_s: How long the lease lasts without a sign of life.
            timeout_s: How long to wait.

        Raises:
            OperationTimeoutError: If there was none in time; it says what is waited for.
        """
        begin_s = time.monotonic()
        types = self._types(episode_type)
        # A first look at every type; from then on the first is waited for, the other looked at.
        waits_s = [0.0] * len(types) if len(types) > 1 else [_LONG_POLL_S]
        is_told = False
        while True:
            answers = []
            for each, wait_s in zip(types, waits_s, strict=True):
                left_s = max(0.0, begin_s + timeout_s - time.monotonic())
                answer = await self._ask(each, lease_s, min(left_s, wait_s))
                if answer.HasField("episode"):
                    self._last_type = each
                    return answer
                answers.append(answer)
            waited_s = time.monotonic() - begin_s
            if waited_s >= timeout_s:
                waits = " or ".join(answer.waiting_for for answer in answers)
                raise OperationTimeoutError(
                    f"no episode came in time; the server waits for: {waits}",
                    waiting_for=waits,
                    remedy="register episodes with Client.episodes.create(), or wait longer",
                )
            if not is_told and waited_s > _TOLD_AFTER_S:
                is_told = True
                await self._tell(types)
            if waits_s[0]:
                # Of the call that waited: a caller that waited may ask again at once.
                retry_s = decode_duration(answers[0].retry_after)
                await asyncio.sleep(min(retry_s, timeout_s - waited_s))
            else:
                waits_s = [_ALTERNATING_POLL_S] + [0.0] * (len(types) - 1)

    def _types(self, episode_type: str) -> list[str]:
        if episode_type != ANY_TYPE:
            return [episode_type]
        # A loop plays many of one type in a row.
        return sorted(TYPES, key=lambda each: each != self._last_type)

    async def _ask(
        self, episode_type: str, lease_s: float, wait_s: float
    ) -> episode_pb2.ClaimEpisodeResponse:
        request = episode_pb2.ClaimEpisodeRequest(
            parent=self.core.project,
            request_id=str(uuid.uuid4()),
            client_id=self.client_id,
            queue=self.queue,
            type=encode_type(episode_type),
            lease_duration=encode_duration(lease_s),
            timeout=encode_duration(wait_s),
            max_held=self._max_held,
        )
        return await self.core.transport.call(
            await self.endpoint(),
            lambda c: c.episode.ClaimEpisode,
            request,
            timeout_s=wait_s + self.core.settings.call_timeout_s,
        )

    async def _tell(self, types: Sequence[str]) -> None:
        """Log what is waited for, and what the queue has of another type."""
        request = episode_pb2.ListEpisodesRequest(
            parent=self.core.project,
            page_size=_MAX_LISTED,
            queue=self.queue,
            states=[STATES["queued"]],
        )
        queued = await self.core.transport.call(
            await self.endpoint(), lambda c: c.episode.ListEpisodes, request
        )
        found = Counter(decode_episode(message).episode_type for message in queued.episodes)
        told = "".join(
            f"; {number} of type {word} {'is' if number == 1 else 'are'}"
            for word, number in found.items()
            if word not in types
        )
        _LOG.warning(
            "waiting: no episode of type %s is open on queue %s%s",
            " or ".join(types),
            self.queue,
            told,
        )
