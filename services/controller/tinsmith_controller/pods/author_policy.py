"""Restricts what the author of a TrainingJob may ask of Kubernetes itself.

Labels, annotations, priorities, tolerations, accounts and extended resources mean something to
other systems of a cluster. They may give a pod an identity at a cloud, a further network, the nodes
of the control plane, or the right to evict others. So the operators list what jobs may say, and a
job that says more is refused with the name of the setting. TrainerPools are the operators' own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tinsmith_jobs.naming import (
    COMPONENT_LABEL,
    EPOCH_LABEL,
    INDEX_LABEL,
    KIND_LABEL,
    MANAGED_LABEL,
    ROLE_LABEL,
    TEMPLATE_ANNOTATION,
    UID_LABEL,
    WORKLOAD_LABEL,
)
from tinsmith_jobs.spec import JobSpec

_EVERYTHING = "*"
_SYSTEM_PRIORITIES = "system-"
"""Beginning of Kubernetes' own PriorityClasses, which evict everything else."""
_PLAIN_RESOURCES = ("cpu", "memory", "ephemeral-storage")
_OWN_LABELS = (
    MANAGED_LABEL,
    KIND_LABEL,
    WORKLOAD_LABEL,
    UID_LABEL,
    COMPONENT_LABEL,
    ROLE_LABEL,
    INDEX_LABEL,
    EPOCH_LABEL,
)
_OWN_ANNOTATIONS = (ROLE_LABEL, TEMPLATE_ANNOTATION)
"""Written by the controller, over whatever a job says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuthorPolicy:
    """What jobs may say; an entry that ends in `/` allows all names with that prefix.

    Attributes:
        labels: Labels of pods with a prefix; those without one are their author's own.
        annotations: Likewise.
        priority_classes: PriorityClasses; `*` allows all but Kubernetes' own.
        tolerations: Keys of taints.
        resources: Resources besides processors, memory and disk. GPUs are asked for by `gpus`.
        service_accounts: ServiceAccounts of drivers and workers.
        has_kueue: Whether Kueue queues the jobs that have its label.
    """

    labels: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()
    priority_classes: tuple[str, ...] = (_EVERYTHING,)
    tolerations: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()
    service_accounts: tuple[str, ...] = ()
    has_kueue: bool = False

    def refusal(self, job: JobSpec, *, has_kueue_label: bool) -> str:
        """Return why a job cannot be run, in one sentence; empty if it can.

        Args:
            job: What it asks for.
            has_kueue_label: Whether it has the label by which Kueue queues jobs.
        """
        if has_kueue_label and not self.has_kueue:
            return (
                "the job has the label of a queue of Kueue, which this deployment does not use: "
                "drop it and name a queue in spec.scheduling.queueName"
            )
        return (
            self._refused_priority(job)
            or self._refused_toleration(job)
            or next(filter(None, self._refused_in_roles(job)), "")
        )

    def _refused_priority(self, job: JobSpec) -> str:
        name = job.scheduling.priority_class
        if not name or name in self.priority_classes:
            return ""
        if _EVERYTHING in self.priority_classes and not name.startswith(_SYSTEM_PRIORITIES):
            return ""
        return _refusal("spec.scheduling.priorityClassName", name, "priority_classes")

    def _refused_toleration(self, job: JobSpec) -> str:
        found = [("spec.scheduling.tolerations", job.scheduling.rules.tolerations)]
        found += [
            (f"template.tolerations of the {role.name}", role.template.tolerations)
            for role in job.roles
        ]
        for field, toleration in ((field, each) for field, group in found for each in group):
            if not toleration.key and _EVERYTHING not in self.tolerations:
                return (
                    f"{field} without a key tolerate every taint; name the key of a taint that the "
                    "operators allow (setting allowed_tolerations)"
                )
            if not _allows(self.tolerations, toleration.key):
                return _refusal(field, toleration.key, "tolerations")
        return ""

    def _refused_in_roles(self, job: JobSpec) -> Iterable[str]:
        for role in job.roles:
            for kind, names, allowed in (
                ("labels", role.template.labels, (*_OWN_LABELS, *self.labels)),
                (
                    "annotations",
                    role.template.annotations,
                    (*_OWN_ANNOTATIONS, *self.annotations),
                ),
            ):
                for name in sorted(names):
                    if "/" in name and not _allows(allowed, name):
                        yield _refusal(f"template.{kind} of the {role.name}", name, kind)
            account = role.template.service_account
            if account and not _allows(self.service_accounts, account):
                field = f"template.serviceAccountName of the {role.name}"
                yield _refusal(field, account, "service_accounts")
            for name in sorted({*role.requests, *role.limits}):
                if not _allows((*_PLAIN_RESOURCES, *self.resources), name):
                    yield _refusal(f"resources of the {role.name}", name, "resources")


def _allows(entries: Sequence[str], name: str) -> bool:
    return any(
        entry in (_EVERYTHING, name) or (entry.endswith("/") and name.startswith(entry))
        for entry in entries
    )


def _refusal(field: str, name: str, setting: str) -> str:
    return f"{field} may not name {name}: ask the operators to allow it (setting allowed_{setting})"
