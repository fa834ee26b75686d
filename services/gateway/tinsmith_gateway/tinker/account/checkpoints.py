"""Training runs and checkpoints, as the REST and command-line clients see them."""

from __future__ import annotations

import asyncio
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf import field_mask_pb2, timestamp_pb2
from starlette.responses import JSONResponse, Response

from tinsmith.rpc.durations import encode_optional_duration
from tinsmith.rpc.error_codec import decode_status
from tinsmith.rpc.lists import pages
from tinsmith.v1 import checkpoint_pb2, models_pb2, scheduler_pb2
from tinsmith_gateway.endpoint import Call
from tinsmith_gateway.tinker.account.downloads import Downloads
from tinsmith_gateway.tinker.wire import age_encryption, bodies, ids, query_parameters
from tinsmith_gateway.tinker.wire.contract_calls import Native, iso_time, user_native
from tinsmith_runtime.errors import (
    CheckpointNotFoundError,
    FailedPreconditionError,
    InvalidFieldError,
)

_COPY_TIMEOUT_S = 600.0
_SAVE_LABEL = "tinsmith.copy"
_Checkpoint = checkpoint_pb2.Checkpoint


class Checkpoints:
    """The endpoints of runs and checkpoints.

    Args:
        downloads: Says from where files can be fetched.
    """

    def __init__(self, downloads: Downloads) -> None:
        self._downloads = downloads

    async def list_runs(self, call: Call) -> Response:
        """List training runs, newest first."""
        native, page = user_native(call), query_parameters.page(call.request)
        runs = await _all_runs(native)
        by_run = await _checkpoints_by_run(native)
        return JSONResponse(
            {
                "training_runs": [
                    _encode_run(native, run, by_run.get(run.name, [])) for run in page.cut(runs)
                ],
                "cursor": page.cursor(len(runs)),
            }
        )

    async def get_run(self, call: Call) -> Response:
        """Describe a training run."""
        native = user_native(call)
        run = await native.run(call.request.path_params["model_id"])
        return JSONResponse(_encode_run(native, run, await native.checkpoints(run.name)))

    async def list_of_run(self, call: Call) -> Response:
        """List the checkpoints of a run, newest first."""
        native = user_native(call)
        run = await native.run(call.request.path_params["model_id"])
        return JSONResponse(
            {"checkpoints": [_encode(one) for one in _shown(await native.checkpoints(run.name))]}
        )

    async def list_all(self, call: Call) -> Response:
        """List the checkpoints of all runs, newest first."""
        native, page = user_native(call), query_parameters.page(call.request)
        every = _shown(await native.checkpoints(f"projects/{native.project}/trainingRuns/-"))
        return JSONResponse(
            {
                "checkpoints": [_encode(one) for one in page.cut(every)],
                "cursor": page.cursor(len(every)),
            }
        )

    async def delete(self, call: Call) -> Response:
        """Delete a checkpoint."""
        native = user_native(call)
        path = _path(call)
        own = await native.checkpoints(ids.run_name(native.project, path.model_id))
        matches = ids.all_matches(path, own)
        if not matches:
            raise CheckpointNotFoundError(f"{path} does not exist", checkpoint=path)
        for match in matches:
            request = checkpoint_pb2.DeleteCheckpointRequest(name=match.name)
            await native.checkpoint_service(
                "DeleteCheckpoint", request, checkpoint_pb2.DeleteCheckpointResponse
            )
        return JSONResponse({})

    async def publish(self, call: Call) -> Response:
        """Let every project read a checkpoint."""
        native = user_native(call)
        name = await _own(native, _path(call))
        request = checkpoint_pb2.PublishCheckpointRequest(name=name)
        await native.checkpoint_service("PublishCheckpoint", request, _Checkpoint)
        return JSONResponse({})

    async def unpublish(self, call: Call) -> Response:
        """Take that back."""
        native = user_native(call)
        name = await _own(native, _path(call))
        request = checkpoint_pb2.UnpublishCheckpointRequest(name=name)
        await native.checkpoint_service("UnpublishCheckpoint", request, _Checkpoint)
        return JSONResponse({})

    async def set_ttl(self, call: Call) -> Response:
        """Set or end the expiry of a checkpoint."""
        body = await call.parse(bodies.CheckpointTtl)
        native = user_native(call)
        request = checkpoint_pb2.UpdateCheckpointRequest(
            name=await _own(native, _path(call)),
            update_mask=field_mask_pb2.FieldMask(paths=["ttl"]),
            ttl=encode_optional_duration(body.ttl_seconds),
        )
        await native.checkpoint_service("UpdateCheckpoint", request, _Checkpoint)
        return JSONResponse({})

    async def external_urls(self, call: Call) -> Response:
        """Say from where the files of a checkpoint can be fetched."""
        path = _path(call)
        if path.kind != ids.EXTERNAL:
            raise InvalidFieldError("checkpoint_id", "must be external_weights/<name>")
        return await self._downloads.urls(call, path)

    async def info(self, call: Call) -> Response:
        """Say what is needed to load a checkpoint."""
        body = await call.parse(bodies.PathReference)
        native = user_native(call)
        checkpoint = await native.checkpoint(ids.TinkerPath.parse(body.tinker_path, "tinker_path"))
        return JSONResponse(
            {"base_model": checkpoint.base_model, **_encode_adapter(checkpoint.adapter)}
        )

    async def copy(self, call: Call) -> Response:
        """Copy a checkpoint into a run of its own, which is never trained."""
        body = await call.parse(bodies.CopyWeights)
        native = user_native(call)
        if body.weights_access_token or call.request.headers.get("x-tinker-weights-access-token"):
            raise InvalidFieldError(
                "weights_access_token", "is not taken: publish the checkpoint in its own project"
            )
        if body.destination_project_id not in (None, native.project):
            raise FailedPreconditionError(
                f"the key is of project {native.project}; use a key of the destination project",
                project=native.project,
            )
        path = ids.TinkerPath.parse(body.source_path, "source_path")
        source = await native.checkpoint(path)
        key = call.request.headers.get("x-idempotency-key") or ids.random_request_id()
        run = await _run_of_copy(native, body, source, key)
        save = checkpoint_pb2.CopyCheckpointRequest(
            parent=run,
            request_id=ids.request_id(run, key, "copy"),
            source_checkpoint=source.name,
            checkpoint_id=ids.native_checkpoint_id(path.kind, path.name),
            labels={
                name: text for name, text in source.labels.items() if age_encryption.is_label(name)
            },
            ttl=encode_optional_duration(body.ttl_seconds),
        )
        operation = await native.checkpoint_service(
            "CopyCheckpoint", save, operations_pb2.Operation
        )
        copied = await _finished(native, operation)
        made = _Checkpoint()
        copied.response.Unpack(made)
        return JSONResponse({"tinker_path": str(ids.path_of(made))})


