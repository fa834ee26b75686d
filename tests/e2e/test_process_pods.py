"""Pods that are processes live and die like pods, as far as tests rely on it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import FakeNode, Json, Kubelet, TestCluster, path
from tests.e2e.cluster.processes import is_alive

PYTHON = [sys.executable, "-u", "-c"]
SERVE = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ["HOSTNAME"].encode())
http.server.ThreadingHTTPServer((os.environ["POD_IP"], 8080), Handler).serve_forever()
"""
ENDS_WELL = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))"
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


@pytest.fixture
def kubelet(cluster: TestCluster, process_pods: None) -> Iterator[Kubelet]:
    """Two nodes with 8 GPUs, on which `tinsmith/http` serves its host name."""
    nodes = [FakeNode(name=f"node-{i}", gpus=8, labels={"rack": f"r{i}"}) for i in range(2)]
    with cluster.kubelet(nodes, images={"tinsmith/http": [*PYTHON, SERVE]}) as started:
        yield started


def make_pod(name: str, program: str = "", **fields: Any) -> Json:
    """A pod of one container, which runs a Python program; `fields` are its container's."""
    pod_fields: Json = {
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


def wait_for_log(kubelet: Kubelet, cluster: TestCluster, ns: str, pod: str, text: str) -> None:
    cluster.wait_for(lambda: text in kubelet.logs(ns, pod), f"{text!r} in the log of {pod}")


def ended(pod: Json) -> Json:
    state: Json = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    return state


def test_a_volume_above_the_programs_does_not_hide_them(
    cluster: TestCluster, namespace: str, kubelet: Kubelet
) -> None:
    root = Path(__file__).parents[2]
    above = root.parent if len(root.parts) > 2 else root
    pod = make_pod(
        "covered",
        f"import os; print(os.path.exists('{root}/pyproject.toml'))",
        volumes=[{"name": "scratch", "emptyDir": {}}],
        volumeMounts=[{"name": "scratch", "mountPath": str(above)}],
    )
    create_pod(cluster, namespace, pod)
    cluster.wait_for_phase(namespace, "covered", "Succeeded")
    assert kubelet.logs(namespace, "covered") == "True\n"


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
    cluster.wait_for_phase(namespace, "client", "Succeeded")
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
        cluster.wait_for_phase(namespace, f"peer-{i}", "Running")["status"]["podIP"]
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
    cluster.wait_for_phase(namespace, "client", "Succeeded")
    assert kubelet.logs(namespace, "client").strip() == str([*sorted(addresses), *addresses])


def test_a_pod_gets_its_environment_and_its_volumes(
    cluster: TestCluster, namespace: str, kubelet: Kubelet
) -> None:
    cluster.kubectl("create", "cm", "settings", "--from-literal=a=1", "-n", namespace)
    secret = ["create", "secret", "generic", "key", "--from-literal=k=hidden"]
    cluster.kubectl(*secret, "-n", namespace)
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
    node = cluster.wait_for_phase(namespace, "shows", "Succeeded")["spec"]["nodeName"]
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
    state = ended(cluster.wait_for_phase(namespace, "fails", "Failed"))
    assert (state["exitCode"], state["reason"], state["message"]) == (3, "Error", "no data")
    assert kubelet.logs(namespace, "fails") == "to the log\n"


def test_kubectl_reads_and_follows_logs(
    cluster: TestCluster, namespace: str, kubelet: Kubelet
) -> None:
    if cluster.authority is None:
        pytest.skip("a cluster of others does not trust this kubelet")
    program = "import time; print('one'); time.sleep(1); print('two')"
    create_pod(cluster, namespace, make_pod("talks", program))
    wait_for_log(kubelet, cluster, namespace, "talks", "one")
    assert cluster.kubectl("logs", "talks", "--follow", "-n", namespace) == "one\ntwo\n"
    assert cluster.kubectl("logs", "talks", "--tail=1", "-n", namespace) == "two\n"


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
    status = cluster.wait_for_phase(namespace, "again", "Succeeded")["status"]
    assert status["containerStatuses"][0]["restartCount"] == 2


@pytest.mark.parametrize(
    ("program", "grace_s", "code"),
    [
        pytest.param(ENDS_WELL, 30, 0, id="ends"),
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
    final = cluster.wait_for_phase(namespace, "slow", "Succeeded" if code == 0 else "Failed")
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
    assert cluster.wait_for_phase(namespace, "pinned", "Running")["spec"]["nodeName"] == "node-1"


@pytest.mark.parametrize("freeze", [False, True], ids=["dead", "cut-off"])
def test_a_lost_node_says_nothing_until_it_returns(
    cluster: TestCluster, namespace: str, kubelet: Kubelet, freeze: bool
) -> None:
    pod = make_pod("lost", "import time; print('up'); time.sleep(600)")
    create_pod(cluster, namespace, pod)
    node = cluster.wait_for_phase(namespace, "lost", "Running")["spec"]["nodeName"]
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


def test_a_claim_keeps_its_files_beyond_a_pod(
    cluster: TestCluster, namespace: str, kubelet: Kubelet
) -> None:
    resources = {"requests": {"storage": "1Gi"}}
    spec = {"accessModes": ["ReadWriteOnce"], "resources": resources}
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data"},
            "spec": spec,
        },
        namespace=namespace,
    )
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    mounts = [{"name": "data", "mountPath": "/data"}]
    for name, program in (
        ("writes", "open('/data/x', 'w').write('kept')"),
        ("reads", "print(open('/data/x').read())"),
    ):
        create_pod(
            cluster, namespace, make_pod(name, program, volumes=volumes, volumeMounts=mounts)
        )
        cluster.wait_for_phase(namespace, name, "Succeeded")
    assert kubelet.logs(namespace, "reads") == "kept\n"


def test_a_pod_waits_for_the_secret_that_it_names(
    cluster: TestCluster, namespace: str, kubelet: Kubelet
) -> None:
    value = {"secretKeyRef": {"name": "late", "key": "k"}}
    program = "import os; print(os.environ['KEY'])"
    create_pod(
        cluster, namespace, make_pod("waits", program, env=[{"name": "KEY", "valueFrom": value}])
    )
    url = path("v1", "pods", namespace, "waits")

    def reason() -> str:
        (state,) = cluster.api.get(url)["status"].get("containerStatuses") or [{"state": {}}]
        return str(state["state"].get("waiting", {}).get("reason"))

    cluster.wait_for(lambda: reason() == "CreateContainerConfigError", "the pod says why it waits")
    cluster.kubectl("create", "secret", "generic", "late", "--from-literal=k=v", "-n", namespace)
    cluster.wait_for_phase(namespace, "waits", "Succeeded")
    assert kubelet.logs(namespace, "waits") == "v\n"


def test_commands_are_probes_inside_the_container(
    cluster: TestCluster, namespace: str, kubelet: Kubelet
) -> None:
    pod = make_pod(
        "probed",
        "import time; time.sleep(1); open('/ready', 'w'); time.sleep(600)",
        readinessProbe={"exec": {"command": ["test", "-e", "/ready"]}, "periodSeconds": 1},
        livenessProbe={
            "exec": {"command": ["test", "!", "-e", "/dead"]},
            "periodSeconds": 1,
            "failureThreshold": 1,
        },
        terminationGracePeriodSeconds=1,
    )
    pod["spec"]["restartPolicy"] = "Always"
    create_pod(cluster, namespace, pod)
    url = path("v1", "pods", namespace, "probed")

    def status() -> Json:
        (found,) = cluster.api.get(url)["status"].get("containerStatuses") or [{}]
        return dict(found)

    cluster.wait_for(lambda: status().get("ready"), "the pod is ready")
    Path(f"/proc/{kubelet.pid(namespace, 'probed')}/root/dead").touch()
    cluster.wait_for(lambda: status()["restartCount"] == 1, "the dead container is restarted")
    ended_with = status()["lastState"]["terminated"]
    assert (ended_with["exitCode"], "liveness probe failed" in ended_with["message"]) == (137, True)


def test_the_hook_before_the_end_runs_before_sigterm(
    cluster: TestCluster, namespace: str, kubelet: Kubelet
) -> None:
    hook = {"exec": {"command": ["sh", "-c", "echo hook >> /proc/1/fd/1"]}}
    program = (
        "import signal, sys, time\n"
        "def end(*_): print('term'); sys.exit()\n"
        "signal.signal(signal.SIGTERM, end); print('up'); time.sleep(600)\n"
    )
    create_pod(cluster, namespace, make_pod("hooked", program, lifecycle={"preStop": hook}))
    wait_for_log(kubelet, cluster, namespace, "hooked", "up")
    cluster.api.delete(path("v1", "pods", namespace, "hooked"))
    wait_for_log(kubelet, cluster, namespace, "hooked", "term")
    assert kubelet.logs(namespace, "hooked").split() == ["up", "hook", "term"]


def test_a_program_that_is_not_there_fails_with_127(
    cluster: TestCluster, namespace: str, kubelet: Kubelet
) -> None:
    create_pod(cluster, namespace, make_pod("absent", command=["/no/such/program"]))
    assert ended(cluster.wait_for_phase(namespace, "absent", "Failed"))["exitCode"] == 127
    assert "not found" in kubelet.logs(namespace, "absent")
