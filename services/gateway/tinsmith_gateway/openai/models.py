"""`GET /v1/models`: base models, aliases, live runs and checkpoints of the project."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import JSONResponse, Response

from tinsmith import names
from tinsmith.rpc.lists import pages
from tinsmith.v1 import checkpoint_pb2, scheduler_pb2
from tinsmith_gateway.access.authentication import Credential
from tinsmith_gateway.endpoint import Call
from tinsmith_gateway.openai.model_calls import ModelCalls
from tinsmith_gateway.openai.text.model_names import BaseModel, Checkpoint, LatestWeights, latest_of
from tinsmith_gateway.services import Services
from tinsmith_gateway.upstream.pod_client import Upstream
from tinsmith_gateway.upstream.routing import CHECKPOINT_SERVICE, SCHEDULER_SERVICE
from tinsmith_runtime.errors import ModelNotFoundError, NotFoundError

_SERVED_STATES = (
    scheduler_pb2.TrainingRun.STATE_ACTIVE,
    scheduler_pb2.TrainingRun.STATE_MOVING,
)
_OWNER = "tinsmith"


class ModelList:
    """Says which names `model` may have."""

    def __init__(self, services: Services, calls: ModelCalls) -> None:
        self._upstream: Upstream = services.upstream
        self._aliases = services.config.aliases()
        self._calls = calls

    async def list_models(self, call: Call) -> Response:
        """Answer `GET /v1/models`."""
        return JSONResponse({"object": "list", "data": await self.entries(call.credential)})

    async def get_model(self, call: Call) -> Response:
        """Answer `GET /v1/models/{id}`."""
        return JSONResponse(await self.entry(call.credential, call.request.path_params["id"]))

    async def entries(self, credential: Credential) -> list[dict[str, Any]]:
        """Return what each name stands for, in OpenAI's form."""
        if credential.episode is not None:
            return [_encode(credential.episode.model, owner=credential.project)]
        served = await self._served(credential)
        models = [_encode_base(name, model) for name, model in sorted(served.items())]
        models += [
            _encode_base(alias, served[name])
            for alias, name in sorted(self._aliases.items())
            if name in served
        ]
        models += [
            _encode_run(run) async for run in self._runs(credential) if run.state in _SERVED_STATES
        ]
        if any(model.trainable for model in served.values()):
            # Checkpoints are the trainers' to list; a deployment that only samples has none.
            models += [_encode_checkpoint(found) async for found in self._checkpoints(credential)]
        return models

    async def entry(self, credential: Credential, name: str) -> dict[str, Any]:
        """Return what a name stands for, in OpenAI's form.

        Raises:
            NotFoundError: If it stands for nothing that the caller may use.
        """
        if credential.episode is not None:
            async with self._calls.target(credential, name):
                return _encode(credential.episode.model, owner=credential.project)
        missing: NotFoundError | None = None
        for source in await self._calls.sources(credential, name):
            try:
                match source:
                    case BaseModel(base):
                        served = await self._served(credential)
                        if base in served:
                            return _encode_base(name, served[base])
                    case LatestWeights(run):
                        found = await self._run(credential, run)
                        return {**_encode_run(found), "id": name}
                    case Checkpoint(checkpoint):
                        saved = await self._checkpoint(credential, checkpoint)
                        return {**_encode_checkpoint(saved), "id": name}
            except NotFoundError as error:
                missing = missing or error
        raise missing or ModelNotFoundError(f"there is no model {name!r}", model=name)

    async def context_of(self, credential: Credential, base_model: str) -> int | None:
        """Return how many tokens the context of a base model has; None under an episode's key."""
        if credential.episode is not None:
            return None
        served = (await self._served(credential)).get(base_model)
        return None if served is None else served.model.max_context_tokens

    async def _served(self, credential: Credential) -> dict[str, scheduler_pb2.ServedModel]:
        capabilities = await self._upstream.call(
            SCHEDULER_SERVICE,
            "GetCapabilities",
            scheduler_pb2.GetCapabilitiesRequest(parent=credential.project),
            scheduler_pb2.Capabilities,
            credential,
        )
        return {model.model.base_model: model for model in capabilities.models if model.sampleable}

    async def _runs(self, credential: Credential) -> AsyncIterator[scheduler_pb2.TrainingRun]:
        listed = pages(
            lambda each: self._upstream.call(
                SCHEDULER_SERVICE,
                "ListTrainingRuns",
                each,
                scheduler_pb2.ListTrainingRunsResponse,
                credential,
            ),
            scheduler_pb2.ListTrainingRunsRequest(parent=credential.project),
        )
        async for page in listed:
            for run in page.training_runs:
                yield run

    async def _checkpoints(
        self, credential: Credential
    ) -> AsyncIterator[checkpoint_pb2.Checkpoint]:
        listed = pages(
            lambda each: self._upstream.call(
                CHECKPOINT_SERVICE,
                "ListCheckpoints",
                each,
                checkpoint_pb2.ListCheckpointsResponse,
                credential,
            ),
            checkpoint_pb2.ListCheckpointsRequest(parent=f"{credential.project}/trainingRuns/-"),
        )
        async for page in listed:
            for checkpoint in page.checkpoints:
                yield checkpoint

    async def _run(self, credential: Credential, name: str) -> scheduler_pb2.TrainingRun:
        return await self._upstream.call(
            SCHEDULER_SERVICE,
            "GetTrainingRun",
            scheduler_pb2.GetTrainingRunRequest(name=name),
            scheduler_pb2.TrainingRun,
            credential,
        )

    async def _checkpoint(self, credential: Credential, name: str) -> checkpoint_pb2.Checkpoint:
        return await self._upstream.call(
            CHECKPOINT_SERVICE,
            "GetCheckpoint",
            checkpoint_pb2.GetCheckpointRequest(name=name),
            checkpoint_pb2.Checkpoint,
            credential,
        )


def _encode(name: str, *, owner: str = _OWNER, created: int = 0, **more: Any) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": owner, **more}


def _encode_base(name: str, served: scheduler_pb2.ServedModel) -> dict[str, Any]:
    model = served.model
    return _encode(name, root=model.base_model, max_model_len=model.max_context_tokens)


def _encode_run(run: scheduler_pb2.TrainingRun) -> dict[str, Any]:
    project = names.RunName.parse(run.name).project
    return _encode(
        latest_of(run.name),
        owner=f"projects/{project}",
        created=run.create_time.seconds,
        root=run.base_model,
        parent=run.name,
    )


def _encode_checkpoint(checkpoint: checkpoint_pb2.Checkpoint) -> dict[str, Any]:
    name = names.CheckpointName.parse(checkpoint.name)
    return _encode(
        names.shorten(checkpoint.name),
        owner=f"projects/{name.project}",
        created=checkpoint.create_time.seconds,
        root=checkpoint.base_model,
        parent=str(name.run_name),
    )
