"""`python -m tinsmith_scheduler [--config FILE]`: one scheduler as its own process."""

from __future__ import annotations

import asyncio
import sys

from tinsmith_runtime.process import run_pod
from tinsmith_runtime.server import wait_for_signal
from tinsmith_scheduler.config import SchedulerConfig
from tinsmith_scheduler.pod import SchedulerPod


async def _serve(config: SchedulerConfig) -> None:
    # Listened for from the beginning: a signal that comes during the start ends it in order.
    stopped = asyncio.create_task(wait_for_signal())
    pod = SchedulerPod(config)
    await pod.start()
    try:
        await stopped
    finally:
        await pod.stop()


if __name__ == "__main__":
    sys.exit(run_pod("scheduler", SchedulerConfig, _serve))
