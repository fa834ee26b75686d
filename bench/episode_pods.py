"""A scheduler and a coordinator, each as a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc

from bench.processes import Child
from tinsmith.v1 import episode_pb2, episode_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from tinsmith_local.process import free_port
from tinsmith_runtime.rpc.auth import ApiKey

_START_TIMEOUT_S = 60.0
_POLL_S = 0.05


class EpisodePods:
    """The two processes; the coordinator can be killed and started again.

    Args:
        folder: Data and logs go below it.
        settings: Of the coordinator, as variables without `TINSMITH_`.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.key = str(ApiKey.generate())
        self.address = f"127.0.0.1:{free_port()}"
        self.scheduler_address = f"127.0.0.1:{free_port()}"
        self._settings = dict(settings or {})
        self._stack = contextlib.ExitStack()
        self._coordinator: Child | None = None

    def start(self) -> None:
        """Start both, and wait until episodes are served."""
        self._stack.enter_context(
            self._child(
                "scheduler",
                LISTEN_ADDRESS=self.scheduler_address,
                BOOTSTRAP_KEY=self.key,
            )
        )
        self.start_coordinator()

    def start_coordinator(self) -> None:
        """Start the coordinator on what it has left, and wait until it serves and is listed."""
        self._coordinator = self._stack.enter_context(
            self._child(
                "coordinator",
                LISTEN_ADDRESS=self.address,
                SCHEDULER_ADDRESS=self.scheduler_address,
                **self._settings,
            )
        )
        self._wait_served(self._coordinator)

    def kill_coordinator(self) -> None:
        """End the coordinator as a crash does."""
        assert self._coordinator is not None, "start it first"
        os.kill(self._coordinator.pid, signal.SIGKILL)
        self._coordinator.stop()

    def stop(self) -> None:
        """End both."""
        self._stack.close()

    def _child(self, pod: str, **settings: str) -> Child:
        values = {
            "DATA_DIR": str(self._folder / pod),
            "POD_KEY": "pod-key-of-the-benchmark",
            "DRAIN_TIMEOUT_S": "5",
            **settings,
        }
        return Child(
            ["-m", f"tinsmith_{pod}"],
            num_threads=1,
            log=self._folder / f"{pod}.log",
            environment={f"TINSMITH_{name}": value for name, value in values.items()},
        )

    def _wait_served(self, coordinator: Child) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        metadata = (("authorization", f"Bearer {self.key}"),)
        serving = episode_pb2.ListEpisodesRequest(parent="projects/default")
        listed = scheduler_pb2.GetCapabilitiesRequest(parent="projects/default")
        with (
            grpc.insecure_channel(self.address) as channel,
            grpc.insecure_channel(self.scheduler_address) as scheduler_channel,
        ):
            episodes = episode_pb2_grpc.EpisodeServiceStub(channel)
            scheduler = scheduler_pb2_grpc.SchedulerServiceStub(scheduler_channel)
            while True:
                coordinator.check_alive()
                try:
                    episodes.ListEpisodes(serving, metadata=metadata, timeout=5)
                    known = scheduler.GetCapabilities(listed, metadata=metadata, timeout=5)
                    if known.coordinator_address:
                        return
                except grpc.RpcError:
                    if time.monotonic() > deadline_s:
                        raise
                if time.monotonic() > deadline_s:
                    raise TimeoutError("the coordinator is not listed by its scheduler")
                time.sleep(_POLL_S)


@contextlib.contextmanager
def episode_pods(folder: Path, settings: Mapping[str, str] | None = None) -> Iterator[EpisodePods]:
    """Run a scheduler and a coordinator until the context ends."""
    pods = EpisodePods(folder, settings)
    try:
        pods.start()
        yield pods
    finally:
        pods.stop()
