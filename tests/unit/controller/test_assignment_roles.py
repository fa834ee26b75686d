"""Roles that ask for nodes of their own: labels and taints by role, within one gang."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.unit.controller.assignment_cases import decided, job, key, node, resources
from tests.unit.controller.cluster_in_memory import NAMESPACE
from tests.unit.controller.manifests_as_written import deployment, manifest, schema, told
from tests.unit.controller.process_in_memory import status_of

from tinsmith_controller.assignment.types import Decisions, Node, PodRequest, Taint, Workload
from tinsmith_jobs.spec import Rules, Toleration

SPOT = Taint("spot", "true")
TOLERATES_SPOT = Rules(tolerations=(Toleration("spot", "Exists"),))


def gang(name: str, gpus: dict[str, int], rules: dict[str, Rules], **fields: Any) -> Workload:
    """Return a job with one pod of each role; `rules` are of the roles that choose nodes."""
    pods = tuple(PodRequest(role, 0, resources(count)) for role, count in gpus.items())
    return dataclasses.replace(job(name, **fields), pods=pods, role_rules=rules)


def nodes_of(decisions: Decisions, name: str) -> dict[str, str]:
    return {found.role: found.node for found in decisions.assign.get(key(name), ())}


def labelled(value: str) -> Rules:
    return Rules(node_selector={"pool": value})


def test_a_role_gets_only_nodes_with_its_label() -> None:
    nodes = [node("n0"), node("n1", labels={"pool": "a"}), node("n2", labels={"pool": "b"})]
    roles = {"trainer": labelled("b"), "sampler": labelled("a")}

    found = decided([gang("j", {"trainer": 1, "sampler": 1}, roles)], nodes)

    assert nodes_of(found, "j") == {"trainer": "n2", "sampler": "n1"}


def test_a_taint_is_tolerated_by_the_roles_alone_that_say_so() -> None:
    nodes = [node("n0", 1), node("n1", 8, taints=(SPOT,))]
    roles = {"sampler": TOLERATES_SPOT}

    assert nodes_of(decided([gang("j", {"trainer": 1, "sampler": 8}, roles)], nodes), "j") == {
        "trainer": "n0",
        "sampler": "n1",
    }
    found = decided([gang("j", {"trainer": 8, "sampler": 1}, roles)], nodes)
    assert not found.assign, "the taint is not tolerated by the trainer"
    assert found.waiting[key("j")].endswith(
        "; the cluster has room for 0 pods with 8 GPUs when no other job runs; "
        "further 8 GPUs on nodes with taints that it does not tolerate"
    )


def test_pods_with_few_nodes_are_placed_first_where_it_would_not_fit_otherwise() -> None:
    nodes = [node("n0", labels={"pool": "a"}), node("n1")]

    found = decided([gang("j", {"trainer": 8, "sampler": 1}, {"sampler": labelled("a")})], nodes)

    assert nodes_of(found, "j") == {"trainer": "n1", "sampler": "n0"}


def test_a_label_that_no_node_has_is_told_with_the_role() -> None:
    roles = {"sampler": labelled("b")}

    found = decided([gang("j", {"trainer": 1, "sampler": 1}, roles)], [node("n0")])

    assert found.waiting[key("j")] == (
        "for the sampler: no node that would do has the label pool=b"
    )
    assert found.unfit == {key("j")}


def test_a_taint_is_told_with_the_toleration_that_would_do() -> None:
    found = decided([job("j", [1])], [node("n0", taints=(SPOT,))])

    assert found.waiting[key("j")] == (
        "none of the 1 nodes can be used: 1 with taints that it does not tolerate, tolerations of "
        "spot=true would do"
    )


def test_pods_that_no_node_is_chosen_for_keep_the_others_waiting_and_nothing_for_them() -> None:
    roles = {"driver": labelled("cpu")}
    waiting = gang("j", {"trainer": 8}, roles, waited_s=10_000)
    waiting = dataclasses.replace(waiting, unplaced=("driver",))

    found = decided([waiting, job("later", [8])], [node("n0")])

    assert found.waiting[key("j")] == "for the driver: no node that would do has the label pool=cpu"
    assert found.unfit == {key("j")}
    assert nodes_of(found, "later") == {"trainer": "n0"}
    there = decided([waiting], [node("n0"), node("n1", 0, labels={"pool": "cpu"})])
    assert nodes_of(there, "j") == {"trainer": "n0"}


@pytest.mark.parametrize(
    ("fields", "reason", "message"),
    [
        ("roles: {trainer: {gpus: 9}}", "NoNodeFits", "no node has 9 GPUs: the largest has 8"),
        (
            "roles: {driver: {template: {nodeSelector: {pool: cpu}}}}",
            "NoNodeFits",
            "for the driver: no node that would do has the label pool=cpu",
        ),
        (
            "data: {configMapRef: {name: no-such-map, key: a}}",
            "Waiting",
            "ConfigMap no-such-map, which does not exist in namespace",
        ),
    ],
)
def test_a_condition_says_why_a_job_has_no_nodes_and_what_to_do(
    tmp_path: Any, fields: str, reason: str, message: str
) -> None:
    world, process = deployment(tmp_path)
    world.create("trainingjobs", NAMESPACE, manifest(fields))

    process.settle()

    [assigned] = [c for c in status_of(world, "a")["conditions"] if c["type"] == "Assigned"]
    assert (assigned["status"], assigned["reason"]) == ("False", reason)
    assert message in assigned["message"]
    is_advised = "else change spec.roles or spec.scheduling" in assigned["message"]
    assert is_advised == (reason == "NoNodeFits")
    assert not world.assigned()


def test_a_job_starts_once_the_node_of_its_driver_is_there(tmp_path: Any) -> None:
    world, process = deployment(tmp_path)
    selector = "roles: {driver: {template: {nodeSelector: {pool: cpu}}}}"
    world.create("trainingjobs", NAMESPACE, manifest(selector))
    process.settle(6)
    assert told(world, "a")[0] == "Queued"
    labels = {"pool": "cpu"}
    body = world.get("nodes", "", "n1")
    body["metadata"]["labels"] = {**body["metadata"].get("labels", {}), **labels}
    world.store("nodes", "", body)

    process.settle(6)

    assert told(world, "a") == ("Running", "")
    pod = world.get("pods", NAMESPACE, "a-driver-0-e1")
    assert pod["spec"]["nodeSelector"] == labels


@pytest.mark.parametrize("plural", ["trainingjobs", "trainerpools"])
def test_the_schema_has_nodes_by_role(plural: str) -> None:
    spec = schema(plural)["properties"]["spec"]["properties"]
    roles = spec["roles"]["properties"] if "roles" in spec else spec
    fields = roles["trainer"]["properties"]["template"]["properties"]
    scheduling = spec["scheduling"]["properties"]
    assert fields["tolerations"]["items"] == scheduling["tolerations"]["items"]
    assert fields["nodeSelector"]["additionalProperties"] == {"type": "string", "maxLength": 63}


@pytest.mark.parametrize(
    ("nodes", "is_lasting"),
    [
        pytest.param([node("n0", 1)], True, id="too-small"),
        pytest.param([node("n0", 8, is_ready=False)], False, id="not-ready"),
        pytest.param([node("n0", 8, is_cordoned=True)], False, id="cordoned"),
        pytest.param([node("n0", 1), node("n1", 8, is_ready=False)], False, id="the-large-one"),
    ],
)
def test_a_node_that_may_come_back_is_no_reason_to_change_a_job(
    nodes: list[Node], is_lasting: bool
) -> None:
    found = decided([gang("j", {"trainer": 8}, {})], nodes)

    assert not found.assign
    assert (key("j") in found.unfit) is is_lasting


def test_tolerations_are_those_of_one_node_and_of_no_ill_one() -> None:
    ill = Taint("node.kubernetes.io/disk-pressure")
    nodes = [node("n0", 8, taints=(SPOT, Taint("team", "a"))), node("n1", 8, taints=(SPOT,))]
    nodes.append(node("n2", 8, taints=(ill,)))

    found = decided([gang("j", {"trainer": 8}, {})], nodes)

    assert found.waiting[key("j")].endswith("tolerations of spot=true would do")
