"""Calls on checkpoints, as coroutines; `checkpoint_forms.py` has the forms."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path

from tinsmith.checkpoints import files
from tinsmith.checkpoints.tasks import (
    Progress,
    checkpoint_endpoints,
    endpoint_of,
    wait_task,
)
from tinsmith.errors import ConfigurationError
from tinsmith.names import name_of
from tinsmith.rpc import codec
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.durations import encode_duration, encode_optional_duration
from tinsmith.rpc.forms import call, future
from tinsmith.rpc.lists import read_pages
from tinsmith.rpc.transport import Endpoint
from tinsmith.training.run_forms import TrainingRun
from tinsmith.types import Checkpoint, CheckpointExport
from tinsmith.v1 import checkpoint_pb2

_EXPORT_FORMATS = {
    "peft": checkpoint_pb2.CheckpointExport.FORMAT_PEFT,
    "merged": checkpoint_pb2.CheckpointExport.FORMAT_MERGED,
}


class CheckpointCalls:
    """The checkpoints of a project; one is given as such, by its resource name or as `run-1/final`.

    Example:
        >>> newest = client.checkpoints.list(run)[0]
        >>> client.checkpoints.download(newest, "adapter")
    """

    def __init__(self, core: ClientCore) -> None:
        self._core = core

    @call
    async def _list(self, run: str | TrainingRun | None = None) -> list[Checkpoint]:
        """Return the checkpoints of a run, or of all runs, newest first.

        Of all runs, checkpoints are left out whose trainers are gone without a successor on their
        ledger.

        Args:
            run: A run, its resource name or its id.

        Returns:
            The checkpoints, without their files' content.

        Raises:
            NotFoundError: If there is no such run.

        Example:
            >>> checkpoints = client.checkpoints.list(run)
        """
        core = self._core
        if run is not None:
            message = await core.get_run(core.run_name(name_of(run)))
            return await self._list_at(core.checkpoints_endpoint(message), message.name)
        found: dict[str, Checkpoint] = {}
        for endpoint in await checkpoint_endpoints(core):
            for checkpoint in await self._list_at(endpoint, f"{core.project}/trainingRuns/-"):
                found[checkpoint.name] = checkpoint
        return sorted(found.values(), key=_created_at, reverse=True)

    @call
    async def _get(self, name: str | Checkpoint) -> Checkpoint:
        """Return a checkpoint of this project, or one that another project published.

        Returns:
            The checkpoint: kind, version, size in bytes and labels.

        Raises:
            NotFoundError: If there is none of this name.

        Example:
            >>> client.checkpoints.get(name).size_bytes
        """
        request = checkpoint_pb2.GetCheckpointRequest(name=self._core.checkpoint_name(name))
        return await self._answer(request.name, "GetCheckpoint", request)

    @call
    async def _delete(self, name: str | Checkpoint) -> None:
        """Delete a checkpoint, its exports and their files.

        Raises:
            NotFoundError: If there is none of this name.

        Example:
            >>> client.checkpoints.delete(saved)
        """
        request = checkpoint_pb2.DeleteCheckpointRequest(name=self._core.checkpoint_name(name))
        endpoint = await endpoint_of(self._core, request.name)
        await self._core.transport.call(endpoint, lambda c: c.checkpoint.DeleteCheckpoint, request)

    @call
    async def _update(
        self,
        name: str | Checkpoint,
        *,
        labels: Mapping[str, str] | None = None,
        ttl_seconds: float | None = None,
        keep: bool = False,
    ) -> Checkpoint:
        """Change labels or expiry of a checkpoint.

        Args:
            name: The checkpoint.
            labels: Replace all of its labels.
            ttl_seconds: It is deleted so long from now on.
            keep: It is kept until it is deleted.

        Returns:
            The checkpoint as it is now.

        Raises:
            ConfigurationError: If both `ttl_seconds` and `keep` are given.
            NotFoundError: If there is none of this name.

        Example:
            >>> client.checkpoints.update(saved, ttl_seconds=7 * 24 * 3600)
        """
        if ttl_seconds is not None and keep:
            raise ConfigurationError(
                "ttl_seconds and keep exclude each other", remedy="give one of them"
            )
        request = checkpoint_pb2.UpdateCheckpointRequest(name=self._core.checkpoint_name(name))
        if labels is not None:
            request.update_mask.paths.append("labels")
            request.labels.update(labels)
        if ttl_seconds is not None or keep:
            request.update_mask.paths.append("expire_time")
        if ttl_seconds is not None:
            request.ttl.CopyFrom(encode_duration(ttl_seconds))
        return await self._answer(request.name, "UpdateCheckpoint", request)

    @call
    async def _publish(self, name: str | Checkpoint) -> Checkpoint:
        """Let every project get, load, sample and copy a checkpoint by its name.

        Returns:
            The checkpoint, published.

        Raises:
            NotFoundError: If there is none of this name.

        Example:
            >>> client.checkpoints.publish(saved)
        """
        request = checkpoint_pb2.PublishCheckpointRequest(name=self._core.checkpoint_name(name))
        return await self._answer(request.name, "PublishCheckpoint", request)

    @call
    async def _unpublish(self, name: str | Checkpoint) -> Checkpoint:
        """Keep other projects from reading a checkpoint from now on.

        Returns:
            The checkpoint, of this project alone.

        Raises:
            NotFoundError: If there is none of this name.

        Example:
            >>> client.checkpoints.unpublish(saved)
        """
        request = checkpoint_pb2.UnpublishCheckpointRequest(name=self._core.checkpoint_name(name))
        return await self._answer(request.name, "UnpublishCheckpoint", request)

    @future("copy of {name_of(source)}")
    async def _copy(
        self,
        source: str | Checkpoint,
        run: str | TrainingRun,
        name: str,
        *,
        labels: Mapping[str, str] | None = None,
        ttl_seconds: float | None = None,
        progress: Progress | None = None,
    ) -> Checkpoint:
        """Copy a checkpoint, of this project or published, into a run of this project.

        Args:
            source: The checkpoint to copy; the server copies it.
            run: The run that gets the copy.
            name: The copy's id within the run.
            labels: Labels of the copy.
            ttl_seconds: The copy is deleted so long after it was made; kept if None.
            progress: Called with bytes done and in all, from another thread.

        Returns:
            The copy, once it is made.

        Raises:
            AlreadyExistsError: If the run has a checkpoint of this id.
            NotFoundError: If source or run does not exist.

        Example:
            >>> copy = client.checkpoints.copy(published, run, "start").result()
        """
        parent = await self._core.get_run(self._core.run_name(name_of(run)))
        endpoint = self._core.trainer_endpoint(parent)
        request = checkpoint_pb2.CopyCheckpointRequest(
            parent=parent.name,
            request_id=str(uuid.uuid4()),
            source_checkpoint=self._core.checkpoint_name(source),
            checkpoint_id=name,
            labels=dict(labels or {}),
            ttl=encode_optional_duration(ttl_seconds),
        )
        operation = await self._core.transport.call(
            endpoint, lambda c: c.checkpoint.CopyCheckpoint, request
        )
        answer = checkpoint_pb2.Checkpoint()
        await wait_task(self._core, endpoint, operation, answer, progress)
        return codec.decode_checkpoint(answer)

    @future("export of {name_of(name)}")
    async def _export(
        self,
        name: str | Checkpoint,
        export_format: str = "peft",
        *,
        progress: Progress | None = None,
    ) -> CheckpointExport:
        """Write a checkpoint on the server in the layout of other tools, to be downloaded.

        Args:
            name: The checkpoint.
            export_format: `peft`: the adapter, as PEFT and vLLM load it. `merged`: a whole model in
                Hugging Face layout.
            progress: Called with bytes done and in all, from another thread.

        Returns:
            The export, once it is written; `download` fetches it.

        Raises:
            ConfigurationError: If there is no such format.
            NotFoundError: If there is no such checkpoint.

        Example:
            >>> export = client.checkpoints.export(saved, "peft").result()
            >>> client.checkpoints.download(export, "adapter")
        """
        if export_format not in _EXPORT_FORMATS:
            raise ConfigurationError(
                f"there is no export format {export_format!r}",
                remedy=f"use one of {', '.join(_EXPORT_FORMATS)}",
            )
        endpoint = await endpoint_of(self._core, self._core.checkpoint_name(name))
        request = checkpoint_pb2.ExportCheckpointRequest(
            name=self._core.checkpoint_name(name),
            request_id=str(uuid.uuid4()),
            format=_EXPORT_FORMATS[export_format],
        )
        operation = await self._core.transport.call(
            endpoint, lambda c: c.checkpoint.ExportCheckpoint, request
        )
        answer = checkpoint_pb2.CheckpointExport()
        await wait_task(self._core, endpoint, operation, answer, progress)
        return codec.decode_export(answer)

    @call
    async def _download(
        self,
        name: str | Checkpoint | CheckpointExport,
        folder: str | Path,
        *,
        progress: Progress | None = None,
    ) -> list[Path]:
        """Fetch the files of a checkpoint or export into a folder.

        A call that was cut off is continued by the same call: what is there is verified by hash and
        not fetched again.

        Args:
            name: A checkpoint or export, or the resource name of one.
            folder: Created if it is missing.
            progress: Called with bytes done and in all, from another thread.

        Returns:
            The paths of the files.

        Raises:
            DataLossError: If a file is not what the server says; it is removed.

        Example:
            >>> paths = client.checkpoints.download(saved, "checkpoint")
        """
        return await files.download_checkpoint(
            self._core, self._core.checkpoint_name(name), Path(folder), progress=progress
        )

    @call
    async def _import_adapter(
        self,
        folder: str | Path,
        run: str | TrainingRun,
        name: str,
        *,
        labels: Mapping[str, str] | None = None,
        ttl_seconds: float | None = None,
        progress: Progress | None = None,
    ) -> Checkpoint:
        """Send a PEFT adapter from this machine and make it a checkpoint.

        Args:
            folder: Holds `adapter_config.json` and `adapter_model.safetensors`.
            run: The run that is to have the checkpoint, on the adapter's base model; its own
                adapter may be another one.
            name: The checkpoint's id within the run.
            labels: Labels of the checkpoint.
            ttl_seconds: It is deleted so long after the import; kept if None.
            progress: Called with bytes sent and in all, from another thread.

        Returns:
            The checkpoint that the run has now.

        Raises:
            ConfigurationError: If a file is missing.
            InvalidArgumentError: If the server does not accept the adapter.

        Example:
            >>> start = client.checkpoints.import_adapter("adapter", run, "start")
            >>> run.load_state(start).result()
        """
        return await files.import_adapter(
            self._core,
            Path(folder),
            name_of(run),
            name,
            labels=labels or {},
            ttl_seconds=ttl_seconds,
            progress=progress,
        )

    async def _answer(self, name: str, method: str, request: object) -> Checkpoint:
        """Call a method that answers with a checkpoint, at the trainer that knows it."""
        endpoint = await endpoint_of(self._core, name)
        answer = await self._core.transport.call(
            endpoint, lambda c: getattr(c.checkpoint, method), request
        )
        return codec.decode_checkpoint(answer)

    async def _list_at(self, endpoint: Endpoint, parent: str) -> list[Checkpoint]:
        pages = read_pages(
            self._core.transport,
            endpoint,
            lambda c: c.checkpoint.ListCheckpoints,
            checkpoint_pb2.ListCheckpointsRequest(parent=parent),
        )
        return [
            codec.decode_checkpoint(message) async for page in pages for message in page.checkpoints
        ]


def _created_at(checkpoint: Checkpoint) -> float:
    return checkpoint.create_time.timestamp() if checkpoint.create_time else 0.0
