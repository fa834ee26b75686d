"""A real Kubernetes API, and processes for pods, on one machine without containers.

Tests take the fixtures `cluster` and `namespace` of `tests/e2e/conftest.py`, and `process_pods` if
they start processes; benchmarks call `prepare` and `start_cluster`:

    nodes = [FakeNode(name="gpu-0", gpus=8, labels={"rack": "r0"})]
    images = {"tinsmith/trainer": [sys.executable, "-m", "tinsmith_trainer"]}
    with cluster.kubelet(nodes, images=images) as kubelet:
        cluster.apply(manifest, namespace=namespace)
        cluster.wait_for_phase(namespace, "trainer-0", "Running")
        kubelet.lose_node("gpu-0", freeze=True)

`cluster.kubelet(nodes, instant=True)` starts nothing: its pods run, or end, once they are bound.
"""

from tests.e2e.cluster.api import ApiClient as ApiClient
from tests.e2e.cluster.api import ApiError as ApiError
from tests.e2e.cluster.api import Json as Json
from tests.e2e.cluster.api import path as path
from tests.e2e.cluster.binaries import UnavailableError as UnavailableError
from tests.e2e.cluster.claims import ClaimProvisioner as ClaimProvisioner
from tests.e2e.cluster.cluster import TestCluster as TestCluster
from tests.e2e.cluster.cluster import prepare as prepare
from tests.e2e.cluster.cluster import start_cluster as start_cluster
from tests.e2e.cluster.crd_server import CrdServer as CrdServer
from tests.e2e.cluster.informer import Informer as Informer
from tests.e2e.cluster.kubelet import Kubelet as Kubelet
from tests.e2e.cluster.nodes import FakeNode as FakeNode
from tests.e2e.cluster.runner import Image as Image
