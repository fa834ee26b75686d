"""The lists and resources that the page shows, each one call to the pod that has it."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.longrunning import operations_pb2
from google.protobuf.message import Message

from tinsmith.rpc.lists import pages
from tinsmith.v1 import (
    checkpoint_pb2,
    coordinator_pb2,
    episode_pb2,
    job_pb2,
    run_metrics_pb2,
    sampler_pb2,
    scheduler_pb2,
)
from tinsmith_gateway.access.authentication import Credential
from tinsmith_gateway.openai.tokenizers import TokenizerStore
from tinsmith_gateway.page.encoding import (
    Json,
    encode_curves,
    encode_message,
    encode_metric,
    encode_trajectory,
)
from tinsmith_gateway.page.results import results_of
from tinsmith_gateway.upstream.pod_client import Upstream
from tinsmith_gateway.upstream.routing import (
    CHECKPOINT_SERVICE,
    COORDINATOR_SERVICE,
    EPISODE_SERVICE,
    JOB_SERVICE,
    OPERATIONS_SERVICE,
    RUN_METRICS_SERVICE,
    SAMPLER_SERVICE,
    SCHEDULER_SERVICE,
)
from tinsmith_runtime.errors import InvalidFieldError, NotFoundError

_ALL_RUNS = "/trainingRuns/-"
_IMAGE = "\N{FRAME WITH PICTURE}"
_MAX_DIGITS = 15
_FIRST_UPDATE_S = 10.0

AnswerT = TypeVar("AnswerT", bound=Message)


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request of the page asks for.

    Attributes:
        credential: Its caller.
        query: Parameters, each with its values.
    """

    credential: Credential
    query: Mapping[str, tuple[str, ...]]

    def text(self, name: str) -> str:
        """Return a parameter; empty if it is absent."""
        return next(iter(self.query.get(name, ())), "")

    def number(self, name: str) -> int:
        """Return a parameter that is a whole number; 0 if it is absent.

        Raises:
            InvalidFieldError: If it is something else.
        """
        return parse_number(name, self.text(name) or "0")


Read = Callable[[Ask], Awaitable[Json]]


