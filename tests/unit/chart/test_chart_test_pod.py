"""The pod of `helm test`: what it may do, which address it asks, and that installing runs none."""

from __future__ import annotations

import pytest
import yaml
from tests.fakes.chart_harness import (
    ROOT,
    VALUE_SETS,
    Manifest,
    load_values,
    merge,
    of_kind,
    render,
)


def pod_of(manifests: list[Manifest]) -> Manifest:
    [pod] = of_kind(manifests, "Pod")
    return pod


@pytest.mark.parametrize("name", VALUE_SETS)
def test_a_test_is_a_hook_and_is_restricted(name: str) -> None:
    pod = pod_of(render(load_values(name)))
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    spec, [only] = pod["spec"], pod["spec"]["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert only["securityContext"]["readOnlyRootFilesystem"] is True
    assert spec["restartPolicy"] == "Never"
    assert spec["activeDeadlineSeconds"] <= 300
    assert only["image"].partition(":")[0].endswith("/driver"), "the image with the client alone"


@pytest.mark.parametrize(
    ("gateway", "address"),
    [
        ({}, "tinsmith-gateway.tinsmith.svc:7077"),
        ({"tlsSecret": "tls"}, "https://tinsmith-gateway.tinsmith.svc:7077"),
        ({"clusterAddress": "https://gateway.example.com:443"}, "https://gateway.example.com:443"),
    ],
)
def test_it_asks_the_gateway_as_drivers_do(gateway: dict[str, str], address: str) -> None:
    manifests = render(merge(load_values("external-values"), {"gateway": gateway}))
    env = {entry["name"]: entry for entry in pod_of(manifests)["spec"]["containers"][0]["env"]}
    assert env["TINSMITH_ADDRESS"]["value"] == address
    key = env["TINSMITH_API_KEY"]["valueFrom"]["secretKeyRef"]
    assert key == {"name": "tinsmith-keys", "key": "bootstrap-key"}


def test_plain_manifests_run_no_test() -> None:
    plain = yaml.safe_load_all((ROOT / "k8s/install.yaml").read_text())
    assert not [manifest for manifest in plain if manifest and manifest["kind"] == "Pod"]
