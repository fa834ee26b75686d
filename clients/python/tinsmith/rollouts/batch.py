"""Rollouts that the server plays: a future of the groups, and the episodes as they end.

The future and each loop over the episodes read the batch for themselves, from a revision on. What
broke off goes on where it was, so a restart of the server or of the coordinator is a pause.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing

from google.longrunning import operations_pb2

from tinsmith.errors import NotFoundError, TinsmithError
from tinsmith.rollouts.batch_codec import (
    EnvironmentTask,
    PlayedEpisode,
    decode_episode,
    decode_groups,
    decode_report,
)
from tinsmith.rollouts.errors import NoRolloutsError
from tinsmith.rollouts.group_plan import GroupConfig
from tinsmith.rollouts.groups import GroupReport, GroupResult, UnusedPlay, list_dropped
from tinsmith.rollouts.keeping import KeepResult, keep_before_error, keep_nothing
from tinsmith.rollouts.trajectory import Trajectory
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.error_codec import decode_status
from tinsmith.rpc.futures import ResultFuture
from tinsmith.rpc.transport import Backoff, Endpoint, is_away
from tinsmith.v1 import rollout_pb2

_NO_ROLLOUTS = "NO_ROLLOUTS"


class RolloutBatch(ResultFuture[GroupResult[EnvironmentTask]]):
    """Groups of episodes that the server plays: a future of them all.

    Example:
        >>> batch = client.rollouts.generate("guessing", [1, 2], sampler=sampler)
        >>> for episode in batch.episodes():
        ...     print(episode.task.seed, episode.trajectory.reward)
        >>> groups = batch.result().groups
    """

    def __init__(
        self,
        core: ClientCore,
        endpoint: Endpoint,
        operation: operations_pb2.Operation,
        tasks: Sequence[EnvironmentTask],
        config: GroupConfig,
        batch_key: str = "",
        keep: KeepResult = keep_nothing,
        note_episode: Callable[[], None] = lambda: None,
    ) -> None:
        self.operation_name: str = operation.name
        """Name of the operation."""
        self.name = operation.name.rpartition("/operations/")[0]
        """Resource name of the batch: `projects/{project}/rolloutBatches/{batch}`."""
        self._core = core
        self._endpoint = endpoint
        self._tasks = tuple(tasks)
        self._config = config
        self._batch_key = batch_key
        self._keep = keep
        self._note_episode = note_episode
        super().__init__(
            core.background,
            what=f"rollouts {self.name}",
            default_timeout_s=core.settings.operation_timeout_s,
            future=core.background.submit(self._collect()),
        )

    def __repr__(self) -> str:
        return f"RolloutBatch({self.name!r})"

    def episodes(self) -> EpisodeStream:
        """Return the plays as they end, from the first on, finished and failed ones.

        Returns:
            A stream to loop over, once, with `for` or `async for`; it ends with the batch.

        Raises:
            TinsmithError: From the loop, if the batch failed, behind its last episode.

        Example:
            >>> rewards = [each.trajectory.reward for each in batch.episodes() if each.trajectory]
        """
        return EpisodeStream(self._core, self._read())

    def report(self) -> GroupReport:
        """Return what became of the episodes so far.

        Raises:
            TinsmithError: If the server cannot be reached.
        """
        return self._core.background.call(self._report())

    async def report_async(self) -> GroupReport:
        """Do as `report`, without blocking."""
        return await self._core.background.acall(self._report())

    def cancel(self) -> None:
        """End the batch: nothing more is played, what had ended is kept. May be called twice.

        Raises:
            TinsmithError: If the server cannot be reached.
        """
        self._core.background.call(self._cancel())

    async def cancel_async(self) -> None:
        """Do as `cancel`, without blocking."""
        await self._core.background.acall(self._cancel())

    def delete(self) -> None:
        """Remove the batch with its episodes; one that goes on is cancelled. May be called twice.

        Raises:
            TinsmithError: If the server cannot be reached.
        """
        self._core.background.call(self._delete())

    async def delete_async(self) -> None:
        """Do as `delete`, without blocking."""
        await self._core.background.acall(self._delete())

    async def _cancel(self) -> None:
        await self._core.transport.call(
            self._endpoint,
            lambda c: c.operations.CancelOperation,
            operations_pb2.CancelOperationRequest(name=self.operation_name),
        )

    async def _delete(self) -> None:
        request = operations_pb2.DeleteOperationRequest(name=self.operation_name)
        try:
            await self._core.transport.call(
                self._endpoint, lambda c: c.operations.DeleteOperation, request
            )
        except NotFoundError:
            return  # Removed before, perhaps by an earlier attempt at this call.

    async def _report(self) -> GroupReport:
        return decode_report((await self._metadata()).report)

    async def _describe(self) -> str:
        try:
            return (await self._metadata()).waiting_for
        except TinsmithError as error:
            return error.message

    async def _metadata(self) -> rollout_pb2.GenerateRolloutsMetadata:
        operation = await self._core.transport.call(
            self._endpoint,
            lambda c: c.operations.GetOperation,
            operations_pb2.GetOperationRequest(name=self.operation_name),
        )
        metadata = rollout_pb2.GenerateRolloutsMetadata()
        operation.metadata.Unpack(metadata)
        return metadata

    async def _collect(self) -> GroupResult[EnvironmentTask]:
        finished: dict[tuple[int, int], Trajectory] = {}
        failed: list[UnusedPlay[EnvironmentTask]] = []
        async for update in self._updates():
            for message in update.episodes:
                self._note_episode()
                episode = self._decode(message)
                if episode.trajectory is not None:
                    finished[episode.task_index, episode.member_index] = episode.trajectory
                elif episode.unfinished is not None:
                    failed.append(UnusedPlay(episode.task, episode.unfinished))
            operation = update.operation
        if operation.HasField("error"):
            failure = _error_of(operation)
            unused = (*failed, *list_dropped(self._tasks, {}, finished))
            await asyncio.to_thread(keep_before_error, self._keep, unused)
            if isinstance(failure, NoRolloutsError):
                failure.unused = unused
            raise failure
        response = rollout_pb2.GenerateRolloutsResponse()
        operation.response.Unpack(response)
        result = decode_groups(response, self._tasks, finished, failed, self._config)
        await asyncio.to_thread(self._keep, result)
        return result

    def _decode(self, message: rollout_pb2.RolloutEpisode) -> PlayedEpisode:
        return decode_episode(message, self._tasks, batch_key=self._batch_key)

    async def _read(self) -> AsyncGenerator[PlayedEpisode, None]:
        async with aclosing(self._updates()) as updates:
            async for update in updates:
                for message in update.episodes:
                    yield self._decode(message)
        if update.operation.HasField("error"):
            raise _error_of(update.operation)

    async def _updates(self) -> AsyncGenerator[rollout_pb2.RolloutUpdate, None]:
        """Yield what ended, until the operation is done; the last one says how."""
        backoff = Backoff(self._core.settings.retry)
        request = rollout_pb2.WatchRolloutEpisodesRequest(name=self.name)
        while True:
            stream = self._core.transport.stream_once(
                self._endpoint, lambda c: c.coordinator.WatchRolloutEpisodes, request
            )
            try:
                async for update in stream:
                    request.after_revision = update.revision
                    backoff = Backoff(self._core.settings.retry)
                    yield update
                    if update.operation.done:
                        return
            except TinsmithError as error:
                delay_s = backoff.delay_s(error, time.monotonic())
                if delay_s is None:
                    raise backoff.gave_up(error, time.monotonic()) from error.__cause__
                await asyncio.sleep(delay_s)
                if is_away(error):
                    await self._endpoint.relocate()
            finally:
                await stream.aclose()


class EpisodeStream:
    """Episodes of a batch as they end; loop over it with `for` or `async for`, once."""

    def __init__(self, core: ClientCore, episodes: AsyncGenerator[PlayedEpisode, None]) -> None:
        self._background = core.background
        self._episodes = episodes

    def __iter__(self) -> Iterator[PlayedEpisode]:
        return self

    def __next__(self) -> PlayedEpisode:
        episode = self._background.call(self._next())
        if episode is None:
            raise StopIteration
        return episode

    def __aiter__(self) -> AsyncIterator[PlayedEpisode]:
        return self

    async def __anext__(self) -> PlayedEpisode:
        episode = await self._background.acall(self._next())
        if episode is None:
            raise StopAsyncIteration
        return episode

    def close(self) -> None:
        """Read no more; the batch goes on. May be called twice."""
        self._background.call(self._episodes.aclose())

    async def close_async(self) -> None:
        """Do as `close`, in the caller's event loop."""
        await self._background.acall(self._episodes.aclose())

    async def _next(self) -> PlayedEpisode | None:
        return await anext(self._episodes, None)


def _error_of(operation: operations_pb2.Operation) -> TinsmithError:
    error = decode_status(operation.error)
    if error.reason == _NO_ROLLOUTS:
        # The class that `run_groups` raises.
        return NoRolloutsError(error.message)
    return error
