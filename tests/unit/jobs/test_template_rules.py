"""What a role's template may not say: a pod of it would be refused when its nodes are held."""

from __future__ import annotations

from typing import Any

import pytest

from tinsmith_jobs.spec_codec import decode_job
from tinsmith_jobs.spec_reader import SpecError

VOLUME: dict[str, Any] = {"name": "a", "emptyDir": {}}
KEY = {"name": "s", "key": "k"}
MOUNT: dict[str, Any] = {"name": "a", "mountPath": "/mnt/a"}


def decode(template: object, role: str = "driver") -> None:
    roles: dict[str, Any] = {"trainer": {"gpus": 1}, role: {"gpus": 1, "template": template}}
    spec = {
        "model": {"name": "m", "source": "hf://org/m"},
        "method": {"type": "supervised"},
        "roles": roles,
    }
    decode_job("job", spec)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ({"volumes": [VOLUME, VOLUME]}, r"volumes\[1\].name is a, which another one has"),
        ({"volumes": [{**VOLUME, "name": "A_b"}]}, r"volumes\[0\].name may have 59 small letters"),
        ({"volumes": [{"name": "a"}]}, "must have one of emptyDir, configMap, secret"),
        (
            {"volumes": [{**VOLUME, "secret": {"secretName": "s"}}]},
            "must have one of emptyDir, configMap, secret",
        ),
        ({"volumes": [{"name": "a", "nfs": {}}]}, r"nfs is not a field \(volumes are"),
        (
            {"volumes": [{"name": "a", "emptyDir": {"sizeLimit": "0"}}]},
            "sizeLimit must be an amount",
        ),
        ({"volumes": [{"name": "a", "emptyDir": {"sizeLimit": "8GB"}}]}, "such as 8Gi"),
        ({"volumes": [{"name": "a", "emptyDir": {"medium": "Disk"}}]}, "medium must be one of"),
        ({"volumes": [{"name": "a", "configMap": {}}]}, r"configMap.name is required"),
        ({"volumes": [{"name": "a", "secret": {"name": "s"}}]}, r"secret.secretName is required"),
        (
            {"volumes": [{"name": "a", "secret": {"secretName": "s", "defaultMode": 0o1000}}]},
            "defaultMode must be a whole number from 0 to 511",
        ),
        (
            {
                "volumes": [
                    {
                        "name": "a",
                        "configMap": {"name": "c", "items": [{"key": "k", "path": "../x"}]},
                    }
                ]
            },
            r"items\[0\].path must be a path without",
        ),
        ({"volumeMounts": [MOUNT]}, "there is no volume 'a' in volumes"),
        (
            {"volumes": [VOLUME], "volumeMounts": [MOUNT, MOUNT]},
            r"volumeMounts\[1\].mountPath is /mnt/a, which another mount has",
        ),
        (
            {"volumes": [VOLUME], "volumeMounts": [{**MOUNT, "mountPath": "mnt"}]},
            "mountPath must be a path from /",
        ),
        (
            {"volumes": [VOLUME], "volumeMounts": [{**MOUNT, "mountPath": "/mnt/../data"}]},
            "mountPath must be a path from /",
        ),
        (
            {"volumes": [VOLUME], "volumeMounts": [{**MOUNT, "mountPath": "/"}]},
            "mountPath must be a path from /",
        ),
        (
            {"volumes": [VOLUME], "volumeMounts": [{**MOUNT, "mountPath": "/job-data/x"}]},
            "mountPath is within /job-data, which is Tinsmith's own",
        ),
        (
            {"volumes": [VOLUME], "volumeMounts": [{**MOUNT, "subPath": "/x"}]},
            "subPath must be a path",
        ),
        ({"initContainers": [{"name": "a"}]}, "image is required"),
        (
            {"initContainers": [{"name": "driver", "image": "i"}]},
            "name is driver, which another one has",
        ),
        ({"initContainers": [{"name": "a", "image": "i", "ports": []}]}, "ports is not a field"),
        (
            {"initContainers": [{"name": "a", "image": "i", "volumeMounts": [MOUNT]}]},
            "there is no volume 'a' in volumes",
        ),
        ({"envFrom": [{}]}, r"envFrom\[0\] must have one of secretRef and configMapRef"),
        (
            {"envFrom": [{"prefix": "1", "secretRef": {"name": "s"}}]},
            "prefix may have letters, digits and _ alone",
        ),
        ({"imagePullSecrets": ["registry"]}, r"imagePullSecrets\[0\] must be an object"),
        ({"imagePullSecrets": [{"name": "A b"}]}, "'A b', which no object may be called"),
        ({"serviceAccountName": "a..b"}, "'a..b', which no object may be called"),
        ({"image": " img"}, "an image has no spaces in its name"),
        ({"initContainers": [{"name": "a", "image": "i\n"}]}, "an image has no spaces"),
        ({"volumes": [{"name": "a", "emptyDir": {"sizeLimit": " 8Gi"}}]}, "sizeLimit must be an"),
        ({"volumes": [{"name": "a", "secret": {"secretName": "My_S"}}]}, "'My_S', which no object"),
        ({"envFrom": [{"secretRef": {"name": "My_S"}}]}, "'My_S', which no object may be called"),
        (
            {"env": [{"name": "A", "value": "x", "valueFrom": {"secretKeyRef": KEY}}]},
            r"env\[0\] must have a value, or one source in valueFrom",
        ),
        (
            {"env": [{"name": "A", "valueFrom": {"secretKeyRef": KEY, "configMapKeyRef": KEY}}]},
            "must have a value, or one source in valueFrom",
        ),
        ({"env": [{"name": "A", "valueFrom": {}}]}, "must have a value, or one source"),
        (
            {"volumes": [VOLUME], "volumeMounts": [{**MOUNT, "mountPath": "/proc/x"}]},
            "mountPath is /proc/x, where the system's own files are",
        ),
        (
            {"volumes": [VOLUME], "volumeMounts": [{**MOUNT, "subPath": "..data"}]},
            "subPath must be a path",
        ),
        ({"serviceAccountName": "A"}, "'A', which no object may be called"),
        (
            {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec"}}}]},
            "fieldPath must be one of metadata.name",
        ),
    ],
)
def test_a_template_that_makes_no_pod_is_refused(template: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        decode(template)


def test_shared_memory_of_a_trainer_is_tinsmiths_own() -> None:
    template = {"volumes": [VOLUME], "volumeMounts": [{**MOUNT, "mountPath": "/dev/shm/"}]}
    decode(template)
    with pytest.raises(SpecError, match="within /dev/shm, which is Tinsmith's own"):
        decode(template, "trainer")
