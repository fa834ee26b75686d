"""The control plane of the test cluster is a real one, and ends with its tests."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.cluster import ApiError, FakeNode, Json, TestCluster, path
from tests.e2e.cluster.processes import is_alive


def test_service_accounts_may_do_what_rbac_grants_and_no_more(
    cluster: TestCluster, namespace: str
) -> None:
    kubeconfig = cluster.service_account_kubeconfig(namespace, "default")
    with pytest.raises(RuntimeError, match='cannot list resource "pods"'):
        cluster.kubectl("get", "pods", "-n", namespace, kubeconfig=kubeconfig)
    account = f"--serviceaccount={namespace}:default"
    cluster.kubectl("create", "rolebinding", "r", "--clusterrole=view", account, "-n", namespace)
    cluster.wait_for(lambda: can_list_pods(cluster, namespace, kubeconfig), "the role is bound")
    with pytest.raises(RuntimeError, match="cannot create"):
        cluster.kubectl("create", "cm", "x", "-n", namespace, kubeconfig=kubeconfig)


def can_list_pods(cluster: TestCluster, namespace: str, kubeconfig: Path) -> bool:
    try:
        cluster.kubectl("get", "pods", "-n", namespace, kubeconfig=kubeconfig)
    except RuntimeError:  # a server learns of a new binding a moment later
        return False
    return True


def test_custom_resources_have_a_schema_and_a_status(cluster: TestCluster, namespace: str) -> None:
    group, plural = "test.tinsmith.dev", "gadgets"
    properties = {
        "spec": {
            "type": "object",
            "properties": {"size": {"type": "integer", "minimum": 1, "description": "How big."}},
        },
        "status": {"type": "object", "properties": {"phase": {"type": "string"}}},
    }
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": {"type": "object", "properties": properties}},
    }
    names = {"plural": plural, "singular": "gadget", "kind": "Gadget", "listKind": "GadgetList"}
    crd = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [version]},
    }
    cluster.apply(crd)
    cluster.kubectl("wait", "crd", f"{plural}.{group}", "--for=condition=Established")
    gadget = {"apiVersion": f"{group}/v1", "kind": "Gadget", "metadata": {"name": "g"}}
    cluster.apply({**gadget, "spec": {"size": 2}}, namespace=namespace)
    url = path(f"{group}/v1", plural, namespace, "g")
    cluster.api.patch(f"{url}/status", {"status": {"phase": "Done"}, "spec": {"size": 9}})
    cluster.api.patch(url, {"status": {"phase": "Never"}})
    found = cluster.api.get(url)
    assert (found["spec"], found["status"]) == ({"size": 2}, {"phase": "Done"})
    with pytest.raises(ApiError, match="should be greater than or equal to 1") as refused:
        cluster.api.patch(url, {"spec": {"size": 0}})
    assert refused.value.status == 422
    cluster.wait_for(lambda: "How big." in explain(cluster), "kubectl explain")
    cluster.api.patch(url, {"metadata": {"finalizers": ["tinsmith.dev/held"]}})


def explain(cluster: TestCluster) -> str:
    try:
        return cluster.kubectl("explain", "gadgets.spec")
    except RuntimeError as error:  # the schema is published some seconds after the resource
        return str(error)


def test_hundreds_of_instant_pods_are_cheap(cluster: TestCluster, namespace: str) -> None:
    nodes = [FakeNode(name=f"many-{i}", gpus=8) for i in range(50)]
    gpu = {"limits": {"nvidia.com/gpu": "1"}}
    url = path("v1", "pods", namespace)

    def outcome(pod: Json) -> int | None:
        return 1 if pod["metadata"]["name"] == "pod-7" else None

    start_s = time.monotonic()
    with cluster.kubelet(nodes, instant=outcome) as kubelet:
        for i in range(400):
            container = {"name": "main", "image": "none", "resources": gpu}
            spec = {"restartPolicy": "Never", "containers": [container]}
            cluster.api.create(url, {"metadata": {"name": f"pod-{i}"}, "spec": spec})

        def phases() -> list[str]:
            return [pod["status"].get("phase", "") for pod in cluster.api.list(url)]

        cluster.wait_for(lambda: phases().count("Running") == 399, "399 run", 60)
        assert phases().count("Failed") == 1
        kubelet.end_pod(namespace, "pod-8", 0)
        cluster.wait_for_phase(namespace, "pod-8", "Succeeded")
        assert time.monotonic() - start_s < 90

        url_9 = path("v1", "pods", namespace, "pod-9")
        node = cluster.api.get(url_9)["spec"]["nodeName"]
        kubelet.lose_node(node)
        cluster.api.delete(url_9)
        time.sleep(0.5)
        assert cluster.api.get(url_9)["status"]["phase"] == "Running"
        kubelet.return_node(node)
        cluster.wait_for(lambda: cluster.api.find(url_9) is None, "the pod is gone")


def test_processes_end_with_a_session_that_is_killed(cluster: TestCluster) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tests.e2e.cluster.processes import Process\n"
        "print(Process(['sleep', '600'], log=Path(sys.argv[1])).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    argv = [sys.executable, "-c", program, str(cluster.folder / "killed.log")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as session:
        assert session.stdout is not None
        pid = int(session.stdout.readline())
        assert is_alive(pid)
        session.send_signal(signal.SIGKILL)
    cluster.wait_for(lambda: not is_alive(pid), "the process ended", 10)
