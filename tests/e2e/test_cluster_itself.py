"""The test cluster does what clusters do, as far as tests rely on it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.cluster import ApiError, FakeNode, Json, Kubelet, TestCluster, path
from tests.e2e.cluster.processes import is_alive

PYTHON = [sys.executable, "-u", "-c"]
SERVE = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(os.environ["HOSTNAME"].encode())
http.server.ThreadingHTTPServer((os.environ["POD_IP"], 8080), Handler).serve_forever()
"""
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


@pytest.fixture
def kubelet(cluster: TestCluster) -> Iterator[Kubelet]:
    """Two nodes with 8 GPUs, on which `tinsmith/http` serves its host name."""
    nodes = [FakeNode(name=f"node-{i}", gpus=8, labels={"rack": f"r{i}"}) for i in range(2)]
    with cluster.kubelet(nodes, images={"tinsmith/http": [*PYTHON, SERVE]}) as started:
        yield started


def make_pod(name: str, program: str = "", **fields: Any) -> Json:
    """A pod of one container, which runs a Python program; `fields` are its container's."""
    pod_fields = {
        key: fields.pop(key)
        for key in ("terminationGracePeriodSeconds", "volumes", "initContainers", "hostname")
        if key in fields
    }
    container = {"name": "main", "image": "python", "env": [POD_IP], **fields}
    if program:
        container["command"] = [*PYTHON, program]
    spec = {"restartPolicy": "Never", "containers": [container], **pod_fields}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def create_pod(cluster: TestCluster, namespace: str, pod: Json) -> Json:
    return cluster.api.create(path("v1", "pods", namespace), pod)


def wait_for_phase(cluster: TestCluster, namespace: str, name: str, phase: str) -> Json:
    url = path("v1", "pods", namespace, name)
    try:
        cluster.wait_for(lambda: cluster.api.get(url)["status"].get("phase") == phase, phase)
    except TimeoutError as error:
        raise AssertionError(f"{error}: {cluster.api.get(url)['status']}") from None
    return cluster.api.get(url)


def wait_for_log(kubelet: Kubelet, cluster: TestCluster, ns: str, pod: str, text: str) -> None:
    cluster.wait_for(lambda: text in kubelet.logs(ns, pod), f"{text!r} in the log of {pod}")


def ended(pod: Json) -> Json:
    state: Json = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    return state


def test_service_accounts_may_do_what_rbac_grants_and_no_more(
    cluster: TestCluster, namespace: str
) -> None:
    kubeconfig = cluster.service_account_kubeconfig(namespace, "default")
    with pytest.raises(RuntimeError, match='cannot list resource "pods"'):
        cluster.kubectl("get", "pods", "-n", namespace, kubeconfig=kubeconfig)
    account = f"--serviceaccount={namespace}:default"
    cluster.kubectl("create", "rolebinding", "r", "--clusterrole=view", account, "-n", namespace)
    cluster.wait_for(
        lambda: (
            "No resources" not in cluster.kubectl("auth", "can-i", "list", "pods", "-n", namespace)
        )
    )
    assert cluster.kubectl("get", "pods", "-n", namespace, kubeconfig=kubeconfig) == ""
    with pytest.raises(RuntimeError, match="cannot create"):
        cluster.kubectl("create", "cm", "x", "-n", namespace, kubeconfig=kubeconfig)


def test_a_deployment_runs_as_processes_behind_its_service(
    cluster: TestCluster, namespace: str, kubelet: Kubelet
) -> None:
    labels = {"app": "web"}
    probe = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1}
    container = {
        "name": "web",
        "image": "tinsmith/http:1.0",
        "env": [POD_IP],
        "ports": [{"name": "http", "containerPort": 8080}],
        "readinessProbe": probe,
    }
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    spec = {"replicas": 2, "selector": {"matchLabels": labels}, "template": template}
    metadata = {"name": "web"}
    ports = [{"port": 80, "targetPort": "http"}]
    cluster.apply(
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"selector": labels, "ports": ports},
        },
        namespace=namespace,
    )
    cluster.kubectl("rollout", "status", "deployment/web", "-n", namespace, "--timeout=30s")
    pods = cluster.api.list(path("v1", "pods", namespace))
    assert len({pod["status"]["podIP"] for pod in pods}) == 2

    ask = (
        "import urllib.request as r\n"
        f"hosts = ['web', 'web.{namespace}', 'web.{namespace}.svc.cluster.local'] * 2\n"
        "print(sorted({r.urlopen(f'http://{h}', timeout=5).read().decode() for h in hosts}))"
    )
    create_pod(cluster, namespace, make_pod("client", ask))
    wait_for_phase(cluster, namespace, "client", "Succeeded")
    names = sorted(pod["metadata"]["name"] for pod in pods)
    assert kubelet.logs(namespace, "client").strip() == str(names)


