"""Calls on checkpoints as a tenant makes them, and the files that they leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import duration_pb2
from tests.fakes.trainer_harness import (
    RunClient,
    new_id,
    refusal,
    response_of,
)

from tinsmith.v1 import checkpoint_pb2

PEFT = checkpoint_pb2.CheckpointExport.FORMAT_PEFT
MERGED = checkpoint_pb2.CheckpointExport.FORMAT_MERGED
WEIGHTS = "adapter_model.safetensors"
SETTINGS = "adapter_config.json"


def folder_of(checkpoint: Any) -> Path:
    return Path(checkpoint.manifest_uri.removeprefix("file://")).parent


def ttl(seconds: int) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=seconds)


async def get(run: RunClient, name: str) -> checkpoint_pb2.Checkpoint:
    return await run.call("GetCheckpoint", checkpoint_pb2.GetCheckpointRequest(name=name))


async def reason(call: Any) -> str:
    return (await refusal(call)).reason


async def copy(run: RunClient, source: str, checkpoint_id: str, **fields: Any) -> Any:
    fields = {"request_id": new_id(), **fields}
    request = checkpoint_pb2.CopyCheckpointRequest(
        parent=run.name, source_checkpoint=source, checkpoint_id=checkpoint_id, **fields
    )
    return await run.call("CopyCheckpoint", request)


async def export(run: RunClient, name: str, kind: Any = PEFT, **fields: Any) -> Any:
    fields = {"request_id": new_id(), **fields}
    request = checkpoint_pb2.ExportCheckpointRequest(name=name, format=kind, **fields)
    return await run.call("ExportCheckpoint", request)


async def exported(run: RunClient, name: str, kind: Any = PEFT) -> checkpoint_pb2.CheckpointExport:
    done = await run.wait(await export(run, name, kind))
    return response_of(done, checkpoint_pb2.CheckpointExport())


async def publish(run: RunClient, name: str, *, undo: bool = False) -> checkpoint_pb2.Checkpoint:
    method = "UnpublishCheckpoint" if undo else "PublishCheckpoint"
    return await run.call(method, getattr(checkpoint_pb2, f"{method}Request")(name=name))
