"""The actions of a plan; the code that carries them out decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith_jobs.status import Assignment, Status


@dataclass(frozen=True, slots=True)
class PodDeletion:
    """A pod that has to go.

    Attributes:
        name: Its name.
        uid: Its uid: another pod of the name stays.
        grace_s: Time to end in; None leaves it to the pod.
    """

    name: str
    uid: str
    grace_s: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that people want to know."""

    reason: str
    message: str
    is_warning: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The next actions for one workload.

    Attributes:
        status: What its status should be; written last, once, if it differs.
        create: Pods to make. Their assignments are in the status that the cluster has already.
        delete: Pods to delete.
        key_epochs: Epochs of the drivers whose keys are good; None among them is the agents' key.
            All other keys of the job are revoked.
        takes_uids: Whether the uids of pods that are made go into the status at once.
        delete_self: Whether the object itself is to be deleted.
        requeue_s: When to look again though nothing happens.
        events: For people.
    """

    status: Status
    create: tuple[Assignment, ...] = ()
    delete: tuple[PodDeletion, ...] = ()
    key_epochs: frozenset[int | None] = frozenset()
    takes_uids: bool = True
    delete_self: bool = False
    requeue_s: float | None = None
    events: tuple[Event, ...] = ()