def test_headless_services_name_every_pod(
    cluster: TestCluster, namespace: str, kubelet: Kubelet
) -> None:
    spec = {"clusterIP": "None", "selector": {"app": "x"}, "ports": [{"port": 8080}]}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "peers"}, "spec": spec}
    cluster.apply(service, namespace=namespace)
    for i in range(2):
        pod = make_pod(f"peer-{i}", "import time; time.sleep(60)", hostname=f"peer-{i}")
        pod["metadata"]["labels"] = {"app": "x"}
        pod["spec"]["subdomain"] = "peers"
        create_pod(cluster, namespace, pod)
    addresses = [
        wait_for_phase(cluster, namespace, f"peer-{i}", "Running")["status"]["podIP"]
        for i in range(2)
    ]
    ask = (
        "import socket, sys, time\n"
        "def ask(name): return sorted({a[4][0] for a in socket.getaddrinfo(name, 1)})\n"
        "while True:\n"
        "    try:\n"
        "        got = [*ask('peers'), *ask('peer-0.peers'), *ask('peer-1.peers')]\n"
        "        if len(got) == 4: print(got); sys.exit()\n"
        "    except OSError: pass\n"
        "    time.sleep(0.1)\n"
    )
    create_pod(cluster, namespace, make_pod("client", ask))
    wait_for_phase(cluster, namespace, "client", "Succeeded")
    assert kubelet.logs(namespace, "client").strip() == str([*sorted(addresses), *addresses])


def test_a_pod_gets_its_environment_and_its_volumes(
    cluster: TestCluster, namespace: str, kubelet: Kubelet
) -> None:
    cluster.kubectl("create", "cm", "settings", "--from-literal=a=1", "-n", namespace)
    cluster.kubectl(
        "create", "secret", "generic", "key", "--from-literal=k=hidden", "-n", namespace
    )
    show = (
        "import os, ssl, urllib.request as r\n"
        "e = os.environ\n"
        "print(e['NODE'], e['KEY'], e['a'], e['BOTH'], e['CPU'])\n"
        "print(open('/etc/settings/a').read(), open('/data/from-init').read(), os.getcwd())\n"
        "try: open('/etc/settings/a', 'w')\n"
        "except OSError as error: print(error.strerror)\n"
        "folder = '/var/run/secrets/kubernetes.io/serviceaccount/'\n"
        "host = e['KUBERNETES_SERVICE_HOST'] + ':' + e['KUBERNETES_SERVICE_PORT']\n"
        "headers = {'Authorization': 'Bearer ' + open(folder + 'token').read()}\n"
        "context = ssl.create_default_context(cafile=folder + 'ca.crt')\n"
        "request = r.Request(f'https://{host}/api', headers=headers)\n"
        "print(r.urlopen(request, context=context).status)\n"
    )
    mount = [{"name": "data", "mountPath": "/data"}]
    pod = make_pod(
        "shows",
        show,
        workingDir="/work-of-a-pod",
        envFrom=[{"configMapRef": {"name": "settings"}}],
        env=[
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "key", "key": "k"}}},
            {"name": "BOTH", "value": "$(KEY)-$(a)-$(missing)-$$(a)"},
            {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
        ],
        resources={"limits": {"cpu": "1500m"}},
        volumeMounts=[*mount, {"name": "settings", "mountPath": "/etc/settings"}],
        volumes=[
            {"name": "data", "emptyDir": {}},
            {"name": "settings", "configMap": {"name": "settings"}},
        ],
        initContainers=[
            {
                "name": "init",
                "image": "python",
                "command": ["/bin/sh", "-c", "echo -n first > /data/from-init"],
                "volumeMounts": mount,
            }
        ],
    )
    create_pod(cluster, namespace, pod)
    node = wait_for_phase(cluster, namespace, "shows", "Succeeded")["spec"]["nodeName"]
    assert kubelet.logs(namespace, "shows").splitlines() == [
        f"{node} hidden 1 hidden-1-$(missing)-$(a) 2",
        "1 first /work-of-a-pod",
        "Read-only file system",
        "200",
    ]
    assert not os.path.exists("/work-of-a-pod")


