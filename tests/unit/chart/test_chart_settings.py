"""Each pod accepts the settings that the chart gives it."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import helm_python
import pytest
from tests.fakes.chart_harness import (
    PODS,
    VALUE_SETS,
    Manifest,
    identity,
    load_values,
    merge,
    of_kind,
    pod_templates,
    program_of,
    render,
)

from tinsmith_controller.assignment.queue_config import parse_queue_config
from tinsmith_controller.assignment.types import QueueConfig, Share
from tinsmith_controller.config import ControllerConfig
from tinsmith_jobs.naming import POD_PATHS
from tinsmith_runtime.config import load_config
from tinsmith_runtime.pod.main import TERMINATION_LOG
from tinsmith_runtime.rpc.pod_identity import PodIdentity, PodKey, PodRole
from tinsmith_runtime.storage.settings import parse_s3_uri

FIELDS = {"status.podIP": "10.1.2.3", "metadata.name": "pod-abc12"}
OTHERS_SECRETS = {
    "pod-key": "k" * 43,
    **{
        f"{role}-database-url": f"postgresql://{role}:p@db/tinsmith"
        for role in ("scheduler", "gateway", "coordinator", "trainer")
    },
    "bootstrap-key": f"tsk_{'a' * 12}_{'b' * 43}",
    "previous-pod-key": "",
    **{
        f"{role}-key": str(PodKey.derive("k" * 43, PodIdentity(PodRole(role), "tinsmith")))
        for role in ("gateway", "coordinator", "environment", "trainer")
    },
}


def _config_class(pod: str) -> type[Any]:
    program = program_of(pod)
    module = importlib.import_module(f"tinsmith_{program}.config")
    return getattr(module, f"{program.capitalize()}Config")  # type: ignore[no-any-return]


def _value(entry: dict[str, Any], manifests: list[Manifest], namespace: str) -> str:
    if "value" in entry:
        return str(entry["value"])
    source = entry["valueFrom"]
    if "fieldRef" in source:
        return FIELDS[source["fieldRef"]["fieldPath"]]
    reference = source["secretKeyRef"]
    wanted = ("Secret", namespace, reference["name"])
    known = [secret["stringData"] for secret in manifests if identity(secret) == wanted]
    content = known[0] if known else OTHERS_SECRETS
    if reference.get("optional"):
        return str(content.get(reference["key"], ""))
    return str(content[reference["key"]])


def _environment(manifests: list[Manifest], pod: str) -> dict[str, str]:
    """Return the variables of a pod's container, with references resolved as Kubernetes would."""
    [template] = [t for t in pod_templates(manifests) if t.component == pod]
    [container] = template.containers
    namespace = template.owner["metadata"]["namespace"]
    found: dict[str, str] = {}
    for entry in container["env"]:
        value = _value(entry, manifests, namespace)
        for name, known in found.items():
            value = value.replace(f"$({name})", known)
        assert "$(" not in value, f"{entry['name']} refers to what is not set before it"
        assert entry["name"] not in found
        found[entry["name"]] = value
    return found


def _files(manifests: list[Manifest], pod: str, folder: Path) -> dict[str, Path]:
    """Write the ConfigMaps that a pod mounts, and return each file by its path in the pod."""
    [template] = [t for t in pod_templates(manifests) if t.component == pod]
    [container] = template.containers
    maps = {m["metadata"]["name"]: m["data"] for m in of_kind(manifests, "ConfigMap")}
    volumes = {
        v["name"]: v["configMap"]["name"] for v in template.spec["volumes"] if "configMap" in v
    }
    files = {}
    for mount in container["volumeMounts"]:
        for name, text in maps.get(volumes.get(mount["name"], ""), {}).items():
            local = folder / mount["name"] / name
            local.parent.mkdir(exist_ok=True)
            local.write_text(text)
            files[f"{mount['mountPath']}/{name}"] = local
    return files


def _load(manifests: list[Manifest], pod: str, folder: Path) -> Any:
    [template] = [t for t in pod_templates(manifests) if t.component == pod]
    files = _files(manifests, pod, folder)
    environment = {
        name: str(files.get(value, value)) for name, value in _environment(manifests, pod).items()
    }
    option, path = template.containers[0]["args"]
    assert option == "--config"
    return load_config(_config_class(pod), path=files[path], environment=environment)


