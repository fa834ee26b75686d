"""What an agent plays episodes with: claim, play with an OpenAI client, submit.

An episode is held under a lease, which a heartbeat in the background keeps for as long as this
process lives: a long tool or a slow grader is not taken for a dead agent. Every call is repeated by
its request id until it is answered, so no reward is lost or counted twice. What cannot be delivered
is raised, never swallowed.

The names are those of AgentJet's TinkerScript, so that its workflows need no other words.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tinsmith.episodes.claims import ANY_TYPE, EpisodeClaims
from tinsmith.episodes.types import Episode, decode_episode, encode_outcome
from tinsmith.errors import FailedPreconditionError, TinsmithError
from tinsmith.v1 import episode_pb2

if TYPE_CHECKING:
    pass

_LOG = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 240.0
_HEARTBEATS_PER_LEASE = 4
_MAX_EPISODE_LEASES = 8
_OVER_REASONS = frozenset({"LEASE_LOST", "EPISODE_ENDED", "EPISODE_NOT_FOUND"})


@dataclass(frozen=True, slots=True)
class OpenaiBaseUrlAndApiKey:
    """What an OpenAI client needs to play an episode; calls with this key are recorded."""

    base_url: str
    api_key: str = field(repr=False)
    model: str
    episode_uuid: str


@dataclass(frozen=True, slots=True)
class WorkflowOutput:
    """What an episode was worth."""

    reward: float | Sequence[float] | None = None
    """Of the episode, or of each of its model calls, in their order."""
    is_success: bool | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Anything that JSON can hold."""
    log_metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to be logged."""


class HeldEpisode:
    """An episode in the hands of an agent; `EpisodeAgent.episode` returns it."""

    def __init__(
        self,
        agent: EpisodeAgent,
        episode: Episode,
        lease_token: str,
        openai: OpenaiBaseUrlAndApiKey,
        *,
        lease_s: float,
    ) -> None:
        self._agent = agent
        self._lease_token = lease_token
        self._lease_s = lease_s
        self._heartbeat: asyncio.Task[None] | None = None
        self._lost: TinsmithError | None = None
        self._is_ended = False
        self.episode = episode
        """As it was claimed."""
        self.openai = openai
        """For an OpenAI client."""

    @property
    def episode_uuid(self) -> str:
        """The last part of its name."""
        return self.episode.episode_uuid

    @property
    def task(self) -> Any:
        """What the training loop says of the task."""
        return self.episode.task

    @property
    def type(self) -> str:
        """`train`, or `eval` if it is played to validate."""
        return self.episode.episode_type

    @property
    def is_held(self) -> bool:
        """Whether it was neither ended here nor, as far as is known, lost."""
        return not self._is_ended and self._lost is None

    def end(self, workflow_output: WorkflowOutput) -> Episode:
        """Submit what it was worth; see `EpisodeAgent.end_episode`.

        Returns:
            The episode as it ended.

        Raises:
            AbortedError: If the lease was lost; see `EpisodeAgent.end_episode`.
        """
        return self._agent.end_episode(self, workflow_output)

    def abort(self, reason: str = "") -> Episode:
        """Give it up; see `EpisodeAgent.abort_episode`.

        Returns:
            The episode, queued again or dead.

        Raises:
            TinsmithError: As `EpisodeAgent.end_episode`.
        """
        return self._agent.abort_episode(self, reason)

    def __repr__(self) -> str:
        return f"HeldEpisode({self.episode.name!r})"

    def begin_heartbeat(self) -> None:
        """Keep the lease from now on. Inside the background loop."""
        self._heartbeat = self._agent.core.background.spawn(self._keep_lease())

    async def submit(self, outcome: episode_pb2.EpisodeOutcome) -> Episode:
        """End it with an outcome. Inside the background loop.

        Returns:
            The episode as it ended.

        Raises:
            AbortedError: If the lease was lost.
        """
        request = episode_pb2.SubmitEpisodeRequest(
            name=self.episode.name, lease_token=self._lease_token, outcome=outcome
        )
        return await self._end(lambda c: c.episode.SubmitEpisode, request)

    async def give_up(self, reason: str) -> Episode:
        """Return it to the queue. Inside the background loop.

        Returns:
            The episode, queued again or dead.

        Raises:
            AbortedError: If the lease was lost.
        """
        request = episode_pb2.AbortEpisodeRequest(
            name=self.episode.name, lease_token=self._lease_token, reason=reason[:1000]
        )
        return await self._end(lambda c: c.episode.AbortEpisode, request)

    async def renew(self) -> bool:
        """Renew the lease, and return whether it still is one. Inside the background loop.

        Returns:
            Whether the lease still is one.

        Raises:
            TinsmithError: If the server cannot be reached.
        """
        request = episode_pb2.HeartbeatEpisodeRequest(
            name=self.episode.name, lease_token=self._lease_token
        )
        try:
            await self._agent.send(lambda c: c.episode.HeartbeatEpisode, request)
        except TinsmithError as error:
            if error.reason not in _OVER_REASONS:
                raise
            self._note_lost(error)
            return False
        return True

    async def _end(self, method: Callable[[Any], Any], request: Any) -> Episode:
        try:
            answer = await self._agent.send(method, request)
        except TinsmithError as error:
            if error.reason in _OVER_REASONS:
                self._note_lost(error)
                self._stop_heartbeat()
            raise
        self._is_ended = True
        self._stop_heartbeat()
        return decode_episode(answer)

    async def _keep_lease(self) -> None:
        # An agent that hangs must not hold its episode for ever.
        give_up_s = time.monotonic() + self._lease_s * _MAX_EPISODE_LEASES
        while time.monotonic() < give_up_s:
            await asyncio.sleep(self._lease_s / _HEARTBEATS_PER_LEASE)
            try:
                if not await self.renew():
                    return
            except TinsmithError as error:
                _LOG.warning(
                    "heartbeat failed", extra={"episode": self.episode.name, "error": str(error)}
                )
        _LOG.warning("held for too long, not kept any more", extra={"episode": self.episode.name})

    def _note_lost(self, error: TinsmithError) -> None:
        if self._lost is None and not self._is_ended:
            self._lost = error
            _LOG.warning("episode lost", extra={"episode": self.episode.name, "error": str(error)})

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None and self._heartbeat is not asyncio.current_task():
            self._heartbeat.cancel()


class EpisodeAgent:
    """Plays episodes of one queue; made by `Client.episodes.agent`.

    Methods block and may be called from any thread; those with `_async` are for asyncio code.
    """

    def __init__(self, claims: EpisodeClaims) -> None:
        self.core = claims.core
        self.queue = claims.queue
        self.client_id = claims.client_id
        self._claims = claims
        self._held: dict[str, HeldEpisode] = {}

    def begin_episode(
        self,
        discard_episode_timeout: float | None = None,
        episode_type: str = "train",
        *,
        allow_discard_timeout: float | None = None,
        timeout_s: float | None = None,
    ) -> tuple[str, OpenaiBaseUrlAndApiKey]:
        """Wait for an episode, claim it, and keep it until it is ended or this process dies.

        Args:
            discard_episode_timeout: Seconds without a sign of life of this process after which the
                episode is given to another agent; 240 by default. It is kept eight times as long
                at most.
            episode_type: `train`, `eval`, or `any` for both.
            allow_discard_timeout: Another name of `discard_episode_timeout`.
            timeout_s: How long to wait for an episode; the client's `operation_timeout_s` by
                default.

        Returns:
            The id of the episode, and what an OpenAI client needs.

        Raises:
            OperationTimeoutError: If there was none in time; it says what is waited for.

        Example:
            >>> episode, openai = agent.begin_episode(240.0)
        """
        lease_s = _lease_s(discard_episode_timeout, allow_discard_timeout)
        held = self.core.background.call(self._begin(lease_s, episode_type, timeout_s))
        return held.episode_uuid, held.openai

    async def begin_episode_async(
        self,
        discard_episode_timeout: float | None = None,
        episode_type: str = "train",
        *,
        allow_discard_timeout: float | None = None,
        timeout_s: float | None = None,
    ) -> tuple[str, OpenaiBaseUrlAndApiKey]:
        """Do as `begin_episode`, in the caller's event loop."""
        lease_s = _lease_s(discard_episode_timeout, allow_discard_timeout)
        held = await self.core.background.acall(self._begin(lease_s, episode_type, timeout_s))
        return held.episode_uuid, held.openai

    def end_episode(self, episode: str | HeldEpisode, workflow_output: WorkflowOutput) -> Episode:
        """Submit what an episode was worth.

        Returns:
            The episode as it ended.

        Raises:
            AbortedError: If the lease was lost (`LEASE_LOST`); the reward is not counted.
            FailedPreconditionError: If the training loop cancelled the episode (`EPISODE_ENDED`).
            TinsmithError: If the server cannot be reached; the episode stays held, and the call
                may be repeated.

        Example:
            >>> agent.end_episode(episode, WorkflowOutput(reward=1.0))
        """
        return self.core.background.call(self._submit(self.held(episode), workflow_output))

    async def end_episode_async(
        self, episode: str | HeldEpisode, workflow_output: WorkflowOutput
    ) -> Episode:
        """Do as `end_episode`, in the caller's event loop."""
        return await self.core.background.acall(self._submit(self.held(episode), workflow_output))

    def abort_episode(self, episode: str | HeldEpisode, reason: str = "") -> Episode:
        """Give an episode up, for another agent to play.

        Returns:
            The episode, queued again or dead.

        Raises:
            TinsmithError: As `end_episode`.

        Example:
            >>> agent.abort_episode(episode, "the tool was down")
        """
        return self.core.background.call(self._give_up(self.held(episode), reason))

    async def abort_episode_async(self, episode: str | HeldEpisode, reason: str = "") -> Episode:
        """Do as `abort_episode`, in the caller's event loop."""
        return await self.core.background.acall(self._give_up(self.held(episode), reason))

    def can_continue_episode(self, episode: str | HeldEpisode) -> bool:
        """Ask whether an episode is still this agent's; this renews the lease.

        Returns:
            Whether it is.

        Raises:
            TinsmithError: If the server cannot be reached.

        Example:
            >>> agent.can_continue_episode(episode)
        """
        return self.core.background.call(self.held(episode).renew())

    async def can_continue_episode_async(self, episode: str | HeldEpisode) -> bool:
        """Do as `can_continue_episode`, in the caller's event loop."""
        return await self.core.background.acall(self.held(episode).renew())

    @contextlib.contextmanager
    def episode(
        self,
        discard_episode_timeout: float | None = None,
        episode_type: str = ANY_TYPE,
        *,
        timeout_s: float | None = None,
    ) -> Iterator[HeldEpisode]:
        """Claim an episode for the time of a block, which is to end it; an exception aborts it.

        Episodes of both types are taken unless `episode_type` is `train` or `eval`; the `type` of
        the episode says which it is.

        Yields:
            A context manager that gives the episode.

        Raises:
            OperationTimeoutError: If there was none in time.
            FailedPreconditionError: If the block neither ended nor aborted it.

        Example:
            >>> with agent.episode() as episode:
            ...     episode.end(WorkflowOutput(reward=play(episode.task)))
        """
        uuid_, _ = self.begin_episode(discard_episode_timeout, episode_type, timeout_s=timeout_s)
        held = self._held[uuid_]
        try:
            yield held
        except BaseException as error:
            self._abort_after(held, error)
            raise
        if held.is_held:
            self.abort_episode(held, "the agent ended without a reward")
            raise FailedPreconditionError(
                f"the block of {held.episode.name} ended without a reward; the episode went back",
                remedy="call episode.end(WorkflowOutput(reward=...)) or episode.abort()",
            )

    def held(self, episode: str | HeldEpisode) -> HeldEpisode:
        """Return an episode that this agent claimed, by its id.

        Returns:
            The episode.

        Raises:
            FailedPreconditionError: If it did not claim it, or ended it.
        """
        if isinstance(episode, HeldEpisode):
            return episode
        if episode not in self._held:
            raise FailedPreconditionError(
                f"episode {episode} is not held by this agent", remedy="begin_episode() claims one"
            )
        return self._held[episode]

    async def send(self, method: Callable[[Any], Any], request: Any) -> Any:
        """Send a call about an episode until it is answered. Inside the background loop.

        Returns:
            The answer.

        Raises:
            TinsmithError: If the call fails for good.
        """
        return await self.core.transport.call(await self._claims.endpoint(), method, request)

    async def _begin(
        self, lease_s: float, episode_type: str, timeout_s: float | None
    ) -> HeldEpisode:
        timeout_s = self.core.settings.operation_timeout_s if timeout_s is None else timeout_s
        answer = await self._claims.claim(episode_type, lease_s=lease_s, timeout_s=timeout_s)
        return self._hold(answer, lease_s)

    def _hold(self, answer: episode_pb2.ClaimEpisodeResponse, lease_s: float) -> HeldEpisode:
        episode = decode_episode(answer.episode)
        openai = OpenaiBaseUrlAndApiKey(
            base_url=openai_base_url(self.core.settings.address),
            api_key=answer.api_key,
            model=episode.model,
            episode_uuid=episode.episode_uuid,
        )
        held = HeldEpisode(self, episode, answer.lease_token, openai, lease_s=lease_s)
        self._held[held.episode_uuid] = held
        held.begin_heartbeat()
        return held

    async def _submit(self, held: HeldEpisode, output: WorkflowOutput) -> Episode:
        outcome = encode_outcome(
            output.reward,
            is_success=output.is_success,
            metadata=output.metadata,
            log_metrics=output.log_metrics,
        )
        return await self._finish(held, held.submit(outcome))

    async def _give_up(self, held: HeldEpisode, reason: str) -> Episode:
        return await self._finish(held, held.give_up(reason))

    async def _finish(self, held: HeldEpisode, end: Awaitable[Episode]) -> Episode:
        """Wait for the end of an episode, and forget it unless it may still be ended."""
        try:
            return await end
        finally:
            if not held.is_held and self._held.get(held.episode_uuid) is held:
                del self._held[held.episode_uuid]

    def _abort_after(self, held: HeldEpisode, error: BaseException) -> None:
        if not held.is_held:
            return
        try:
            self.abort_episode(held, f"{type(error).__name__}: {error}")
        except TinsmithError as failure:
            # What the block raised matters more; the lease runs out by itself.
            _LOG.warning("not aborted", extra={"episode": held.episode.name, "error": str(failure)})


def openai_base_url(address: str) -> str:
    """Return the OpenAI endpoint of the server at an address."""
    url = address if address.startswith(("http://", "https://")) else f"http://{address}"
    return f"{url.rstrip('/')}/v1"


def _lease_s(discard_episode_timeout: float | None, allow_discard_timeout: float | None) -> float:
    if discard_episode_timeout is not None and allow_discard_timeout is not None:
        raise TypeError("give discard_episode_timeout or its alias allow_discard_timeout, not both")
    given = allow_discard_timeout if discard_episode_timeout is None else discard_episode_timeout
    return DEFAULT_TIMEOUT_S if given is None else float(given)
