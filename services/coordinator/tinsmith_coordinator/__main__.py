"""`python -m tinsmith_coordinator [--config FILE]`: one coordinator as its own process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys

from tinsmith_coordinator.config import CoordinatorConfig
from tinsmith_coordinator.pod import CoordinatorPod
from tinsmith_runtime.process import run_pod
from tinsmith_runtime.server import wait_for_signal

logger = logging.getLogger(__name__)

_LOST_EXIT_CODE = 3


async def _serve(config: CoordinatorConfig) -> None:
    # Listened for from the beginning: a signal that comes during the start, which lasts as long as
    # another coordinator holds the database, ends it in order.
    stopped = asyncio.create_task(wait_for_signal())
    pod = CoordinatorPod(config, on_lost=_exit_lost)
    start = asyncio.create_task(pod.start())
    await asyncio.wait((start, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not start.done():
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await start
        return
    await start
    try:
        await stopped
    finally:
        await pod.stop()


def _exit_lost() -> None:
    """End at once: another coordinator decides now, and nothing of this one may count any more."""
    logger.critical("another coordinator took over")
    os._exit(_LOST_EXIT_CODE)


if __name__ == "__main__":
    sys.exit(run_pod("coordinator", CoordinatorConfig, _serve))
