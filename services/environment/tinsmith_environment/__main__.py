"""`python -m tinsmith_environment [--config FILE]`: one environment as its own process."""

from __future__ import annotations

import sys

from tinsmith_environment.config import EnvironmentConfig
from tinsmith_environment.pod import EnvironmentPod
from tinsmith_runtime.pod.main import run_pod, serve


async def _serve(config: EnvironmentConfig) -> None:
    await serve(EnvironmentPod(config))


if __name__ == "__main__":
    sys.exit(run_pod("environment", EnvironmentConfig, _serve))
