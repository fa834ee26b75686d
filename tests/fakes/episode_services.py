"""A real scheduler and a real coordinator in a thread, for tests of the SDK."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from tests.fakes.coordinator_harness import MovedClock
from tests.support.pod_keys import POD_KEY

from tinsmith_coordinator.config import CoordinatorConfig
from tinsmith_coordinator.pod import CoordinatorPod
from tinsmith_runtime.rpc.auth import ApiKey
from tinsmith_scheduler.config import SchedulerConfig
from tinsmith_scheduler.pod import SchedulerPod


class Services:
    """Scheduler and coordinator in a thread with an event loop of its own."""

    def __init__(self, folder: Path) -> None:
        self.key = str(ApiKey.generate())
        self.clock = MovedClock()
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_handle_exception)
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.scheduler = SchedulerPod(
            SchedulerConfig(
                data_dir=folder, pod_key=POD_KEY, bootstrap_key=self.key, drain_timeout_s=1
            )
        )
        self.coordinator: CoordinatorPod
        self._run(self.scheduler.start())
        self.start_coordinator()

    def start_coordinator(self) -> None:
        """Start the coordinator on another port, and wait until it is listed."""
        self._run(self._start_coordinator())

    async def _start_coordinator(self) -> None:
        # In the loop: a pod opens its channel when it is built.
        self.coordinator = CoordinatorPod(
            CoordinatorConfig(
                data_dir=self._folder,
                scheduler_address=self.scheduler.address,
                pod_key=POD_KEY,
                drain_timeout_s=1,
                sweep_interval_s=0.01,
            ),
            clock=self.clock,
        )
        await self.coordinator.start()
        await self.coordinator.wait_listed(20)

    def stop_coordinator(self) -> None:
        """Stop the coordinator."""
        self._run(self.coordinator.stop())

    def stop(self) -> None:
        """Stop both."""
        self.stop_coordinator()
        self._run(self.scheduler.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)


def _handle_exception(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    # As the SDK's own loop: grpc.aio has one wake-up socket for a process.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