@pytest.mark.parametrize("pod", PODS)
@pytest.mark.parametrize("name", VALUE_SETS)
def test_a_pod_accepts_its_settings(name: str, pod: str, tmp_path: Path) -> None:
    manifests = render(load_values(name))
    config = _load(manifests, pod, tmp_path)
    known = {f"TINSMITH_{field.name.upper()}" for field in dataclasses.fields(config)}
    known.add(TERMINATION_LOG)
    given = {name for name in _environment(manifests, pod) if name.startswith("TINSMITH_")}
    assert given - known == set(), "variables that the pod would not read"


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_listens_where_its_ports_and_services_say(pod: str) -> None:
    manifests = render(load_values("trial-values"))
    [template] = [t for t in pod_templates(manifests) if t.component == pod]
    ports = {p["name"]: p["containerPort"] for p in template.containers[0]["ports"]}
    environment = _environment(manifests, pod)
    addresses = {
        "grpc": "TINSMITH_LISTEN_ADDRESS",
        "api": "TINSMITH_LISTEN_ADDRESS",
        "metrics": "TINSMITH_METRICS_ADDRESS",
        "health": "TINSMITH_HEALTH_ADDRESS",
    }
    for port, number in ports.items():
        host, _, text = environment[addresses[port]].rpartition(":")
        assert int(text) == number
        # A gateway is also reached from inside its pod, by `kubectl port-forward`.
        assert host == ("0.0.0.0" if port == "api" else "10.1.2.3")


@pytest.mark.parametrize("name", VALUE_SETS)
def test_addresses_lead_to_services(name: str) -> None:
    manifests = render(load_values(name))
    known = {
        f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc:{port['port']}"
        for service in of_kind(manifests, "Service")
        for port in service["spec"]["ports"]
    }
    for pod in PODS:
        environment = _environment(manifests, pod)
        for variable in ("TINSMITH_SCHEDULER_ADDRESS", "TINSMITH_GATEWAY_ADDRESS"):
            if variable in environment:
                assert environment[variable].removeprefix("https://") in known


def test_further_settings_reach_the_pod(tmp_path: Path) -> None:
    manifests = render(load_values("full-values"))
    scheduler = _load(manifests, "scheduler", tmp_path)
    assert (scheduler.max_runs_per_project, scheduler.session_timeout_s) == (512, 90.5)
    gateway = _load(manifests, "gateway", tmp_path)
    assert gateway.aliases() == {"fast": "qwen3-0.6b"}
    assert gateway.pins_clients is True


def test_a_misspelt_setting_is_refused_before_anything_is_installed() -> None:
    values = merge(load_values("trial-values"), {"scheduler": {"settings": {"max_runs": 3}}})
    with pytest.raises(helm_python.HelmValuesError, match="max_runs"):
        render(values)


def test_queues_and_projects_are_what_the_controller_reads(tmp_path: Path) -> None:
    files = _files(render(load_values("full-values")), "controller", tmp_path)
    content = files["/etc/tinsmith/queues/queues.toml"].read_bytes()
    assert parse_queue_config(content, "queues.toml") == QueueConfig(
        queues={"default": Share(64), "night": Share(128, 0.25)},
        projects={"research": Share(48, 2.5), "products": Share(None, 1.0)},
        backfill_patience_s=600.0,
    )


def test_namespaces_and_projects_are_told_to_both_who_ask() -> None:
    manifests = render(load_values("full-values"))
    controller = _environment(manifests, "controller")
    assert controller["TINSMITH_NAMESPACES"] == "research,products,research-batch"
    assert controller["TINSMITH_PROJECTS"] == (
        "research=research,products=products,research-batch=batch"
    )
    scheduler = _environment(manifests, "scheduler")
    assert scheduler["TINSMITH_JOB_NAMESPACES"] == (
        "research=research,products=products,batch=research-batch"
    )


def test_a_change_of_settings_replaces_the_pods_that_read_them() -> None:
    base = load_values("trial-values")

    def annotations(changes: dict[str, Any]) -> dict[str, Any]:
        return {
            t.component: t.owner["spec"]["template"]["metadata"].get("annotations")
            for t in pod_templates(render(merge(base, changes)))
        }

    before = annotations({})
    for changes, replaced in (
        ({"checkpoints": {"settings": {"checkpoint_sweep_interval_s": 30}}}, {"checkpoints"}),
        ({"scheduler": {"settings": {"max_runs_per_project": 3}}}, {"scheduler"}),
        # The controller reads them again by itself.
        ({"jobs": {"queues": {"default": {"maxGPUs": 1}}}}, set()),
    ):
        after = annotations(changes)
        assert {pod for pod in before if before[pod] != after[pod]} == replaced


