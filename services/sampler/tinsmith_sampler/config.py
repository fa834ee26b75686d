"""Settings of the sampler pod."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinsmith_runtime.config import parse_models
from tinsmith_runtime.devices import check_device, check_dtype
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.rpc.server import ServerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerConfig:
    """Settings of one sampler."""

    storage_uri: str
    """Where trainers put checkpoints; the same store as theirs."""
    base_models: str = ""
    """`name=directory or hub id`, separated by commas."""
    worker_name: str = "sampler-0"
    """Identity at the scheduler; must be the same after a restart."""
    pool: str = ""
    """The scheduler sends only callers here whose key is bound to it; empty is for all others."""
    dedicated_project: str = ""
    """The one project that this sampler is for; empty serves all."""
    dedicated_checkpoint: str = ""
    """The one checkpoint of such a sampler; sampling sessions of the project on it come here. Empty
    serves the base model."""
    scheduler_address: str = ""
    """`host:port` of the scheduler."""
    pod_key: str = field(default="", repr=False)
    """The secret that the pods of one deployment share."""
    listen_address: str = "127.0.0.1:0"
    metrics_address: str | None = None
    drain_timeout_s: float = 30.0
    dtype: str = "float32"
    """Of the base model: float32, bfloat16, or auto: bfloat16 on a GPU that computes in it."""
    device: str = "cpu"
    """cpu, cuda, cuda:N, or auto: the GPU if torch can use one. The log warns of a GPU that is left
    out."""
    num_threads: int = 0
    """Threads of one operation; 0 takes all cores."""
    exact: bool | None = None
    """Whether a run's bits must depend neither on what is computed beside it nor on the number of
    threads: true refuses to start where the machine cannot keep that; auto, the default, starts
    without the promise there and says so; false does not try."""
    compiled: bool | None = None
    """Whether elementwise kernels are compiled at start, which takes a compiler and up to a minute;
    unset does so on a GPU alone. Trainer and sampler must agree."""
    max_concurrent_sequences: int = 256
    """Sequences that decode at once, if the cache has room for them; more wait."""
    cache_bytes: int = 2 * 2**30
    """Memory for keys and values, by base model."""
    max_queued_sequences: int = 4096
    """Sequences that wait; more are refused."""
    max_samples: int = 256
    """Samples of one request."""
    max_topk_logprobs: int = 64
    max_loaded_weights: int = 16
    """Checkpoints and versions from files that stay in memory."""
    session_ttl_s: float = 5.0
    """How long an answer of the scheduler about a sampling session is used."""
    weight_poll_interval_s: float = 1.0
    """Time between two questions to a trainer in another process for newer weights of a run, while
    requests decode that take them in flight."""

    def __post_init__(self) -> None:
        check_device(self.device)
        check_dtype(self.dtype)
        for name in (
            "max_concurrent_sequences",
            "cache_bytes",
            "max_queued_sequences",
            "max_samples",
            "max_topk_logprobs",
            "max_loaded_weights",
            "session_ttl_s",
            "weight_poll_interval_s",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if self.max_samples > self.max_queued_sequences:
            raise ConfigError(
                f"max_samples is {self.max_samples}, above max_queued_sequences "
                f"{self.max_queued_sequences}: such a request could never be accepted"
            )
        if self.dedicated_project and self.pool:
            raise ConfigError("dedicated_project and pool exclude each other; set one of them")
        if self.dedicated_checkpoint and not self.dedicated_project:
            raise ConfigError("dedicated_checkpoint needs dedicated_project")
        self.models()
        self.server()

    def models(self) -> dict[str, str]:
        """Return the directory or hub id of each base model."""
        return parse_models(self.base_models)

    def server(self) -> ServerConfig:
        """Return the settings of the gRPC server."""
        return ServerConfig(
            listen_address=self.listen_address,
            metrics_address=self.metrics_address,
            drain_timeout_s=self.drain_timeout_s,
        )
