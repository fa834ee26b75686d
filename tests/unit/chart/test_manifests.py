"""The manifests of k8s/: samples that the cluster takes, and generated files that are fresh."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.fakes.chart_harness import (
    PODS,
    ROOT,
    VALUE_SETS,
    identity,
    load_values,
    of_kind,
    pod_templates,
    render,
)

from tinsmith_jobs.spec_codec import decode_job, decode_pool, is_left_alone

SAMPLES = sorted((ROOT / "k8s/samples").glob("*.yaml"))
CRDS = {
    crd["spec"]["names"]["kind"]: crd
    for crd in map(yaml.safe_load, (path.read_text() for path in (ROOT / "k8s/crd").glob("*.yaml")))
}


def _schema(kind: str) -> dict[str, Any]:
    """Return the schema of a resource; what it keeps of other fields is for the codec to refuse."""
    [version] = CRDS[kind]["spec"]["versions"]
    schema = copy.deepcopy(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return dict(schema)


def _check(manifest: dict[str, Any]) -> None:
    crd = CRDS[manifest["kind"]]["spec"]
    assert manifest["apiVersion"] == f"{crd['group']}/{crd['versions'][0]['name']}"
    jsonschema.Draft202012Validator(_schema(manifest["kind"])).validate(manifest)
    decode = decode_job if manifest["kind"] == "TrainingJob" else decode_pool
    decode(manifest["metadata"]["name"], manifest["spec"])


def _objects(path: Path) -> list[dict[str, Any]]:
    return [manifest for manifest in yaml.safe_load_all(path.read_text()) if manifest]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_is_valid(path: Path) -> None:
    ours = [manifest for manifest in _objects(path) if manifest["kind"] in CRDS]
    assert len(ours) == 1
    _check(ours[0])
    assert "namespace" not in ours[0]["metadata"], "samples go where -n says"
    assert path.read_text().startswith("# "), "a sample begins with what it shows"


def test_there_is_a_sample_of_every_method_and_kind() -> None:
    manifests = [m for path in SAMPLES for m in _objects(path) if m["kind"] in CRDS]
    assert {manifest["kind"] for manifest in manifests} == set(CRDS)
    methods = {m["spec"]["method"]["type"] for m in manifests if m["kind"] == "TrainingJob"}
    assert methods >= {"supervised", "rl", "custom", "serve"}
    names = [manifest["metadata"]["name"] for manifest in manifests]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        pytest.param({"method": {"type": "orpo"}}, "orpo", id="unknown-method"),
        pytest.param({"method": {}}, "type", id="no-method"),
        pytest.param({"backoffLimit": -1}, "minimum", id="below-zero"),
        pytest.param({"model": {"name": "x", "source": "https://x"}}, "match", id="bad-source"),
    ],
)
def test_the_schema_refuses_what_the_server_would(change: dict[str, Any], complaint: str) -> None:
    [job] = _objects(ROOT / "k8s/samples/lora-sft.yaml")
    job["spec"] |= change
    with pytest.raises(jsonschema.ValidationError, match=complaint):
        _check(job)


def test_parameters_of_a_method_are_free() -> None:
    [job] = _objects(ROOT / "k8s/samples/lora-sft.yaml")
    job["spec"]["method"]["parameters"] = {"anything": {"nested": [1]}}
    _check(job)


def test_the_job_for_kueue_is_left_to_it() -> None:
    [job] = _objects(ROOT / "k8s/samples/kueue.yaml")
    assert job["spec"]["suspend"] is True
    # Kueue suspends and resumes; the controller still runs the pods.
    assert not is_left_alone(job["spec"])


def test_pools_of_the_chart_are_valid() -> None:
    pools = [
        pool for name in VALUE_SETS for pool in of_kind(render(load_values(name)), "TrainerPool")
    ]
    assert pools
    for pool in pools:
        _check(pool)


def test_a_pool_gets_what_the_namespace_has_unless_it_says_otherwise() -> None:
    pools = {
        pool["metadata"]["name"]: pool
        for pool in of_kind(render(load_values("full-values")), "TrainerPool")
    }
    ours, own = pools["qwen"]["spec"]["model"], pools["llama"]["spec"]["model"]
    assert ours["hubTokenSecretRef"] == {"name": "tinsmith-hub"}
    assert ours["cacheClaimName"] == "tinsmith-models"
    assert own["hubTokenSecretRef"] == {"name": "own"}
    assert "cacheClaimName" not in own
    assert pools["llama"]["metadata"]["namespace"] == "products"


def test_generated_files_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "helm.render", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_plain_manifests_are_those_of_the_chart_and_hold_no_secret() -> None:
    plain = _objects(ROOT / "k8s/install.yaml")
    rendered = render({**load_values("external-values"), "kubernetesVersion": "1.24.0"})
    without_tests = [manifest for manifest in rendered if manifest["kind"] != "Pod"]
    assert sorted(map(identity, plain)) == sorted(map(identity, without_tests))
    assert of_kind(plain, "Secret") == []
    assert {t.component for t in pod_templates(plain)} == set(PODS)


def test_kustomization_lists_every_file() -> None:
    kustomization = yaml.safe_load((ROOT / "k8s/kustomization.yaml").read_text())
    crds = {f"crd/{path.name}" for path in (ROOT / "k8s/crd").glob("*.yaml")}
    assert set(kustomization["resources"]) == {"namespace.yaml", "install.yaml", *crds}
