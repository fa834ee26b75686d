"""One node of a cluster as it is in production: kubelet, containerd and runc.

It wants network, mount and process namespaces of its own, and `prepare_namespaces` first: it writes
below /var and /run, and leaves its containers to the end of the namespaces.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from tests.e2e.cluster import Json, TestCluster
from tests.e2e.cluster.api import ApiError
from tests.e2e.cluster.control_plane import write_kubeconfig
from tests.e2e.cluster.debian import run
from tests.e2e.cluster.processes import Process
from tests.node.images import PAUSE
from tests.node.network import ADDRESS, pod_network, prepare_network
from tests.node.programs import Programs
from tinsmith_local.process import free_port

FOLDER = "TINSMITH_NODE_FOLDER"
"""Variable of the tests: where the images are, and that the namespaces are theirs alone."""
_START_TIMEOUT_S = 60.0
# The kubelet of a machine sets them; ours finds them so and leaves the machine's alone.
_TUNABLES = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


def prepare_namespaces(folder: Path) -> None:
    """Give the programs of a node a network and folders to write to, in namespaces of their own.

    The control groups of containers are made in those that have the name of the folder.
    """
    prepare_network()
    cwd = Path("/")
    # /var/log/pods, /var/lib/cni, /run/containerd and others have no setting.
    for name in ("changes", "work"):
        (folder / "var" / name).mkdir(parents=True)
    layers = f"lowerdir=/var,upperdir={folder}/var/changes,workdir={folder}/var/work"
    run(["mount", "-t", "overlay", "overlay", "-o", layers, "/var"], cwd=cwd)
    for place in ("/run", "/dev/shm"):
        run(["mount", "-t", "tmpfs", "tmpfs", place], cwd=cwd)
    for name, value in _TUNABLES.items():
        file = folder / name.replace("/", ".")
        file.write_text(f"{value}\n")
        run(["mount", "--bind", file, f"/proc/sys/{name}"], cwd=cwd)
    for hierarchy in control_groups():
        if not (hierarchy / "tasks").exists():
            continue  # version 2, where runc makes what it needs
        group = hierarchy / folder.name
        group.mkdir()
        for name in ("cpuset.cpus", "cpuset.mems"):  # empty in a new group, which holds no process
            if (group / name).exists():
                (group / name).write_text((hierarchy / name).read_text())


def control_groups() -> list[Path]:
    """Return the hierarchies of control groups; one of several controllers has several names."""
    return [folder for folder in Path("/sys/fs/cgroup").iterdir() if not folder.is_symlink()]


class ContainerNode:
    """A node with GPUs that exist in its status alone, and images that it does not pull.

    Args:
        cluster: Where it is registered; must be our own.
        name: Of the node.
        programs: What it consists of.
        images: Archive of the images.
        gpus: How many it says it has.
        control_group: That its containers are in.
    """

    def __init__(
        self,
        cluster: TestCluster,
        name: str,
        programs: Programs,
        images: Path,
        *,
        gpus: int,
        control_group: str,
    ) -> None:
        self.name = name
        self._control_group = f"/{control_group}"
        self.folder = cluster.new_folder(name)
        self._cluster = cluster
        self._programs = programs
        self._images = images
        self._gpus = gpus
        self._socket = self.folder / "containerd.sock"
        self._processes: dict[str, Process] = {}

    def __enter__(self) -> Self:
        try:
            self._start_containerd()
            self._control("images", "import", "--no-unpack", str(self._images))
            self._start_kubelet()
            self._wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the kubelet, then containerd; containers end with their namespaces."""
        for process in reversed(self._processes.values()):
            process.kill()

    def processes_of(self, pod: Json) -> list[int]:
        """Return the numbers of the processes in the containers of a pod, in our namespace."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_inside = f"pod{pod['metadata']['uid']}/" in (folder / "cgroup").read_text()
                if is_inside and b"busybox" not in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
        return found

    def logs(self) -> str:
        """Return the end of what the programs wrote."""
        return "\n".join(f"== {name}\n{p.tail(60)}" for name, p in self._processes.items())

    def _start_containerd(self) -> None:
        networks = self.folder / "networks"
        networks.mkdir()
        (networks / "pods.conflist").write_text(json.dumps(pod_network(self.folder / "addresses")))
        config = self.folder / "containerd.toml"
        config.write_text(
            f"""
