"""Certificates of pods: one for each role, what they name, and what pods are told of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.fakes.chart_harness import VALUE_SETS, load_values, merge, of_kind, pod_templates, render

from tinsmith_runtime.rpc.pod_identity import PodRole
from tinsmith_runtime.rpc.pod_tls import host_of, identity_uri

EXTERNAL = load_values("external-values")
_OUTSIDE = {"postgresql", "s3"}
"""What the trial brings along, which is no pod of ours."""


def _certificates(manifests: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the certificates of pods, by namespace and Secret."""
    return {
        (manifest["metadata"]["namespace"], manifest["spec"]["secretName"]): manifest["spec"]
        for manifest in of_kind(manifests, "Certificate")
        if not manifest["spec"].get("isCA")
    }


@pytest.mark.parametrize("name", VALUE_SETS)
def test_every_pod_has_the_certificate_of_its_role(name: str) -> None:
    manifests = render(load_values(name))
    certificates = _certificates(manifests)
    for template in pod_templates(manifests):
        if template.component in _OUTSIDE:
            continue
        [volume] = [v for v in template.spec["volumes"] if v["name"] == "certificates"]
        spec = certificates[template.namespace, volume["secret"]["secretName"]]
        role = "trainer" if template.component == "checkpoints" else template.component
        assert spec["dnsNames"] == [host_of(role)]
        assert spec["uris"] == [identity_uri(role, template.namespace)]
        [container] = template.containers
        [mount] = [m for m in container["volumeMounts"] if m["name"] == "certificates"]
        env = {entry["name"]: entry.get("value") for entry in container["env"]}
        names = ("CERTIFICATE", "CERTIFICATE_KEY", "AUTHORITY")
        wanted = [f"{mount['mountPath']}/{file}" for file in ("tls.crt", "tls.key", "ca.crt")]
        assert [env[f"TINSMITH_POD_{key}"] for key in names] == wanted
        assert mount["readOnly"]
        assert "grpc" not in container["livenessProbe"]


def test_pods_of_jobs_find_certificates_under_the_name_that_the_controller_knows() -> None:
    manifests = render(EXTERNAL)
    [controller] = [t for t in pod_templates(manifests) if t.component == "controller"]
    env = {entry["name"]: entry.get("value") for entry in controller.containers[0]["env"]}
    prefix, namespaces = env["TINSMITH_POD_CERTIFICATE_SECRETS"], env["TINSMITH_NAMESPACES"]
    certificates = _certificates(manifests)
    for namespace in namespaces.split(","):
        roles = {
            secret.removeprefix(f"{prefix}-")
            for found, secret in certificates
            if found == namespace and secret.startswith(f"{prefix}-")
        }
        assert roles >= {"trainer", "sampler", "environment", "coordinator"}
        assert roles <= set(PodRole)
        # The operators' own roles are nothing for a namespace of jobs.
        if namespace != controller.namespace:
            assert not roles & {"scheduler", "gateway", "controller"}


def test_an_authority_is_made_unless_an_issuer_is_named() -> None:
    kinds = ("ClusterIssuer", "Issuer")
    made = render(EXTERNAL)
    names = {manifest["metadata"]["name"] for manifest in of_kind(made, *kinds)}
    assert {spec["issuerRef"]["name"] for spec in _certificates(made).values()} < names
    [authority] = [m for m in of_kind(made, "Certificate") if m["spec"].get("isCA")]
    assert re.fullmatch(r"\d+h", authority["spec"]["duration"])
    given = {"name": "company", "kind": "ClusterIssuer"}
    named = render(merge(EXTERNAL, {"tls": {"issuer": given}}))
    assert of_kind(named, *kinds) == []
    references = [spec["issuerRef"] for spec in _certificates(named).values()]
    assert all(given.items() <= reference.items() for reference in references)


def test_secrets_may_be_made_without_cert_manager() -> None:
    manifests = render(merge(EXTERNAL, {"tls": {"certManager": False}}))
    assert of_kind(manifests, "Certificate", "ClusterIssuer", "Issuer") == []
    volumes = [v["name"] for t in pod_templates(manifests) for v in t.spec["volumes"]]
    assert "certificates" in volumes


def test_no_job_may_read_the_token_of_the_hub() -> None:
    changes = {
        "models": {"hubToken": {"token": "t"}},
        "controller": {"settings": {"protected_secret_names": "mine,yours"}},
    }
    [controller] = [
        t for t in pod_templates(render(merge(EXTERNAL, changes))) if t.component == "controller"
    ]
    env = {entry["name"]: entry.get("value") for entry in controller.containers[0]["env"]}
    assert env["TINSMITH_PROTECTED_SECRET_NAMES"].endswith("-hub,mine,yours")


def test_without_tls_nothing_of_it_is_left() -> None:
    text = str(render(merge(EXTERNAL, {"tls": {"enabled": False}})))
    assert "ertificate" not in text
