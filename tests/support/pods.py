"""The pods of a deployment as processes on this machine, for tests and benchmarks.

They lie here and not in `tinsmith_local`, since that is installed, and its users start one server.
What every process does, which the demo needs as well, is `tinsmith_local.process.ChildProcess`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support import outlived
from tests.support.pod_keys import POD_KEY
from tests.support.wait import TIMEOUT_S

import tinsmith
from tinsmith_local.process import ChildProcess, free_port, wait_until_served
from tinsmith_runtime.rpc.auth import ApiKey

_LISTED = ("trainer", "sampler", "environment", "coordinator")
"""Kinds that register at the scheduler."""
_REGISTERED = '"event": "registered"'
_ASK_S = 2.0
"""Time for which a server that is not there yet is asked, before its process is looked at."""


class PodProcess(ChildProcess):
    """`python -m tinsmith_<kind>`, with its settings as variables and none of ours inherited.

    It ends with this process, however that ends.

    Args:
        name: Its kind, with `-` and more where there are several.
        folder: Where its log goes.
        settings: By name of the field.
        launcher: What runs the module, such as `-m torch.distributed.run`.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        settings: Mapping[str, object],
        *,
        launcher: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.kind = kind_of(name)
        self.settings = dict(settings)
        variables = {f"TINSMITH_{field.upper()}": str(value) for field, value in settings.items()}
        super().__init__(
            [*launcher, "-m", f"tinsmith_{self.kind}"],
            folder / f"{name}.log",
            {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables},
        )
        self._log_begin = 0

    @property
    def address(self) -> str:
        """Where it listens, if its settings give it a port."""
        return str(self.settings["listen_address"])

    @property
    def metrics_address(self) -> str:
        """Of its endpoint of Prometheus."""
        return str(self.settings["metrics_address"])

    @property
    def is_listed(self) -> bool:
        """Whether it registered at the scheduler since its last start, which it says in its log."""
        return _REGISTERED.encode() in self.log.read_bytes()[self._log_begin :]

    def start(self, variables: Mapping[str, str] | None = None) -> None:
        """Start the pod, with further variables for this time; it serves a little later."""
        self._log_begin = self.log.stat().st_size if self.log.is_file() else 0
        super().start(variables)
        outlived.register(self.pid)

    def kill(self) -> None:
        """Send SIGKILL to the pod and its group, and reap it; repeating changes nothing."""
        super().kill()
        if self._process is not None:
            outlived.forget(self.pid)

    def inherited(self) -> dict[str, str]:
        """Return the variables of this process without those of Tinsmith."""
        found = super().inherited()
        return {name: value for name, value in found.items() if "TINSMITH_" not in name}