def test_exit_code_message_and_log_reach_the_api(
    cluster: TestCluster, namespace: str, kubelet: Kubelet
) -> None:
    program = "open('/dev/termination-log', 'w').write('no data'); print('to the log'); exit(3)"
    create_pod(cluster, namespace, make_pod("fails", program))
    state = ended(wait_for_phase(cluster, namespace, "fails", "Failed"))
    assert (state["exitCode"], state["reason"], state["message"]) == (3, "Error", "no data")
    assert cluster.kubectl("logs", "fails", "-n", namespace) == "to the log\n"


def test_a_container_is_restarted_with_back_off(
    cluster: TestCluster, namespace: str, kubelet: Kubelet
) -> None:
    program = "import os; n = len(os.listdir('/data')); open(f'/data/{n}', 'w'); exit(n < 2)"
    pod = make_pod(
        "again",
        program,
        volumes=[{"name": "data", "emptyDir": {}}],
        volumeMounts=[{"name": "data", "mountPath": "/data"}],
    )
    pod["spec"]["restartPolicy"] = "OnFailure"
    create_pod(cluster, namespace, pod)
    status = wait_for_phase(cluster, namespace, "again", "Succeeded")["status"]
    assert status["containerStatuses"][0]["restartCount"] == 2


@pytest.mark.parametrize(
    ("program", "grace_s", "code"),
    [
        pytest.param(
            "import signal, sys; signal.signal(15, lambda *_: sys.exit(0))", 30, 0, id="ends"
        ),
        pytest.param("", 1, 137, id="ignores"),
    ],
)
def test_deletion_sends_sigterm_and_kills_after_the_grace_period(
    cluster: TestCluster, namespace: str, kubelet: Kubelet, program: str, grace_s: int, code: int
) -> None:
    pod = make_pod(
        "slow",
        program + "\nimport time; print('up'); time.sleep(600)",
        terminationGracePeriodSeconds=grace_s,
    )
    # A finalizer keeps the object, so that its last status can be seen.
    pod["metadata"]["finalizers"] = ["tinsmith.dev/look"]
    create_pod(cluster, namespace, pod)
    wait_for_log(kubelet, cluster, namespace, "slow", "up")
    pid = kubelet.pid(namespace, "slow")
    url = path("v1", "pods", namespace, "slow")
    start_s = time.monotonic()
    cluster.api.delete(url)
    final = wait_for_phase(cluster, namespace, "slow", "Succeeded" if code == 0 else "Failed")
    assert ended(final)["exitCode"] == code
    assert not is_alive(pid)
    assert time.monotonic() - start_s < 15
    cluster.api.patch(url, {"metadata": {"finalizers": None}})
    cluster.wait_for(lambda: cluster.api.find(url) is None, "the pod is gone")


def test_pods_are_scheduled_by_gpus_and_affinity(
    cluster: TestCluster, namespace: str, kubelet: Kubelet
) -> None:
    program = "import time; time.sleep(600)"
    gpus = {"limits": {"nvidia.com/gpu": "8"}}
    for i in range(3):
        create_pod(cluster, namespace, make_pod(f"gpu-{i}", program, resources=gpus))
    url = path("v1", "pods", namespace)

    def phases() -> list[str]:
        return sorted(pod["status"].get("phase", "") for pod in cluster.api.list(url))

    cluster.wait_for(lambda: phases() == ["Pending", "Running", "Running"], "two of three run")
    pinned = make_pod("pinned", program)
    pinned["spec"]["nodeSelector"] = {"rack": "r1"}
    create_pod(cluster, namespace, pinned)
    assert wait_for_phase(cluster, namespace, "pinned", "Running")["spec"]["nodeName"] == "node-1"


