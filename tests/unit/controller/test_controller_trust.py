"""Which jobs may have pods that know the deployment's secrets."""

from __future__ import annotations

from typing import Any

import pytest

from tinsmith_controller.pods.image_policy import check_images
from tinsmith_jobs.spec_codec import decode_job

TRUSTED = ("registry/tinsmith/", "registry/environments/")
SECRETS = ("tinsmith-keys", "storage")


def reason(**roles: Any) -> str:
    spec = {
        "method": {"type": "custom"},
        "model": {"name": "m", "source": "hf://org/m"},
        "roles": {"trainer": {}, "driver": {"template": {"image": "mine:1"}}, **roles},
    }
    return check_images(decode_job("job", spec), TRUSTED, SECRETS)


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ({"image": "elsewhere/environment:1"}, "elsewhere/environment:1"),
        ({"image": "registry/tinsmith-evil:1"}, "registry/tinsmith-evil:1"),
        ({"command": ["sh", "-c", "env"]}, "command"),
        ({"args": ["--config", "/tmp/x"]}, "command"),
        ({"env": [{"name": "LD_PRELOAD", "value": "/tmp/x"}]}, "LD_PRELOAD"),
        ({"envFrom": [{"configMapRef": {"name": "preload"}}]}, "envFrom"),
        ({"initContainers": [{"name": "first", "image": "mine:1"}]}, "initContainers"),
        ({"serviceAccountName": "storage"}, "serviceAccountName"),
        (
            {
                "volumes": [{"name": "code", "configMap": {"name": "code"}}],
                "volumeMounts": [{"name": "code", "mountPath": "/app/lib"}],
            },
            "below /mnt/",
        ),
        (
            {
                "volumes": [{"name": "code", "configMap": {"name": "code"}}],
                "volumeMounts": [{"name": "code", "mountPath": "/mnt/code"}],
                "env": [{"name": "TINSMITH_PYTHON_PATH", "value": "/opt/../mnt/code"}],
            },
            "TINSMITH_PYTHON_PATH beside files of the job",
        ),
    ],
)
def test_pods_with_secrets_obey_operators_alone(template: dict[str, Any], word: str) -> None:
    assert word in reason(environment={"template": template})


@pytest.mark.parametrize(
    "template",
    [
        {"image": "registry/environments/chess:3"},
        {"env": [{"name": "TINSMITH_NUM_WORKERS", "value": "4"}]},
        {
            "volumes": [{"name": "boards", "persistentVolumeClaim": {"claimName": "boards"}}],
            "volumeMounts": [{"name": "boards", "mountPath": "/mnt/boards"}],
        },
        {},
    ],
)
def test_trusted_images_and_settings_will_do(template: dict[str, Any]) -> None:
    assert reason(environment={"template": template}) == ""


def test_drivers_and_players_may_be_anything() -> None:
    worker = {"template": {"image": "players:1", "command": ["play"]}}

    assert reason(agents=[{"name": "red", "worker": worker}]) == ""


REFERENCE = {"secretKeyRef": {"name": "tinsmith-keys", "key": "pod-key"}}
WHOLE = {"secretRef": {"name": "tinsmith-keys"}}


@pytest.mark.parametrize(
    "template",
    [
        {"env": [{"name": "KEY", "valueFrom": REFERENCE}]},
        {"envFrom": [WHOLE]},
        {"volumes": [{"name": "keys", "secret": {"secretName": "tinsmith-keys"}}]},
        {"initContainers": [{"name": "first", "image": "mine:1", "envFrom": [WHOLE]}]},
        {
            "initContainers": [
                {
                    "name": "first",
                    "image": "mine:1",
                    "env": [{"name": "KEY", "valueFrom": REFERENCE}],
                }
            ]
        },
        {"imagePullSecrets": [{"name": "tinsmith-keys"}]},
    ],
)
def test_no_pod_may_ask_for_the_secrets_by_name(template: dict[str, Any]) -> None:
    assert "Secret tinsmith-keys" in reason(driver={"template": {"image": "mine:1", **template}})


@pytest.mark.parametrize(
    "name", ["other-pod-keys", "job-pod-keys", "other-driver-key-e3", "other-agents-key"]
)
def test_no_pod_may_ask_for_the_keys_of_a_workload(name: str) -> None:
    reference = {"secretKeyRef": {"name": name, "key": "trainer-key"}}
    env = [{"name": "KEY", "valueFrom": reference}]

    assert name in reason(driver={"template": {"image": "mine:1", "env": env}})


def test_operators_may_trust_everybody() -> None:
    spec = {
        "method": {"type": "supervised"},
        "model": {"name": "m", "source": "hf://org/m"},
        "roles": {"trainer": {"template": {"command": ["anything"]}}},
    }

    assert check_images(decode_job("job", spec), ("*",), SECRETS) == ""
