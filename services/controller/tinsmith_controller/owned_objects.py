"""Objects that a workload owns besides its pods, and what is remembered of one between looks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tinsmith_controller.kube.api_client import ApiError, Cluster, Json, Resource
from tinsmith_controller.kube.leader_election import LeaderElection
from tinsmith_controller.rpc.scheduler_client import SchedulerError
from tinsmith_jobs.plan.observed import ObservedJob, ObservedPool


class RetryLaterError(Exception):
    """Something that a look depends on is not there now; the text says what."""


@dataclass(slots=True)
class Memory:
    """What is remembered of a workload between looks; all of it can be lost without harm.

    Attributes:
        taken_names: Names of pods that others have.
        rejection: Why the cluster will never take a pod.
        unsettled_pods: Names of pods that may have been made: the answer was lost.
        settled_keys: The epochs whose keys were made good last, and the agents' generation.
        api_keys: Those keys, by epoch and agent.
        has_services: Whether its services were made.
        key_secret: What the secret with the keys of its pods holds; None if it may not be there.
    """

    taken_names: set[str] = field(default_factory=set)
    unsettled_pods: set[str] = field(default_factory=set)
    rejection: str = ""
    settled_keys: tuple[frozenset[int | None], int] | None = None
    api_keys: Mapping[int | None, Mapping[str, str]] = field(default_factory=dict)
    has_services: bool = False
    key_secret: Mapping[str, str] | None = None


class OwnedObjects:
    """Makes secrets and services of workloads."""

    def __init__(self, cluster: Cluster, election: LeaderElection) -> None:
        self._cluster = cluster
        self._election = election

    def create(self, resource: Resource, item: ObservedJob | ObservedPool, body: Json) -> None:
        """Create a secret or service of a workload, unless it is there.

        Raises:
            SchedulerError: If the cluster refuses it.
            RetryLaterError: If one of the name is left of a workload that is gone.
        """
        namespace, name = item.key.namespace, body["metadata"]["name"]
        self._election.require()
        try:
            self._cluster.create(resource, namespace, body)
            return
        except ApiError as error:
            if error.is_forbidden or error.is_invalid:
                raise SchedulerError(
                    f"the cluster refuses {resource.plural} {name}: {error.message}"
                ) from error
            if not error.already_exists:
                raise
        found = self._cluster.get(resource, namespace, name)
        if not is_owned_by(item, found):
            raise RetryLaterError(f"{resource.plural} {name} is left of another workload")
        if found.get("data") != body.get("data"):
            self._cluster.replace(resource, namespace, {**found, "data": body["data"]})


def is_owned_by(item: ObservedJob | ObservedPool, content: Json) -> bool:
    """Return whether an object is one of a workload, and not of an earlier one of its name."""
    references = content["metadata"].get("ownerReferences") or []
    return item.uid in {entry.get("uid") for entry in references}
