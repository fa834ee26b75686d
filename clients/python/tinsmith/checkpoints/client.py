"""The part of `Client` that concerns checkpoints."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tinsmith.checkpoints import calls, files
from tinsmith.checkpoints.calls import Progress
from tinsmith.rpc import model_catalog
from tinsmith.rpc.futures import ResultFuture
from tinsmith.training.training_run import TrainingRun
from tinsmith.types import Checkpoint, CheckpointExport

if TYPE_CHECKING:
    from tinsmith.rpc.core import ClientCore

T = TypeVar("T")


class CheckpointCalls:
    """Methods on checkpoints; a checkpoint is given as such or by its resource name."""

    _core: ClientCore

    def list_checkpoints(self, run: str | TrainingRun | None = None) -> list[Checkpoint]:
        """Return the checkpoints of a run, or of all runs, newest first."""
        return self._call(model_catalog.list_checkpoints(self._core, _optional_name(run)))

    async def list_checkpoints_async(
        self, run: str | TrainingRun | None = None
    ) -> list[Checkpoint]:
        """Do as `list_checkpoints`, in the caller's event loop."""
        return await self._acall(model_catalog.list_checkpoints(self._core, _optional_name(run)))

    def get_checkpoint(self, name: str | Checkpoint) -> Checkpoint:
        """Return a checkpoint of this project, or one that another project published."""
        return self._call(calls.get_checkpoint(self._core, _name_of(name)))

    async def get_checkpoint_async(self, name: str | Checkpoint) -> Checkpoint:
        """Do as `get_checkpoint`, in the caller's event loop."""
        return await self._acall(calls.get_checkpoint(self._core, _name_of(name)))

    def delete_checkpoint(self, name: str | Checkpoint) -> None:
        """Delete a checkpoint, its exports and their files."""
        self._call(calls.delete_checkpoint(self._core, _name_of(name)))

    async def delete_checkpoint_async(self, name: str | Checkpoint) -> None:
        """Do as `delete_checkpoint`, in the caller's event loop."""
        await self._acall(calls.delete_checkpoint(self._core, _name_of(name)))

    def update_checkpoint(
        self,
        name: str | Checkpoint,
        *,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        keep: bool = False,
    ) -> Checkpoint:
        """Change a checkpoint, and return it.

        Args:
            name: Which one.
            labels: Replace all of its labels.
            ttl_s: It is deleted so long from now on.
            keep: It is kept until it is deleted.
        """
        return self._call(
            calls.update_checkpoint(
                self._core, _name_of(name), labels=labels, ttl_s=ttl_s, keep=keep
            )
        )

    async def update_checkpoint_async(
        self,
        name: str | Checkpoint,
        *,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        keep: bool = False,
    ) -> Checkpoint:
        """Do as `update_checkpoint`, in the caller's event loop."""
        return await self._acall(
            calls.update_checkpoint(
                self._core, _name_of(name), labels=labels, ttl_s=ttl_s, keep=keep
            )
        )

    def publish_checkpoint(self, name: str | Checkpoint) -> Checkpoint:
        """Let every project get, load, sample and copy a checkpoint by its name."""
        return self._call(calls.publish_checkpoint(self._core, _name_of(name)))

    async def publish_checkpoint_async(self, name: str | Checkpoint) -> Checkpoint:
        """Do as `publish_checkpoint`, in the caller's event loop."""
        return await self._acall(calls.publish_checkpoint(self._core, _name_of(name)))

    def unpublish_checkpoint(self, name: str | Checkpoint) -> Checkpoint:
        """Keep other projects from reading a checkpoint from now on."""
        return self._call(calls.unpublish_checkpoint(self._core, _name_of(name)))

    async def unpublish_checkpoint_async(self, name: str | Checkpoint) -> Checkpoint:
        """Do as `unpublish_checkpoint`, in the caller's event loop."""
        return await self._acall(calls.unpublish_checkpoint(self._core, _name_of(name)))

    def copy_checkpoint(
        self,
        source: str | Checkpoint,
        run: str | TrainingRun,
        name: str,
        *,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        progress: Progress | None = None,
    ) -> ResultFuture[Checkpoint]:
        """Copy a checkpoint, of this project or published, into a run of this project.

        Args:
            source: What is copied, by the server.
            run: The run that is to have the copy.
            name: The copy's id within the run.
            labels: Labels of the copy.
            ttl_s: The copy is deleted so long after it was made; kept if None.
            progress: Called with bytes done and in all, from another thread.
        """
        return self._core.future(
            calls.copy_checkpoint(
                self._core,
                _name_of(source),
                _name_of(run),
                name,
                labels=labels or {},
                ttl_s=ttl_s,
                progress=progress,
            ),
            what=f"copy of {_name_of(source)}",
        )

    def export_checkpoint(
        self,
        name: str | Checkpoint,
        export_format: str = "peft",
        *,
        progress: Progress | None = None,
    ) -> ResultFuture[CheckpointExport]:
        """Write a checkpoint on the server in the layout of other tools, to be downloaded.

        Args:
            name: Which one.
            export_format: `peft`: the adapter, as PEFT and vLLM load it. `merged`: a whole model in
                Hugging Face layout.
            progress: Called with bytes done and in all, from another thread.
        """
        return self._core.future(
            calls.export_checkpoint(self._core, _name_of(name), export_format, progress=progress),
            what=f"export of {_name_of(name)}",
        )

    def download_checkpoint(
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
        """
        return self._call(
            files.download_checkpoint(self._core, _name_of(name), Path(folder), progress=progress)
        )

    async def download_checkpoint_async(
        self,
        name: str | Checkpoint | CheckpointExport,
        folder: str | Path,
        *,
        progress: Progress | None = None,
    ) -> list[Path]:
        """Do as `download_checkpoint`, in the caller's event loop."""
        return await self._acall(
            files.download_checkpoint(self._core, _name_of(name), Path(folder), progress=progress)
        )

    def import_adapter(
        self,
        folder: str | Path,
        run: str | TrainingRun,
        name: str,
        *,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        progress: Progress | None = None,
    ) -> Checkpoint:
        """Send a PEFT adapter from this machine and make it a checkpoint.

        Args:
            folder: Holds `adapter_config.json` and `adapter_model.safetensors`.
            run: The run that is to have the checkpoint, on the adapter's base model; its own
                adapter may be another one.
            name: The checkpoint's id within the run.
            labels: Labels of the checkpoint.
            ttl_s: It is deleted so long after the import; kept if None.
            progress: Called with bytes sent and in all, from another thread.
        """
        return self._call(
            files.import_adapter(
                self._core,
                Path(folder),
                _name_of(run),
                name,
                labels=labels or {},
                ttl_s=ttl_s,
                progress=progress,
            )
        )

    async def import_adapter_async(
        self,
        folder: str | Path,
        run: str | TrainingRun,
        name: str,
        *,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        progress: Progress | None = None,
    ) -> Checkpoint:
        """Do as `import_adapter`, in the caller's event loop."""
        return await self._acall(
            files.import_adapter(
                self._core,
                Path(folder),
                _name_of(run),
                name,
                labels=labels or {},
                ttl_s=ttl_s,
                progress=progress,
            )
        )

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._core.background.call(coroutine)

    async def _acall(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await self._core.background.acall(coroutine)


def _name_of(value: str | Checkpoint | CheckpointExport | TrainingRun) -> str:
    return value if isinstance(value, str) else value.name


def _optional_name(run: str | TrainingRun | None) -> str | None:
    return None if run is None else _name_of(run)
