"""What is the same in the main program of every pod: settings, logs, exit codes."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from tinsmith_runtime.config import load_config
from tinsmith_runtime.errors import ConfigError, TinsmithError
from tinsmith_runtime.logs import configure_logging

logger = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT")

_CAN_NOT_START = 2


def run_pod(
    pod: str, config_class: type[ConfigT], serve: Callable[[ConfigT], Coroutine[Any, Any, None]]
) -> int:
    """Read the settings of a pod, serve until a signal, and return the exit code of the process.

    Args:
        pod: Name of the pod, such as `trainer`.
        config_class: Its settings, read from `--config FILE` and `TINSMITH_*` variables.
        serve: Serves until the process is asked to stop.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m tinsmith_{pod}", description=f"One {pod} as its own process."
    )
    parser.add_argument("--config", type=Path, help="TOML file; TINSMITH_* variables win")
    arguments = parser.parse_args()
    configure_logging(pod)
    try:
        asyncio.run(serve(load_config(config_class, path=arguments.config)))
    except (ConfigError, TinsmithError) as error:
        logger.critical("can not start", extra={"problem": str(error)})
        return _CAN_NOT_START
    return 0