async def _run_of_copy(
    native: Native, body: bodies.CopyWeights, source: checkpoint_pb2.Checkpoint, key: str
) -> str:
    """Return the run that is to have a copy, created for it, and parked at once."""
    session_id, number = body.session_id, body.model_seq_id
    is_own_session = session_id is None or number is None
    if is_own_session:
        request = scheduler_pb2.CreateSessionRequest(
            parent=f"projects/{native.project}",
            request_id=ids.request_id(native.project, key, "session"),
            display_name="copy of weights",
        )
        session = await native.scheduler("CreateSession", request, scheduler_pb2.Session)
        session_id, number = session.name.rpartition("/")[2], 0
    assert session_id is not None
    assert number is not None
    model_id = ids.new_model_id(session_id, number)
    creation = scheduler_pb2.CreateTrainingRunRequest(
        parent=ids.session_name(native.project, session_id),
        request_id=ids.request_id(native.project, model_id, "create"),
        training_run_id=ids.run_id_of(model_id),
        base_model=source.base_model,
        adapter=source.adapter,
        labels={_SAVE_LABEL: str(ids.path_of(source))},
    )
    operation = await native.scheduler("CreateTrainingRun", creation, operations_pb2.Operation)
    await _finished(native, operation)
    if is_own_session:
        finish = scheduler_pb2.FinishSessionRequest(
            session=ids.session_name(native.project, session_id), outcome="success"
        )
        await native.scheduler("FinishSession", finish, scheduler_pb2.Session)
    return ids.run_name(native.project, model_id)


async def _finished(
    native: Native, operation: operations_pb2.Operation
) -> operations_pb2.Operation:
    async with asyncio.timeout(_COPY_TIMEOUT_S):
        while not operation.done:
            operation = await native.wait(operation.name, _COPY_TIMEOUT_S)
    if operation.HasField("error"):
        raise decode_status(operation.error)
    return operation


