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


def _match(second: dict[str, Any]) -> dict[str, Any]:
    """Return a match of an agent with pods of its own, and another one."""
    first = {"name": "black", "trainer": {}, "sampler": {}}
    agents = [first, {"name": "white", **second}]
    return {"method": {"type": "match"}, "model": MODEL, "roles": {"agents": agents}}


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
        "scored", {**TRAINING, "method": {"type": "evaluate"}},
        "evaluate has no trainer and no agents", id="trainer-of-an-evaluation",
    ),
    pytest.param(
        "bucket", {**TRAINING, "checkpoint": {"uri": "s3://bucket/path"}},
        "spec.checkpoint.uri needs spec.checkpoint.secretRef", id="no-secret",
    ),
    pytest.param(
        "unreached",
        {"method": {"type": "rl"}, "poolRef": {"name": "p"}, "roles": {"environment": {}}},
        "no environment or coordinator", id="environment-of-a-pool",
    ),
    pytest.param(
        "alone",
        {"method": {"type": "match"}, "model": MODEL, "roles": {"agents": [{"name": "a"}]}},
        "needs two (spec.)?roles.agents", id="one-agent",
    ),
    pytest.param(
        "half", _match({"trainer": {}}), "or neither", id="agent-without-sampler",
    ),
    pytest.param(
        "unshared", _match({}), "needs (spec.)?roles.trainer", id="nothing-to-share",
    ),
    pytest.param(
        "foreign",
        {
            **TRAINING,
            "roles": {**TRAINING["roles"], "agents": [{"name": "a", "model": MODEL}]},
        },
        "model needs a trainer and sampler", id="model-without-trainer",
    ),
    pytest.param(
        "idle",
        {**TRAINING, "roles": {"trainer": {"gpus": 1}, "sampler": {"gpus": 2}}},
        "the embedded engine samples on one device", id="devices-of-a-sampler",
    ),
    pytest.param(
        "source",
        {**TRAINING, "model": {"name": "tiny", "source": "http://example.com"}},
        "spec.model.source",
        id="source",
    ),
    pytest.param("a.b", TRAINING, "metadata.name", id="name-with-dots"),
    pytest.param(
        "counted-twice",
        {
            **TRAINING,
            "roles": {
                "trainer": {"resources": {"limits": {"nvidia.com/gpu": 1}}},
                "sampler": {"gpus": 1},
            },
        },
        "the field gpus", id="gpus-among-limits",
    ),
]  # fmt: skip
"""Name, spec and a pattern of the sentence; `TRAINING` alone is accepted."""
