"""`python -m tinsmith_sampler [--config FILE]`: one sampler as its own process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from tinsmith_runtime.config import load_config
from tinsmith_runtime.errors import ConfigError, TinsmithError
from tinsmith_runtime.logs import configure_logging
from tinsmith_runtime.server import wait_for_signal
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.pod import SamplerPod, load_engines

logger = logging.getLogger(__name__)


def main() -> int:
    """Serve until a signal; return the exit code of the process."""
    parser = argparse.ArgumentParser(prog="python -m tinsmith_sampler", description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML file; TINSMITH_* variables win")
    arguments = parser.parse_args()
    configure_logging("sampler")
    try:
        asyncio.run(_serve(load_config(SamplerConfig, path=arguments.config)))
    except (ConfigError, TinsmithError) as error:
        logger.critical("can not start", extra={"problem": str(error)})
        return 2
    return 0


async def _serve(config: SamplerConfig) -> None:
    stopped = asyncio.create_task(wait_for_signal())
    host = await asyncio.to_thread(load_engines, config)
    pod = SamplerPod(config, host)
    await pod.start()
    await stopped
    await pod.stop()
    await asyncio.to_thread(host.thread.close, config.drain_timeout_s)


if __name__ == "__main__":
    sys.exit(main())
