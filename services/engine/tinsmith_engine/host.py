"""The engines of a pod and the one thread that may touch them.

Trainer and sampler of one process share a host. A training step and a decode step then never run
at the same time, and weights pass between them without a file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from tinsmith_engine.base.engine_thread import EngineThread, Parts
from tinsmith_engine.base.memory import keep_freed_memory
from tinsmith_engine.files.hub_files import resolve_model
from tinsmith_engine.training.engine import Engine
from tinsmith_runtime.errors import ModelNotFoundError
from tinsmith_runtime.pod.engine_settings import EngineConfig
from tinsmith_runtime.text.tokenizer_files import require_tokenizers

ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class EngineHost:
    """Base models in memory, by name, and their thread.

    Attributes:
        engines: One engine for each base model.
        directories: Where each was loaded from.
        thread: The thread that owns all of them.
    """

    engines: Mapping[str, Engine]
    directories: Mapping[str, Path]
    thread: EngineThread

    @classmethod
    def load(
        cls,
        models: Mapping[str, str],
        *,
        dtype: str,
        device: str,
        num_threads: int | None,
        max_resident_runs: int,
        exact: bool | None = None,
        compiled: bool | None = None,
        load: Callable[..., Engine] = Engine.load,
    ) -> EngineHost:
        """Load base models; takes as long as reading them does.

        Args:
            models: Directory or hub id by name.
            dtype: Of the base models, float32 or bfloat16.
            device: A torch device.
            num_threads: Threads of one operation; None takes all cores.
            max_resident_runs: Runs that each engine can hold.
            exact: Whether a run's bits must not depend on its neighbours; see `Engine.load`.
            compiled: Whether elementwise kernels are compiled; None does so on a GPU alone.
            load: Loads one model, with the arguments of `Engine.load`.

        Raises:
            ModelNotFoundError: If one is neither a directory nor a model of the hub.
            ConfigError: If the machine cannot do what `exact` or `compiled` ask for.
        """
        keep_freed_memory()
        thread = EngineThread(num_threads=num_threads)
        engines = {}
        directories = {}
        for name, source in models.items():
            directories[name] = resolve_model(source)
            engines[name] = thread.submit(
                load,
                directories[name],
                dtype=dtype,
                device=device,
                max_resident_runs=max_resident_runs,
                num_threads=num_threads,
                exact=exact,
                compiled=compiled,
            ).result()
        return cls(engines, directories, thread)

    def engine(self, base_model: str) -> Engine:
        """Return the engine of a base model.

        Raises:
            ModelNotFoundError: If this pod does not serve it.
        """
        engine = self.engines.get(base_model)
        if engine is None:
            raise model_not_served(base_model, self.engines)
        return engine

    async def call(
        self,
        function: Callable[ParametersT, ResultT],
        *args: ParametersT.args,
        **kwargs: ParametersT.kwargs,
    ) -> ResultT:
        """Run a function on the engines' thread, in the order of the calls."""
        return await asyncio.wrap_future(self.thread.submit(function, *args, **kwargs))

    async def call_by_part(
        self, parts: Parts[ResultT], on_part: Callable[[float], None] | None = None
    ) -> ResultT:
        """Run a long job on the engines' thread, where other work comes between its parts.

        Args:
            parts: The job.
            on_part: Called on the event loop before each part, with the seconds that the job is
                still expected to take.
        """
        loop = asyncio.get_running_loop()

        def notify(left_s: float) -> None:
            if on_part is not None:
                loop.call_soon_threadsafe(on_part, left_s)

        future = self.thread.submit_parts(parts, notify)
        return await asyncio.wrap_future(future)


def model_not_served(base_model: str, served: Iterable[str]) -> ModelNotFoundError:
    """Return the error about a base model that a pod does not serve."""
    return ModelNotFoundError(
        f"base model {base_model!r} is not served here; served are: "
        f"{', '.join(sorted(served)) or 'none'}",
        base_model=base_model,
    )


def load_engines(
    config: EngineConfig, *, max_resident_runs: int, load: Callable[..., Engine] = Engine.load
) -> EngineHost:
    """Load the base models of a pod; takes as long as reading them does.

    Args:
        config: Its settings.
        max_resident_runs: Runs that each engine can hold.
        load: Loads one model, with the arguments of `Engine.load`.

    Returns:
        The engines. Each of them has a tokenizer.

    Raises:
        ModelNotFoundError: If one is neither a directory nor a model of the hub, or has no
            tokenizer.
        ConfigError: If the machine cannot do what `exact` or `compiled` ask for.
    """
    models = config.models()
    require_tokenizers(models)
    host = EngineHost.load(
        models,
        dtype=config.dtype,
        device=config.device,
        num_threads=config.num_threads or None,
        exact=config.exact,
        compiled=config.compiled,
        max_resident_runs=max_resident_runs,
        load=load,
    )
    # Those of the hub are here now.
    require_tokenizers(host.directories)
    return host
