"""Which nodes Kueue admitted the roles of a job to, and a spec with these rules.

The rules are those of the ResourceFlavors that its Workload was admitted with, and of admission
checks. They are never written into the job: a copy of its spec has them while it is admitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tinsmith_controller.kueue.names import pod_set_names
from tinsmith_controller.kueue.workload_record import FlavorRecord, KueueWorkload, NodeRules
from tinsmith_jobs.spec import JobSpec, Role


@dataclass(frozen=True, slots=True)
class AdmittedNodes:
    """Where the pods of a job may run.

    Attributes:
        rules: By role; of those alone that have any.
        problem: Why that is not known or cannot be followed; empty if it can.
    """

    rules: Mapping[str, NodeRules] = field(default_factory=dict)
    problem: str = ""


def admitted_nodes(
    workload: KueueWorkload, spec: JobSpec, flavors: Mapping[str, FlavorRecord]
) -> AdmittedNodes:
    """Return the rules that an admission brings.

    Args:
        workload: An admitted Workload.
        spec: What its job asks for itself.
        flavors: ResourceFlavors by name.
    """
    found: dict[str, NodeRules] = {}
    names = pod_set_names(spec.roles)
    for role in spec.roles:
        if role.name not in names:
            continue
        pod_set = names[role.name]
        assignment = workload.assignments.get(pod_set)
        if assignment is None:
            return AdmittedNodes({}, f"waits for Kueue: its admission says nothing of {pod_set}")
        if assignment.has_topology:
            return AdmittedNodes({}, _no_topology(role))
        missing = [name for name in assignment.flavors if name not in flavors]
        if missing:
            return AdmittedNodes(
                {}, f"waits for the ResourceFlavor {missing[0]}, which is not there"
            )
        rules = NodeRules({})
        for each in (
            *(flavors[name].rules for name in assignment.flavors),
            workload.updates.get(pod_set, NodeRules({})),
        ):
            # As Kueue has it, the first flavor counts where two name one label.
            rules = NodeRules(
                {**each.labels, **rules.labels},
                tuple(dict.fromkeys((*rules.tolerations, *each.tolerations))),
            )
        own = spec.scheduling.rules_for(role).node_selector
        differing = sorted(
            key for key in rules.labels if own.get(key, rules.labels[key]) != rules.labels[key]
        )
        if differing:
            return AdmittedNodes({}, _conflict(role, differing[0], own, rules))
        if rules.labels or rules.tolerations:
            found[role.name] = rules
    return AdmittedNodes(found)


def with_admitted_nodes(spec: JobSpec, rules: Mapping[str, NodeRules]) -> JobSpec:
    """Return a spec whose roles have the rules of an admission besides their own."""
    if not rules:
        return spec
    return replace(spec, roles=tuple(_merged(role, rules.get(role.name)) for role in spec.roles))


def _merged(role: Role, rules: NodeRules | None) -> Role:
    if rules is None:
        return role
    template = replace(
        role.template,
        node_selector={**role.template.node_selector, **rules.labels},
        tolerations=tuple(dict.fromkeys((*role.template.tolerations, *rules.tolerations))),
    )
    return replace(role, template=template)


def _no_topology(role: Role) -> str:
    return (
        f"Kueue chose a topology for the {role.name}, and Tinsmith chooses nodes itself: take "
        "topologyName out of the ResourceFlavor, and deactivate and activate the Workload"
    )


def _conflict(role: Role, key: str, own: Mapping[str, str], rules: NodeRules) -> str:
    return (
        f"Kueue admitted the {role.name} to nodes with {key}={rules.labels[key]}, and the job asks "
        f"for {key}={own[key]}: correct the ResourceFlavor or the job"
    )
