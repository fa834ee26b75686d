"""`python -m tinsmith_scheduler`: serve until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from tinsmith_runtime.config import load_config
from tinsmith_runtime.logs import configure_logging
from tinsmith_runtime.server import wait_for_signal
from tinsmith_scheduler.config import SchedulerConfig
from tinsmith_scheduler.pod import SchedulerPod


def main() -> None:
    """Read the settings and serve."""
    parser = argparse.ArgumentParser(prog="tinsmith-scheduler")
    parser.add_argument("--config", type=Path, help="TOML file; TINSMITH_* variables win over it")
    arguments = parser.parse_args()
    configure_logging("scheduler")
    asyncio.run(_serve(load_config(SchedulerConfig, path=arguments.config)))


async def _serve(config: SchedulerConfig) -> None:
    # Listened for from the beginning: a signal that comes during the start ends it in order.
    signalled = asyncio.create_task(wait_for_signal())
    pod = SchedulerPod(config)
    await pod.start()
    try:
        await signalled
    finally:
        await pod.stop()


if __name__ == "__main__":
    main()
