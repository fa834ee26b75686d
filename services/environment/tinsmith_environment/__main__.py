"""`python -m tinsmith_environment [--config FILE]`: one environment as its own process."""

from __future__ import annotations

import asyncio
import sys

from tinsmith_environment.config import EnvironmentConfig
from tinsmith_environment.pod import EnvironmentPod
from tinsmith_runtime.pod.main import run_pod
from tinsmith_runtime.rpc.server import wait_for_signal


async def _serve(config: EnvironmentConfig) -> None:
    stopped = asyncio.create_task(wait_for_signal())
    pod = EnvironmentPod(config)
    await pod.start()
    await stopped
    await pod.stop()


if __name__ == "__main__":
    sys.exit(run_pod("environment", EnvironmentConfig, _serve))
