"""Calls on the runs of a project, as coroutines of the background loop; `client` has the forms."""

from __future__ import annotations

from tinsmith.names import name_of
from tinsmith.rpc import codec
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.forms import call
from tinsmith.training.run_catalog import all_runs
from tinsmith.training.run_creation import continue_run
from tinsmith.training.training_run import TrainingRun
from tinsmith.types import TrainingRunInfo
from tinsmith.v1 import scheduler_pb2


class TrainingRunListCalls:
    """The training runs of a project, of this and earlier clients.

    Example:
        >>> for info in client.runs.list():
        ...     print(info.name, info.activity)
        >>> run = client.runs.get("run-1")
    """

    def __init__(self, core: ClientCore) -> None:
        self._core = core

    @call
    async def _list(self) -> list[TrainingRunInfo]:
        """Return the runs of the project, newest first.

        Returns:
            The runs: state, model, adapter and labels.

        Raises:
            TinsmithError: If the server cannot be reached or refuses the key.

        Example:
            >>> names = [run.name for run in client.runs.list()]
        """
        return [codec.decode_run(message, is_listed=True) for message in await all_runs(self._core)]

    @call
    async def _get(self, name: str | TrainingRunInfo) -> TrainingRun:
        """Continue a run, of this or an earlier client.

        Args:
            name: The run's resource name or id, or its entry of a list.

        Returns:
            The run; `pending_operations` has what was acknowledged and had not ended.

        Raises:
            NotFoundError: If there is no such run.

        Example:
            >>> run = client.runs.get("run-1")
        """
        return await continue_run(self._core, name_of(name))

    @call
    async def _delete(self, name: str | TrainingRun | TrainingRunInfo) -> None:
        """Delete a run with its operations and checkpoints; repeating it succeeds.

        Raises:
            TinsmithError: If the server cannot be reached or refuses the key.

        Example:
            >>> client.runs.delete(run)
        """
        request = scheduler_pb2.DeleteTrainingRunRequest(name=self._core.run_name(name_of(name)))
        await self._core.transport.call(
            self._core.scheduler, lambda c: c.scheduler.DeleteTrainingRun, request
        )
