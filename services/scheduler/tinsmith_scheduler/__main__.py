"""`python -m tinsmith_scheduler [--config FILE]`: one scheduler as its own process."""

from __future__ import annotations

import sys

from tinsmith_runtime.pod.main import run_pod, serve_exclusive
from tinsmith_scheduler.config import SchedulerConfig
from tinsmith_scheduler.pod import SchedulerPod


async def _serve(config: SchedulerConfig) -> None:
    await serve_exclusive("scheduler", lambda on_lost: SchedulerPod(config, on_lost=on_lost))


if __name__ == "__main__":
    sys.exit(run_pod("scheduler", SchedulerConfig, _serve))
