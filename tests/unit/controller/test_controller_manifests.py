"""The pods that the controller makes: what they may do, what they know, how ranks meet."""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import Any

import pytest

from tinsmith.driver.agents import agent_key_variable
from tinsmith.names import serving_pool
from tinsmith_controller.pods.deployment import Deployment
from tinsmith_controller.pods.pod_manifests import (
    make_keys_secret,
    make_pod,
    make_services,
)
from tinsmith_controller.pods.workload_context import WorkloadContext
from tinsmith_jobs.naming import COMPONENT_LABEL, NamespacedName, pod_name, worker_id
from tinsmith_jobs.recipe_check import OWN_VARIABLES
from tinsmith_jobs.spec_codec import decode_job, decode_pool
from tinsmith_jobs.status import Assignment
from tinsmith_runtime.rpc.pod_identity import PodKey

DEPLOYMENT = Deployment(
    scheduler_address="scheduler:7070",
    gateway_address="gateway:7077",
    pod_root="root",
    database_secret="tinsmith-keys",
    storage_uri="s3://bucket/store",
    storage_secret="s3",
    image_repository="registry/tinsmith",
    image_tag="1.2.3",
)
MODEL = {"name": "qwen", "source": "hf://org/qwen"}
AGENT = {
    "name": "red",
    "trainer": {"gpus": 1},
    "sampler": {"gpus": 1},
    "worker": {"template": {"image": "players:1"}},
}


def owner_of(spec: dict[str, Any]) -> WorkloadContext:
    """Return a job with a node for each of its pods."""
    job = decode_job("math", {"model": MODEL, **spec})
    assignments = tuple(
        Assignment(
            pod_name("math", role.name, index, 1),
            role.name,
            index,
            "n1" if role.is_placed else "",
            role.gpus,
            1,
        )
        for role in job.roles
        for index in range(role.replicas)
    )
    key = NamespacedName("TrainingJob", "team-a", "math")
    return WorkloadContext(key, "uid-1", "project-a", job, assignments, "qwen")


def pods_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    owner = owner_of(spec)
    return [make_pod(owner, entry, DEPLOYMENT) for entry in owner.assignments]


