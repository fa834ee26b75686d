"""Calls of a client that create runs and samplers; `client_forms.py` has all forms of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tinsmith.rpc import codec
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.forms import call
from tinsmith.sampling.opening import open_sampler
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.settings import RetryPolicy
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.training.run_creation import create_run, create_run_from
from tinsmith.training.run_forms import TrainingRun
from tinsmith.types import Checkpoint, ModelInfo
from tinsmith.v1 import models_pb2, scheduler_pb2


@dataclass(frozen=True, slots=True)
class SupportedModel:
    """A base model, by the name that requests give."""

    model_name: str


@dataclass(frozen=True, slots=True)
class ServerCapabilities:
    """What a server offers."""

    supported_models: list[SupportedModel]


class ClientCalls:
    """The calls of a client that create runs and samplers."""

    def __init__(self, core: ClientCore) -> None:
        self._core = core

    @call
    async def _create_lora_training_run(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = False,
        *,
        alpha: float | None = None,
        display_name: str = "",
        user_metadata: Mapping[str, str] | None = None,
        run_id: str = "",
        history_retention_seconds: float | None = None,
        chat_template: str = "",
    ) -> TrainingRun:
        """Create a run that trains a low-rank adapter; returns once a trainer holds it.

        Args:
            base_model: Name of the model, as `list_models` has it.
            rank: Rank of the adapter, 1 to 128.
            seed: Seed of its initial weights; 0 if None.
            train_mlp: Whether MLP projections are adapted.
            train_attn: Whether attention projections are adapted.
            train_unembed: Whether the unembedding is adapted; off here and on in
                `create_lora_training_client`, whose defaults are Tinker's.
            alpha: The adapter is scaled by alpha / rank; 32 by default.
            display_name: What the run is, for people.
            user_metadata: Labels of the run.
            run_id: Last part of its name; drawn by the server if empty. An id is used once, even
                if its run was deleted.
            history_retention_seconds: How long its past is kept after each operation, to be forked
                and replayed: 25 h if None, which is the least, and at most 90 days unless the
                server is set otherwise.
            chat_template: `role_colon`, or a file that ends with `.jinja`: the template of the run,
                its samples, checkpoints and exports. That of the base model if it is empty.

        Returns:
            The run.

        Raises:
            NotFoundError: If no trainer serves the model.
            InvalidArgumentError: If rank or alpha is out of range.
            ConfigurationError: If there is no such template, or it cannot be trained by.
            ResourceExhaustedError: If the project has too many runs.

        Example:
            >>> run = client.create_lora_training_run("tiny", rank=16)
        """
        adapter = codec.encode_lora(
            rank=rank,
            seed=seed or 0,
            alpha=alpha,
            train_attention=train_attn,
            train_mlp=train_mlp,
            train_unembedding=train_unembed,
        )
        return await create_run(
            self._core,
            base_model,
            adapter,
            display_name=display_name,
            labels=user_metadata or {},
            run_id=run_id,
            history_retention_seconds=history_retention_seconds,
            chat_template=chat_template,
        )

    @call
    async def _create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, str] | None = None,
    ) -> TrainingRun:
        """Create a run with the arguments and defaults of Tinker's method of this name.

        Returns:
            The run; see `create_lora_training_run`.

        Raises:
            NotFoundError: If no trainer serves the model.

        Example:
            >>> run = client.create_lora_training_client("tiny", rank=16)
        """
        return await self._create_lora_training_run(
            base_model,
            rank,
            seed,
            train_mlp,
            train_attn,
            train_unembed,
            user_metadata=user_metadata,
        )

    @call
    async def _create_full_training_run(
        self,
        base_model: str,
        *,
        display_name: str = "",
        user_metadata: Mapping[str, str] | None = None,
        run_id: str = "",
        history_retention_seconds: float | None = None,
        chat_template: str = "",
    ) -> TrainingRun:
        """Create a run that trains all weights; returns once a trainer holds it.

        Arguments and errors are those of `create_lora_training_run`.

        Returns:
            The run.

        Raises:
            NotFoundError: If no trainer serves the model.
            ResourceExhaustedError: If the project has too many runs.

        Example:
            >>> run = client.create_full_training_run("tiny")
        """
        return await create_run(
            self._core,
            base_model,
            models_pb2.AdapterConfig(full=models_pb2.FullParameterConfig()),
            display_name=display_name,
            labels=user_metadata or {},
            run_id=run_id,
            history_retention_seconds=history_retention_seconds,
            chat_template=chat_template,
        )

    @call
    async def _create_training_run_from_checkpoint(
        self,
        checkpoint: str | Checkpoint,
        *,
        include_optimizer: bool = True,
        display_name: str = "",
        user_metadata: Mapping[str, str] | None = None,
        history_retention_seconds: float | None = None,
    ) -> TrainingRun:
        """Create a run that begins from a checkpoint; returns once it is loaded.

        Base model and adapter are those of the checkpoint. A run that cannot load it is not
        created.

        Args:
            checkpoint: One of this project, also as `run-1/final`, or one that another project
                published.
            include_optimizer: Whether to take moments and version too, which a checkpoint of
                `save_state` has.
            display_name: What the run is, for people.
            user_metadata: Labels of the run.
            history_retention_seconds: As in `create_lora_training_run`.

        Returns:
            The run.

        Raises:
            NotFoundError: If there is no such checkpoint.
            FailedPreconditionError: If it has no optimizer state and that is asked for.

        Example:
            >>> run = client.create_training_run_from_checkpoint(saved)
        """
        return await create_run_from(
            self._core,
            self._core.checkpoint_name(checkpoint),
            include_optimizer=include_optimizer,
            display_name=display_name,
            labels=user_metadata or {},
            history_retention_seconds=history_retention_seconds,
        )

    @call
    async def _create_training_client_from_state(
        self,
        path: str | Checkpoint,
        base_model: str | None = None,  # noqa: ARG002 - Tinker's programs may give it
        user_metadata: Mapping[str, str] | None = None,
    ) -> TrainingRun:
        """Create a run with the weights of a checkpoint and a new optimizer, as Tinker's method.

        Args:
            path: A checkpoint or its resource name.
            base_model: Not needed: it is that of the checkpoint.
            user_metadata: Labels of the run.

        Returns:
            The run.

        Raises:
            NotFoundError: If there is no such checkpoint.

        Example:
            >>> run = client.create_training_client_from_state(saved)
        """
        return await self._create_training_run_from_checkpoint(
            path, include_optimizer=False, user_metadata=user_metadata
        )

    @call
    async def _create_training_client_from_state_with_optimizer(
        self,
        path: str | Checkpoint,
        base_model: str | None = None,  # noqa: ARG002 - as above
        user_metadata: Mapping[str, str] | None = None,
    ) -> TrainingRun:
        """Create a run with weights and optimizer of a checkpoint, as Tinker's method.

        The arguments are those of `create_training_client_from_state`.

        Returns:
            The run.

        Raises:
            NotFoundError: If there is no such checkpoint.
            FailedPreconditionError: If it has no optimizer state.

        Example:
            >>> run = client.create_training_client_from_state_with_optimizer(saved)
        """
        return await self._create_training_run_from_checkpoint(path, user_metadata=user_metadata)

    @call
    async def _create_sampler(
        self,
        *,
        base_model: str = "",
        checkpoint: str | Checkpoint = "",
        run: TrainingRun | str = "",
    ) -> Sampler:
        """Return a sampler of one source: a base model, a checkpoint, or the live weights of a run.

        Args:
            base_model: Name of the model.
            checkpoint: A checkpoint, its resource name, or `run-1/final`.
            run: A run, its resource name or its id.

        Returns:
            The sampler.

        Raises:
            ConfigurationError: Unless exactly one source is given.
            NotFoundError: If the source does not exist.

        Example:
            >>> sampler = client.create_sampler(base_model="tiny")
        """
        checkpoint = self._core.checkpoint_name(checkpoint)
        if isinstance(run, TrainingRun):
            live = run
            return await open_sampler(
                self._core,
                base_model=base_model,
                checkpoint=checkpoint,
                run=live.name,
                min_version=lambda: live.version,
            )
        return await open_sampler(self._core, base_model=base_model, checkpoint=checkpoint, run=run)

    @call
    async def _create_sampling_client(
        self,
        model_path: str | Checkpoint | None = None,
        base_model: str | None = None,
        retry_config: RetryPolicy | None = None,
    ) -> Sampler:
        """Return a sampler with the arguments of Tinker's method of this name.

        Args:
            model_path: A checkpoint, its resource name, or `run-1/final`.
            base_model: Name of a base model.
            retry_config: How requests of the sampler are sent again; as the client's calls if None.

        Returns:
            The sampler.

        Raises:
            ConfigurationError: Unless exactly one source is given, or if `retry_config` is no
                `RetryPolicy`.
            NotFoundError: If the source does not exist.

        Example:
            >>> sampler = client.create_sampling_client(base_model="tiny")
        """
        return await open_sampler(
            self._core,
            base_model=base_model or "",
            checkpoint=self._core.checkpoint_name(model_path or ""),
            retry_config=retry_config,
        )

    @call
    async def _list_models(self) -> list[ModelInfo]:
        """Return the base models that are served, and what can be done with them.

        Returns:
            The models: their names, sizes and limits in tokens.

        Raises:
            TinsmithError: If the server cannot be reached or refuses the key.

        Example:
            >>> names = [model.base_model for model in client.list_models()]
        """
        request = scheduler_pb2.GetCapabilitiesRequest(parent=self._core.project)
        answer = await self._core.transport.call(
            self._core.scheduler, lambda c: c.scheduler.GetCapabilities, request
        )
        return [codec.decode_served_model(model) for model in answer.models]

    @call
    async def _get_server_capabilities(self) -> ServerCapabilities:
        """Return the names of the models that are served, as Tinker's method of this name.

        Returns:
            The names, in `supported_models`.

        Raises:
            TinsmithError: If the server cannot be reached or refuses the key.

        Example:
            >>> client.get_server_capabilities().supported_models
        """
        models = await self._list_models()
        return ServerCapabilities([SupportedModel(model.base_model) for model in models])

    @call
    async def _get_tokenizer(self, base_model: str) -> Tokenizer:
        """Return the tokenizer of a base model.

        Returns:
            The tokenizer.

        Raises:
            NotFoundError: If the model is not served.

        Example:
            >>> tokens = client.get_tokenizer("tiny").encode("hello")
        """
        return await self._core.get_tokenizer(base_model)
