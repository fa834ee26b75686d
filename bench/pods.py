"""Scheduler, trainer, sampler and gateway as a process each, as in a cluster, on loopback."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import tinsmith
from bench.processes import Child
from tinsmith_local.process import free_port
from tinsmith_runtime.rpc.auth import ApiKey

_START_TIMEOUT_S = 120.0
_POLL_S = 0.05


class Pods:
    """Running pods; ended when the context ends.

    Args:
        folder: Of their data, logs and store.
        model: Folder of the base model.
        base_model: Its name.
        num_samplers: Samplers, each a process with one thread; 0 for a caller that samples itself.
        further: Settings of further pods by their name, as variables without `TINSMITH_`.

    Attributes:
        scheduler_address: Of the scheduler; what it says of pods leads to them directly.
        gateway_address: Of the gateway.
        api_key: Of the default project.
        gateway: The gateway's process.
        pod_key: The root secret of the keys of pods.
        storage_uri: Where checkpoints go.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        base_model: str,
        *,
        num_samplers: int = 1,
        further: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.scheduler_address = f"127.0.0.1:{free_port()}"
        self.gateway_address = f"127.0.0.1:{free_port()}"
        self.api_key = str(ApiKey.generate())
        self.pod_key = secrets.token_urlsafe(32)
        self.storage_uri = f"file://{folder / 'store'}"
        self._base_model = base_model
        self._num_samplers = num_samplers
        shared = {
            "POD_KEY": self.pod_key,
            "SCHEDULER_ADDRESS": self.scheduler_address,
            "BASE_MODELS": f"{base_model}={model}",
            "STORAGE_URI": self.storage_uri,
            "NUM_THREADS": "1",
            "LISTEN_ADDRESS": "127.0.0.1:0",
        }
        pods: dict[str, Mapping[str, str]] = {
            "scheduler": {
                "BOOTSTRAP_KEY": self.api_key,
                "LISTEN_ADDRESS": self.scheduler_address,
            },
            "trainer": {},
            **{
                f"sampler-{index}": {"WORKER_NAME": f"sampler-{index}"}
                for index in range(num_samplers)
            },
            "gateway": {"LISTEN_ADDRESS": self.gateway_address},
            **(further or {}),
        }
        folder.mkdir(parents=True, exist_ok=True)
        self._children: dict[str, Child] = {}
        for pod, values in pods.items():
            settings = {**shared, "DATA_DIR": str(folder / pod), **values}
            self._children[pod] = Child(
                ["-m", f"tinsmith_{pod.partition('-')[0]}"],
                num_threads=1,
                log=folder / f"{pod}.log",
                environment={f"TINSMITH_{name}": value for name, value in settings.items()},
            )
        self.gateway = self._children["gateway"]

    def child(self, pod: str) -> Child:
        """Return the process of a pod."""
        return self._children[pod]

    def wait_ready(self) -> None:
        """Wait until the base model can be trained and sampled, through the gateway too.

        Raises:
            RuntimeError: If a pod ends or does not register in time.
        """
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        retry = tinsmith.RetryPolicy(budget_s=_START_TIMEOUT_S)
        for address in (self.scheduler_address, self.gateway_address):
            with tinsmith.Client(address, self.api_key, retry=retry) as client:
                while not any(
                    model.trainable and (model.sampleable or not self._num_samplers)
                    for model in client.list_models()
                ):
                    for child in self._children.values():
                        child.check_alive()
                    if time.monotonic() > deadline_s:
                        raise RuntimeError("the pods did not register in time")
                    time.sleep(_POLL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in reversed(self._children.values()):
            child.stop()
