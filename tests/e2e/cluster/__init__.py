"""A real Kubernetes API, and processes for pods, on one machine without containers.

`start_cluster` gives a `TestCluster`; tests take the fixtures of `tests/e2e/conftest.py` instead.
"""

from tests.e2e.cluster.api import ApiClient as ApiClient
from tests.e2e.cluster.api import ApiError as ApiError
from tests.e2e.cluster.api import Json as Json
from tests.e2e.cluster.api import path as path
from tests.e2e.cluster.binaries import UnavailableError as UnavailableError
from tests.e2e.cluster.cluster import TestCluster as TestCluster
from tests.e2e.cluster.cluster import prepare as prepare
from tests.e2e.cluster.cluster import start_cluster as start_cluster
from tests.e2e.cluster.crd_server import CrdServer as CrdServer
from tests.e2e.cluster.informer import Informer as Informer
from tests.e2e.cluster.kubelet import Kubelet as Kubelet
from tests.e2e.cluster.nodes import FakeNode as FakeNode
from tests.e2e.cluster.runner import Image as Image
