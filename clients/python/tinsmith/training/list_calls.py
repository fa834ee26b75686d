"""Calls on the runs of a project, as coroutines; `list_forms.py` has the forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tinsmith.errors import ConfigurationError, NotFoundError
from tinsmith.names import name_of
from tinsmith.rpc import codec
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.forms import call
from tinsmith.rpc.lists import read_pages
from tinsmith.training.metric_turns import Reading, Side, find_crossing, find_first
from tinsmith.training.past_steps import MetricTurn, StepReplay
from tinsmith.training.run_catalog import all_runs
from tinsmith.training.run_creation import (
    continue_run,
    continued,
    delete_run,
    fork_run,
    update_run,
)
from tinsmith.training.run_forms import TrainingRun
from tinsmith.training.step_replay import replay_step
from tinsmith.types import LastMetric, MetricCurve, TrainingRunInfo
from tinsmith.v1 import run_metrics_pb2

_MAX_POINTS = 10_000
"""The most that one query of curves answers with."""


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
        return [codec.decode_run(message) for message in await all_runs(self._core)]

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
    async def _fork(
        self,
        run: str | TrainingRun | TrainingRunInfo,
        step: int,
        *,
        display_name: str = "",
        user_metadata: Mapping[str, str] | None = None,
        run_id: str = "",
        history_retention_seconds: float | None = None,
    ) -> TrainingRun:
        """Create a run whose state is that of another one after an optimizer step, bit for bit.

        Weights, moments and version are those of that moment: the nearest snapshot, and the
        operations after it, computed again when the fork is first used. The source is not touched,
        and may be deleted.

        Args:
            run: The run to fork, its resource name or its id; it may be one of the past.
            step: How many optimizer steps it had; 0 is its beginning. Where loads led it to a
                version twice, the later one is meant.
            display_name: What the fork is, for people.
            user_metadata: Labels of the fork.
            run_id: Last part of its name; drawn by the server if empty.
            history_retention_seconds: How long its own past is kept; 25 h if None, however long
                that of the source is.

        Returns:
            The fork.

        Raises:
            NotFoundError: If there is no such run, or it never had such a step.
            FailedPreconditionError: If what it did there is not kept any more; the message says
                which steps are.
            ResourceExhaustedError: If the project has too many runs.

        Example:
            >>> fork = client.runs.fork("run-1", 120)
        """
        message = await fork_run(
            self._core,
            name_of(run),
            step,
            display_name=display_name,
            labels=user_metadata,
            run_id=run_id,
            history_retention_seconds=history_retention_seconds,
        )
        return await continued(self._core, message)

    @call
    async def _replay(self, run: str | TrainingRun | TrainingRunInfo, step: int) -> StepReplay:
        """Play a step of a run again with its inputs, and compare with what is recorded.

        A short-lived fork executes the operations of the step anew. The run itself is only read.

        Args:
            run: The run, its resource name or its id.
            step: The step, by the version that it made: from 1.

        Returns:
            The operations of the step, each with its metrics now and as they are recorded.

        Raises:
            NotFoundError: If there is no such run, or no optimizer step made this version.
            FailedPreconditionError: If what the run did there is not kept any more.

        Example:
            >>> assert client.runs.replay("run-1", 120).is_equal
        """
        return await replay_step(self._core, name_of(run), step)

    @call
    async def _find_turn(
        self,
        run: str | TrainingRun | TrainingRunInfo,
        metric: str = "loss",
        *,
        above: float | None = None,
        below: float | None = None,
        good: int | None = None,
        bad: int | None = None,
    ) -> MetricTurn:
        """Find the step where a metric turned, from what is recorded of the run.

        That is the first step beyond a threshold. Given a good and a bad step, it is the first
        from which on the metric was nearer to its value at the bad one.

        Args:
            run: The run, its resource name or its id.
            metric: Its name as `get_metrics` has it; `trainer/` may be left out.
            above: What it must not exceed.
            below: What it must not fall short of.
            good: A step where it was well; with `bad`.
            bad: A later step where it was not.

        Returns:
            The step, as the metric counts them, and the values there and before.

        Raises:
            ConfigurationError: Unless one of `above`, `below`, and `good` with `bad` is given.
            NotFoundError: If there is no such run or metric, or it never turned.

        Example:
            >>> turn = client.runs.find_turn("run-1", "loss", above=5.0)
            >>> fork = client.runs.fork("run-1", turn.step)
        """
        name = self._core.run_name(name_of(run))
        chosen = [above is not None, below is not None, good is not None and bad is not None]
        if sum(chosen) != 1 or (good is None) != (bad is None):
            raise ConfigurationError("give one of above, below, and good with bad")
        metric = await self._recorded_metric(name, metric)

        async def query(low: int, high: int | None) -> Reading | None:
            answer = await self._query_metrics(
                name, [metric], min_step=low, max_step=high, max_points=_MAX_POINTS
            )
            curves = [codec.decode_curve(curve) for curve in answer.curves]
            return Reading(curves[0], answer.bucket_steps) if curves else None

        if good is not None and bad is not None:
            return await find_crossing(query, metric, good, bad)
        threshold = above if above is not None else below
        side = Side(float(threshold or 0.0), is_above=above is not None)
        return await find_first(query, metric, side)

    async def _recorded_metric(self, name: str, metric: str) -> str:
        """Return the name under which a metric of a run is recorded."""
        answer = await self._query_metrics(name, [metric, f"trainer/{metric}"], max_points=1)
        found = {curve.name for curve in answer.curves}
        for each in (metric, f"trainer/{metric}"):
            if each in found:
                return each
        raise NotFoundError(f"no metric {metric} is recorded of {name}")

    async def _query_metrics(
        self,
        name: str,
        names: Sequence[str],
        *,
        min_step: int = 0,
        max_step: int | None = None,
        max_points: int,
    ) -> run_metrics_pb2.QueryRunMetricsResponse:
        request = run_metrics_pb2.QueryRunMetricsRequest(
            run=name, names=names, min_step=min_step, max_step=max_step, max_points=max_points
        )
        return await self._core.transport.call(
            self._core.scheduler, lambda c: c.run_metrics.QueryRunMetrics, request
        )

    def log_metrics(
        self, name: str | TrainingRun | TrainingRunInfo, metrics: Mapping[str, float], *, step: int
    ) -> None:
        """Have the server keep metrics of a run, as `TrainingRun.log_metrics`.

        Args:
            name: The run, its resource name or its id.
            metrics: Values by name.
            step: The step that they are of, from 0.

        Example:
            >>> client.runs.log_metrics("run-1", {"eval/accuracy": 0.5}, step=100)
        """
        self._core.metric_log.add(self._core.run_name(name_of(name)), metrics, step)

    @call
    async def _get_metrics(
        self,
        name: str | TrainingRun | TrainingRunInfo,
        names: Sequence[str] = (),
        *,
        min_step: int = 0,
        max_step: int | None = None,
        max_points: int = 500,
    ) -> dict[str, MetricCurve]:
        """Return the curves of a run: what was logged, and `trainer/...` that the trainer measured.

        Args:
            name: The run, its resource name or its id.
            names: The metrics; all if empty.
            min_step: First step.
            max_step: Last step; None for the last that was recorded.
            max_points: Limits the points of each curve. Steps are put together in buckets of a
                power of two, so that a long curve has few.

        Returns:
            Curves by name.

        Raises:
            NotFoundError: If there is no such run.

        Example:
            >>> curve = client.runs.get_metrics("run-1", ["reward"])["reward"]
        """
        answer = await self._query_metrics(
            self._core.run_name(name_of(name)),
            names,
            min_step=min_step,
            max_step=max_step,
            max_points=max_points,
        )
        return {curve.name: codec.decode_curve(curve) for curve in answer.curves}

    @call
    async def _list_metrics(
        self, names: Sequence[str] = (), *, run: str | TrainingRun | TrainingRunInfo = "-"
    ) -> list[LastMetric]:
        """Return where metrics stand: the newest point of each, of all runs or of one.

        Args:
            names: The metrics, at most 64; all if empty.
            run: The run, its resource name or its id; `-` for all.

        Returns:
            The points, by run and name.

        Raises:
            NotFoundError: If there is no such run.

        Example:
            >>> rewards = client.runs.list_metrics(["reward"])
        """
        named = name_of(run)
        parent = f"{self._core.project}/trainingRuns/-" if named == "-" else ""
        pages = read_pages(
            self._core.transport,
            self._core.scheduler,
            lambda c: c.run_metrics.ListRunMetrics,
            run_metrics_pb2.ListRunMetricsRequest(
                parent=parent or self._core.run_name(named), names=names, page_size=1000
            ),
        )
        return [codec.decode_last_metric(each) async for page in pages for each in page.metrics]

    @call
    async def _update(
        self, name: str | TrainingRun | TrainingRunInfo, *, history_retention_seconds: float
    ) -> TrainingRunInfo:
        """Change how long the past of a run is kept, to be forked and replayed.

        A longer time keeps what is still there; a shorter one drops what is older.

        Args:
            name: The run, its resource name or its id.
            history_retention_seconds: Time after the end of each operation: 25 h at least, 90 days
                at most unless the server is set otherwise.

        Returns:
            The run.

        Raises:
            NotFoundError: If there is no such run.
            InvalidArgumentError: If the time is too short or too long.
            UnavailableError: If no trainer of the run answers.

        Example:
            >>> client.runs.update("run-1", history_retention_seconds=30 * 24 * 3600)
        """
        message = await update_run(
            self._core,
            self._core.run_name(name_of(name)),
            history_retention_seconds=history_retention_seconds,
        )
        return codec.decode_run(message)

    @call
    async def _delete(self, name: str | TrainingRun | TrainingRunInfo) -> None:
        """Delete a run with its operations and checkpoints; repeating it succeeds.

        Raises:
            TinsmithError: If the server cannot be reached or refuses the key.

        Example:
            >>> client.runs.delete(run)
        """
        await delete_run(self._core, self._core.run_name(name_of(name)))
