"""Which nodes an admission leaves to the roles of a job, and why it may not be followed."""

from __future__ import annotations

from typing import Any

import pytest

from tinsmith_controller.kueue.flavors import admitted_nodes, with_admitted_nodes
from tinsmith_controller.kueue.workload_record import flavor_record, kueue_workload
from tinsmith_jobs.spec import JobSpec, Method, Role, Rules, Scheduling, Template, Toleration

FLAVORS = {
    record.name: record
    for record in (
        flavor_record({"metadata": {"name": "a100"}, "spec": {"nodeLabels": {"gpu": "a100"}}}),
        flavor_record(
            {
                "metadata": {"name": "spot"},
                "spec": {
                    "nodeLabels": {"gpu": "any", "spot": "true"},
                    "tolerations": [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}],
                },
            }
        ),
        flavor_record({"metadata": {"name": "plain"}, "spec": {}}),
    )
}
SPOT = Toleration("spot", "Exists", "", "NoSchedule")


def spec_of(selector: dict[str, str] | None = None) -> JobSpec:
    template = Template(node_selector=selector or {})
    roles = (Role("trainer", "trainer", 1, 1, template=template), Role("driver", "driver", 1))
    return JobSpec(method=Method.RL, roles=roles, scheduling=Scheduling(rules=Rules({"zone": "b"})))


def admission(trainer: dict[str, Any], checks: tuple[Any, ...] = ()) -> Any:
    driver = {"name": "driver", "flavors": {"cpu": "plain"}}
    given = {"podSetAssignments": [{"name": "trainer", **trainer}, driver]}
    status = {"admission": given, "admissionChecks": list(checks)}
    return kueue_workload({"metadata": {"name": "w"}, "spec": {}, "status": status})


def test_rules_of_several_flavors_and_of_checks_come_together() -> None:
    update = {"name": "trainer", "nodeSelector": {"pool": "new"}}
    check = {"name": "capacity", "state": "Ready", "podSetUpdates": [update]}
    flavors = {"cpu": "a100", "memory": "a100", "nvidia.com/gpu": "spot"}
    spec = spec_of()
    found = admitted_nodes(admission({"flavors": flavors}, (check,)), spec, FLAVORS)
    assert found.problem == ""
    assert list(found.rules) == ["trainer"]

    trainer, driver = with_admitted_nodes(spec, found.rules).roles
    rules = spec.scheduling.rules_for(trainer)
    # As Kueue has it, the flavor that is named first counts where two name one label.
    assert rules.node_selector == {"zone": "b", "gpu": "a100", "spot": "true", "pool": "new"}
    assert rules.tolerations == (SPOT,)
    assert driver == spec.roles[1]


@pytest.mark.parametrize(
    ("trainer", "selector", "words"),
    [
        pytest.param({"flavors": {"cpu": "h200"}}, {}, "ResourceFlavor h200", id="no-flavor"),
        pytest.param(
            {"flavors": {"cpu": "a100"}, "topologyAssignment": {"levels": ["rack"]}},
            {},
            "chose a topology for the trainer",
            id="topology",
        ),
        pytest.param(
            {"flavors": {"cpu": "a100"}},
            {"gpu": "h200"},
            "gpu=a100, and the job asks for gpu=h200",
            id="conflict",
        ),
        pytest.param(
            {"name": "other", "flavors": {}},
            {},
            "its admission says nothing of trainer",
            id="other",
        ),
    ],
)
def test_what_cannot_be_followed_is_said(
    trainer: dict[str, Any], selector: dict[str, str], words: str
) -> None:
    found = admitted_nodes(admission(trainer), spec_of(selector), FLAVORS)
    assert words in found.problem
    assert not found.rules
