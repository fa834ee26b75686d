"""The optional tier: custom resources whose rules are evaluated."""

from __future__ import annotations

import pytest

from tests.e2e.cluster import ApiError, CrdServer, Json, TestCluster, path

GROUP = "cel.tinsmith.dev"


def definition(rule: str) -> Json:
    """A kind `Widget`, whose spec has a size that keeps a rule."""
    size = {"type": "integer", "x-kubernetes-validations": [{"rule": rule, "message": "by CEL"}]}
    properties = {
        "spec": {"type": "object", "properties": {"size": size}},
        "status": {"type": "object", "properties": {"phase": {"type": "string"}}},
    }
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": {"type": "object", "properties": properties}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"widgets.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"plural": "widgets", "singular": "widget", "kind": "Widget"},
            "versions": [version],
        },
    }


@pytest.fixture(scope="module")
def widgets(crd_server: CrdServer) -> None:
    crd_server.install(definition("self >= oldSelf"))


def test_a_rule_that_does_not_compile_is_refused(crd_server: CrdServer) -> None:
    with pytest.raises(ApiError, match="compilation failed"):
        crd_server.install(definition("self >"))


def test_rules_are_evaluated_behind_the_core_server(
    cluster: TestCluster, widgets: None, namespace: str
) -> None:
    widget = {"apiVersion": f"{GROUP}/v1", "kind": "Widget", "metadata": {"name": "w"}}
    cluster.apply({**widget, "spec": {"size": 2}}, namespace=namespace)
    url = path(f"{GROUP}/v1", "widgets", namespace, "w")
    with pytest.raises(ApiError, match="by CEL") as refused:
        cluster.api.patch(url, {"spec": {"size": 1}})
    assert refused.value.status == 422
    with pytest.raises(RuntimeError, match="by CEL"):
        cluster.apply({**widget, "spec": {"size": 1}}, namespace=namespace)

    cluster.api.patch(f"{url}/status", {"status": {"phase": "Done"}, "spec": {"size": 9}})
    found = cluster.api.get(url)
    assert (found["spec"], found["status"]) == ({"size": 2}, {"phase": "Done"})

    kubeconfig = cluster.service_account_kubeconfig(namespace, "default")
    with pytest.raises(RuntimeError, match="cannot get resource"):
        cluster.kubectl("get", "widgets", "w", "-n", namespace, kubeconfig=kubeconfig)


def test_custom_owners_of_the_tier_collect_their_children(
    cluster: TestCluster, widgets: None, namespace: str
) -> None:
    url = path(f"{GROUP}/v1", "widgets", namespace)
    widget = {"apiVersion": f"{GROUP}/v1", "kind": "Widget", "metadata": {"name": "owner"}}
    owner = cluster.api.create(url, widget)["metadata"]
    reference = {
        "apiVersion": f"{GROUP}/v1",
        "kind": "Widget",
        "name": "owner",
        "uid": owner["uid"],
    }
    child = {"metadata": {"name": "child", "ownerReferences": [reference]}}
    cluster.api.create(path("v1", "configmaps", namespace), child)
    cluster.api.delete(f"{url}/owner")
    child_url = path("v1", "configmaps", namespace, "child")
    # The garbage collector learns of new kinds every 30 s.
    cluster.wait_for(lambda: cluster.api.find(child_url) is None, "the child is gone", 80)
