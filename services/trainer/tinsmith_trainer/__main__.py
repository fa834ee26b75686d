"""`python -m tinsmith_trainer [--config FILE]`: one trainer as its own process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from tinsmith_runtime.config import load_config
from tinsmith_runtime.errors import ConfigError, TinsmithError
from tinsmith_runtime.ledger.records import FencedError
from tinsmith_runtime.logs import configure_logging
from tinsmith_runtime.server import wait_for_signal
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.pod import TrainerPod, load_engines

logger = logging.getLogger(__name__)

_FENCED_EXIT_CODE = 3


def main() -> int:
    """Serve until a signal; return the exit code of the process."""
    parser = argparse.ArgumentParser(prog="python -m tinsmith_trainer", description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML file; TINSMITH_* variables win")
    arguments = parser.parse_args()
    configure_logging("trainer")
    try:
        config = load_config(TrainerConfig, path=arguments.config)
        asyncio.run(_serve(config))
    except (ConfigError, TinsmithError) as error:
        logger.critical("can not start", extra={"problem": str(error)})
        return 2
    return 0


async def _serve(config: TrainerConfig) -> None:
    host = await asyncio.to_thread(load_engines, config)
    pod = TrainerPod(config, host, on_fenced=_exit_fenced)
    stopped = asyncio.create_task(wait_for_signal())
    await pod.start()
    await stopped
    await pod.stop()
    await asyncio.to_thread(host.thread.close, config.drain_timeout_s)


def _exit_fenced(error: FencedError) -> None:
    """End at once: another process holds a run, and nothing of this one may count any more."""
    logger.critical("fenced", extra={"problem": error.message})
    os._exit(_FENCED_EXIT_CODE)


if __name__ == "__main__":
    sys.exit(main())
