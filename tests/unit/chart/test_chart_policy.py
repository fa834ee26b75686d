"""What every rendered object must keep to, whatever the values: rights, limits, probes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.chart_harness import (
    COMPONENT,
    PODS,
    VALUE_SETS,
    Manifest,
    identity,
    load_values,
    of_kind,
    pod_templates,
    program_of,
    render,
    selects,
    walk,
)
from tests.support.dockerfiles import IMAGES

RBAC = ("Role", "ClusterRole")


@pytest.fixture(params=VALUE_SETS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(load_values(request.param))


def test_pods_are_restricted(manifests: list[Manifest]) -> None:
    templates = pod_templates(manifests)
    assert {template.component for template in templates} >= set(PODS)
    for template in templates:
        pod = template.spec["securityContext"]
        assert pod["runAsNonRoot"] is True
        assert pod["runAsUser"] > 0
        assert pod["runAsGroup"] > 0
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        if template.component in PODS:
            assert (pod["runAsUser"], pod["runAsGroup"]) == (65532, 65532)
        for key in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
            assert key not in template.spec
        for container in template.containers:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["runAsNonRoot"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "privileged" not in context


def test_pods_mount_nothing_of_the_host_and_bound_what_they_write(
    manifests: list[Manifest],
) -> None:
    for template in pod_templates(manifests):
        volumes = template.spec["volumes"]
        claims = template.owner["spec"].get("volumeClaimTemplates", [])
        for volume in volumes:
            kinds = {"emptyDir", "configMap", "secret"}
            if template.component == "checkpoints":
                kinds.add("persistentVolumeClaim")
            assert set(volume) - {"name"} <= kinds, volume
            assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"]
        known = {v["name"] for v in volumes} | {c["metadata"]["name"] for c in claims}
        for container in template.containers:
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert set(mounts.values()) <= known
            if container in template.spec["containers"]:
                assert mounts["/tmp"] == "tmp"


def test_containers_have_requests_and_limits(manifests: list[Manifest]) -> None:
    for template in pod_templates(manifests):
        for container in template.containers:
            for side in ("requests", "limits"):
                assert set(container["resources"][side]) >= {"cpu", "memory"}


def test_images_are_those_that_are_made(manifests: list[Manifest]) -> None:
    for template in pod_templates(manifests):
        if template.component in PODS:
            program = program_of(template.component)
            [container] = template.containers
            assert container["image"].rpartition("/")[2].partition(":")[0] == program
            assert f"tinsmith_{program}" in {image.module for image in IMAGES}


def test_images_are_pinned(manifests: list[Manifest]) -> None:
    for template in pod_templates(manifests):
        for container in template.containers:
            _, _, tag = container["image"].rpartition("/")[2].partition(":")
            assert tag not in ("", "latest"), container["image"]


def test_containers_have_probes_and_named_ports(manifests: list[Manifest]) -> None:
    for template in pod_templates(manifests):
        for container in template.spec["containers"]:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert container[probe]["timeoutSeconds"] >= 5, (template.component, probe)
            ports = {port["name"] for port in container["ports"]}
            assert len(ports) == len(container["ports"])
            asked = [port for path, port in walk(container) if path.endswith("httpGet.port")]
            assert set(asked) <= ports
            numbers = {port["containerPort"] for port in container["ports"]}
            assert {p for path, p in walk(container) if path.endswith("grpc.port")} <= numbers


def test_ports_name_their_protocol(manifests: list[Manifest]) -> None:
    """Helm applies on the server, and old servers do not fill in this part of a port's identity."""
    for manifest in manifests:
        for path, value in walk(manifest):
            if path.endswith(".ports"):
                assert all(port["protocol"] in ("TCP", "UDP") for port in value), path


def test_pods_have_time_to_drain(manifests: list[Manifest]) -> None:
    for template in pod_templates(manifests):
        grace = template.spec["terminationGracePeriodSeconds"]
        for container in template.spec["containers"]:
            drains = [e for e in container["env"] if e["name"] == "TINSMITH_DRAIN_TIMEOUT_S"]
            for drain in drains:
                assert grace >= float(drain["value"]) + 5


