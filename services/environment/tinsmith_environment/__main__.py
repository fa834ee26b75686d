"""`python -m tinsmith_environment [--config FILE]`: one environment pod as its own process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from tinsmith_environment.config import EnvironmentConfig
from tinsmith_environment.deployment import EnvironmentDeployment
from tinsmith_runtime.config import load_config
from tinsmith_runtime.errors import ConfigError, TinsmithError
from tinsmith_runtime.logs import configure_logging
from tinsmith_runtime.server import wait_for_signal

logger = logging.getLogger(__name__)


def main() -> int:
    """Serve until a signal; return the exit code of the process."""
    parser = argparse.ArgumentParser(prog="python -m tinsmith_environment", description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML file; TINSMITH_* variables win")
    arguments = parser.parse_args()
    configure_logging("environment")
    try:
        config = load_config(EnvironmentConfig, path=arguments.config)
        asyncio.run(_serve(config))
    except (ConfigError, TinsmithError) as error:
        logger.critical("can not start", extra={"problem": str(error)})
        return 2
    return 0


async def _serve(config: EnvironmentConfig) -> None:
    stopped = asyncio.create_task(wait_for_signal())
    deployment = EnvironmentDeployment(config)
    await deployment.start()
    await stopped
    await deployment.stop()


if __name__ == "__main__":
    sys.exit(main())
