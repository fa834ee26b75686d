"""`python -m tinsmith_environment [--config FILE]`: one environment pod as its own process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from tinsmith_environment import codec
from tinsmith_environment.config import EnvironmentConfig
from tinsmith_environment.pod import EnvironmentPod
from tinsmith_runtime.auth import Authenticator, CachingKeyVerifier
from tinsmith_runtime.config import load_config
from tinsmith_runtime.errors import ConfigError, TinsmithError
from tinsmith_runtime.logs import configure_logging
from tinsmith_runtime.scheduler_client import SchedulerClient, WorkerRegistration
from tinsmith_runtime.server import PodServer, wait_for_signal

logger = logging.getLogger(__name__)


def main() -> int:
    """Serve until a signal; return the exit code of the process."""
    parser = argparse.ArgumentParser(prog="python -m tinsmith_environment", description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML file; TINSMITH_* variables win")
    arguments = parser.parse_args()
    configure_logging("environment")
    try:
        config = load_config(EnvironmentConfig, path=arguments.config)
        if not config.scheduler_address or not config.pod_key:
            raise ConfigError("an environment pod needs scheduler_address and pod_key")
        asyncio.run(_serve(config))
    except (ConfigError, TinsmithError) as error:
        logger.critical("can not start", extra={"problem": str(error)})
        return 2
    return 0


async def _serve(config: EnvironmentConfig) -> None:
    scheduler = SchedulerClient(config.scheduler_address, pod_key=config.pod_key)
    authenticator = Authenticator(CachingKeyVerifier(scheduler.verify_key), pod_key=config.pod_key)
    server = PodServer(config.server(), domain=codec.DOMAIN, authenticator=authenticator)
    pod = EnvironmentPod(config, server)
    await pod.start()
    registration = WorkerRegistration(scheduler, pod.describe())
    registration.start()
    await wait_for_signal()
    await registration.stop()
    await pod.stop()
    await scheduler.close()


if __name__ == "__main__":
    sys.exit(main())
