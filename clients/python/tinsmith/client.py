"""The entry point: connects, creates runs and samplers, lists and deletes."""

from __future__ import annotations

import asyncio
import atexit
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tinsmith.checkpoints.client import CheckpointCalls
from tinsmith.environments.client import EnvironmentClient, EnvironmentInstance
from tinsmith.episodes.client import EpisodeClient
from tinsmith.jobs.client import JobClient
from tinsmith.keys.client import KeyCalls
from tinsmith.rpc import codec, model_catalog
from tinsmith.rpc.core import ClientCore
from tinsmith.sampling.sampler import Sampler, create_sampler
from tinsmith.settings import RetryPolicy, resolve_settings
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.training import run_info
from tinsmith.training.training_run import TrainingRun
from tinsmith.types import Checkpoint, RunInfo, ServedModel
from tinsmith.v1 import models_pb2
from tinsmith.version import __version__

_LONG_POLL_S = 20.0
_POLL_PAUSE_S = 0.02


class Client(CheckpointCalls, KeyCalls):
    """A connection to a Tinsmith server; opens a session, and finishes it at the end.

    Methods without `_async` block; they may be called from any thread. Those with `_async` are for
    asyncio code. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        address: str | None = None,
        api_key: str | None = None,
        *,
        project: str | None = None,
        display_name: str = "",
        labels: Mapping[str, str] | None = None,
        ca_file: Path | str | None = None,
        operation_timeout_s: float = 3600.0,
        retry: RetryPolicy | None = None,
        session: str = "",
    ) -> None:
        """Connect.

        Args:
            address: `host:port`, `https://host:port` for TLS, else `TINSMITH_ADDRESS`, else the
                server of `tinsmith up`.
            api_key: The key, else `TINSMITH_API_KEY`, else that of the local server.
            project: Id of the project, else `TINSMITH_PROJECT`, else the one of the key.
            display_name: What the session is for, for people.
            labels: Labels of the session.
            ca_file: PEM file of the authorities to trust, for a server with a private certificate;
                else `TINSMITH_CA_FILE`, else gRPC's own list.
            operation_timeout_s: How long `result()` waits unless it is told otherwise.
            retry: How long and how often calls are sent again.
            session: Resumes the session of a client that is gone, by its resource name or id,
                instead of opening one; `resumed_runs` are its runs. `display_name` and `labels`
                stay as they were.

        Raises:
            ConfigurationError: If address or key is missing, or the file of authorities not there.
            FailedPreconditionError: If the session to resume was finished.
            TinsmithError: If the server cannot be reached or refuses the key.
        """
        settings = resolve_settings(
            address=address,
            api_key=api_key,
            project=project,
            ca_file=ca_file,
            operation_timeout_s=operation_timeout_s,
            retry=retry,
        )
        self._core = ClientCore(settings)
        self._closed = False
        self.environments = EnvironmentClient(self._core)
        self.episodes = EpisodeClient(self._core)
        self.jobs = JobClient(self._core)
        self._resumed_runs: list[TrainingRun] = []
        try:
            self._call(self._core.find_project())
            if session:
                self._resumed_runs = self._call(self._resume(session))
            else:
                self._call(
                    self._core.session.open(
                        display_name=display_name, labels=labels or {}, version=__version__
                    )
                )
        except BaseException:
            self._shut_down("errored")
            raise
        reference = weakref.ref(self)
        self._at_exit = lambda: _close_at_exit(reference)
        atexit.register(self._at_exit)

    @classmethod
    async def connect_async(cls, *args: Any, **kwargs: Any) -> Self:
        """Connect without blocking the event loop; the arguments are those of `Client`."""
        return await asyncio.to_thread(cls, *args, **kwargs)

    @property
    def project(self) -> str:
        """Id of the project."""
        return self._core.settings.project

    @property
    def address(self) -> str:
        """Address of the server."""
        return self._core.settings.address

    @property
    def session(self) -> str:
        """Resource name of the session: keep it, to resume after a crash.

        Raises:
            TinsmithError: If the session ended.
        """
        return self._core.session.name

    @property
    def resumed_runs(self) -> list[TrainingRun]:
        """The runs of a session that was resumed, oldest first; each goes on at its next number."""
        return list(self._resumed_runs)

    def create_lora_training_run(
        self,
        base_model: str,
        rank: int = 32,
        *,
        seed: int = 0,
        alpha: float | None = None,
        train_attention: bool = True,
        train_mlp: bool = True,
        train_unembedding: bool = False,
        display_name: str = "",
        labels: Mapping[str, str] | None = None,
        run_id: str = "",
    ) -> TrainingRun:
        """Create a run that trains a low-rank adapter; blocks until a trainer holds it.

        Args:
            base_model: Name of the model, as `get_capabilities` lists it.
            rank: Rank of the adapter, 1 to 128.
            seed: Seed of its initial weights.
            alpha: The adapter is scaled by alpha / rank; 32 by default.
            train_attention: Whether attention projections are adapted.
            train_mlp: Whether MLP projections are adapted.
            train_unembedding: Whether the unembedding is adapted.
            display_name: What the run is, for people.
            labels: Labels of the run.
            run_id: Last part of its name; drawn by the server if empty. An id is used once, even
                if its run was deleted.
        """
        adapter = codec.encode_lora(
            rank=rank,
            seed=seed,
            alpha=alpha,
            train_attention=train_attention,
            train_mlp=train_mlp,
            train_unembedding=train_unembedding,
        )
        return self._call(
            run_info.create_run(
                self._core,
                base_model,
                adapter,
                display_name=display_name,
                labels=labels or {},
                run_id=run_id,
            )
        )

    create_lora_training_client = create_lora_training_run

    async def create_lora_training_run_async(
        self,
        base_model: str,
        rank: int = 32,
        *,
        seed: int = 0,
        alpha: float | None = None,
        train_attention: bool = True,
        train_mlp: bool = True,
        train_unembedding: bool = False,
        display_name: str = "",
        labels: Mapping[str, str] | None = None,
        run_id: str = "",
    ) -> TrainingRun:
        """Do as `create_lora_training_run`, in the caller's event loop."""
        adapter = codec.encode_lora(
            rank=rank,
            seed=seed,
            alpha=alpha,
            train_attention=train_attention,
            train_mlp=train_mlp,
            train_unembedding=train_unembedding,
        )
        return await self._acall(
            run_info.create_run(
                self._core,
                base_model,
                adapter,
                display_name=display_name,
                labels=labels or {},
                run_id=run_id,
            )
        )

    create_lora_training_client_async = create_lora_training_run_async

    def create_full_training_run(
        self,
        base_model: str,
        *,
        display_name: str = "",
        labels: Mapping[str, str] | None = None,
        run_id: str = "",
    ) -> TrainingRun:
        """Create a run that trains all weights; blocks until a trainer holds it."""
        adapter = models_pb2.AdapterConfig(full=models_pb2.FullParameterConfig())
        return self._call(
            run_info.create_run(
                self._core,
                base_model,
                adapter,
                display_name=display_name,
                labels=labels or {},
                run_id=run_id,
            )
        )

    async def create_full_training_run_async(
        self,
        base_model: str,
        *,
        display_name: str = "",
        labels: Mapping[str, str] | None = None,
        run_id: str = "",
    ) -> TrainingRun:
        """Do as `create_full_training_run`, in the caller's event loop."""
        adapter = models_pb2.AdapterConfig(full=models_pb2.FullParameterConfig())
        return await self._acall(
            run_info.create_run(
                self._core,
                base_model,
                adapter,
                display_name=display_name,
                labels=labels or {},
                run_id=run_id,
            )
        )

    def get_run(self, name: str) -> TrainingRun:
        """Continue a run, of this or an earlier client, by its resource name or id.

        What was acknowledged and had not ended is in its `pending_operations`.
        """
        return self._call(run_info.continue_run(self._core, name))

    async def get_run_async(self, name: str) -> TrainingRun:
        """Do as `get_run`, in the caller's event loop."""
        return await self._acall(run_info.continue_run(self._core, name))

    def list_runs(self) -> list[RunInfo]:
        """Return the runs of the project, newest first."""
        return self._call(model_catalog.list_runs(self._core))

    def delete_run(self, name: str) -> None:
        """Delete a run with its operations and checkpoints; repeating it succeeds."""
        self._call(model_catalog.delete_run(self._core, name))

    def create_training_run_from_checkpoint(
        self,
        checkpoint: str | Checkpoint,
        *,
        include_optimizer: bool = True,
        display_name: str = "",
        labels: Mapping[str, str] | None = None,
    ) -> TrainingRun:
        """Create a run that begins from a checkpoint; blocks until it is loaded.

        Base model and adapter are those of the checkpoint. A run that cannot load it does not come
        to be.

        Args:
            checkpoint: One of this project, or one that another project published.
            include_optimizer: Whether to take moments and version too, which a checkpoint of
                `save_state` has.
            display_name: What the run is, for people.
            labels: Labels of the run.
        """
        name = checkpoint if isinstance(checkpoint, str) else checkpoint.name
        return self._call(
            run_info.create_run_from(
                self._core,
                name,
                include_optimizer=include_optimizer,
                display_name=display_name,
                labels=labels or {},
            )
        )

    async def create_training_run_from_checkpoint_async(
        self,
        checkpoint: str | Checkpoint,
        *,
        include_optimizer: bool = True,
        display_name: str = "",
        labels: Mapping[str, str] | None = None,
    ) -> TrainingRun:
        """Do as `create_training_run_from_checkpoint`, in the caller's event loop."""
        name = checkpoint if isinstance(checkpoint, str) else checkpoint.name
        return await self._acall(
            run_info.create_run_from(
                self._core,
                name,
                include_optimizer=include_optimizer,
                display_name=display_name,
                labels=labels or {},
            )
        )

    def create_sampler(
        self,
        *,
        base_model: str = "",
        checkpoint: str | Checkpoint = "",
        run: TrainingRun | str | None = None,
    ) -> Sampler:
        """Return a sampler of one source: a base model, a checkpoint, or the live weights of a run.

        Args:
            base_model: Name of the model.
            checkpoint: A checkpoint or its resource name.
            run: A run, its resource name or its id.
        """
        name = checkpoint if isinstance(checkpoint, str) else checkpoint.name
        return self._call(
            create_sampler(self._core, base_model=base_model, checkpoint=name, run=run)
        )

    create_sampling_client = create_sampler

    async def create_sampler_async(
        self,
        *,
        base_model: str = "",
        checkpoint: str | Checkpoint = "",
        run: TrainingRun | str | None = None,
    ) -> Sampler:
        """Do as `create_sampler`, in the caller's event loop."""
        name = checkpoint if isinstance(checkpoint, str) else checkpoint.name
        return await self._acall(
            create_sampler(self._core, base_model=base_model, checkpoint=name, run=run)
        )

    create_sampling_client_async = create_sampler_async

    def create_instance(
        self, environment: str, *, seed: int = 0, config: Mapping[str, Any] | None = None
    ) -> EnvironmentInstance:
        """Create and reset an instance of an environment; as `environments.create_instance`."""
        return self.environments.create_instance(environment, seed=seed, config=config)

    def get_tokenizer(self, base_model: str) -> Tokenizer:
        """Return the tokenizer of a base model."""
        return self._call(self._core.get_tokenizer(base_model))

    def get_capabilities(self) -> list[ServedModel]:
        """Return the base models that are served, and what can be done with them."""
        return self._call(model_catalog.list_models(self._core))

    def close(self, outcome: str = "success") -> None:
        """Finish the session and fail what is pending. Repeating it changes nothing.

        Args:
            outcome: `success`, `errored` or `interrupted`, for people.
        """
        if self._closed or self._core.background.is_of_parent:
            # The session of a client that was forked belongs to the process that opened it.
            return
        atexit.unregister(self._at_exit)
        self._shut_down(outcome)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(_outcome_of(kind))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close, _outcome_of(kind))

    def _shut_down(self, outcome: str) -> None:
        self._closed = True
        try:
            self._call(self._close(outcome))
        finally:
            self._core.background.close()

    async def _close(self, outcome: str) -> None:
        for stream in list(self._core.streams):
            stream.close()
        await self._core.session.close(outcome)
        await self._core.transport.close()

    async def _resume(self, session: str) -> list[TrainingRun]:
        run_info = await self._core.session.resume(self._core.session_name(session))
        return [TrainingRun(self._core, each.run, each.status) for each in run_info]


def _outcome_of(kind: type[BaseException] | None) -> str:
    if kind is None:
        return "success"
    return "errored" if issubclass(kind, Exception) else "interrupted"


def _close_at_exit(reference: weakref.ref[Client]) -> None:
    client = reference()
    if client is not None:
        client.close("interrupted")
