"""`python -m tinsmith_coordinator [--config FILE]`: one coordinator as its own process."""

from __future__ import annotations

import sys

from tinsmith_coordinator.config import CoordinatorConfig
from tinsmith_coordinator.pod import CoordinatorPod
from tinsmith_runtime.pod.main import run_pod, serve_exclusive


async def _serve(config: CoordinatorConfig) -> None:
    await serve_exclusive("coordinator", lambda on_lost: CoordinatorPod(config, on_lost=on_lost))


if __name__ == "__main__":
    sys.exit(run_pod("coordinator", CoordinatorConfig, _serve))
