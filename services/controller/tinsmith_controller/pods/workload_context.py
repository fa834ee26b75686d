"""The workload that pods, services and secrets are made for."""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith.names import serving_pool
from tinsmith_jobs.naming import NamespacedName, pool_id
from tinsmith_jobs.spec import JobSpec, PoolSpec, Role
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

    def pool_of(self, agent: str = "") -> str:
        """Return the pool of the pods of an agent, or of those of the whole workload.

        Empty for pods that others use too. Samplers that serve a project are in its own. An agent
        without trainers and samplers of its own is in the pool of its job.
        """
        spec = self.spec
        if not isinstance(spec, JobSpec):
            return ""
        if spec.is_serving:
            return serving_pool(self.project)
        found = spec.agent(agent)
        has_own_pods = found is not None and found.has_own_pods
        return pool_id(self.key.name, self.uid, agent if has_own_pods else "")

    def role(self, name: str) -> Role:
        """Return a role that the workload has."""
        role = self.spec.role(name)
        assert role is not None, f"{self.key} has no role {name}"
        return role
