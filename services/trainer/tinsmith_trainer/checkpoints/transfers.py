"""What copies, exports and imports do: from files of the store, or an upload, to other files.

Each attempt writes into a folder of its own, below one of its task. What was cut off is just done
again, and an attempt that ends late touches no files of another. Nothing counts before the ledger
has the row, which names the folder. What other attempts left is removed after that.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import save_file

from tinsmith.whole_files import sha256_of
from tinsmith_engine import FullConfig, LoraConfig
from tinsmith_engine.files.weight_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    read_header_of,
    weights_file,
)
from tinsmith_engine.host import EngineHost
from tinsmith_engine.runs.merging import MergedModel
from tinsmith_engine.runs.peft_export import export_config
from tinsmith_engine.runs.peft_import import plan_import, read_import
from tinsmith_runtime.adapters import adapter_from_json, adapter_to_json
from tinsmith_runtime.errors import CheckpointIncompatibleError, FileRefusedError
from tinsmith_runtime.ledger import CheckpointRecord, ExportRecord, Ledger, RunRecord, StoredFile
from tinsmith_runtime.storage.checkpoint_manifests import WrittenManifest
from tinsmith_runtime.storage.objects import Progress
from tinsmith_runtime.text.tokenizer_files import TEMPLATE_FILE
from tinsmith_trainer.checkpoints.files import CheckpointFiles
from tinsmith_trainer.checkpoints.registry import CheckpointRegistry, stored_files
from tinsmith_trainer.checkpoints.uploads import Uploads

EXPORT_LIFETIME_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class CopyWork:
    """A copy of `source` under the name `checkpoint`."""

    checkpoint: str
    source: str
    labels: Mapping[str, str]
    ttl_s: float | None


@dataclass(frozen=True, slots=True)
class ExportWork:
    """A checkpoint in another layout: `format` is `peft` or `merged`."""

    checkpoint: str
    format: str


@dataclass(frozen=True, slots=True)
class ImportWork:
    """A checkpoint from an upload."""

    checkpoint: str
    upload: str


TaskWork = CopyWork | ExportWork | ImportWork
Made = CheckpointRecord | ExportRecord
"""The row that a task ends with."""


class CheckpointWork:
    """Does copies, exports and imports.

    Args:
        host: The base models.
        ledger: Which exports there are.
        checkpoints: Which checkpoints there are, and which project may read them.
        files: Their files.
        uploads: What clients sent.
        shard_bytes: Size at which another file of a merged model is begun.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        host: EngineHost,
        ledger: Ledger,
        checkpoints: CheckpointRegistry,
        files: CheckpointFiles,
        uploads: Uploads,
        *,
        shard_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._host = host
        self._ledger = ledger
        self._checkpoints = checkpoints
        self._files = files
        self._uploads = uploads
        self._shard_bytes = shard_bytes
        self._clock = clock

    async def do(self, run: RunRecord, work: TaskWork, task_id: str, progress: Progress) -> Made:
        """Do what a task asks for.

        Args:
            run: The run that the task belongs to.
            work: What is asked for.
            task_id: Names the folder; the same for each attempt under one epoch.
            progress: Told of the bytes that are written.

        Raises:
            TinsmithError: Why it cannot be done.
        """
        attempt = f"{task_id}-e{run.epoch}/{uuid.uuid4().hex[:12]}"
        match work:
            case CopyWork():
                return await self._copy(run, work, attempt, progress)
            case ExportWork():
                return await self._export(run, work, attempt, progress)
            case ImportWork():
                return await self._import(run, work, attempt, progress)

    async def tidy(self, run: RunRecord, work: TaskWork, task_id: str) -> None:
        """Have the files removed that attempts of a task left which are not what it made.

        To be called once the task has ended.
        """
        made: Made | None
        if isinstance(work, ExportWork):
            made = await self._ledger.get_export(f"{work.checkpoint}/exports/{work.format}")
        else:
            made = await self._ledger.get_checkpoint(work.checkpoint)
        attempts = [
            folder
            for parent in _parents(run, work, f"{task_id}-e{run.epoch}")
            for folder in await asyncio.to_thread(self._files.subfolders, parent)
        ]
        left = [folder for folder in attempts if made is None or folder != made.folder]
        if left:
            await self._ledger.note_folder_deletions(run.name, left, not_before_s=self._clock())

    def end(self, work: TaskWork) -> None:
        """Remove what a task that ended needs no longer; blocks."""
        if isinstance(work, ImportWork):
            self._uploads.remove(work.upload)

    async def check_copy(self, run: RunRecord, work: CopyWork) -> CheckpointRecord:
        """Return the source of a copy, if the run may have it.

        Raises:
            CheckpointNotFoundError: If the project of the run may not read the source.
            CheckpointIncompatibleError: If the run has another base model or chat template.
        """
        source = await self._checkpoints.readable(work.source, run.name.split("/")[1])
        if source.base_model != run.base_model:
            raise CheckpointIncompatibleError(
                f"checkpoint {source.name} is of base model {source.base_model}, {run.name} of "
                f"{run.base_model}; copy it into a run of the same base model",
                checkpoint=source.name,
            )
        template = adapter_from_json(source.adapter).chat_template
        if template != adapter_from_json(run.adapter).chat_template:
            raise CheckpointIncompatibleError(
                f"checkpoint {source.name} has another chat template than {run.name}, by which its "
                "samples would be asked; create a run from it and copy it there",
                checkpoint=source.name,
            )
        return source

    async def check_export(self, work: ExportWork) -> CheckpointRecord:
        """Return the checkpoint of an export, if it has the format.

        Raises:
            CheckpointNotFoundError: If there is no such checkpoint.
            CheckpointIncompatibleError: If it holds a whole model, which is no adapter.
        """
        record = await self._checkpoints.readable(work.checkpoint, None)
        is_full = isinstance(adapter_from_json(record.adapter), FullConfig)
        if work.format == "peft" and is_full:
            raise CheckpointIncompatibleError(
                f"checkpoint {record.name} holds a whole model, no adapter; export it as merged",
                checkpoint=record.name,
            )
        return record

    async def _copy(
        self, run: RunRecord, work: CopyWork, attempt: str, progress: Progress
    ) -> CheckpointRecord:
        await self.check_copy(run, work)
        await self._checkpoints.make_way(work.checkpoint)
        async with self._checkpoints.held(work.source, run.name.split("/")[1]) as source:
            manifest = await asyncio.to_thread(self._files.manifest, source.folder, source.sha256)
            folder = _folder(run, source.kind, work.checkpoint, attempt)
            attributes = {**manifest.attributes, "run": run.name, "source": source.name}
            written = await asyncio.to_thread(
                self._files.copy, source.folder, manifest, folder, attributes, progress
            )
        return self._record(
            work.checkpoint,
            run,
            written,
            folder,
            kind=source.kind,
            adapter=source.adapter,
            version=source.version,
            sequence_number=source.sequence_number,
            labels=work.labels,
            ttl_s=work.ttl_s,
            source=source.name,
        )

    async def _export(
        self, run: RunRecord, work: ExportWork, attempt: str, progress: Progress
    ) -> ExportRecord:
        name = f"{work.checkpoint}/exports/{work.format}"
        await self.check_export(work)
        async with self._checkpoints.held(work.checkpoint, None) as record:
            now_s = self._clock()
            known = await self._ledger.get_export(name)
            if known is not None and known.expire_time_s > now_s:
                return _renewed(known, now_s)
            folder = _export_folder(run, work, attempt)
            write = self._write_peft if work.format == "peft" else self._write_merged
            written = await asyncio.to_thread(write, record, folder, progress)
        return ExportRecord(
            name=name,
            checkpoint=work.checkpoint,
            run=run.name,
            format=work.format,
            folder=folder,
            sha256=written.sha256,
            size_bytes=written.manifest.size_bytes,
            files=stored_files(written.manifest),
            create_time_s=now_s,
            expire_time_s=now_s + EXPORT_LIFETIME_S,
        )

    def _write_peft(
        self, record: CheckpointRecord, folder: str, progress: Progress
    ) -> WrittenManifest:
        manifest = self._files.manifest(record.folder, record.sha256)
        with self._files.scratch() as scratch:
            wanted = (ADAPTER_CONFIG_FILE, ADAPTER_FILE)
            files = self._files.fetch(record.folder, manifest, scratch, wanted)
            settings = json.loads(files[ADAPTER_CONFIG_FILE].read_text())
            # A folder of this machine means nothing where the adapter goes.
            settings["base_model_name_or_path"] = record.base_model
            files[ADAPTER_CONFIG_FILE].write_text(json.dumps(settings, indent=1, sort_keys=True))
            template = adapter_from_json(record.adapter).chat_template
            if template:
                files[TEMPLATE_FILE] = scratch / TEMPLATE_FILE
                files[TEMPLATE_FILE].write_text(template, encoding="utf-8")
            attributes = {"export": "peft", "base_model": record.base_model}
            return self._files.put(folder, files, attributes, progress)

    def _write_merged(
        self, record: CheckpointRecord, folder: str, progress: Progress
    ) -> WrittenManifest:
        manifest = self._files.manifest(record.folder, record.sha256)
        config = adapter_from_json(record.adapter)
        name = weights_file(config)
        engine = self._host.engine(record.base_model)
        with self._files.scratch() as scratch:
            weights = self._files.fetch(record.folder, manifest, scratch, (name,))[name]
            weights = weights.rename(scratch / f".{name}")
            model = MergedModel(
                self._host.directories[record.base_model],
                weights,
                config,
                engine.model.lora_targets,
                max_shard_bytes=self._shard_bytes,
            )
            # Each byte is written twice: here, and into the store.
            files: dict[str, Path] = {}
            done_bytes = 0

            def note(path: Path) -> None:
                nonlocal done_bytes
                files[path.name] = path
                done_bytes += path.stat().st_size
                progress(done_bytes, 2 * model.size_bytes)

            model.write(scratch, note)
            attributes = {"export": "merged", "base_model": record.base_model}
            return self._files.put(
                folder,
                files,
                attributes,
                lambda done, total: progress(done_bytes + done, done_bytes + total),
            )

    async def _import(
        self, run: RunRecord, work: ImportWork, attempt: str, progress: Progress
    ) -> CheckpointRecord:
        await self._checkpoints.make_way(work.checkpoint)
        upload, paths = await asyncio.to_thread(self._uploads.complete, work.upload)
        folder = _folder(run, "sampler", work.checkpoint, attempt)
        config, written = await asyncio.to_thread(
            self._write_import, run, upload.files, paths, folder, progress
        )
        return self._record(
            work.checkpoint,
            run,
            written,
            folder,
            kind="sampler",
            adapter=adapter_to_json(config),
            version=0,
            sequence_number=0,
            labels=upload.labels,
            ttl_s=upload.ttl_s,
        )

    def _write_import(
        self,
        run: RunRecord,
        promised: tuple[StoredFile, ...],
        paths: Mapping[str, Path],
        folder: str,
        progress: Progress,
    ) -> tuple[LoraConfig, WrittenManifest]:
        for file in promised:
            if sha256_of(paths[file.name]) != file.sha256:
                raise FileRefusedError(
                    f"{file.name} does not have the SHA-256 that was announced; send it again",
                    file=file.name,
                )
        engine = self._host.engine(run.base_model)
        units = engine.model.lora_targets
        # In this order: nothing of the weights is allocated before all of it is known to fit.
        header = read_header_of(paths[ADAPTER_FILE])
        own = adapter_from_json(run.adapter)
        config = replace(
            plan_import(paths[ADAPTER_CONFIG_FILE].read_bytes(), header, units),
            chat_template=own.chat_template,
            stop_token_ids=own.stop_token_ids,
        )
        base_dir = self._host.directories[run.base_model]
        tensors = read_import(paths[ADAPTER_FILE], config, units, base_dir)
        settings = export_config(config, units, run.base_model, engine.model.other_modules)
        attributes = {
            "kind": "sampler",
            "run": run.name,
            "base_model": run.base_model,
            "adapter": adapter_to_json(config),
            "version": 0,
            "sequence_number": 0,
            "source": "import",
        }
        with self._files.scratch() as scratch:
            files = {name: scratch / name for name in (ADAPTER_CONFIG_FILE, ADAPTER_FILE)}
            files[ADAPTER_CONFIG_FILE].write_text(json.dumps(settings, indent=1, sort_keys=True))
            save_file(tensors, files[ADAPTER_FILE], {"format": "pt"})
            return config, self._files.put(folder, files, attributes, progress)

    def _record(
        self,
        name: str,
        run: RunRecord,
        written: WrittenManifest,
        folder: str,
        *,
        kind: str,
        adapter: str,
        version: int,
        sequence_number: int,
        labels: Mapping[str, str],
        ttl_s: float | None,
        source: str = "",
    ) -> CheckpointRecord:
        now_s = self._clock()
        return CheckpointRecord(
            name=name,
            run=run.name,
            kind=kind,
            base_model=run.base_model,
            adapter=adapter,
            version=version,
            sequence_number=sequence_number,
            size_bytes=written.manifest.size_bytes,
            folder=folder,
            sha256=written.sha256,
            create_time_s=now_s,
            labels=dict(labels),
            expire_time_s=None if ttl_s is None else now_s + ttl_s,
            files=stored_files(written.manifest),
            source_checkpoint=source,
        )


def _renewed(export: ExportRecord, now_s: float) -> ExportRecord:
    """Return an export whose time begins anew."""
    return replace(export, expire_time_s=now_s + EXPORT_LIFETIME_S)


def _parents(run: RunRecord, work: TaskWork, task: str) -> Iterator[str]:
    """Yield the folders that hold those of the attempts of a task."""
    match work:
        case ExportWork():
            yield _export_folder(run, work, task)
        case ImportWork():
            yield _folder(run, "sampler", work.checkpoint, task)
        case CopyWork():
            for kind in ("training", "sampler"):
                yield _folder(run, kind, work.checkpoint, task)


def _folder(run: RunRecord, kind: str, checkpoint: str, below: str) -> str:
    return f"{run.name}/checkpoints/{kind}/{checkpoint.rpartition('/')[2]}-{below}"


def _export_folder(run: RunRecord, work: ExportWork, below: str) -> str:
    return f"{run.name}/exports/{work.checkpoint.rpartition('/')[2]}-{work.format}-{below}"
