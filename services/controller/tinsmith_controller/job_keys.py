"""Keys of drivers and of agents' programs: good before their pods are made, bad once they are not.

A key becomes an entry of its job's secret before a pod is made that has it. The secret goes once
the job holds nothing; a key in it that was replaced before that is bad.
"""

from __future__ import annotations

from tinsmith_controller.kube.api_client import SECRETS, ApiError, Cluster
from tinsmith_controller.kube.leader_election import LeaderElection
from tinsmith_controller.owned_objects import Memory, RetryLaterError, is_owned_by
from tinsmith_controller.pods.workload_context import WorkloadContext
from tinsmith_controller.rpc.scheduler_client import JobIdentity, KeySpentError, SchedulerClient
from tinsmith_jobs.naming import pod_keys_name
from tinsmith_jobs.plan.actions import Plan
from tinsmith_jobs.plan.observed import ObservedJob, ObservedPool
from tinsmith_jobs.spec import DRIVER
from tinsmith_jobs.status import Status


class JobKeys:
    """Makes keys good and bad, and deletes the secrets that they were in."""

    def __init__(
        self,
        cluster: Cluster,
        election: LeaderElection,
        scheduler: SchedulerClient,
    ) -> None:
        self._cluster = cluster
        self._election = election
        self._scheduler = scheduler

    def settle(
        self,
        job: ObservedJob,
        identity: JobIdentity,
        plan: Plan,
        memory: Memory,
        owner: WorkloadContext | None,
    ) -> None:
        """Make the keys that a plan names good, and all others of the job bad.

        Args:
            job: The job.
            identity: Names it at the scheduler.
            plan: What is to be.
            memory: Of the job.
            owner: What its pods are made from; None if its spec cannot be run.

        Raises:
            SchedulerError: If the scheduler does not do it.
            RetryLaterError: If a key was taken.
        """
        generation = _generation(plan.status)
        settled = (plan.key_epochs, generation)
        if memory.settled_keys == settled or not (plan.key_epochs or job.status.epoch):
            return
        spec = job.spec
        # A job that uses a pool of the cluster reaches what is shared.
        is_in_pool = owner is None or bool(spec and spec.pool)
        names = ["", *(agent.name for agent in spec.agents)] if spec is not None else [""]
        pools = {name: "" if owner is None or is_in_pool else owner.pool_of(name) for name in names}
        self._election.require()
        try:
            keys = self._scheduler.settle_keys(
                identity,
                plan.key_epochs,
                generation=generation,
                pools=pools,
            )
        except KeySpentError as error:
            # It was taken meanwhile, as when a node seemed lost: this driver never gets another.
            driver = plan.status.assigned_to(DRIVER, 0)
            if driver is not None and driver.epoch == error.epoch:
                memory.taken_names.add(driver.pod)
            raise RetryLaterError(str(error)) from error
        memory.api_keys, memory.settled_keys = keys, settled

    def delete_secret(self, item: ObservedJob | ObservedPool, plan: Plan, memory: Memory) -> None:
        """Delete the secret of a workload that gives back all that it held.

        The stored status still has the assignments that it was made for. So this is done again if
        the process dies before it writes the next one.
        """
        holds_keys = bool(item.status.assignments) or memory.key_secret is not None
        if holds_keys and not plan.status.assignments:
            self._delete_own(item, pod_keys_name(item.key.name))
            memory.key_secret = None

    def _delete_own(self, item: ObservedJob | ObservedPool, name: str) -> None:
        """Delete a secret unless it is another workload's: a pool may have the name of a job."""
        try:
            found = self._cluster.get(SECRETS, item.key.namespace, name)
        except ApiError as error:
            if error.is_not_found:
                return
            raise
        if is_owned_by(item, found):
            self._election.require()
            uid = found["metadata"]["uid"]
            self._cluster.delete(SECRETS, item.key.namespace, name, uid=uid)


def _generation(status: Status) -> int:
    """Return a number that is another one each time that a job gets nodes."""
    return int(status.assigned_time.timestamp()) if status.assigned_time is not None else 0
