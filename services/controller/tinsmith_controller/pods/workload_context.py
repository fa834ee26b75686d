"""The workload that pods, services and secrets are made for."""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith_jobs.naming import NamespacedName, pool_id
from tinsmith_jobs.spec import TRAINER, JobSpec, PoolSpec, Role
from tinsmith_jobs.status import Assignment


@dataclass(frozen=True, slots=True)
class WorkloadContext:
    """The workload that things are made for.

    Attributes:
        key: Its name.
        uid: Its uid.
        project: Its project; empty for a pool.
        spec: What it asks for.
        assignments: Its pods.
        model_name: Base model that it trains; that of its pool where it uses one.
    """

    key: NamespacedName
    uid: str
    project: str
    spec: JobSpec | PoolSpec
    assignments: tuple[Assignment, ...]
    model_name: str = ""

    @property
    def pool(self) -> str:
        """The pool that its pods register in; empty for those that others use too."""
        is_own = isinstance(self.spec, JobSpec) and not self.spec.is_serving
        return pool_id(self.key.name, self.uid) if is_own else ""

    def role(self, name: str) -> Role:
        """Return a role that the workload has."""
        role = self.spec.role(name)
        assert role is not None, f"{self.key} has no role {name}"
        return role


def is_group(spec: JobSpec | PoolSpec, role: Role) -> bool:
    """Whether the pods of a role are ranks of one process group."""
    return (
        isinstance(spec, JobSpec)
        and role.kind == TRAINER
        and spec.adapter_type == "full"
        and role.replicas > 1
    )
