"""Descriptions of jobs that are refused, by the schema of the resource and by the codec alike."""

from __future__ import annotations

from typing import Any

import pytest

MODEL = {"name": "tiny", "source": "hf://org/tiny"}
TRAINING: dict[str, Any] = {
    "method": {"type": "rl"},
    "model": MODEL,
    "roles": {"trainer": {"gpus": 1}, "sampler": {"gpus": 1}},
}
REFUSED = [
    pytest.param("x" * 41, TRAINING, "at most 40 ", id="long-name"),
    pytest.param(
        "none",
        {"method": {"type": "supervised"}, "roles": {"trainer": {}}},
        "one of spec.model and spec.poolRef is needed",
        id="no-model",
    ),
    pytest.param(
        "both", {**TRAINING, "poolRef": {"name": "p"}}, "has no trainer or sampler", id="pool"
    ),
    pytest.param(
        "custom",
        {
            "method": {"type": "custom"},
            "model": MODEL,
            "roles": {"trainer": {}, "driver": {"replicas": 1}},
        },
        r"custom needs (spec\.)?roles\.driver\.template",
        id="custom",
    ),
    pytest.param(
        "blind", {**TRAINING, "roles": {"trainer": {"gpus": 1}}}, "samples, so it needs",
        id="no-sampler",
    ),
    pytest.param(
        "bucket", {**TRAINING, "checkpoint": {"uri": "s3://bucket/path"}},
        "spec.checkpoint.uri needs spec.checkpoint.secretRef", id="no-secret",
    ),
    pytest.param(
        "source",
        {**TRAINING, "model": {"name": "tiny", "source": "http://example.com"}},
        "spec.model.source",
        id="source",
    ),
]  # fmt: skip
"""Name, spec and a pattern of the sentence; `TRAINING` alone is accepted."""
