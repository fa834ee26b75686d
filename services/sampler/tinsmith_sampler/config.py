"""Settings of the sampler pod."""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith.names import serving_pool
from tinsmith_runtime.config import require_positive
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.pod.engine_settings import EngineConfig
from tinsmith_runtime.pod.settings import WorkerConfig

ENGINES = ("embedded", "vllm")
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerConfig(WorkerConfig, EngineConfig):
    """Settings of one sampler."""

    storage_uri: str
    """Where trainers put checkpoints; the same store as theirs."""
    worker_name: str = "sampler-0"
    engine: str = "embedded"
    """What samples: `embedded`, the own decoder in this process, or `vllm`, a process beside it."""
    vllm_python: str = "/opt/vllm/bin/python"
    """Interpreter of the environment that has vLLM; the default is that of the image."""
    vllm_max_adapter_rank: int = 64
    """Largest rank of an adapter that vLLM takes: 8, 16, 32, 64, 128, 256, 320 or 512."""
    vllm_max_batch_adapters: int = 8
    """Adapters whose tokens vLLM makes together; more wait for each other."""
    vllm_tensor_parallel_size: int = 0
    """GPUs that vLLM cuts each layer over; 0 takes all that the pod sees, and 1 on a CPU."""
    vllm_start_timeout_s: float = 1800.0
    """Time that vLLM may take to load a model."""
    vllm_stall_timeout_s: float = 300.0
    """Time without a step, although there is work, after which vLLM is ended and started again."""
    dedicated_project: str = ""
    """The one project that this sampler is for; empty serves all."""
    dedicated_checkpoint: str = ""
    """The one checkpoint of such a sampler; sampling sessions of the project on it come here. Empty
    serves the base model."""
    max_concurrent_sequences: int = 256
    """Sequences that get a token at once, if the cache has room for them; more wait."""
    cache_bytes: int = 2 * 2**30
    """Memory for keys and values, by base model; it is never passed. A request that needs more is
    refused, and one that finds too little free waits."""
    max_queued_sequences: int = 16_384
    """Sequences that wait, of all projects; more are refused, but to a project that has less than
    an equal part."""
    max_project_queued_sequences: int = 4096
    """Sequences of one project that wait; more are refused."""
    max_samples: int = 256
    """Samples of one request."""
    max_topk_logprobs: int = 64
    """Most probable tokens that a position is asked for."""
    max_loaded_weights: int = 16
    """Checkpoints and versions from files that stay in memory."""
    session_ttl_s: float = 5.0
    """How long an answer of the scheduler about a sampling session is used."""
    weight_poll_interval_s: float = 1.0
    """Time between two questions to a trainer in another process for newer weights of a run, while
    requests decode that take them in flight."""

    def __post_init__(self) -> None:
        self.check_engine()
        if self.engine not in ENGINES:
            raise ConfigError(f"engine must be one of {', '.join(ENGINES)}, got {self.engine!r}")
        if self.vllm_max_adapter_rank not in _VLLM_RANKS:
            raise ConfigError(
                f"vllm_max_adapter_rank must be one of {', '.join(map(str, _VLLM_RANKS))}, got "
                f"{self.vllm_max_adapter_rank}"
            )
        if self.vllm_tensor_parallel_size < 0:
            raise ConfigError("vllm_tensor_parallel_size must be at least 0")
        require_positive(
            self,
            "vllm_max_batch_adapters",
            "vllm_start_timeout_s",
            "vllm_stall_timeout_s",
            "max_concurrent_sequences",
            "cache_bytes",
            "max_queued_sequences",
            "max_project_queued_sequences",
            "max_samples",
            "max_topk_logprobs",
            "max_loaded_weights",
            "session_ttl_s",
            "weight_poll_interval_s",
        )
        for name in ("max_queued_sequences", "max_project_queued_sequences"):
            if self.max_samples > getattr(self, name):
                raise ConfigError(
                    f"max_samples is {self.max_samples}, above {name} {getattr(self, name)}: such "
                    "a request could never be accepted"
                )
        if self.dedicated_project and self.pool != serving_pool(self.dedicated_project):
            raise ConfigError(
                f"a sampler of the dedicated_project {self.dedicated_project} is of its pool: set "
                f"pool to {serving_pool(self.dedicated_project)}, and pod_key to the key of that"
            )
        if self.dedicated_checkpoint and not self.dedicated_project:
            raise ConfigError("dedicated_checkpoint needs dedicated_project")
        self.server()
