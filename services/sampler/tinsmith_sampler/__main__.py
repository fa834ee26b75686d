"""`python -m tinsmith_sampler [--config FILE]`: one sampler as its own process."""

from __future__ import annotations

import asyncio
import sys

from tinsmith_engine.base.hardware import placed
from tinsmith_engine.host import load_engines
from tinsmith_runtime.pod.main import run_pod
from tinsmith_runtime.rpc.server import wait_for_signal
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.engines.embedded_engine import EmbeddedEngines
from tinsmith_sampler.pod import SamplerPod
from tinsmith_sampler.vllm.source import VllmEngines


async def _serve(config: SamplerConfig) -> None:
    config = placed(config)
    stopped = asyncio.create_task(wait_for_signal())
    if config.engine == "vllm":
        await _serve_vllm(config, stopped)
        return
    host = await asyncio.to_thread(load_engines, config, max_resident_runs=1)
    pod = SamplerPod(config, EmbeddedEngines(host))
    await pod.start()
    await stopped
    await pod.stop()
    await asyncio.to_thread(host.thread.close, config.drain_timeout_s)


async def _serve_vllm(config: SamplerConfig, stopped: asyncio.Task[None]) -> None:
    source = await VllmEngines.start(config)
    try:
        pod = SamplerPod(config, source)
        await pod.start()
        await stopped
        await pod.stop()
    finally:
        await source.close()


if __name__ == "__main__":
    sys.exit(run_pod("sampler", SamplerConfig, _serve))
