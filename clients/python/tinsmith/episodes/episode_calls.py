"""Episodes on the server: registered and watched by a loop; `episode_forms.py` has the forms."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from tinsmith.episodes.agent import EpisodeAgent
from tinsmith.episodes.claims import EpisodeClaims
from tinsmith.episodes.types import STATES, Episode, EpisodeSpec, decode_episode, encode_spec
from tinsmith.errors import TinsmithError
from tinsmith.names import EpisodeName
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.forms import call
from tinsmith.rpc.lists import read_pages
from tinsmith.rpc.located_service import LocatedService
from tinsmith.rpc.transport import Backoff, is_away
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.v1 import episode_pb2

_MAX_REQUEST_EPISODES = 1000
_MAX_REQUEST_BYTES = 16 * 2**20
_MAX_CANCELLED = 1000


@dataclass(frozen=True, slots=True)
class CancelledQueue:
    """What was cancelled."""

    num_cancelled: int
    revision: int
    """The last one of the project: `watch(after_revision=...)` sees what ends later."""


class EpisodeCalls:
    """The episodes of a project, which remote agents play.

    Example:
        >>> client.episodes.create([EpisodeSpec(task={"question": "6 * 7"})], sampler=run.sampler())
        >>> for episode in client.episodes.watch():
        ...     print(episode.state, episode.outcome)
    """

    def __init__(self, core: ClientCore) -> None:
        self._core = core
        self._service = LocatedService.of_coordinator(core)

    def watch(
        self, queue: str = "default", *, after_revision: int = 0, timeout_s: float | None = None
    ) -> Iterator[Episode]:
        """Yield episodes of a queue as they end, with their trajectories, in order.

        Goes on by itself after a lost connection, and misses nothing.

        Args:
            queue: Which queue.
            after_revision: Leaves out what ended up to this revision, such as that of the last
                episode that an earlier watch yielded.
            timeout_s: Ends the iteration after this time; None goes on for ever.

        Yields:
            The episodes, each once.

        Raises:
            TinsmithError: If the server cannot be reached or refuses the key.

        Example:
            >>> for episode in client.episodes.watch("default", timeout_s=60):
            ...     print(episode.name, episode.state)
        """
        return self._core.background.iterate(self._watch(queue, after_revision, timeout_s))

    def agent(
        self, *, queue: str = "default", client_id: str = "", max_held: int = 0
    ) -> EpisodeAgent:
        """Return what an agent plays episodes with.

        Args:
            queue: What it claims from.
            client_id: Names it, for people and throttling; drawn if empty.
            max_held: Episodes that clients of this id may hold at once; 0 for no limit.

        Returns:
            An agent; nothing is sent before it claims.

        Example:
            >>> agent = client.episodes.agent(queue="default")
        """
        claims = EpisodeClaims(
            self._core, self._service.endpoint, queue=queue, client_id=client_id, max_held=max_held
        )
        return EpisodeAgent(claims)

    @call
    async def _create(
        self,
        episodes: Sequence[EpisodeSpec],
        *,
        queue: str = "default",
        sampler: Sampler | str = "",
        model: str = "",
        max_attempts: int = 0,
    ) -> list[Episode]:
        """Register episodes, which agents then claim.

        Args:
            episodes: What is to be played. More than 1,000 are registered in several requests, each
                of which is all or none.
            queue: Where they wait; loops that share a project use queues of their own.
            sampler: What their model calls use: a sampler, or the name of its sampling session.
            model: The name that agents give as `model`.
            max_attempts: Claims after which an episode that was not submitted is dead; 0 for 4.

        Returns:
            The episodes, queued.

        Raises:
            ResourceExhaustedError: If too many episodes have not ended.

        Example:
            >>> client.episodes.create([EpisodeSpec(task={"question": "7 * 6"})], sampler=sampler)
        """
        messages = [
            encode_spec(
                spec,
                queue=queue,
                sampling_session=sampler if isinstance(sampler, str) else sampler.name,
                model=model,
                max_attempts=max_attempts,
            )
            for spec in episodes
        ]
        created: list[Episode] = []
        for batch in _batches(messages):
            request = episode_pb2.CreateEpisodesRequest(
                parent=self._core.project, request_id=str(uuid.uuid4()), episodes=batch
            )
            answer = await self._core.transport.call(
                await self._service.endpoint(), lambda c: c.episode.CreateEpisodes, request
            )
            created += [decode_episode(message) for message in answer.episodes]
        return created

    @call
    async def _get(self, episode: str, *, include_trajectories: bool = True) -> Episode:
        """Return an episode, by its name or id.

        Returns:
            The episode.

        Raises:
            NotFoundError: If there is none.

        Example:
            >>> episode = client.episodes.get(name)
        """
        request = episode_pb2.GetEpisodeRequest(
            name=episode_name(self._core, episode), include_trajectories=include_trajectories
        )
        answer = await self._core.transport.call(
            await self._service.endpoint(), lambda c: c.episode.GetEpisode, request
        )
        return decode_episode(answer)

    @call
    async def _list(self, *, queue: str = "", states: Sequence[str] = ()) -> list[Episode]:
        """Return the episodes of the project, newest first, without trajectories.

        Args:
            queue: Restricts the list to a queue.
            states: Restricts it to states, such as `dead`.

        Returns:
            The episodes.

        Raises:
            TinsmithError: If the server cannot be reached or refuses the key.

        Example:
            >>> dead = client.episodes.list(states=["dead"])
        """
        request = episode_pb2.ListEpisodesRequest(
            parent=self._core.project, queue=queue, states=[STATES[word] for word in states]
        )
        pages = read_pages(
            self._core.transport,
            await self._service.endpoint(),
            lambda c: c.episode.ListEpisodes,
            request,
        )
        return [decode_episode(message) async for page in pages for message in page.episodes]

    @call
    async def _cancel_queue(self, queue: str = "default") -> CancelledQueue:
        """End all episodes of a queue that are open; a watch may go on from there.

        Returns:
            How many were open, and the revision from which a watch goes on.

        Raises:
            TinsmithError: If the server cannot be reached or refuses the key.

        Example:
            >>> client.episodes.cancel_queue("default")
        """
        request = episode_pb2.CancelEpisodesRequest(parent=self._core.project, queue=queue)
        return await self._send_cancel(request)

    @call
    async def _cancel(self, episodes: Sequence[Episode | str]) -> int:
        """End episodes that are not to be played any more; return how many were open.

        Returns:
            Number of those that were open.

        Raises:
            TinsmithError: If the server cannot be reached or refuses the key.

        Example:
            >>> client.episodes.cancel(episodes)
        """
        names = [
            episode_name(self._core, each if isinstance(each, str) else each.name)
            for each in episodes
        ]
        num_cancelled = 0
        # Without names the request would mean the whole queue.
        for first in range(0, len(names), _MAX_CANCELLED):
            request = episode_pb2.CancelEpisodesRequest(
                parent=self._core.project, names=names[first : first + _MAX_CANCELLED]
            )
            num_cancelled += (await self._send_cancel(request)).num_cancelled
        return num_cancelled

    async def _send_cancel(self, request: episode_pb2.CancelEpisodesRequest) -> CancelledQueue:
        answer = await self._core.transport.call(
            await self._service.endpoint(), lambda c: c.episode.CancelEpisodes, request
        )
        return CancelledQueue(answer.num_cancelled, answer.revision)

    async def _watch(
        self, queue: str, revision: int, timeout_s: float | None
    ) -> AsyncGenerator[Episode, None]:
        deadline_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        endpoint = await self._service.endpoint()
        backoff = Backoff(self._core.settings.retry)
        while (left_s := deadline_s - time.monotonic()) > 0:
            request = episode_pb2.WatchEpisodesRequest(
                parent=self._core.project, queue=queue, after_revision=revision
            )
            stream = self._core.transport.stream_once(
                endpoint, lambda c: c.episode.WatchEpisodes, request
            )
            try:
                while (message := await _within(stream, left_s)) is not None:
                    revision = message.revision
                    backoff = Backoff(self._core.settings.retry)
                    yield decode_episode(message)
                    left_s = deadline_s - time.monotonic()
            except TinsmithError as error:
                delay_s = backoff.delay_s(error, time.monotonic())
                if delay_s is None:
                    raise backoff.gave_up(error, time.monotonic()) from error.__cause__
                await asyncio.sleep(delay_s)
                if is_away(error):
                    await endpoint.relocate()
            finally:
                await stream.aclose()


def episode_name(core: ClientCore, value: str) -> str:
    """Return the resource name of an episode that may be given by its id alone."""
    if "/" not in value:
        return str(EpisodeName(core.settings.project, value))
    return str(EpisodeName.parse(value))


def _batches(messages: Sequence[episode_pb2.Episode]) -> Iterator[list[episode_pb2.Episode]]:
    """Yield parts that fit into a request."""
    batch: list[episode_pb2.Episode] = []
    num_bytes = 0
    for message in messages:
        size = message.ByteSize()
        if batch and (len(batch) == _MAX_REQUEST_EPISODES or num_bytes + size > _MAX_REQUEST_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(message)
        num_bytes += size
    if batch:
        yield batch


async def _within(
    stream: AsyncIterator[episode_pb2.Episode], timeout_s: float
) -> episode_pb2.Episode | None:
    """Return the next message, None at the end of the stream or of the time."""
    try:
        async with asyncio.timeout(None if timeout_s == float("inf") else timeout_s):
            return await anext(stream, None)
    except TimeoutError:
        return None