def container(pod: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = pod["spec"]["containers"][0]
    return found


def env_of(pod: dict[str, Any]) -> dict[str, Any]:
    return {
        entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container(pod)["env"]
    }


EVERYTHING: dict[str, Any] = {
    "method": {"type": "rl"},
    "roles": {
        "trainer": {"gpus": 8},
        "sampler": {"gpus": 1, "replicas": 2},
        "environment": {"template": {"image": "own-environment:1"}},
        "coordinator": {},
        "driver": {"template": {"env": [{"name": "TINSMITH_API_KEY", "value": "stolen"}]}},
        "agents": [AGENT],
    },
}


def test_every_pod_meets_the_restricted_standard() -> None:
    for pod in pods_of(EVERYTHING):
        spec, only = pod["spec"], container(pod)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= set(only["resources"]["limits"])
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert all("hostPath" not in volume for volume in spec["volumes"])


def test_secrets_of_the_deployment_stay_in_pods_of_tinsmith() -> None:
    for pod in pods_of(EVERYTHING):
        is_client = pod["metadata"]["labels"]["tinsmith.dev/role"] in ("driver", "red-worker")
        references = [
            value["secretKeyRef"]
            for value in env_of(pod).values()
            if isinstance(value, dict) and "secretKeyRef" in value
        ]
        entries = {each["key"] for each in references if each["name"] == "math-pod-keys"}
        assert entries, "a pod has a key"
        if is_client:
            assert all(entry.startswith(("driver-e1.", "workers.")) for entry in entries)
        else:
            assert len(entries) == 1
            assert all(entry.endswith("-key") and "." not in entry for entry in entries)


def test_a_pod_is_given_the_key_of_its_role_namespace_and_pool() -> None:
    owner = owner_of(EVERYTHING)
    keys = {
        name: base64.b64decode(text).decode()
        for name, text in make_keys_secret(owner, DEPLOYMENT, {})["data"].items()
    }
    assert set(keys) == {"trainer-key", "sampler-key", "environment-key", "coordinator-key"} | {
        "red-trainer-key",
        "red-sampler-key",
    }
    for pod in pods_of(EVERYTHING):
        env = {entry["name"]: entry for entry in pod["spec"]["containers"][0]["env"]}
        if "TINSMITH_POD_KEY" not in env:
            continue
        reference = env["TINSMITH_POD_KEY"]["valueFrom"]["secretKeyRef"]
        assert reference["name"] == "math-pod-keys"
        key = PodKey.parse(keys[reference["key"]])
        assert key == PodKey.derive("root", key.identity)
        kind = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        pool = env["TINSMITH_POOL"]["value"]
        assert (key.identity.role, key.identity.pool) == (kind, pool)
        assert key.identity.namespace == pod["metadata"]["namespace"]


def test_network_policies_know_a_pod_by_its_role_and_not_by_what_its_author_says() -> None:
    labels = {"app.kubernetes.io/component": "trainer", "team": "research"}
    roles = EVERYTHING["roles"] | {"driver": {"template": {"labels": labels}}}
    components = {
        pod["metadata"]["labels"]["tinsmith.dev/role"]: pod["metadata"]["labels"][
            "app.kubernetes.io/component"
        ]
        for pod in pods_of(EVERYTHING | {"roles": roles})
    }
    assert components["driver"] == "driver"
    assert components["red-worker"] == "worker"
    assert components["red-trainer"] == components["trainer"] == "trainer"


def test_variables_of_the_controller_win_over_the_templates() -> None:
    driver = next(pod for pod in pods_of(EVERYTHING) if "-driver-" in pod["metadata"]["name"])
    names = [entry["name"] for entry in container(driver)["env"]]

    assert names.count("TINSMITH_API_KEY") == 1
    assert env_of(driver)["TINSMITH_API_KEY"] == {
        "secretKeyRef": {"name": "math-pod-keys", "key": "driver-e1.api-key"}
    }


def test_an_author_is_told_of_each_variable_that_would_be_lost() -> None:
    for pod in pods_of({**EVERYTHING, "roles": EVERYTHING["roles"] | {"driver": {}}}):
        if pod["metadata"]["labels"][COMPONENT_LABEL] in ("driver", "worker"):
            set_here = set(env_of(pod)) - {agent_key_variable("red")}
            assert set_here <= OWN_VARIABLES, "recipe_check.py refuses these by name"


def test_pods_of_a_role_tolerate_and_select_what_their_template_says() -> None:
    spot = {"key": "spot", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}
    rented = {"key": "rented", "operator": "Equal", "value": "yes"}
    driver = {"nodeSelector": {"pool": "cpu", "zone": "b"}, "tolerations": [rented]}
    spec = {
        **EVERYTHING,
        "scheduling": {"nodeSelector": {"zone": "a"}, "tolerations": [spot]},
        "roles": EVERYTHING["roles"] | {"driver": {"template": driver}},
    }
    pods = {pod["metadata"]["labels"]["tinsmith.dev/role"]: pod["spec"] for pod in pods_of(spec)}

    assert pods["driver"]["tolerations"] == [spot, rented]
    assert pods["driver"]["nodeSelector"] == {"pool": "cpu", "zone": "b"}
    assert pods["environment"]["tolerations"] == pods["trainer"]["tolerations"] == [spot]
    assert pods["environment"]["nodeSelector"] == {"zone": "a"}


def test_pods_are_pinned_by_affinity_and_ask_for_their_gpus() -> None:
    trainer = pods_of(EVERYTHING)[0]
    terms = trainer["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]

    assert terms == [
        {
            "matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}],
        }
    ]
    assert "nodeName" not in trainer["spec"]
    assert container(trainer)["resources"]["limits"]["nvidia.com/gpu"] == "8"


def test_workers_of_a_job_join_its_pool_under_names_without_an_epoch() -> None:
    trainer = env_of(pods_of(EVERYTHING)[0])

    assert trainer["TINSMITH_WORKER_NAME"] == worker_id("math", "uid-1", "trainer", 0)
    assert trainer["TINSMITH_POOL"].startswith("math.")
    assert trainer["TINSMITH_BASE_MODELS"] == "qwen=org/qwen"
    assert trainer["TINSMITH_SHARD_BASE"] == "true"


def test_the_ranks_of_a_full_trainer_meet_at_their_first_pod() -> None:
    spec = {
        "method": {"type": "supervised"},
        "adapter": {"type": "full"},
        "roles": {"trainer": {"replicas": 2, "gpus": 8}},
    }
    second = pods_of(spec)[1]

    command = " ".join(container(second)["command"])
    assert "--nnodes 2 --node-rank 1" in command
    assert "--master-addr math-trainer-0-e1.job-math-trainer.team-a.svc" in command
    assert second["spec"]["subdomain"] == make_services(owner_of(spec))[0]["metadata"]["name"]
    assert "readinessProbe" not in container(second), "only the first rank serves"


def test_samplers_that_serve_belong_to_the_project_and_the_checkpoint() -> None:
    spec = {
        "method": {"type": "serve"},
        "serve": {"checkpoint": "projects/p/trainingRuns/r/checkpoints/c"},
        "roles": {"sampler": {}},
    }
    only = pods_of(spec)
    env = env_of(only[0])

    assert len(only) == 1, "nothing trains, so there is no driver"
    assert env["TINSMITH_DEDICATED_PROJECT"] == "project-a"
    assert env["TINSMITH_DEDICATED_CHECKPOINT"] == "projects/p/trainingRuns/r/checkpoints/c"
    # Its key is of that pool too: with one of the shared pool it could serve all projects.
    assert env["TINSMITH_POOL"] == serving_pool("project-a")
    secret = make_keys_secret(owner_of(spec), DEPLOYMENT, {})["data"]
    entry = env["TINSMITH_POD_KEY"]["secretKeyRef"]["key"]
    key = PodKey.parse(base64.b64decode(secret[entry]).decode())
    assert (key.identity.role, key.identity.pool) == ("sampler", serving_pool("project-a"))


def test_replicas_of_a_pool_are_shared_by_all() -> None:
    pool = decode_pool("shared", {"model": MODEL, "trainer": {"gpus": 1}})
    owner = WorkloadContext(
        NamespacedName("TrainerPool", "team-a", "shared"), "uid-2", "", pool, ()
    )
    pod = make_pod(owner, Assignment("shared-trainer-0-e1", "trainer", 0, "n1", 1, 1), DEPLOYMENT)

    assert env_of(pod)["TINSMITH_POOL"] == ""


def test_the_driver_is_told_what_to_do() -> None:
    spec = {
        "method": {"type": "supervised", "maxSteps": 7, "parameters": {"learning_rate": 0.001}},
        "roles": {"trainer": {}},
        "data": {"configMapRef": {"name": "examples", "key": "train.jsonl"}},
        "checkpoint": {"everySteps": 3},
    }
    driver = pods_of(spec)[-1]
    method = json.loads(env_of(driver)["TINSMITH_JOB_METHOD"])

    assert method["type"] == "supervised"
    assert method["maxSteps"] == 7
    assert method["parameters"] == {"learning_rate": 0.001}
    assert method["model"] == "qwen"
    assert method["checkpoint"]["everySteps"] == 3
    assert method["data"] == "/job-data/train.jsonl"
    assert {"name": "job-data", "mountPath": "/job-data", "readOnly": True} in container(driver)[
        "volumeMounts"
    ]


@pytest.mark.parametrize("workload", ["a", "x" * 40])
@pytest.mark.parametrize("role", ["trainer", "agent/abcdefghijklmnop/sampler"])
def test_names_are_short_enough_wherever_they_are_used(workload: str, role: str) -> None:
    assert len(worker_id(workload, "uid", role, 1023)) <= 63
    assert len(pod_name(workload, role, 1023, 10**6)) <= 253


def test_the_secret_of_a_job_goes_with_it() -> None:
    secret = make_keys_secret(owner_of(EVERYTHING), DEPLOYMENT, {3: {"": "tsk_key"}})

    assert secret["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    assert secret["data"]["driver-e3.api-key"] == "dHNrX2tleQ=="


def test_nothing_that_an_author_writes_is_replaced_by_a_secret() -> None:
    """Kubernetes expands `$(NAME)` in values; `$$` is a dollar."""
    spec = {
        "method": {"type": "supervised", "parameters": {"data": "$(TINSMITH_POD_KEY)"}},
        "model": {"name": "m", "source": "file:///$(TINSMITH_POD_KEY)"},
        "roles": {
            "trainer": {
                "template": {
                    "env": [{"name": "TINSMITH_LOG_LEVEL", "value": "$(TINSMITH_POD_KEY)"}]
                }
            }
        },
        "checkpoint": {"uri": "s3://$(TINSMITH_DATABASE_URL)", "secretRef": {"name": "mine"}},
    }
    for pod in pods_of(spec):
        for entry in container(pod)["env"]:
            value = entry.get("value", "")
            if entry["name"] not in ("TINSMITH_LISTEN_ADDRESS", "TINSMITH_METRICS_ADDRESS"):
                assert "$(" not in value.replace("$$", ""), entry


def test_programs_of_authors_have_no_identity_at_the_object_store() -> None:
    owner = owner_of(EVERYTHING)
    deployment = dataclasses.replace(DEPLOYMENT, service_account="jobs")
    for entry in owner.assignments:
        pod = make_pod(owner, entry, deployment)
        runs_programs = entry.role in ("driver", "environment", "agent/red/worker")
        assert ("serviceAccountName" in pod["spec"]) != runs_programs


def test_a_store_of_ones_own_is_reached_with_ones_own_secret() -> None:
    spec = {
        "method": {"type": "supervised"},
        "roles": {"trainer": {}},
        "checkpoint": {"uri": "s3://mine/store", "secretRef": {"name": "mine"}},
    }
    owner = owner_of(spec)
    deployment = dataclasses.replace(DEPLOYMENT, storage_secret="s3", service_account="jobs")
    trainer = make_pod(owner, owner.assignments[0], deployment)

    # Where the author's Secret has no keys, the deployment's identity does not sign instead.
    assert "envFrom" not in container(trainer)
    assert "serviceAccountName" not in trainer["spec"]
    variables = {entry["name"]: entry.get("value") for entry in container(trainer)["env"]}
    assert variables["TINSMITH_S3_CREDENTIALS"] == "environment"
    reference = {"name": "mine", "key": "AWS_ACCESS_KEY_ID", "optional": True}
    assert env_of(trainer)["AWS_ACCESS_KEY_ID"] == {"secretKeyRef": reference}


def test_no_job_may_ask_for_the_certificate_of_a_pod() -> None:
    deployment = dataclasses.replace(DEPLOYMENT, certificate_secrets="tinsmith-pods")
    assert {"tinsmith-keys", "s3", "tinsmith-pods-trainer"} <= set(deployment.own_secrets())
    assert not [name for name in DEPLOYMENT.own_secrets() if name.startswith("-")]


def test_pods_that_serve_show_the_certificate_of_their_role() -> None:
    owner = owner_of(
        {"method": {"type": "rl"}, "roles": {"trainer": {"gpus": 1}, "sampler": {"gpus": 1}}}
    )
    deployment = dataclasses.replace(DEPLOYMENT, certificate_secrets="tinsmith-pods")
    for assignment in owner.assignments:
        kind = owner.role(assignment.role).kind
        for given in (DEPLOYMENT, deployment):
            spec = make_pod(owner, assignment, given)["spec"]
            [container] = spec["containers"]
            volumes = {volume["name"]: volume for volume in spec["volumes"]}
            env = {entry["name"]: entry.get("value") for entry in container["env"]}
            if given is DEPLOYMENT or kind == "driver":
                assert "certificates" not in volumes
                assert "TINSMITH_POD_CERTIFICATE" not in env
                continue
            assert volumes["certificates"]["secret"]["secretName"] == f"tinsmith-pods-{kind}"
            assert env["TINSMITH_POD_CERTIFICATE_KEY"] == "/certificates/tls.key"
            assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": 9090}


def test_no_pod_fills_the_disk_of_its_node() -> None:
    """A volume in memory counts as memory of the pod, which has a limit."""
    hub = {**EVERYTHING, "model": {"name": "m", "source": "hf://org/m"}}
    sizes = {
        (volume["name"], volume["emptyDir"].get("sizeLimit"))
        for spec in (EVERYTHING, hub)
        for pod in pods_of(spec)
        for volume in pod["spec"]["volumes"]
        if "emptyDir" in volume and volume["emptyDir"].get("medium") != "Memory"
    }
    assert sizes == {("tmp", "64Gi"), ("data", "64Gi"), ("cache", "1Ti")}


PARTS: dict[str, Any] = {
    "image": "loop:1",
    "envFrom": [
        {"prefix": "A_", "configMapRef": {"name": "settings"}},
        {"secretRef": {"name": "s"}},
    ],
    "env": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
    "volumes": [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "corpus", "persistentVolumeClaim": {"claimName": "corpus", "readOnly": True}},
        {
            "name": "script",
            "configMap": {"name": "loop", "items": [{"key": "a.py", "path": "a.py"}]},
        },
        {"name": "netrc", "secret": {"secretName": "netrc", "defaultMode": 256}},
    ],
    "volumeMounts": [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "tmp", "mountPath": "/scratch"},
        {"name": "corpus", "mountPath": "/mnt/corpus", "subPath": "en", "readOnly": True},
        {"name": "script", "mountPath": "/app"},
    ],
    "initContainers": [
        {
            "name": "fetch",
            "image": "fetch:1",
            "args": ["--into", "/scratch"],
            "volumeMounts": [{"name": "tmp", "mountPath": "/scratch"}],
        }
    ],
    "imagePullSecrets": [{"name": "registry"}],
    "serviceAccountName": "reader",
}


def test_a_driver_has_the_volumes_and_init_containers_of_its_template() -> None:
    roles = {"trainer": {"gpus": 1}, "driver": {"template": PARTS}}
    [_, pod] = pods_of({"method": {"type": "custom"}, "roles": roles})
    spec, only = pod["spec"], container(pod)

    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["own-shm"] == {
        "name": "own-shm",
        "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"},
    }
    assert volumes["own-tmp"]["emptyDir"] == {"sizeLimit": DEPLOYMENT.volume_size}
    assert volumes["own-corpus"]["persistentVolumeClaim"] == {
        "claimName": "corpus",
        "readOnly": True,
    }
    assert volumes["own-script"]["configMap"]["items"] == [{"key": "a.py", "path": "a.py"}]
    assert volumes["own-netrc"]["secret"] == {"secretName": "netrc", "defaultMode": 256}
    mounts = {mount["mountPath"]: mount for mount in only["volumeMounts"]}
    assert mounts["/mnt/corpus"] == {
        "name": "own-corpus",
        "mountPath": "/mnt/corpus",
        "subPath": "en",
        "readOnly": True,
    }
    assert mounts["/tmp"]["name"] == "tmp", "Tinsmith's own has its name"
    assert only["envFrom"] == PARTS["envFrom"]
    assert env_of(pod)["NODE"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert {"name": "registry"} in spec["imagePullSecrets"]
    assert spec["serviceAccountName"] == "reader"
    assert spec["automountServiceAccountToken"] is False


def test_what_runs_before_a_role_has_no_key_and_asks_for_no_more() -> None:
    roles = {"trainer": {"gpus": 1}, "driver": {"gpus": 1, "template": PARTS}}
    [_, pod] = pods_of({"method": {"type": "custom"}, "roles": roles})
    [first] = pod["spec"]["initContainers"]

    assert first["securityContext"] == container(pod)["securityContext"]
    assert {entry["name"] for entry in first["env"]} == {"HOME"}
    assert {mount["mountPath"] for mount in first["volumeMounts"]} == {"/tmp", "/scratch"}
    own = container(pod)["resources"]["requests"]
    assert own["nvidia.com/gpu"] == "1"
    assert first["resources"]["requests"] == {
        name: amount for name, amount in own.items() if name != "nvidia.com/gpu"
    }
