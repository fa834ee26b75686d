"""`python -m tinsmith_gateway [--config FILE]`: one gateway as its own process."""

from __future__ import annotations

import sys

from tinsmith_gateway.config import GatewayConfig
from tinsmith_gateway.pod import GatewayPod
from tinsmith_runtime.pod.main import run_pod, serve_exclusive


async def _serve(config: GatewayConfig) -> None:
    await serve_exclusive("gateway", lambda on_lost: GatewayPod(config, on_lost=on_lost))


if __name__ == "__main__":
    sys.exit(run_pod("gateway", GatewayConfig, _serve))
