"""Runs one pod as processes: the thread that brings it from bound to gone."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from urllib3.exceptions import HTTPError

from tests.e2e.cluster.api import ApiClient, ApiError, Json, path
from tests.e2e.cluster.container import Mount
from tests.e2e.cluster.pod_status import pod_status
from tests.e2e.cluster.pod_values import ConfigError, PodValues
from tests.e2e.cluster.runner import ContainerRunner, Image, Surroundings
from tests.e2e.cluster.services import ServiceNetwork

logger = logging.getLogger(__name__)

_TICK_S = 0.05
_RETRY_S = 0.5
_IDLE_S = 1.0
# What an image would have: a volume of the pod, such as one at /tmp, does not hide it.
_PROGRAMS = sorted(
    {Path(__file__).parents[3], Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
)


class _GoneError(Exception):
    """The pod is no longer in the API, or was replaced by a namesake."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """What all pods of a kubelet share."""

    api: ApiClient
    folder: Path
    images: Mapping[str, Image]
    services: ServiceNetwork
    executor: Executor
    backoff_s: float
    base_environment: Mapping[str, str]
    node_address: str


class PodWorker:
    """One pod on one node. `update` tells what the API says; everything else is its thread's.

    Args:
        host: What the kubelet has.
        pod: The pod as it was bound.
        address: An address of its own.
    """

    def __init__(self, host: Host, pod: Json, address: str) -> None:
        metadata = pod["metadata"]
        self.key = (metadata["namespace"], metadata["name"])
        self.uid: str = metadata["uid"]
        self.node: str = pod["spec"]["nodeName"]
        self.address = address
        self.folder = host.folder / f"{'_'.join(self.key)}_{self.uid[:8]}"
        self._host = host
        self._pod = pod
        self._hostname: str = pod["spec"].get("hostname") or metadata["name"]
        self._is_gone = False
        self._is_present = True
        self._reported: Json | None = None
        self._volumes: dict[str, Path] = {}
        self._kill_at_s: float | None = None
        self._wake = threading.Event()
        self._step_lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, name=f"pod {metadata['name']}", daemon=True
        )
        hosts = self.folder / "hosts"
        self.folder.mkdir(parents=True)
        host.services.add_pod(self.uid, metadata["namespace"], address, self._hostname, hosts)
        addresses = {"podIP": address, "hostIP": host.node_address}
        self._values = PodValues(host.api, {**pod, "status": addresses})
        policy = pod["spec"].get("restartPolicy", "Always")
        init_policy = "Never" if policy == "Never" else "OnFailure"
        self.init = [self._runner(c, init_policy) for c in pod["spec"].get("initContainers", [])]
        self.main = [self._runner(c, policy) for c in pod["spec"]["containers"]]

    def start(self) -> None:
        self._thread.start()

    def update(self, pod: Json) -> None:
        """Take note of a change of the pod."""
        self._pod = pod
        self._wake.set()

    def forget(self) -> None:
        """Take note that the pod is gone: its processes are killed."""
        self._is_gone = True
        self._wake.set()

    def set_present(self, is_present: bool) -> None:
        """Take note that the kubelet of the node is silent, or speaks again and reports anew.

        Once this returns, a silent one says nothing more.
        """
        with self._step_lock:
            self._reported = None
            self._is_present = is_present
        self._wake.set()

    def kill(self) -> None:
        """Kill every process, as a machine does that loses power."""
        for runner in (*self.init, *self.main):
            runner.kill()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread."""
        self._thread.join(timeout_s)

    def runner(self, container: str = "") -> ContainerRunner:
        """Return a container by name; the first one without."""
        runners = {runner.state.name: runner for runner in (*self.main, *self.init)}
        if container and container not in runners:
            raise KeyError(f"pod {self.key[1]} has no container {container}")
        return runners[container or self.main[0].state.name]

    def _run(self) -> None:
        try:
            while True:
                self._wake.wait(_IDLE_S if self._is_idle() else _TICK_S)
                self._wake.clear()
                try:
                    with self._step_lock:
                        if self._is_present and self._step():
                            return
                except (HTTPError, OSError, ApiError) as error:
                    logger.info("pod %s: %s; tried again", self.key, error)
                    time.sleep(_RETRY_S)
        except _GoneError:
            pass
        except Exception as error:
            logger.exception("the worker of pod %s failed", self.key)
            self._give_up(f"a bug of the test kubelet: {error!r}")
        finally:
            self.kill()
            self._host.services.remove_pod(self.uid)
            shutil.rmtree(self.folder / "volumes", ignore_errors=True)

    def _is_idle(self) -> bool:
        """Whether nothing happens by itself: the pod ended, or its kubelet is silent."""
        return not self._is_present or (
            self._reported is not None and self._reported["phase"] in ("Succeeded", "Failed")
        )

    def _step(self) -> bool:
        """Do what is due; say whether the pod's life is over."""
        if self._is_gone:
            return True
        if "deletionTimestamp" in self._pod["metadata"]:
            return self._step_to_end()
        if self._mount_volumes():
            for runner in self.init:
                runner.step()
                if not runner.is_done:
                    break
            if all(runner.state.exit_code == 0 for runner in self.init):
                for runner in self.main:
                    runner.step()
        self._report()
        return False

    def _step_to_end(self) -> bool:
        runners = (*self.init, *self.main)
        if self._kill_at_s is None:
            grace_s = float(self._pod["metadata"].get("deletionGracePeriodSeconds", 30))
            self._kill_at_s = time.monotonic() + grace_s
            for runner in runners:
                runner.terminate(grace_s)
        if time.monotonic() >= self._kill_at_s:
            for runner in runners:
                runner.kill()
        if not all(runner.finish() for runner in runners):
            return False
        self._report()
        self._host.api.delete(path("v1", "pods", *self.key), grace_s=0, uid=self.uid)
        return True

    def _mount_volumes(self) -> bool:
        """Write the files of the volumes; False while something that they name is missing."""
        for volume in self._pod["spec"].get("volumes", []):
            if volume["name"] not in self._volumes:
                try:
                    source = self._values.materialise(volume, self.folder / "volumes")
                except ConfigError as error:
                    message = f"volume {volume['name']}: {error}"
                    for runner in (*self.init, *self.main):
                        waiting = {"reason": "ContainerCreating", "message": message}
                        runner.state.state = {"waiting": waiting}
                    return False
                self._volumes[volume["name"]] = source
        return True

    def _report(self) -> None:
        states = ([r.state for r in self.init], [r.state for r in self.main])
        status = pod_status(self._pod, self.address, *states)
        status["hostIP"] = self._host.node_address
        if self._reported is not None and _without_times(status) == _without_times(self._reported):
            return
        url = path("v1", "pods", *self.key, "status")
        body = {"metadata": {"uid": self.uid}, "status": status}
        try:
            self._host.api.patch(url, body, kind="strategic")
        except ApiError as error:
            if error.status in (404, 409, 422):  # 422: the uid of a namesake may not be changed
                raise _GoneError from None
            raise
        self._reported = status

    def _give_up(self, message: str) -> None:
        status = {"phase": "Failed", "reason": "KubeletFailed", "message": message}
        with contextlib.suppress(ApiError, HTTPError, OSError):  # the log has it anyway
            url = path("v1", "pods", *self.key, "status")
            self._host.api.patch(url, {"status": status}, kind="strategic")

    def _runner(self, spec: Json, policy: str) -> ContainerRunner:
        name = spec["image"].split("@")[0]
        head, _, last = name.rpartition("/")
        name = f"{head}/{last.split(':')[0]}" if head else last.split(":")[0]
        surroundings = Surroundings(
            folder=self.folder / "containers" / spec["name"],
            address=self.address,
            hostname=self._hostname,
            image=self._host.images.get(name, Image()),
            environment=self._values.environment,
            mounts=self._mounts,
            executor=self._host.executor,
            backoff_s=self._host.backoff_s,
            grace_s=float(self._pod["spec"].get("terminationGracePeriodSeconds", 30)),
            base_environment={**self._host.base_environment, "HOSTNAME": self._hostname},
        )
        return ContainerRunner(spec, policy, surroundings)

    def _mounts(self, spec: Json) -> list[Mount]:
        mounts = [Mount(self.folder / "hosts", "/etc/hosts")]
        kinds = {volume["name"]: volume for volume in self._pod["spec"].get("volumes", [])}
        for mount in spec.get("volumeMounts", []):
            volume = kinds[mount["name"]]
            source = self._volumes[mount["name"]]
            if sub_path := mount.get("subPath"):
                source = source / sub_path
                if not source.exists():
                    source.mkdir(parents=True)
            written = {"configMap", "secret", "projected", "downwardAPI"} & volume.keys()
            mounts.append(
                Mount(source, mount["mountPath"], mount.get("readOnly", False) or bool(written))
            )
        hidden = [
            Mount(folder, str(folder), read_only=True)
            for folder in _PROGRAMS
            if any(folder.is_relative_to(mount.target) for mount in mounts)
        ]
        return sorted([*mounts, *hidden], key=lambda entry: entry.target)


def _without_times(status: Json) -> Json:
    """Return a status as it compares: what the server has may carry other times for the same."""
    return {**status, "conditions": [(c["type"], c["status"]) for c in status["conditions"]]}
