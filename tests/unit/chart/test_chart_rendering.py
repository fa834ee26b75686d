"""What values do: refusals, versions of Kubernetes, names, repeatability."""

from __future__ import annotations

import json
from typing import Any

import helm_python
import jsonschema
import pytest
import yaml
from tests.fakes.chart_harness import (
    CHART,
    ROOT,
    VALUE_SETS,
    identity,
    load_values,
    merge,
    of_kind,
    pod_templates,
    render,
)

from tinsmith_runtime.rpc.auth import ApiKey
from tinsmith_runtime.rpc.pod_identity import PodIdentity, PodKey, PodRole

EXTERNAL = load_values("external-values")
FILES = load_values("files-values")
TRIAL = load_values("trial-values")


@pytest.mark.parametrize("name", VALUE_SETS)
def test_lint_has_no_warning(name: str) -> None:
    values = load_values(name)
    version = "v" + values.get("kubernetesVersion", "1.31.0")
    report = helm_python.lint(CHART, values, strict=True, kube_version=version)
    # An icon is a matter of taste; everything from a warning on is not.
    assert [message for message in report["messages"] if message["severity"] > 1] == []
    assert report["errors"] == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        pytest.param({"gatewy": {}}, "gatewy", id="misspelt-table"),
        pytest.param({"gateway": {"replica": 2}}, "replica", id="misspelt-field"),
        pytest.param({"gateway": {"replicas": 3}}, "maximum", id="third-single-writer"),
        pytest.param({"controller": {"replicas": 0}}, "minimum", id="no-controller"),
        pytest.param({"scheduler": {"replicas": "1"}}, "replicas", id="text-for-number"),
        pytest.param({"image": {"tag": "latest"}}, "tag", id="tag-latest"),
        pytest.param({"image": {"repository": "Upper/Case"}}, "repository", id="bad-repository"),
        pytest.param({"s3": {"image": "x/y:latest"}}, "image", id="trial-image-latest"),
        pytest.param({"s3": {"image": "x/y"}}, "image", id="trial-image-without-tag"),
        pytest.param({"storage": {"uri": "gs://bucket"}}, "uri", id="other-store"),
        pytest.param({"storage": {"uri": "file:///checkpoints"}}, "uri", id="folder-elsewhere"),
        pytest.param({"storage": {"uri": "file:///storage/../etc"}}, "uri", id="folder-above"),
        pytest.param({"storage": {"env": {"PATH": "/"}}}, "PATH", id="other-variable"),
        pytest.param({"database": {"url": "mysql://db"}}, "url", id="other-database"),
        pytest.param({"database": {"port": 0}}, "port", id="no-port"),
        pytest.param({"jobs": {"namespaces": []}}, "namespaces", id="no-namespace"),
        pytest.param({"jobs": {"namespaces": [{"name": "a"}]}}, "project", id="no-project"),
        pytest.param(
            {"jobs": {"namespaces": [{"name": "A_b", "project": "p"}]}}, "name", id="bad-namespace"
        ),
        pytest.param({"jobs": {"queues": {"q": {"gpus": 1}}}}, "gpus", id="misspelt-queue"),
        pytest.param({"jobs": {"projects": {"p": {"weight": 0}}}}, "weight", id="no-weight"),
        pytest.param({"scheduler": {"resources": {"limits": None}}}, "limits", id="no-limits"),
        pytest.param(
            {"scheduler": {"resources": {"limits": {"cpu": "1", "memory": "1 GB"}}}},
            "memory",
            id="bad-quantity",
        ),
        pytest.param({"scheduler": {"settings": {"Max-Runs": 1}}}, "Max-Runs", id="bad-setting"),
        pytest.param(
            {"gateway": {"settings": {"nonsense_key": 1}}}, "nonsense_key", id="unknown-setting"
        ),
        pytest.param(
            {"controller": {"settings": {"kueue": "yes"}}}, "kueue", id="setting-of-another-type"
        ),
        pytest.param({"networkPolicy": {"metricsFrom": [{"ip": "x"}]}}, "ip", id="bad-peer"),
        pytest.param({"monitoring": {"monitors": True}}, "monitors", id="switch-for-word"),
        pytest.param({"gateway": {"ingress": {"enabled": True}}}, "host", id="ingress-nowhere"),
        pytest.param({"pools": {"p": {}}}, "spec", id="pool-without-spec"),
        pytest.param({"kubernetesVersion": "latest"}, "kubernetesVersion", id="bad-version"),
    ],
)
def test_the_schema_refuses(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(helm_python.HelmError, match=complaint):
        render(merge(EXTERNAL, changes))


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        pytest.param({}, "no database: set database.url", id="nothing"),
        pytest.param({"postgresql": {"enabled": True}}, "no object store: set", id="no-store"),
        pytest.param(
            merge(TRIAL, {"database": {"url": "postgresql://x"}}), "two databases", id="2db"
        ),
        pytest.param(
            merge(TRIAL, {"storage": {"uri": "s3://bucket"}}), "two object stores", id="2s3"
        ),
        pytest.param(
            merge(EXTERNAL, {"database": {"url": "postgresql://x"}}), "two databases", id="2-urls"
        ),
        pytest.param(
            merge(FILES, {"storage": {"persistentVolumeClaim": ""}}),
            "name the claim",
            id="no-claim",
        ),
        pytest.param(
            merge(EXTERNAL, {"storage": {"persistentVolumeClaim": "a"}}),
            "is for shared files",
            id="claim-for-s3",
        ),
        pytest.param(
            merge(FILES, {"storage": {"existingSecret": "a"}}), "of an S3 client", id="files-of-s3"
        ),
        pytest.param(
            merge(EXTERNAL, {"storage": {"env": {"AWS_REGION": "x"}}}), "exclude", id="2-secrets"
        ),
        pytest.param(
            merge(
                EXTERNAL,
                {"jobs": {"namespaces": [{"name": "a", "project": p} for p in ("p", "q")]}},
            ),
            "names a twice",
            id="namespace-twice",
        ),
        pytest.param(
            merge(
                EXTERNAL,
                {
                    "pools": {
                        "p": {
                            "namespace": "elsewhere",
                            "spec": {"model": {"name": "m", "source": "x"}},
                        }
                    }
                },
            ),
            "not one of jobs.namespaces",
            id="pool-elsewhere",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused_with_the_remedy(
    values: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(helm_python.HelmError, match=complaint):
        render(values)


def test_every_value_is_in_the_schema_with_its_default() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(defaults, schema)
    for table in (
        "image",
        "jobs",
        "gateway",
        "networkPolicy",
        "environment",
        "controller",
        "checkpoints",
    ):
        assert set(schema["properties"][table]["properties"]) == set(defaults[table]), table
    assert set(schema["properties"]) - {"global"} == set(defaults)


@pytest.mark.parametrize("name", [n for n in VALUE_SETS if "existing" in str(load_values(n))])
def test_rendering_repeats_to_the_letter(name: str) -> None:
    values = load_values(name)
    with helm_python.Chart.load(CHART) as chart:
        assert chart.render(values, name="a", namespace="b") == chart.render(
            values, name="a", namespace="b"
        )


def test_only_generated_keys_differ_between_renderings() -> None:
    with helm_python.Chart.load(CHART) as chart:
        first, second = (chart.render(TRIAL, name="a", namespace="b") for _ in range(2))
    assert [path for path in first if first[path] != second[path]] == [
        "tinsmith/templates/secrets.yaml"
    ]


def test_a_generated_key_is_the_same_in_every_namespace() -> None:
    secrets = {
        identity(secret): secret["stringData"] for secret in of_kind(render(TRIAL), "Secret")
    }
    ours = secrets["Secret", "tinsmith", "tinsmith-keys"]
    theirs = secrets["Secret", "tinsmith-jobs", "tinsmith-keys"]
    urls = {f"{role}-database-url" for role in ("coordinator", "trainer")}
    assert theirs == {name: ours[name] for name in urls}
    for role in ("gateway", "coordinator", "environment", "trainer"):
        identity_of_pod = PodIdentity(PodRole(role), "tinsmith")
        assert ours[f"{role}-key"] == str(PodKey.derive(ours["pod-key"], identity_of_pod))
    assert len(ours["pod-key"]) >= 43
    password = secrets["Secret", "tinsmith", "tinsmith-postgresql"]["password"]
    assert f":{password}@tinsmith-postgresql.tinsmith.svc:5432/" in ours["trainer-database-url"]


def test_a_long_release_has_names_that_fit() -> None:
    release = "a-release-with-a-name-as-long-as-helm-lets-it-be-0001"
    assert len(release) == 53
    for name in VALUE_SETS:
        manifests = render(load_values(name), release=release)
        for manifest in manifests:
            assert len(manifest["metadata"]["name"]) <= 63, identity(manifest)
            labels = manifest["metadata"].get("labels", {})
            assert all(len(value) <= 63 for value in labels.values()), identity(manifest)
        for stateful in of_kind(manifests, "StatefulSet"):
            # Its pods carry a label of the name, a dash and ten characters.
            assert len(stateful["metadata"]["name"]) <= 52


def test_two_long_releases_do_not_share_a_name() -> None:
    names = [
        {identity(m) for m in render(EXTERNAL, release=f"{'long-' * 9}{end}")}
        for end in ("one", "two")
    ]
    shared = names[0] & names[1]
    assert {kind for kind, _, _ in shared} <= {"Namespace"}


def test_no_object_is_made_twice() -> None:
    for name in VALUE_SETS:
        identities = [identity(manifest) for manifest in render(load_values(name))]
        assert len(identities) == len(set(identities))


def test_a_namespace_of_jobs_can_be_that_of_the_release() -> None:
    values = merge(TRIAL, {"jobs": {"namespaces": [{"name": "tinsmith", "project": "default"}]}})
    identities = [identity(manifest) for manifest in render(values)]
    assert len(identities) == len(set(identities))


@pytest.mark.parametrize(
    ("version", "budget", "scaler", "probe"),
    [
        pytest.param("1.20.2", "policy/v1beta1", "autoscaling/v2beta2", "exec", id="1.20"),
        pytest.param("1.22.0", "policy/v1", "autoscaling/v2beta2", "exec", id="1.22"),
        pytest.param("1.23.9", "policy/v1", "autoscaling/v2", "exec", id="1.23"),
        pytest.param("1.24.0", "policy/v1", "autoscaling/v2", "grpc", id="1.24"),
        pytest.param("v1.36", "policy/v1", "autoscaling/v2", "grpc", id="1.36"),
    ],
)
def test_api_versions_are_those_of_the_cluster(
    version: str, budget: str, scaler: str, probe: str
) -> None:
    # With TLS, health is told over HTTP everywhere.
    values = {"kubernetesVersion": version, "tls": {"enabled": False}}
    manifests = render(merge(load_values("full-values"), values))
    assert {m["apiVersion"] for m in of_kind(manifests, "PodDisruptionBudget")} == {budget}
    assert {m["apiVersion"] for m in of_kind(manifests, "HorizontalPodAutoscaler")} == {scaler}
    scheduler = next(t for t in pod_templates(manifests) if t.component == "scheduler")
    assert probe in scheduler.containers[0]["livenessProbe"]


def test_the_chart_has_the_definitions_of_the_repository() -> None:
    ours = {path.name: path.read_text() for path in (ROOT / "k8s/crd").glob("*.yaml")}
    assert ours == {path.name: path.read_text() for path in (CHART / "crds").glob("*.yaml")}


def test_monitors_are_made_where_they_are_wanted() -> None:
    kinds = ("ServiceMonitor", "PodMonitor")
    for word, count in (("auto", 0), ("never", 0), ("always", 2)):
        manifests = render(merge(EXTERNAL, {"monitoring": {"monitors": word}}))
        assert len(of_kind(manifests, *kinds)) == count


@pytest.mark.parametrize("kind", ["ClusterIP", "NodePort", "LoadBalancer"])
def test_the_gateway_sees_the_addresses_of_its_clients(kind: str) -> None:
    """Strangers are limited by address: behind one address they would share with all others."""
    values = merge(EXTERNAL, {"gateway": {"service": {"type": kind}}})
    services = of_kind(render(values), "Service")
    (service,) = (each for each in services if each["metadata"]["name"] == "tinsmith-gateway")
    expected = None if kind == "ClusterIP" else "Local"
    assert service["spec"].get("externalTrafficPolicy") == expected


def test_the_key_that_the_chart_draws_has_a_check() -> None:
    secrets = (each["stringData"] for each in of_kind(render(TRIAL), "Secret"))
    (secret,) = (each for each in secrets if "bootstrap-key" in each)
    key = ApiKey.parse(secret["bootstrap-key"])
    assert key == key.checked(secret["pod-key"])
    assert key.check
