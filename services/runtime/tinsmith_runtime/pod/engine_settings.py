"""Settings of pods that hold base models, apart from the others: engines know no transport."""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith_runtime.config import parse_models
from tinsmith_runtime.devices import check_device, check_dtype


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of a pod that holds base models."""

    __slots__ = ()

    base_models: str = ""
    """`name=directory or hub id`, separated by commas."""
    dtype: str = "float32"
    """Of the base model: float32, bfloat16, or auto: bfloat16 on a GPU that computes in it.
    Adapters are always float32."""
    device: str = "cpu"
    """cpu, cuda, cuda:N, or auto: the GPU if torch can use one. The log warns of a GPU that is left
    out."""
    num_threads: int = 0
    """Threads of one operation; 0 takes all cores. Changes no bit of an exact engine."""
    exact: bool | None = None
    """Whether a run's bits must depend neither on what is computed beside it nor on the number of
    threads. true refuses to start where the machine cannot keep that. auto, the default, starts
    without the promise there and says so. false does not try."""
    compiled: bool | None = None
    """Whether elementwise kernels are compiled at start, which takes a compiler and up to a minute;
    unset does so on a GPU alone. Trainer and sampler must agree."""

    def check_engine(self) -> None:
        """Raise ConfigError if a device, dtype or base model is not one."""
        check_device(self.device)
        check_dtype(self.dtype)
        self.models()

    def models(self) -> dict[str, str]:
        """Return the directory or hub id of each base model.

        Raises:
            ConfigError: If an entry is not `name=source`.
        """
        return parse_models(self.base_models)
