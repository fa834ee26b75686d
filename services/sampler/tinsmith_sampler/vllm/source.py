"""The vLLM engines of a pod, described by the files of their models and started before it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinsmith_engine.base.hardware import visible_hardware
from tinsmith_engine.base.types import ModelInfo
from tinsmith_engine.files.base_copies import HEAD_WEIGHT, holds_another_head
from tinsmith_engine.files.hub_files import load_hf_config, resolve_model, stored_tensors
from tinsmith_engine.files.weight_files import read_header_of
from tinsmith_runtime.errors import CheckpointIncompatibleError
from tinsmith_runtime.text.tokenizer_files import require_tokenizers
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.engines.engine_protocol import EngineListener, SamplingEngine
from tinsmith_sampler.forms.trials import FormTrials
from tinsmith_sampler.vllm.engine import VllmEngine
from tinsmith_sampler.vllm.messages import Configure
from tinsmith_sampler.vllm.process import Interpreter

_MAX_CONTEXT_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class VllmEngines:
    """Engines that run, by base model.

    Attributes:
        started: The engines.
        directories: Where the files of each model are.
    """

    started: Mapping[str, VllmEngine]
    directories: Mapping[str, Path]

    @classmethod
    async def start(cls, config: SamplerConfig) -> VllmEngines:
        """Start vLLM for each base model; takes as long as loading them does.

        Args:
            config: Settings of the pod; nothing of device and dtype is `auto`.

        Raises:
            ModelNotFoundError: If a model is neither a directory nor a model of the hub.
            WorkerUnavailableError: If vLLM does not start.
        """
        models = config.models()
        require_tokenizers(models)
        directories = {
            name: await asyncio.to_thread(resolve_model, source) for name, source in models.items()
        }
        require_tokenizers(directories)
        started: dict[str, VllmEngine] = {}
        try:
            for name, directory in directories.items():
                engine = _engine(config, directory)
                started[name] = engine
                await engine.start()
        except BaseException:
            for engine in started.values():
                await engine.close()
            raise
        return cls(started, directories)

    @property
    def infos(self) -> Mapping[str, ModelInfo]:
        """The base models by name."""
        return {name: engine.info for name, engine in self.started.items()}

    def engines(
        self,
        config: SamplerConfig,  # noqa: ARG002 - they were started with it
        listener: EngineListener,
        trials: FormTrials,  # noqa: ARG002 - vLLM compiles forms in its own processes
    ) -> Mapping[str, SamplingEngine]:
        """Return the engines; vLLM follows no run, so that nothing is told of newer weights."""
        for engine in self.started.values():
            engine.on_failed = listener.note_failed
        return self.started

    async def close(self) -> None:
        """End the processes; nothing that they do is worth waiting for."""
        for engine in self.started.values():
            await engine.close()


def _engine(config: SamplerConfig, directory: Path) -> VllmEngine:
    tensor_parallel_size = config.vllm_tensor_parallel_size
    if config.device == "cpu":
        tensor_parallel_size = tensor_parallel_size or 1
    else:
        tensor_parallel_size = tensor_parallel_size or max(1, len(visible_hardware().gpus))
    info = describe(directory, config, tensor_parallel_size)
    return VllmEngine(
        info,
        Configure(
            model=str(directory),
            dtype=config.dtype,
            max_model_tokens=info.max_context_tokens,
            max_sequences=config.max_concurrent_sequences,
            max_logprobs=config.max_topk_logprobs,
            cache_bytes=config.cache_bytes,
            max_adapters=config.vllm_max_batch_adapters,
            max_host_adapters=max(config.max_loaded_weights, config.vllm_max_batch_adapters),
            max_adapter_rank=config.vllm_max_adapter_rank,
            tensor_parallel_size=tensor_parallel_size,
        ),
        Interpreter(
            config.vllm_python,
            config.num_threads,
            config.vllm_start_timeout_s,
            is_cpu=config.device == "cpu",
        ),
        stall_timeout_s=config.vllm_stall_timeout_s,
    )


def describe(directory: Path, config: SamplerConfig, tensor_parallel_size: int) -> ModelInfo:
    """Return what a model is, from its files alone.

    Raises:
        CheckpointIncompatibleError: If vLLM would read its files otherwise than they are meant.
    """
    hf_config = load_hf_config(directory)
    text_config = hf_config.get_text_config()
    if getattr(text_config, "tie_word_embeddings", False) and holds_another_head(directory):
        raise CheckpointIncompatibleError(
            f"{directory} holds an lm_head.weight that differs from the embedding, and its "
            "config.json says that they are tied, which vLLM would follow; set "
            "tie_word_embeddings to false there",
            tensor=HEAD_WEIGHT,
        )
    num_parameters = sum(
        math.prod(entry.shape)
        for file in sorted(set(stored_tensors(directory).values()))
        for entry in read_header_of(file).values()
    )
    return ModelInfo(
        vocab_size=text_config.vocab_size,
        max_context_tokens=min(
            getattr(text_config, "max_position_embeddings", _MAX_CONTEXT_TOKENS),
            _MAX_CONTEXT_TOKENS,
        ),
        dtype=config.dtype,
        num_parameters=num_parameters,
        exactness="fast",
        family=hf_config.model_type,
        fingerprint=(
            f"device={config.device} dtype={config.dtype} tensor_parallel={tensor_parallel_size}"
        ),
    )
