"""The settings that a controller has to be given."""

from typing import Any

REQUIRED: dict[str, Any] = {
    "namespaces": "team-a",
    "scheduler_address": "scheduler:7070",
    "gateway_address": "gateway:7077",
    "pod_key": "k",
    "storage_uri": "s3://bucket",
    "image_repository": "tinsmith",
    "image_tag": "1",
    "lease_namespace": "tinsmith",
}
