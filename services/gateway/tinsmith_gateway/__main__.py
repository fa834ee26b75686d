"""`python -m tinsmith_gateway [--config FILE]`: one gateway as its own process."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from tinsmith_gateway.config import GatewayConfig
from tinsmith_gateway.pod import GatewayPod
from tinsmith_runtime.process import run_pod
from tinsmith_runtime.server import wait_for_signal

logger = logging.getLogger(__name__)

_LOST_EXIT_CODE = 3


async def _serve(config: GatewayConfig) -> None:
    stopped = asyncio.create_task(wait_for_signal())
    pod = GatewayPod(config, on_lost=_exit_lost)
    await pod.start()
    try:
        await stopped
    finally:
        await pod.stop()


def _exit_lost() -> None:
    """End at once: another gateway has the database now."""
    logger.critical("another gateway took over")
    os._exit(_LOST_EXIT_CODE)


if __name__ == "__main__":
    sys.exit(run_pod("gateway", GatewayConfig, _serve))
