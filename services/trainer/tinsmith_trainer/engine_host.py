"""The engines of a trainer and the one thread that may touch them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from tinsmith_engine import Engine, EngineThread
from tinsmith_runtime.errors import ModelNotFoundError

ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")


class EngineHost:
    """Base models by name, and their thread.

    Args:
        engines: One engine for each base model.
        thread: The thread that owns all of them; trainer and sampler share it in one process.
    """

    def __init__(self, engines: Mapping[str, Engine], thread: EngineThread) -> None:
        self.engines = dict(engines)
        self.thread = thread

    def engine(self, base_model: str) -> Engine:
        """Return the engine of a base model.

        Raises:
            ModelNotFoundError: If this pod does not serve it.
        """
        engine = self.engines.get(base_model)
        if engine is None:
            served = ", ".join(sorted(self.engines)) or "none"
            raise ModelNotFoundError(
                f"base model {base_model!r} is not served here; served are: {served}",
                base_model=base_model,
            )
        return engine

    async def call(
        self,
        function: Callable[ParametersT, ResultT],
        *args: ParametersT.args,
        **kwargs: ParametersT.kwargs,
    ) -> ResultT:
        """Run a function on the engine's thread, in the order of the calls."""
        return await asyncio.wrap_future(self.thread.submit(function, *args, **kwargs))
