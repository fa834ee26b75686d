"""`python -m tinsmith_controller [--config FILE]`: one controller as its own process."""

from __future__ import annotations

import asyncio
import contextlib
import sys

from tinsmith_controller.config import ControllerConfig
from tinsmith_controller.health import HealthServer
from tinsmith_controller.pod import ControllerPod, open_pod
from tinsmith_runtime.observability.metrics import MetricsServer
from tinsmith_runtime.pod.main import end_at_once, run_pod
from tinsmith_runtime.rpc.server import wait_for_signal


async def _serve(config: ControllerConfig) -> None:
    stopped = asyncio.create_task(wait_for_signal())
    pod: ControllerPod | None = None
    with contextlib.ExitStack() as servers:
        # They answer while the API server is waited for: no probe ends a process that waits.
        if config.metrics_address:
            servers.callback(MetricsServer.start(config.metrics_address).stop)
        if config.health_address:
            health = HealthServer(
                config.health_address,
                is_alive=lambda: pod is None or pod.is_alive,
                is_ready=lambda: pod is not None,
            )
            health.start()
            servers.callback(health.stop)
        pod = await open_pod(config, stopped, on_lost=_exit_lost)
        if pod is None:
            return
        running = asyncio.create_task(asyncio.to_thread(pod.run))
        await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.to_thread(pod.stop)
        await running


def _exit_lost() -> None:
    """End at once: another replica may decide now, and two must not."""
    end_at_once("another controller may have taken over")


if __name__ == "__main__":
    sys.exit(run_pod("controller", ControllerConfig, _serve))
