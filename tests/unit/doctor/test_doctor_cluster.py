"""Faults of a cluster that are planted, and the finding that names each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tinsmith.doctor.cluster import KubectlError, check_cluster
from tinsmith.doctor.findings import Level

READY = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}


def job(phase: str, message: str = "") -> dict[str, Any]:
    conditions = [{"type": "Assigned", "message": message}] if message else []
    return {
        "metadata": {"namespace": "lab", "name": "first"},
        "status": {"phase": phase, "conditions": conditions},
    }


def findings(
    *,
    definitions: Sequence[str] = ("trainingjobs", "trainerpools"),
    pods: Sequence[Any] = (READY,),
    jobs: Sequence[Any] = (),
    refused: str = "",
) -> list[str]:
    """Return what does not work in such a cluster, each with its remedy on the same line."""

    def kubectl(words: Sequence[str]) -> dict[str, Any]:
        kind, name = words[1], words[-1]
        if kind == refused:
            raise KubectlError("forbidden")
        if kind == "customresourcedefinitions" and name.partition(".")[0] not in definitions:
            return json.loads("")  # type: ignore[no-any-return] # as kubectl, which prints nothing
        return {
            "items": {"pods": list(pods), "trainingjobs": list(jobs)}.get(kind, []),
            "kind": kind,
        }

    return [
        f"{finding.check}: {finding.text}; {finding.remedy}"
        for finding in check_cluster(kubectl)
        if finding.level is not Level.GOOD
    ]


def test_a_cluster_that_works_has_no_findings() -> None:
    assert findings(jobs=[job("Running"), job("Succeeded")]) == []


@pytest.mark.parametrize(
    ("cluster", "named"),
    [
        pytest.param({"refused": "--raw"}, "no cluster answers: forbidden", id="away"),
        pytest.param({"definitions": ["trainingjobs"]}, "trainerpools.tinsmith.dev", id="crd"),
        pytest.param({"pods": []}, "none of 0 controllers is ready", id="no-controller"),
        pytest.param({"pods": [{}]}, "kubectl describe pods", id="controller-not-ready"),
        pytest.param({"refused": "trainingjobs"}, "ask for the rights", id="rights"),
        pytest.param(
            {"jobs": [job("Queued", "needs 8 GPUs; 4 are free")]},
            "Queued: needs 8 GPUs; 4 are free; kubectl describe trainingjob -n lab first",
            id="queued",
        ),
        pytest.param({"jobs": [job("Failed")]}, "Failed: no reason is given", id="failed"),
    ],
)
def test_a_fault_of_a_cluster_is_named(cluster: dict[str, Any], named: str) -> None:
    [found] = findings(**cluster)
    assert named in found