def test_new_credentials_of_the_store_replace_the_pods_that_read_them() -> None:
    base = merge(load_values("full-values"), {"storage": {"env": {"AWS_ACCESS_KEY_ID": "id"}}})
    changed = merge(base, {"storage": {"env": {"AWS_ACCESS_KEY_ID": "other"}}})
    before, after = (
        {t.component: t.owner["spec"]["template"] for t in pod_templates(render(values))}
        for values in (base, changed)
    )
    assert {pod for pod in before if before[pod] != after[pod]} == {"checkpoints"}


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_checkpoint_server_finds_what_jobs_saved_and_gets_no_runs(
    name: str, tmp_path: Path
) -> None:
    manifests = render(load_values(name))
    config = _load(manifests, "checkpoints", tmp_path)
    controller = _environment(manifests, "controller")
    assert config.storage_uri == controller["TINSMITH_STORAGE_URI"]
    # A ledger that trainers of jobs share: without one it would keep an empty one of its own.
    assert config.database_url.startswith("postgresql://")
    # Each replica registers as itself, and for all callers.
    assert (config.worker_name, config.pool) == (FIELDS["metadata.name"], "")
    assert (config.models(), config.device) == ({}, "cpu")
    [template] = [t for t in pod_templates(manifests) if t.component == "checkpoints"]
    secret = controller["TINSMITH_STORAGE_SECRET_NAME"]
    sources = [{"secretRef": {"name": secret}}] if secret else []
    assert template.containers[0].get("envFrom", []) == sources


def test_shared_files_are_mounted_where_checkpoints_are_read_and_written(tmp_path: Path) -> None:
    manifests = render(load_values("files-values"))
    [template] = [t for t in pod_templates(manifests) if t.component == "checkpoints"]
    config = _load(manifests, "checkpoints", tmp_path)
    controller = _load(manifests, "controller", tmp_path)
    assert isinstance(controller, ControllerConfig)

    assert config.storage_uri == controller.storage_uri == "file:///storage/tinsmith"
    assert controller.storage_claim_name == "checkpoints"
    claim = {"claimName": "checkpoints"}
    assert {"name": "storage", "persistentVolumeClaim": claim} in template.spec["volumes"]
    mounts = template.containers[0]["volumeMounts"]
    assert {"name": "storage", "mountPath": POD_PATHS["storage"]} in mounts
    others = [t for t in pod_templates(manifests) if t.component != "checkpoints"]
    assert not any("persistentVolumeClaim" in v for t in others for v in t.spec["volumes"])


def test_the_checkpoint_server_needs_no_secret_where_its_account_is_its_identity() -> None:
    values = load_values("full-values")
    del values["storage"]["env"]
    manifests = render(values)
    [template] = [t for t in pod_templates(manifests) if t.component == "checkpoints"]
    assert "envFrom" not in template.containers[0]
    [account] = [
        account
        for account in of_kind(manifests, "ServiceAccount")
        if account["metadata"]["name"] == template.spec["serviceAccountName"]
    ]
    assert account["metadata"]["annotations"] == {
        "eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/y"
    }


@pytest.mark.parametrize("name", ["trial-values", "full-values"])
def test_the_storage_secret_is_what_pods_of_jobs_understand(name: str) -> None:
    manifests = render(load_values(name))
    controller = _environment(manifests, "controller")
    secret_name = controller["TINSMITH_STORAGE_SECRET_NAME"]
    secrets = [s for s in of_kind(manifests, "Secret") if s["metadata"]["name"] == secret_name]
    namespaces = {secret["metadata"]["namespace"] for secret in secrets}
    assert namespaces == {"tinsmith", *controller["TINSMITH_NAMESPACES"].split(",")}
    location, settings = parse_s3_uri(controller["TINSMITH_STORAGE_URI"], secrets[0]["stringData"])
    assert location.bucket in ("tinsmith", "checkpoints")
    assert settings.endpoint.startswith(("http://tinsmith-s3", "https://s3.example.com"))


@pytest.mark.parametrize("name", VALUE_SETS)
def test_what_jobs_need_is_in_each_of_their_namespaces(name: str) -> None:
    manifests = render(load_values(name))
    controller = _environment(manifests, "controller")
    known = {identity(manifest) for manifest in manifests}
    for namespace in controller["TINSMITH_NAMESPACES"].split(","):
        account = controller["TINSMITH_SERVICE_ACCOUNT_NAME"]
        assert ("ServiceAccount", namespace, account) in known
        secret = ("Secret", namespace, controller["TINSMITH_DATABASE_SECRET_NAME"])
        assert (secret in known) is (load_values(name).get("secrets") is None)
