"""Which pods may talk to which by the chart's policies, as Kubernetes adds them up."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
from tests.fakes.chart_harness import (
    PODS,
    Manifest,
    load_values,
    merge,
    of_kind,
    pod_templates,
    render,
    selects,
)

from tinsmith_jobs.naming import COMPONENT_LABEL
from tinsmith_jobs.spec import (
    COORDINATOR,
    DRIVER,
    ENVIRONMENT,
    SAMPLER,
    TRAINER,
    WORKER,
)

JOB_ROLES = (TRAINER, SAMPLER, ENVIRONMENT, COORDINATOR, DRIVER, WORKER)
PORTS = {
    "scheduler": 7070,
    "gateway": 7077,
    "coordinator": 7074,
    "environment": 7073,
    "checkpoints": 7071,
    "postgresql": 5432,
    "s3": 7070,
    "job-trainer": 7071,
    "job-sampler": 7072,
    "job-environment": 7073,
    "job-coordinator": 7074,
}
WORKERS = {"job-trainer", "job-sampler", "job-environment", "job-coordinator"}
ALLOWED = {
    "scheduler": {"gateway", "coordinator", "environment", "controller", "checkpoints", *WORKERS},
    "gateway": {"job-driver", "job-worker", "test"},
    "coordinator": {"gateway"},
    "environment": {"gateway", "coordinator", "job-coordinator"},
    "checkpoints": {"scheduler", "gateway", "job-sampler"},
    "postgresql": {
        *("scheduler", "gateway", "coordinator", "checkpoints"),
        *("job-trainer", "job-coordinator"),
    },
    "s3": {"checkpoints", "job-trainer", "job-sampler"},
    "job-trainer": {"scheduler", "gateway", "job-sampler", "job-trainer"},
    "job-sampler": {"gateway", "coordinator", "job-coordinator"},
    "job-environment": {"gateway", "coordinator", "job-coordinator"},
    "job-coordinator": {"gateway"},
}


@dataclass(frozen=True)
class Pod:
    """A pod as policies see it."""

    namespace: str
    labels: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, namespace: str, labels: dict[str, str]) -> Pod:
        return cls(namespace, tuple(sorted(labels.items())))


@dataclass
class Cluster:
    """The policies of a release, and the pods that they are about."""

    policies: list[Manifest]
    pods: dict[str, Pod]

    def allows(self, source: Pod, target: Pod, port: int, protocol: str = "TCP") -> bool:
        """Return whether a connection leaves its source and is let in at its target."""
        return self.leaves(source, target, port, protocol) and self.admits(
            source, target, port, protocol
        )

    def admits(self, source: Pod, target: Pod, port: int, protocol: str = "TCP") -> bool:
        return self._side("Ingress", target, source, port, protocol)

    def leaves(self, source: Pod, target: Pod, port: int, protocol: str = "TCP") -> bool:
        return self._side("Egress", source, target, port, protocol)

    def _side(self, side: str, pod: Pod, peer: Pod, port: int, protocol: str) -> bool:
        about = [
            policy
            for policy in self.policies
            if policy["metadata"]["namespace"] == pod.namespace
            and side in policy["spec"]["policyTypes"]
            and selects(policy["spec"]["podSelector"], dict(pod.labels))
        ]
        peers, rules = ("to", "egress") if side == "Egress" else ("from", "ingress")
        return not about or any(
            _fits(rule, rule.get(peers), policy["metadata"]["namespace"], peer, port, protocol)
            for policy in about
            for rule in policy["spec"].get(rules, [])
        )


def _fits(rule: Manifest, peers: Any, namespace: str, peer: Pod, port: int, protocol: str) -> bool:
    ports = rule.get("ports")
    if ports and {"port": port, "protocol": protocol} not in ports:
        return False
    return any(_is_peer(entry, namespace, peer) for entry in peers)


def _is_peer(entry: dict[str, Any], namespace: str, peer: Pod) -> bool:
    # Addresses outside of the cluster: what is inside is reached by its labels alone.
    if "ipBlock" in entry:
        return peer.namespace == ""
    namespaces = {"kubernetes.io/metadata.name": peer.namespace}
    if "namespaceSelector" in entry:
        if peer.namespace == "" or not selects(entry["namespaceSelector"], namespaces):
            return False
    elif peer.namespace != namespace:
        return False
    return selects(entry.get("podSelector", {}), dict(peer.labels))


OUTSIDE = Pod("", ())
STRANGER = Pod.of("elsewhere", {"app": "stranger"})
DNS = Pod.of("kube-system", {"k8s-app": "kube-dns"})
PROMETHEUS = Pod.of("monitoring", {"app": "prometheus"})


def _cluster(values: dict[str, Any]) -> Cluster:
    manifests = render(values)
    pods = {t.component: Pod.of("tinsmith", t.labels) for t in pod_templates(manifests)}
    for pod in of_kind(manifests, "Pod"):
        labels = pod["metadata"]["labels"]
        pods[labels[COMPONENT_LABEL]] = Pod.of(pod["metadata"]["namespace"], labels)
    for role in JOB_ROLES:
        pods[f"job-{role}"] = Pod.of("tinsmith-jobs", {COMPONENT_LABEL: role})
    return Cluster(of_kind(manifests, "NetworkPolicy"), pods)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    """Where the gateway is for jobs alone, so that the table says which pod reaches which."""
    closed = {"networkPolicy": {"gatewayFrom": []}}
    return _cluster(merge(load_values("trial-values"), closed))


@pytest.mark.parametrize("side", ["leaves", "admits"])
@pytest.mark.parametrize("target", sorted(PORTS))
def test_a_pod_is_reached_by_those_who_need_it_and_nobody_else(
    cluster: Cluster, target: str, side: str
) -> None:
    """Each side says it by itself: one that is too open is not made good by the other."""
    may = getattr(cluster, side)
    reached = {
        source
        for source, pod in cluster.pods.items()
        if (source != target or source == "job-trainer")
        and may(pod, cluster.pods[target], PORTS[target])
    }
    assert reached == ALLOWED[target]


def test_strangers_reach_nothing(cluster: Cluster) -> None:
    for target, port in itertools.product(cluster.pods.values(), {*PORTS.values(), 9090, 8080}):
        assert not cluster.allows(STRANGER, target, port)


def test_everybody_resolves_names(cluster: Cluster) -> None:
    for pod in cluster.pods.values():
        if dict(pod.labels).get("app.kubernetes.io/component") not in ("postgresql", "s3"):
            assert cluster.leaves(pod, DNS, 53, "UDP")


@pytest.mark.parametrize(
    "pod", ["environment", "job-environment", "job-driver", "job-worker", "test"]
)
def test_code_of_tenants_has_no_way_out(cluster: Cluster, pod: str) -> None:
    for port in (80, 443, 5432, 6443):
        assert not cluster.leaves(cluster.pods[pod], OUTSIDE, port)
    reachable = {
        target
        for target, port in PORTS.items()
        if target != pod and cluster.allows(cluster.pods[pod], cluster.pods[target], port)
    }
    assert reachable == ({"scheduler"} if "environment" in pod else {"gateway"})


def test_the_gateway_is_everybodys_by_default_and_nothing_else_is() -> None:
    cluster = _cluster(load_values("trial-values"))
    assert cluster.allows(STRANGER, cluster.pods["gateway"], 7077)
    assert cluster.allows(OUTSIDE, cluster.pods["gateway"], 7077)
    for pod in {*PODS} - {"gateway"}:
        for port in PORTS.values():
            assert not cluster.allows(STRANGER, cluster.pods[pod], port)


def test_metrics_are_read_by_those_who_are_named(cluster: Cluster) -> None:
    named = {
        "networkPolicy": {
            "metricsFrom": [
                {
                    "namespaceSelector": {
                        "matchLabels": {"kubernetes.io/metadata.name": "monitoring"}
                    }
                }
            ]
        }
    }
    open_cluster = _cluster(merge(load_values("trial-values"), named))
    for name in (*PODS, "job-trainer", "job-driver"):
        assert open_cluster.allows(PROMETHEUS, open_cluster.pods[name], 9090)
        assert not open_cluster.allows(STRANGER, open_cluster.pods[name], 9090)
        assert not cluster.allows(PROMETHEUS, cluster.pods[name], 9090)


def test_the_api_server_is_reached_by_those_who_use_it(cluster: Cluster) -> None:
    users = {name for name, pod in cluster.pods.items() if cluster.leaves(pod, OUTSIDE, 6443)}
    assert users == {"controller", "scheduler"}


def test_every_namespace_denies_by_default() -> None:
    for name in ("trial-values", "full-values"):
        manifests = render(load_values(name))
        namespaces = {"tinsmith"} | {
            m["metadata"]["namespace"] for m in of_kind(manifests, "ServiceAccount")
        }
        denials = {
            policy["metadata"]["namespace"]
            for policy in of_kind(manifests, "NetworkPolicy")
            if policy["metadata"]["name"].endswith("default-deny")
            and policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        }
        assert denials == namespaces


def test_policies_can_be_left_to_somebody_else() -> None:
    values = merge(load_values("trial-values"), {"networkPolicy": {"enabled": False}})
    assert of_kind(render(values), "NetworkPolicy") == []