def parse_number(name: str, text: str) -> int:
    """Return a whole number of the query.

    Raises:
        InvalidFieldError: If it is none.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise InvalidFieldError(name, "must be a whole number")
    return int(text)


class Resources:
    """Reads for the page."""

    def __init__(self, upstream: Upstream, tokenizers: TokenizerStore) -> None:
        self._upstream = upstream
        self._tokenizers = tokenizers
        self.lists: Mapping[str, Read] = {
            "capabilities": self._capabilities,
            "runs": self._runs,
            "metrics": self._metrics,
            "checkpoints": self._checkpoints,
            "jobs": self._jobs,
            "episodes": self._episodes,
            "matches": self._matches,
            "samplers": self._samplers,
        }
        """What can be watched, by its name in a path."""

    async def me(self, ask: Ask) -> Json:
        """Return what the caller is."""
        caller = ask.credential.caller
        return {"project": caller.project, "role": str(caller.role), "key_id": caller.key_id}

    async def run(self, ask: Ask, run: str) -> Json:
        """Return a run, and why it could not be placed if it failed."""
        request = scheduler_pb2.GetTrainingRunRequest(name=_run_name(ask, run))
        found = await self._call(
            ask, SCHEDULER_SERVICE, "GetTrainingRun", request, scheduler_pb2.TrainingRun
        )
        encoded = encode_message(found)
        if found.state == scheduler_pb2.TrainingRun.STATE_FAILED:
            creation = await self._call(
                ask,
                OPERATIONS_SERVICE,
                "GetOperation",
                operations_pb2.GetOperationRequest(name=f"{found.name}/operations/create"),
                operations_pb2.Operation,
            )
            encoded["failure"] = creation.error.message
        return encoded

    async def curves(self, ask: Ask, run: str, *, width: int = 0, after_revision: int = 0) -> Json:
        """Return curves of a run: of the metrics `name`, in at most `max_points` points."""
        request = run_metrics_pb2.QueryRunMetricsRequest(
            run=_run_name(ask, run),
            names=ask.query.get("name", ()),
            min_step=ask.number("min_step"),
            max_points=ask.number("max_points"),
            bucket_steps=width,
            after_revision=after_revision,
        )
        if ask.text("max_step"):
            request.max_step = ask.number("max_step")
        answer = await self._call(
            ask,
            RUN_METRICS_SERVICE,
            "QueryRunMetrics",
            request,
            run_metrics_pb2.QueryRunMetricsResponse,
        )
        return encode_curves(answer)

    async def run_checkpoints(self, ask: Ask, run: str) -> Json:
        """Return checkpoints of a run."""
        return await self._list_checkpoints(ask, _run_name(ask, run))

    async def job(self, ask: Ask, job: str) -> Json:
        """Return a job."""
        request = job_pb2.GetTrainingJobRequest(name=f"{ask.credential.project}/trainingJobs/{job}")
        return encode_message(
            await self._call(ask, JOB_SERVICE, "GetTrainingJob", request, job_pb2.TrainingJob)
        )

    async def episode(self, ask: Ask, episode: str) -> Json:
        """Return an episode with its trajectories, token by token."""
        request = episode_pb2.GetEpisodeRequest(
            name=f"{ask.credential.project}/episodes/{episode}", include_trajectories=True
        )
        found = await self._call(ask, EPISODE_SERVICE, "GetEpisode", request, episode_pb2.Episode)
        trajectories = [encode_trajectory(each) for each in found.trajectories]
        await self._add_texts(ask, found.sampling_session, trajectories)
        found.ClearField("trajectories")
        return {**encode_message(found), "trajectories": trajectories}

    async def match(self, ask: Ask, match: str) -> Json:
        """Return a match with what came of the games that the coordinator still has."""
        request = coordinator_pb2.WatchMatchRequest(
            name=f"{ask.credential.project}/matches/{match}"
        )
        updates = self._upstream.stream(
            COORDINATOR_SERVICE,
            "WatchMatch",
            request,
            coordinator_pb2.MatchUpdate,
            ask.credential,
            timeout_s=_FIRST_UPDATE_S,
        )
        async with contextlib.aclosing(updates):
            first = await anext(updates)
        return {**encode_message(first.match), "results": results_of(first.games)}

    async def _add_texts(self, ask: Ask, session: str, trajectories: list[Json]) -> None:
        """Add what each token stands for, as long as the model is served."""
        request = scheduler_pb2.GetSamplingSessionRequest(name=session)
        try:
            found = await self._call(
                ask, SCHEDULER_SERVICE, "GetSamplingSession", request, scheduler_pb2.SamplingSession
            )
            tokenizer = await self._tokenizers.get(found.base_model, ask.credential)
        except NotFoundError:
            # The session ended, or no pod serves the model any more: there are the numbers still.
            return

        def texts(tokens: list[int]) -> list[str]:
            return [_IMAGE if token < 0 else tokenizer.text_of(token) for token in tokens]

        for trajectory in trajectories:
            trajectory["texts"] = await tokenizer.aside(texts, trajectory["tokens"])

    async def _capabilities(self, ask: Ask) -> Json:
        request = scheduler_pb2.GetCapabilitiesRequest(parent=ask.credential.project)
        return encode_message(
            await self._call(
                ask, SCHEDULER_SERVICE, "GetCapabilities", request, scheduler_pb2.Capabilities
            )
        )

    async def _runs(self, ask: Ask) -> Json:
        """Return runs, each with the last values of the metrics `summary`."""
        request = scheduler_pb2.ListTrainingRunsRequest(parent=ask.credential.project)
        _set_page(ask, request)
        answer = await self._call(
            ask,
            SCHEDULER_SERVICE,
            "ListTrainingRuns",
            request,
            scheduler_pb2.ListTrainingRunsResponse,
        )
        names = ask.query.get("summary", ())
        last = await self._last_values(ask, answer.training_runs, names) if names else {}
        runs = [
            {**encode_message(run), "metrics": last.get(run.name, {})}
            for run in answer.training_runs
        ]
        return {"training_runs": runs, "next_page_token": answer.next_page_token}

    async def _last_values(
        self, ask: Ask, runs: Sequence[scheduler_pb2.TrainingRun], names: Sequence[str]
    ) -> dict[str, Json]:
        found: dict[str, Json] = {}
        if not runs:
            return found
        request = run_metrics_pb2.ListRunMetricsRequest(
            parent=ask.credential.project + _ALL_RUNS,
            names=names,
            run_ids=[run.name.rpartition("/")[2] for run in runs],
        )
        listed = pages(
            lambda each: self._call(
                ask,
                RUN_METRICS_SERVICE,
                "ListRunMetrics",
                each,
                run_metrics_pb2.ListRunMetricsResponse,
            ),
            request,
            page_size=1000,
        )
        async for page in listed:
            for metric in page.metrics:
                found.setdefault(metric.run, {})[metric.name] = encode_metric(metric)
        return found

    async def _metrics(self, ask: Ask) -> Json:
        request = run_metrics_pb2.ListRunMetricsRequest(
            parent=ask.credential.project + _ALL_RUNS, names=ask.query.get("name", ())
        )
        _set_page(ask, request)
        answer = await self._call(
            ask,
            RUN_METRICS_SERVICE,
            "ListRunMetrics",
            request,
            run_metrics_pb2.ListRunMetricsResponse,
        )
        return {
            "metrics": [encode_metric(metric) for metric in answer.metrics],
            "next_page_token": answer.next_page_token,
        }

    async def _checkpoints(self, ask: Ask) -> Json:
        return await self._list_checkpoints(ask, ask.credential.project + _ALL_RUNS)

    async def _list_checkpoints(self, ask: Ask, parent: str) -> Json:
        request = checkpoint_pb2.ListCheckpointsRequest(parent=parent)
        return await self._list(
            ask,
            CHECKPOINT_SERVICE,
            "ListCheckpoints",
            request,
            checkpoint_pb2.ListCheckpointsResponse,
        )

    async def _jobs(self, ask: Ask) -> Json:
        request = job_pb2.ListTrainingJobsRequest(parent=ask.credential.project)
        return await self._list(
            ask, JOB_SERVICE, "ListTrainingJobs", request, job_pb2.ListTrainingJobsResponse
        )

    async def _episodes(self, ask: Ask) -> Json:
        request = episode_pb2.ListEpisodesRequest(
            parent=ask.credential.project, queue=ask.text("queue")
        )
        return await self._list(
            ask, EPISODE_SERVICE, "ListEpisodes", request, episode_pb2.ListEpisodesResponse
        )

    async def _matches(self, ask: Ask) -> Json:
        request = coordinator_pb2.ListMatchesRequest(parent=ask.credential.project)
        return await self._list(
            ask, COORDINATOR_SERVICE, "ListMatches", request, coordinator_pb2.ListMatchesResponse
        )

    async def _samplers(self, ask: Ask) -> Json:
        request = sampler_pb2.ListLoadedWeightsRequest(parent=ask.credential.project)
        return await self._list(
            ask,
            SAMPLER_SERVICE,
            "ListLoadedWeights",
            request,
            sampler_pb2.ListLoadedWeightsResponse,
        )

    async def _list(
        self, ask: Ask, service: str, method: str, request: Any, response: type[AnswerT]
    ) -> Json:
        _set_page(ask, request)
        return encode_message(await self._call(ask, service, method, request, response))

    async def _call(
        self, ask: Ask, service: str, method: str, request: Message, response: type[AnswerT]
    ) -> AnswerT:
        return await self._upstream.call(service, method, request, response, ask.credential)


def _set_page(ask: Ask, request: Any) -> None:
    request.page_size = ask.number("page_size")
    request.page_token = ask.text("page_token")


def _run_name(ask: Ask, run: str) -> str:
    return f"{ask.credential.project}/trainingRuns/{run}"
