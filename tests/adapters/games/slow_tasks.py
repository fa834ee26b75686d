"""Tasks that share a lock of the process, as runtimes of verifiers do, and may load slowly."""

import asyncio
import time

import verifiers.v1 as vf

LOCK = asyncio.Lock()
_HELD_S = 1.0


class SlowConfig(vf.TasksetConfig):
    load_s: float = 0.0


class Slow(vf.Task):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        async with LOCK:
            await asyncio.sleep(_HELD_S)


class Slows(vf.Taskset[Slow, SlowConfig]):
    def load(self):
        time.sleep(self.config.load_s)
        return [Slow(vf.TaskData(prompt="Hello."), self.config.task)]


__all__ = ["Slows"]
