"""Makes pods of a workload, after the services and the secret that they are made with.

A pod whose creation was not answered is looked for before anything is planned: nodes are not given
back while one runs there.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinsmith_controller.kube.api_client import PODS, SECRETS, SERVICES, ApiError, Cluster
from tinsmith_controller.kube.leader_election import LeaderElection
from tinsmith_controller.objects.caches import Caches
from tinsmith_controller.owned_objects import Memory, OwnedObjects, RetryLaterError, is_owned_by
from tinsmith_controller.pods.deployment import Deployment
from tinsmith_controller.pods.pod_manifests import make_keys_secret, make_pod, make_services
from tinsmith_controller.pods.workload_context import WorkloadContext
from tinsmith_controller.rpc.scheduler_client import SchedulerError
from tinsmith_jobs.plan.observed import ObservedJob, ObservedPool
from tinsmith_jobs.status import Assignment


class PodCreation:
    """Makes pods."""

    def __init__(
        self,
        cluster: Cluster,
        stores: Caches,
        election: LeaderElection,
        objects: OwnedObjects,
        deployment: Deployment,
    ) -> None:
        self._cluster = cluster
        self._stores = stores
        self._election = election
        self._objects = objects
        self._deployment = deployment

    def create(
        self,
        item: ObservedJob | ObservedPool,
        owner: WorkloadContext,
        assignments: Sequence[Assignment],
        memory: Memory,
    ) -> None:
        """Make a pod for each assignment.

        Raises:
            ApiError: If the outcome is not known.
            SchedulerError: If the cluster refuses something for now.
            RetryLaterError: If it refuses a pod for good, or another has the name.
        """
        if not memory.has_services:
            for service in make_services(owner):
                self._objects.create(SERVICES, item, service)
            memory.has_services = True
        secret = make_keys_secret(owner, self._deployment, memory.api_keys)
        if secret["data"] != memory.key_secret:
            self._objects.create(SECRETS, item, secret)
            memory.key_secret = secret["data"]
        for assignment in assignments:
            self._create(item, owner, assignment, memory)

    def settle(self, item: ObservedJob | ObservedPool, memory: Memory) -> None:
        """Look for pods that may have been made.

        One that is made still later is seen by the watch, and deleted if it is not wanted by then.

        Raises:
            ApiError: If that is still not known.
        """
        for name in sorted(memory.unsettled_pods):
            try:
                found = self._cluster.get(PODS, item.key.namespace, name)
            except ApiError as error:
                if not error.is_not_found:
                    raise
            else:
                if is_owned_by(item, found):
                    self._stores.note(PODS, found)
            memory.unsettled_pods.discard(name)

    def _create(
        self,
        item: ObservedJob | ObservedPool,
        owner: WorkloadContext,
        assignment: Assignment,
        memory: Memory,
    ) -> None:
        pod = make_pod(owner, assignment, self._deployment)
        try:
            self._election.require()
            self._stores.note(PODS, self._cluster.create(PODS, item.key.namespace, pod))
        except ApiError as error:
            if error.already_exists:
                self._look_at_namesake(item, assignment, memory)
            elif error.is_invalid:
                memory.rejection = f"the cluster refuses pod {assignment.pod}: {error.message}"
                raise RetryLaterError(memory.rejection) from error
            elif error.is_forbidden:
                raise SchedulerError(
                    f"the cluster refuses pod {assignment.pod} for now: {error.message}"
                ) from error
            else:
                if error.is_outcome_unknown:
                    memory.unsettled_pods.add(assignment.pod)
                raise

    def _look_at_namesake(
        self, item: ObservedJob | ObservedPool, assignment: Assignment, memory: Memory
    ) -> None:
        """Find out whether a pod that has a name is ours, of an earlier look, or foreign."""
        found = self._cluster.get(PODS, item.key.namespace, assignment.pod)
        if is_owned_by(item, found):
            self._stores.note(PODS, found)
        else:
            memory.taken_names.add(assignment.pod)
            raise RetryLaterError(f"another pod has the name {assignment.pod}")