version = 2
root = "{self.folder / "containerd"}"
state = "/run/containerd-{self.name}"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
address = "{self._socket}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
# Who lacks CAP_SYS_RESOURCE cannot make a container less likely to be killed than itself.
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{self._programs.network_plugins}"
conf_dir = "{networks}"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"""
        )
        self._run("containerd", "containerd", "--config", str(config))
        self._wait("containerd to answer", lambda: self._control("version"))

    def _start_kubelet(self) -> None:
        authority = self._cluster.authority
        assert authority is not None, "the node needs a certificate of the cluster's authority"
        user = f"system:node:{self.name}"
        identity = authority.issue(user, organizations=["system:nodes"])
        serving = authority.issue(f"kubelet-{self.name}", addresses=[ADDRESS])
        self._cluster.apply(
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "ClusterRoleBinding",
                "metadata": {"name": "nodes"},
                "roleRef": {
                    "apiGroup": "rbac.authorization.k8s.io",
                    "kind": "ClusterRole",
                    "name": "system:node",
                },
                "subjects": [
                    {
                        "apiGroup": "rbac.authorization.k8s.io",
                        "kind": "Group",
                        "name": "system:nodes",
                    }
                ],
            }
        )
        kubeconfig = self.folder / "kubelet.kubeconfig"
        write_kubeconfig(
            kubeconfig, self._cluster.api.server, authority.certificate.read_bytes(), identity
        )
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": ADDRESS,
            "port": free_port(ADDRESS),
            "healthzPort": 0,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": False},
                "x509": {"clientCAFile": str(authority.certificate)},
            },
            "authorization": {"mode": "AlwaysAllow"},
            "tlsCertFile": str(serving.certificate),
            "tlsPrivateKeyFile": str(serving.key),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self._control_group,
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "protectKernelDefaults": True,
            "makeIPTablesUtilChains": False,
            "enableControllerAttachDetach": False,
            "clusterDNS": [ADDRESS],
            "clusterDomain": "cluster.local",
            "resolvConf": "",
            "nodeStatusUpdateFrequency": "1s",
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"memory.available": "16Mi"},
        }
        file = self.folder / "kubelet.yaml"
        file.write_text(yaml.safe_dump(config))
        endpoint = f"unix://{self._socket}"
        self._run(
            "kubelet",
            str(self._programs.kubelet),
            f"--config={file}",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={self.name}",
            f"--node-ip={ADDRESS}",
            f"--root-dir={self.folder / 'kubelet'}",
            f"--cert-dir={self.folder / 'kubelet-certificates'}",
            f"--volume-plugin-dir={self.folder / 'volume-plugins'}",
            "--container-runtime=remote",
            f"--container-runtime-endpoint={endpoint}",
            f"--image-service-endpoint={endpoint}",
            f"--runtime-cgroups={self._control_group}",
            "--oom-score-adj=0",
            "--v=2",
        )

    def _wait_ready(self) -> None:
        url = f"/api/v1/nodes/{self.name}"
        gpus = {"nvidia.com/gpu": str(self._gpus)}

        def is_ready() -> bool:
            node = self._cluster.api.get(url)
            conditions = {c["type"]: c["status"] for c in node["status"].get("conditions", [])}
            if node["status"].get("allocatable", {}).get("nvidia.com/gpu") != str(self._gpus):
                # What a device plugin tells its kubelet.
                status: Json = {"status": {"capacity": gpus, "allocatable": gpus}}
                self._cluster.api.patch(f"{url}/status", status, kind="strategic")
                return False
            return conditions.get("Ready") == "True"

        self._wait("the node to be ready", is_ready)

    def _control(self, *arguments: str) -> str:
        return run(
            ["ctr", f"--address={self._socket}", "--namespace=k8s.io", *arguments],
            cwd=self.folder,
            env=self._programs.environment,
        )

    def _run(self, name: str, *argv: str) -> None:
        command = ["env", *argv]  # looks the program up in the PATH that it gets
        log = self.folder / f"{name}.log"
        self._processes[name] = Process(command, log=log, env=self._programs.environment)

    def _wait(self, what: str, is_there: Callable[[], object]) -> None:
        end_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            with contextlib.suppress(RuntimeError, ApiError, OSError, subprocess.SubprocessError):
                if is_there():
                    return
            ended = [name for name, p in self._processes.items() if p.poll() is not None]
            if ended or time.monotonic() > end_s:
                raise RuntimeError(f"in vain for {what} ({ended} ended):\n{self.logs()}")
            time.sleep(0.1)