@pytest.mark.parametrize("freeze", [False, True], ids=["dead", "cut-off"])
def test_a_lost_node_says_nothing_until_it_returns(
    cluster: TestCluster, namespace: str, kubelet: Kubelet, freeze: bool
) -> None:
    pod = make_pod("lost", "import time; print('up'); time.sleep(600)")
    create_pod(cluster, namespace, pod)
    node = wait_for_phase(cluster, namespace, "lost", "Running")["spec"]["nodeName"]
    wait_for_log(kubelet, cluster, namespace, "lost", "up")
    pid = kubelet.pid(namespace, "lost")
    kubelet.lose_node(node, freeze=freeze)
    assert is_alive(pid) == freeze
    conditions = cluster.api.get(f"/api/v1/nodes/{node}")["status"]["conditions"]
    assert [c["status"] for c in conditions if c["type"] == "Ready"] == ["Unknown"]

    url = path("v1", "pods", namespace, "lost")
    cluster.api.delete(url, grace_s=1)
    time.sleep(2)
    left = cluster.api.get(url)
    assert left["metadata"]["deletionTimestamp"]
    assert left["status"]["phase"] == "Running"
    assert is_alive(pid) == freeze

    kubelet.return_node(node)
    cluster.wait_for(lambda: cluster.api.find(url) is None, "the pod is gone")
    assert not is_alive(pid)
    assert wait_for_ready_node(cluster, node)


def wait_for_ready_node(cluster: TestCluster, name: str) -> bool:
    node = cluster.api.get(f"/api/v1/nodes/{name}")
    ready = [c["status"] for c in node["status"]["conditions"] if c["type"] == "Ready"]
    return ready == ["True"] and not node["spec"].get("taints")


def test_children_are_collected_with_their_owner(
    cluster: TestCluster, namespace: str, kubelet: Kubelet
) -> None:
    owner = cluster.api.create(path("v1", "configmaps", namespace), {"metadata": {"name": "owner"}})
    pod = make_pod(
        "child", "import time; print('up'); time.sleep(600)", terminationGracePeriodSeconds=1
    )
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner"}
    pod["metadata"]["ownerReferences"] = [{**reference, "uid": owner["metadata"]["uid"]}]
    create_pod(cluster, namespace, pod)
    wait_for_log(kubelet, cluster, namespace, "child", "up")
    pid = kubelet.pid(namespace, "child")
    cluster.api.delete(path("v1", "configmaps", namespace, "owner"))
    url = path("v1", "pods", namespace, "child")
    cluster.wait_for(lambda: cluster.api.find(url) is None, "the child is gone")
    assert not is_alive(pid)


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
            create_pod(cluster, namespace, make_pod(f"pod-{i}", resources=gpu))

        def phases() -> list[str]:
            return [pod["status"].get("phase", "") for pod in cluster.api.list(url)]

        cluster.wait_for(lambda: phases().count("Running") == 399, "399 run", 60)
        assert phases().count("Failed") == 1
        kubelet.end_pod(namespace, "pod-8", 0)
        wait_for_phase(cluster, namespace, "pod-8", "Succeeded")
        assert time.monotonic() - start_s < 60


def test_processes_end_with_a_session_that_is_killed(cluster: TestCluster) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tests.e2e.cluster.processes import Process\n"
        "print(Process(['sleep', '600'], log=Path(sys.argv[1])).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    import subprocess

    argv = [*PYTHON, program, str(cluster.folder / "killed.log")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as session:
        assert session.stdout is not None
        pid = int(session.stdout.readline())
        assert is_alive(pid)
        session.send_signal(signal.SIGKILL)
    cluster.wait_for(lambda: not is_alive(pid), "the process ended", 10)