async def _own(native: Native, path: ids.TinkerPath) -> str:
    own = await native.checkpoints(ids.run_name(native.project, path.model_id))
    found = ids.newest_match(path, own)
    if found is None:
        raise CheckpointNotFoundError(f"{path} does not exist", checkpoint=path)
    return found.name


def _path(call: Call) -> ids.TinkerPath:
    parameters = call.request.path_params
    return ids.TinkerPath.of_checkpoint_id(
        parameters["model_id"], f"{parameters['kind']}/{parameters['name']}"
    )


async def _all_runs(native: Native) -> list[scheduler_pb2.TrainingRun]:
    listed = pages(
        lambda each: native.scheduler(
            "ListTrainingRuns", each, scheduler_pb2.ListTrainingRunsResponse
        ),
        scheduler_pb2.ListTrainingRunsRequest(parent=f"projects/{native.project}"),
    )
    return [run async for page in listed for run in page.training_runs]


async def _checkpoints_by_run(native: Native) -> dict[str, list[checkpoint_pb2.Checkpoint]]:
    by_run: dict[str, list[checkpoint_pb2.Checkpoint]] = {}
    for checkpoint in await native.checkpoints(f"projects/{native.project}/trainingRuns/-"):
        by_run.setdefault(checkpoint.name.rpartition("/checkpoints/")[0], []).append(checkpoint)
    return by_run


def _shown(checkpoints: list[checkpoint_pb2.Checkpoint]) -> list[checkpoint_pb2.Checkpoint]:
    """Leave out what was overwritten and is not removed yet."""
    newest: dict[str, checkpoint_pb2.Checkpoint] = {}
    for checkpoint in checkpoints:
        path = str(ids.path_of(checkpoint))
        known = newest.get(path)
        if known is None or known.sequence_number < checkpoint.sequence_number:
            newest[path] = checkpoint
    return [one for one in checkpoints if newest[str(ids.path_of(one))] is one]


def _encode_run(
    native: Native, run: scheduler_pb2.TrainingRun, checkpoints: list[checkpoint_pb2.Checkpoint]
) -> dict[str, Any]:
    shown = [_encode(checkpoint) for checkpoint in _shown(checkpoints)]
    last = max(
        [_seconds(run.create_time), *(_seconds(one.create_time) for one in checkpoints)],
    )
    adapter = _encode_adapter(run.adapter)
    return {
        "training_run_id": ids.model_id_of(run.name),
        "base_model": run.base_model,
        "model_owner": native.project,
        "is_lora": adapter["is_lora"],
        "lora_rank": adapter["lora_rank"],
        "corrupted": False,
        "last_request_time": iso_time(timestamp_pb2.Timestamp(seconds=int(last))),
        "last_checkpoint": _last(shown, "training"),
        "last_sampler_checkpoint": _last(shown, "sampler"),
        "user_metadata": dict(run.labels) or None,
    }


def _last(shown: list[dict[str, Any]], checkpoint_type: str) -> dict[str, Any] | None:
    return next((one for one in shown if one["checkpoint_type"] == checkpoint_type), None)


def _encode(checkpoint: checkpoint_pb2.Checkpoint) -> dict[str, Any]:
    path = ids.path_of(checkpoint)
    has_expiry = checkpoint.HasField("expire_time")
    labels = {
        name: text for name, text in checkpoint.labels.items() if not age_encryption.is_label(name)
    }
    return {
        "checkpoint_id": path.checkpoint_id,
        "checkpoint_type": ids.CHECKPOINT_TYPES[path.kind],
        "time": iso_time(checkpoint.create_time),
        "tinker_path": str(path),
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.state == _Checkpoint.STATE_PUBLISHED,
        "user_metadata": labels or None,
        "expires_at": iso_time(checkpoint.expire_time) if has_expiry else None,
    }


def _encode_adapter(adapter: models_pb2.AdapterConfig) -> dict[str, Any]:
    if adapter.WhichOneof("kind") != "lora":
        return {"is_lora": False, "lora_rank": None}
    lora = adapter.lora
    return {
        "is_lora": True,
        "lora_rank": lora.rank,
        "train_unembed": lora.train_unembedding,
        "train_mlp": lora.train_mlp,
        "train_attn": lora.train_attention,
    }


def _seconds(stamp: timestamp_pb2.Timestamp) -> float:
    return stamp.seconds + stamp.nanos / 1e9