def test_tokens_of_the_api_go_to_those_who_use_it(manifests: list[Manifest]) -> None:
    for account in of_kind(manifests, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    accounts = {identity(a)[1:] for a in of_kind(manifests, "ServiceAccount")}
    for template in pod_templates(manifests):
        wanted = template.component in ("controller", "scheduler")
        assert template.spec["automountServiceAccountToken"] is wanted
        namespace = template.owner["metadata"]["namespace"]
        assert (namespace, template.spec["serviceAccountName"]) in accounts


def test_service_links_do_not_become_settings(manifests: list[Manifest]) -> None:
    for template in pod_templates(manifests):
        assert template.spec["enableServiceLinks"] is False


def test_rights_are_named_one_by_one(manifests: list[Manifest]) -> None:
    for role in of_kind(manifests, *RBAC):
        for rule in role["rules"]:
            assert "*" not in str(rule), identity(role)
            if "secrets" in rule["resources"]:
                assert rule["verbs"] == ["create", "get", "update", "delete"]
                assert rule["resources"] == ["secrets"]
            assert not {"escalate", "bind", "impersonate", "deletecollection"} & set(rule["verbs"])


def test_rights_in_the_whole_cluster_only_read(manifests: list[Manifest]) -> None:
    [role] = of_kind(manifests, "ClusterRole")
    for rule in role["rules"]:
        assert rule["verbs"] == ["get", "list", "watch"]
    resources = {resource for rule in role["rules"] for resource in rule["resources"]}
    assert resources == {"nodes", "priorityclasses", "pods"}


def test_only_the_scheduler_reads_logs(manifests: list[Manifest]) -> None:
    holders = {
        role["metadata"]["labels"][COMPONENT]
        for role in of_kind(manifests, *RBAC)
        if "pods/log" in str(role["rules"])
    }
    assert holders == {"scheduler"}


def test_bindings_name_roles_and_accounts_that_exist(manifests: list[Manifest]) -> None:
    known = {identity(manifest) for manifest in manifests}
    for binding in of_kind(manifests, "RoleBinding", "ClusterRoleBinding"):
        role, namespace = binding["roleRef"], binding["metadata"].get("namespace", "")
        assert (role["kind"], namespace, role["name"]) in known
        for subject in binding["subjects"]:
            assert (subject["kind"], subject["namespace"], subject["name"]) in known


def test_selectors_fit_the_pods_they_are_for(manifests: list[Manifest]) -> None:
    templates = pod_templates(manifests)
    for template in templates:
        assert selects(template.owner["spec"]["selector"], template.labels)
        fitting = [t for t in templates if selects(template.owner["spec"]["selector"], t.labels)]
        assert fitting == [template]
    for service in of_kind(manifests, "Service"):
        fitting = [
            t for t in templates if selects({"matchLabels": service["spec"]["selector"]}, t.labels)
        ]
        assert fitting, identity(service)
        for template in fitting:
            names = {port["name"] for c in template.spec["containers"] for port in c["ports"]}
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    for monitor in of_kind(manifests, "ServiceMonitor"):
        services = of_kind(manifests, "Service")
        assert any(selects(monitor["spec"]["selector"], s["metadata"]["labels"]) for s in services)


def test_budgets_protect_what_has_several_and_block_no_drain(manifests: list[Manifest]) -> None:
    templates = pod_templates(manifests)
    scalers = {
        scaler["spec"]["scaleTargetRef"]["name"]: scaler["spec"]["minReplicas"]
        for scaler in of_kind(manifests, "HorizontalPodAutoscaler")
    }
    budgets = of_kind(manifests, "PodDisruptionBudget")
    assert "controller" in {budget["metadata"]["labels"][COMPONENT] for budget in budgets}
    for budget in budgets:
        [template] = [t for t in templates if selects(budget["spec"]["selector"], t.labels)]
        name = template.owner["metadata"]["name"]
        replicas = template.owner["spec"].get("replicas", scalers.get(name))
        assert replicas > budget["spec"]["maxUnavailable"]
        assert template.component not in ("scheduler", "gateway", "coordinator")


def test_single_writers_can_be_replaced_although_a_standby_is_never_ready(
    manifests: list[Manifest],
) -> None:
    for template in pod_templates(manifests):
        rolling = template.owner["spec"].get("strategy", {}).get("rollingUpdate")
        if template.component in ("scheduler", "gateway", "coordinator"):
            assert rolling == {"maxSurge": 1, "maxUnavailable": "100%"}
            start = template.containers[0]["startupProbe"]
            assert start["periodSeconds"] * start["failureThreshold"] > 100 * 365 * 86_400
        elif template.component in PODS:
            assert rolling == {"maxSurge": 1, "maxUnavailable": 0}


def test_scalers_point_at_something_that_scales(manifests: list[Manifest]) -> None:
    for scaler in of_kind(manifests, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        [found] = [
            manifest
            for manifest in of_kind(manifests, target["kind"])
            if manifest["metadata"]["name"] == target["name"]
        ]
        assert found["apiVersion"] == target["apiVersion"]
        assert found["metadata"]["namespace"] == scaler["metadata"]["namespace"]
        assert "replicas" not in found["spec"]


def test_references_between_objects_lead_somewhere(manifests: list[Manifest]) -> None:
    """Of ConfigMaps and of Secrets, but for those that the values leave to others."""
    known = {identity(manifest) for manifest in manifests}
    for template in pod_templates(manifests):
        namespace = template.owner["metadata"]["namespace"]
        for path, value in walk(template.spec):
            if path.endswith(".configMap"):
                assert ("ConfigMap", namespace, value["name"]) in known
            if path.endswith(".secretRef"):
                is_known = ("Secret", namespace, value["name"]) in known
                assert is_known or of_kind(manifests, "Secret") == []
            if path.endswith(".secretKeyRef"):
                secret = ("Secret", namespace, value["name"])
                if secret in known:
                    [keys] = [m["stringData"] for m in manifests if identity(m) == secret]
                    assert value["key"] in keys or value.get("optional")
                else:
                    assert value["name"] == "tinsmith-keys"
                    assert of_kind(manifests, "Secret") == []


def test_objects_name_their_namespace_and_origin(manifests: list[Manifest]) -> None:
    cluster_wide = {"ClusterRole", "ClusterRoleBinding", "Namespace"}
    for manifest in manifests:
        assert ("namespace" in manifest["metadata"]) is (manifest["kind"] not in cluster_wide)
        assert manifest["metadata"]["labels"]["app.kubernetes.io/part-of"] == "tinsmith"


def _secrets_of(value: Any) -> list[str]:
    return [name for path, name in walk(value) if path.endswith("secretKeyRef.key")]


def test_secrets_go_where_they_are_needed(manifests: list[Manifest]) -> None:
    wanted = {
        "scheduler": {"pod-key", "previous-pod-key", "scheduler-database-url", "bootstrap-key"},
        "gateway": {"gateway-key", "gateway-database-url"},
        "coordinator": {"coordinator-key", "coordinator-database-url"},
        "environment": {"environment-key"},
        "controller": {"pod-key", "previous-pod-key"},
        "checkpoints": {"trainer-key", "trainer-database-url"},
    }
    assert set(wanted) == set(PODS)
    for template in pod_templates(manifests):
        if template.component in wanted:
            assert set(_secrets_of(template.spec)) == wanted[template.component]
            for container in template.containers:
                whole = [source["secretRef"]["name"] for source in container.get("envFrom", [])]
                reads_bucket = template.component == "checkpoints" and not any(
                    "persistentVolumeClaim" in volume for volume in template.spec["volumes"]
                )
                assert whole == (["tinsmith-storage"] if reads_bucket else [])
