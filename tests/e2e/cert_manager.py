"""The kinds of cert-manager, for servers that are to take what the chart asks of it.

No certificate comes of them here: `Release` makes the Secrets, as cert-manager would.
"""

from __future__ import annotations

import json

from tests.e2e.cluster import TestCluster, path

_GROUP = "cert-manager.io"
_KINDS = {
    "Certificate": ("certificates", "Namespaced"),
    "Issuer": ("issuers", "Namespaced"),
    "ClusterIssuer": ("clusterissuers", "Cluster"),
}


def install_kinds(cluster: TestCluster) -> None:
    """Define the kinds that the chart uses, without their schemas, and its namespace."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "cert-manager"}}
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(namespace))
    definitions = path("apiextensions.k8s.io/v1", "customresourcedefinitions")
    for kind, (plural, scope) in _KINDS.items():
        name = f"{plural}.{_GROUP}"
        schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        version = {
            "name": "v1",
            "served": True,
            "storage": True,
            "schema": {"openAPIV3Schema": schema},
        }
        manifest = {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": name},
            "spec": {
                "group": _GROUP,
                "scope": scope,
                "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
                "versions": [version],
            },
        }
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

        def is_served(url: str = f"{definitions}/{name}") -> bool:
            conditions = cluster.api.get(url).get("status", {}).get("conditions") or []
            return any((c["type"], c["status"]) == ("Established", "True") for c in conditions)

        cluster.wait_for(is_served, f"{kind} to be served")