class PodDeployment:
    """Pods that share a scheduler, keys and a store; they run while the context is open.

    Args:
        folder: Of their data, logs and store.
        models: Folder by base model.
        names: Of the pods, in the order of their start; a kind, or a kind with `-` and more.
        settings: Further ones by kind or name, by name of the field.
        certificates: A folder of `tinsmith certificates`; without one pods speak in clear.
        storage_uri: Where checkpoints go; a folder by default.
        make: Class of its processes.

    Attributes:
        folder: As given.
        processes: By name; what is added before the start is started and awaited as well.
        scheduler_address: Of the scheduler; what it says of pods leads to them directly.
        gateway_address: Of the gateway.
        api_key: Of the operators, in the default project.
        pod_key: The root secret of the keys of pods.
        storage_uri: Where checkpoints go.
    """

    def __init__(
        self,
        folder: Path,
        models: Mapping[str, Path],
        names: Iterable[str] = (),
        *,
        settings: Mapping[str, Mapping[str, object]] | None = None,
        certificates: Path | None = None,
        storage_uri: str = "",
        make: type[PodProcess] = PodProcess,
    ) -> None:
        self.folder = folder
        self.scheduler_address = f"127.0.0.1:{free_port()}"
        self.gateway_address = f"127.0.0.1:{free_port()}"
        self.api_key = str(ApiKey.generate())
        self.pod_key = POD_KEY
        self.storage_uri = storage_uri or f"file://{(folder / 'store').resolve()}"
        self._models = dict(models)
        self._settings = settings or {}
        self._certificates = certificates
        self.processes = {name: make(name, folder, self.settings_of(name)) for name in names}

    @property
    def address(self) -> str:
        """What clients are given: the gateway's if there is one."""
        return self.gateway_address if "gateway" in self.processes else self.scheduler_address

    def settings_of(self, name: str, **further: object) -> dict[str, object]:
        """Return the settings of a pod: by kind, over these by name, over these what is given."""
        kind = kind_of(name)
        values: dict[str, object] = {
            "pod_key": self.pod_key,
            "scheduler_address": self.scheduler_address,
            "listen_address": "127.0.0.1:0",
            "metrics_address": f"127.0.0.1:{free_port()}",
            "drain_timeout_s": 5,
            "data_dir": self.folder / name,
            "base_models": ",".join(f"{model}={place}" for model, place in self._models.items()),
            "storage_uri": self.storage_uri,
            "num_threads": 1,
        }
        if name != kind:
            values["worker_name"] = name
        if kind == "scheduler":
            values |= {"listen_address": self.scheduler_address, "bootstrap_key": self.api_key}
        if kind == "gateway":
            values["listen_address"] = self.gateway_address
        values |= self.certificate_of(kind)
        return {**values, **self._settings.get(kind, {}), **self._settings.get(name, {}), **further}

    def certificate_of(self, kind: str) -> dict[str, object]:
        """Return the settings of a kind of pod that speaks TLS; none where pods speak in clear."""
        if self._certificates is None:
            return {}
        own = self._certificates / kind
        return {
            "pod_certificate": own / "tls.crt",
            "pod_certificate_key": own / "tls.key",
            "pod_authority": own / "ca.crt",
        }

    def __enter__(self) -> Self:
        try:
            for process in self.processes.values():
                process.start()
            self.wait_served()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def client(self, address: str = "", *, budget_s: float = TIMEOUT_S) -> tinsmith.Client:
        """Return a client of the operators, which tries for as long as a test may take."""
        return tinsmith.Client(
            address or self.address,
            self.api_key,
            operation_timeout_s=TIMEOUT_S,
            retry=tinsmith.RetryPolicy(budget_s=budget_s),
        )

    def restart(self, name: str) -> None:
        """Kill a pod, start it again on what it left, and wait until all pods serve."""
        self.processes[name].kill()
        self.processes[name].start()
        self.wait_served()

    def wait_served(self) -> None:
        """Wait until all pods are listed, and clients can train and sample what there is.

        Raises:
            ServerStartError: If a pod ends, or they do not come to that.
        """
        pods = list(self.processes.values())
        workers = [pod for pod in pods if pod.kind in _LISTED]
        wait_until_served(pods, lambda: all(pod.is_listed for pod in workers))
        # Clients do not speak TLS with certificates of pods.
        addresses = {self.address} if self._certificates else {self.scheduler_address, self.address}
        for address in addresses:
            wait_until_served(pods, functools.partial(self._is_served, address))

    def stop(self) -> None:
        """End all pods; they drain beside each other."""
        for process in self.processes.values():
            process.terminate()
        with contextlib.ExitStack() as stack:
            for process in self.processes.values():
                stack.callback(process.stop, is_asked=True)

    def _is_served(self, address: str) -> bool:
        kinds = {pod.kind for pod in self.processes.values()}
        try:
            with self.client(address, budget_s=_ASK_S) as client:
                models = client.list_models()
        except tinsmith.UnavailableError:
            return False
        return not self._models or any(
            (model.trainable or "trainer" not in kinds)
            and (model.sampleable or "sampler" not in kinds)
            for model in models
        )


def kind_of(name: str) -> str:
    """Return the kind of the pod that a name begins with."""
    return name.partition("-")[0]
