"""The rules of our resources where the server evaluates them: refused at once, with a sentence.

Optional, as the server is. The controller checks the same for servers that do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.cluster import ApiError, CrdServer, Json, TestCluster, path
from tests.fakes.job_specs import REFUSED, TRAINING

_CRD = Path(__file__).parents[2] / "k8s" / "crd" / "trainingjobs.tinsmith.dev.yaml"
# A group and names of their own: the other tests have theirs at the server without rules, and
# `kubectl` looks a short name like `trainingjob` up over all groups.
GROUP = "rules.tinsmith.dev"
_NAMES = {
    "kind": "RuledJob",
    "listKind": "RuledJobList",
    "plural": "ruledjobs",
    "singular": "ruledjob",
}


@pytest.fixture(scope="module")
def jobs(cluster: TestCluster, crd_server: CrdServer) -> Iterator[str]:
    """The path of jobs in a namespace."""
    definition = yaml.safe_load(_CRD.read_text())
    definition["metadata"]["name"] = f"{_NAMES['plural']}.{GROUP}"
    definition["spec"] |= {"group": GROUP, "names": _NAMES}
    crd_server.install(definition)
    with cluster.namespace() as namespace:
        yield path(f"{GROUP}/v1alpha1", _NAMES["plural"], namespace)


def _job(name: str, spec: Json) -> Json:
    return {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": _NAMES["kind"],
        "metadata": {"name": name},
        "spec": spec,
    }


@pytest.mark.parametrize(("name", "spec", "message"), REFUSED)
def test_a_job_that_can_not_be_run_is_refused(
    cluster: TestCluster, jobs: str, name: str, spec: Json, message: str
) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        cluster.api.create(jobs, _job(name, spec))
    assert refused.value.status == 422


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": {"type": "rl_episodes"}}, "spec.method.type is immutable"),
        ({"model": {"name": "other", "source": "hf://org/o"}}, "only while the job is suspended"),
        ({"cancel": False}, "cannot be taken back"),
    ],
)
def test_what_is_fixed_can_not_be_changed(
    cluster: TestCluster, jobs: str, change: dict[str, Any], message: str
) -> None:
    name = f"fixed-{next(iter(change))}"
    cluster.api.create(jobs, _job(name, {**TRAINING, "cancel": "cancel" in change}))

    with pytest.raises(ApiError, match=message):
        cluster.api.patch(f"{jobs}/{name}", {"spec": change})


def test_a_suspended_job_may_change_its_model(cluster: TestCluster, jobs: str) -> None:
    cluster.api.create(jobs, _job("asleep", {**TRAINING, "suspend": True}))
    model = {"name": "other", "source": "hf://org/other"}

    changed = cluster.api.patch(f"{jobs}/asleep", {"spec": {"model": model}})

    assert changed["spec"]["model"] == {**model, "dtype": "auto"}
