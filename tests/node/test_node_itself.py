"""The node does what a node does; jobs are tested beside it."""

from __future__ import annotations

from tests.e2e.cluster import TestCluster
from tests.node.images import REPOSITORY, TAG

_LOOK_UP = """
import os, socket
print(os.getuid(), socket.gethostbyname("kubernetes.default.svc"))
socket.create_connection(("kubernetes.default", 443), 5).close()
"""


def test_a_pod_runs_from_an_image_with_an_address_and_finds_services(
    cluster: TestCluster, namespace: str
) -> None:
    container = {
        "name": "main",
        "image": f"{REPOSITORY}/driver:{TAG}",
        "command": ["python", "-c", _LOOK_UP],
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "hello"},
        "spec": {"containers": [container], "restartPolicy": "Never"},
    }
    cluster.apply(pod, namespace=namespace)

    status = cluster.wait_for_phase(namespace, "hello", "Succeeded")["status"]

    assert status["podIP"].startswith("10.201.1.")
    assert cluster.kubectl("logs", "-n", namespace, "hello") == "65532 10.202.0.1\n"
