"""Keeps the pods of a workload that holds nodes: what to make, replace and delete.

A pod is made under a name that its assignment carries, and that was stored before. A pod that is
gone, with its node, by its end or by `kubectl delete`, is replaced under a new epoch. The ranks of
a full-parameter trainer only work together, so all of them are replaced with one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from tinsmith_jobs.naming import NamespacedName, pod_name, sampler_selector
from tinsmith_jobs.plan.actions import PodDeletion
from tinsmith_jobs.plan.failure_policy import was_told_to_stop
from tinsmith_jobs.plan.observed import Observed, PodPhase, PodView
from tinsmith_jobs.spec import DRIVER, SAMPLER, WORKER, Reaction, Role
from tinsmith_jobs.status import Assignment, RoleStatus, Status

_CLIENT_KINDS = (DRIVER, WORKER)
"""They begin when everything that they call is there."""
_Wanted = dict[tuple[str, int], Role]
"""The pods that a workload is to have, by role and index."""


@dataclass(frozen=True, slots=True)
class PodMaintenance:
    """The result of one look at the pods.

    Attributes:
        assignments: The new assignments; entries without a node are missing, to be placed.
        epoch: The new epoch.
        create: Pods to make.
        delete: Pods to delete.
        failures: Pods that failed, and what that means.
        lost: Sentences about pods that are gone without a fault of the job.
        refused: Nodes that refused a pod.
        num_stopped: Pods that ended without a failure and without being told to.
        num_unplaced: Pods that need a node and have none.
        not_ready: Sentences about pods that are not ready.
        is_ready: Whether all pods are there and ready.
        takes_uids: Whether uids of pods are stored now.
        role_statuses: Pods by role.
    """

    assignments: tuple[Assignment, ...]
    epoch: int
    create: tuple[Assignment, ...]
    delete: tuple[PodDeletion, ...]
    failures: tuple[tuple[PodView, Reaction], ...]
    lost: tuple[str, ...]
    refused: frozenset[str]
    num_stopped: int
    num_unplaced: int
    not_ready: tuple[str, ...]
    is_ready: bool
    takes_uids: bool
    role_statuses: tuple[RoleStatus, ...]


def maintain_pods(
    workload: str,
    roles: Sequence[Role],
    status: Status,
    observed: Observed,
    *,
    react: Callable[[PodView], Reaction],
    groups: Collection[str] = (),
    may_create: bool = True,
    is_start: bool = False,
) -> PodMaintenance:
    """Look at the pods of a workload that holds nodes.

    Args:
        workload: Its name.
        roles: Its roles.
        status: Its status, as stored.
        observed: What there is.
        react: Says what the end of a pod means.
        groups: Roles whose pods are only of use together.
        may_create: Whether pods may be made now; false during the pause after a failure.
        is_start: Whether servers begin that no client has called yet. Then one that is gone may be
            made again under its name, unless it is a rank of a group, which others of it know.
    """
    wanted = {(role.name, index): role for role in roles for index in range(role.replicas)}
    view = _View(workload, status, observed, wanted)
    view.examine(react)
    view.spread(groups)
    servers_ready = _servers_ready(observed, wanted, status.assignments)
    takes_uids = servers_ready or not is_start or bool(groups)
    assignments = view.renewed(takes_uids=takes_uids)
    return PodMaintenance(
        assignments=assignments,
        epoch=view.epoch,
        create=_to_create(status, observed, wanted, assignments) if may_create else (),
        delete=_to_delete(status, observed, assignments, wanted),
        failures=tuple(view.failures),
        lost=tuple(view.lost),
        refused=frozenset(view.refused),
        num_stopped=view.num_stopped,
        num_unplaced=_num_unplaced(wanted, assignments),
        not_ready=tuple(_not_ready(observed, wanted, assignments)),
        is_ready=_is_ready(observed, wanted, assignments),
        takes_uids=takes_uids,
        role_statuses=_role_statuses(roles, status, observed, assignments, view),
    )


def with_pods(status: Status, workload: NamespacedName, kept: PodMaintenance) -> Status:
    """Return a status with what a look at the pods of a workload came to."""
    has_samplers = any(entry.name == SAMPLER for entry in kept.role_statuses)
    return replace(
        status,
        assignments=kept.assignments,
        epoch=kept.epoch,
        role_statuses=kept.role_statuses,
        sampler_selector=sampler_selector(workload.kind, workload.name) if has_samplers else "",
    )


def is_fine(pod: PodView | None, role: Role) -> bool:
    """Whether a pod does what it is for; a player that is done has played."""
    if pod is None or pod.is_deleting:
        return False
    if role.kind == WORKER and pod.phase is PodPhase.SUCCEEDED:
        return True
    return pod.phase is PodPhase.RUNNING and pod.is_ready


class _View:
    """The assignments of a workload, while they are gone through."""

    def __init__(
        self,
        workload: str,
        status: Status,
        observed: Observed,
        wanted: _Wanted,
    ) -> None:
        self._workload = workload
        self._status = status
        self._observed = observed
        self._wanted = wanted
        self.epoch = status.epoch
        self.failures: list[tuple[PodView, Reaction]] = []
        self.lost: list[str] = []
        self.refused: set[str] = set()
        self.stale: set[tuple[str, int]] = set()
        self.num_stopped = 0
        self._homeless: set[tuple[str, int]] = set()

    def examine(self, react: Callable[[PodView], Reaction]) -> None:
        """Find the entries whose pod has to be replaced."""
        for entry in self._status.assignments:
            key = (entry.role, entry.index)
            role = self._wanted.get(key)
            if role is None:
                continue
            pod = self._observed.pods.get(entry.pod)
            node = entry.node or (pod.node if pod is not None else "")
            if node and node in self._observed.lost_nodes:
                self._replace(entry, f"{role.name} {entry.index} was on node {node}, which is lost")
                self._homeless.add(key)
            elif (
                pod is not None
                and not pod.node
                and entry.node in self._observed.cordoned_nodes
                and not pod.is_deleting
            ):
                self._replace(entry, f"{role.name} {entry.index} cannot start on a cordoned node")
                self._homeless.add(key)
            elif pod is None and entry.uid:
                self._replace(entry, f"pod {entry.pod} is gone")
            elif pod is None and not self._has_its_size(entry):
                # Nothing was made of it yet, so nothing is lost.
                self.stale.add(key)
                self._homeless.add(key)
            elif entry.pod in self._observed.taken_names:
                self._replace(entry, f"another pod has the name {entry.pod}")
            elif pod is not None and pod.has_ended and not is_fine(pod, role):
                self._end(entry, pod, react)

    def _end(self, entry: Assignment, pod: PodView, react: Callable[[PodView], Reaction]) -> None:
        if pod.phase is PodPhase.SUCCEEDED:
            # A driver that did what the job is for never comes here: the job has ended then.
            self._replace(entry, f"pod {entry.pod} stopped")
            self.num_stopped += not was_told_to_stop(pod)
            return
        reaction = react(pod)
        self.failures.append((pod, reaction))
        if reaction is Reaction.RESTART_JOB:
            self.stale.update(self._wanted)
        elif reaction is not Reaction.FAIL_JOB:
            self.stale.update(
                key
                for key in self._wanted
                if key[0] == entry.role
                and (reaction is Reaction.RESTART_ROLE or key[1] == entry.index)
            )
        if pod.is_turned_away and reaction is not Reaction.FAIL_JOB:
            self._homeless.add((entry.role, entry.index))
            if pod.is_refused and entry.node:
                self.refused.add(entry.node)

    def _replace(self, entry: Assignment, why: str) -> None:
        self.lost.append(why)
        self.stale.add((entry.role, entry.index))

    def spread(self, groups: Collection[str]) -> None:
        """Replace the whole of a group with any of its pods."""
        for group in groups:
            if any(role == group for role, _ in self.stale):
                self.stale.update(key for key in self._wanted if key[0] == group)

    def renewed(self, *, takes_uids: bool) -> tuple[Assignment, ...]:
        """Return the assignments: what is stale under a new epoch, what was lost without a node."""
        found: list[Assignment] = []
        epoch = self._status.epoch + 1
        for entry in self._status.assignments:
            key = (entry.role, entry.index)
            role = self._wanted.get(key)
            pod = self._observed.pods.get(entry.pod)
            if role is None:
                # Scaled down: the node is held until the pod is gone.
                if pod is not None:
                    found.append(entry)
            elif key not in self.stale:
                uid = pod.uid if pod is not None and takes_uids else entry.uid
                found.append(replace(entry, uid=uid))
            elif not role.is_placed:
                found.append(self._unplaced(key, epoch))
            elif (
                key not in self._homeless
                and entry.node not in self._observed.cordoned_nodes
                and self._has_its_size(entry)
            ):
                pod_after = pod_name(self._workload, *key, epoch)
                found.append(replace(entry, pod=pod_after, epoch=epoch, uid=""))
        known = {(entry.role, entry.index) for entry in found}
        found += [
            self._unplaced(key, epoch)
            for key, role in self._wanted.items()
            if key not in known and not role.is_placed
        ]
        if any(entry.epoch == epoch for entry in found) or self._homeless:
            self.epoch = epoch
        return tuple(found)

    def _has_its_size(self, entry: Assignment) -> bool:
        """Whether a pod made now asks for what was given; else it is placed anew."""
        wanted = self._observed.requests.get(entry.role)
        if wanted is None or not entry.node:
            return True
        given = entry.resources
        return entry.gpus == wanted.gpus if given is None else given == wanted

    def _unplaced(self, key: tuple[str, int], epoch: int) -> Assignment:
        return Assignment(pod_name(self._workload, *key, epoch), *key, "", 0, epoch)


def _to_create(
    status: Status,
    observed: Observed,
    wanted: _Wanted,
    assignments: tuple[Assignment, ...],
) -> tuple[Assignment, ...]:
    """Return the assignments that are stored and have no pod yet; clients of others come last.

    A pod that still ends keeps its place, unless its node is lost: the cluster cannot say then
    when it has ended.
    """
    stored = set(status.assignments)
    taken = {
        (pod.role, pod.index)
        for pod in observed.pods.values()
        if not pod.has_ended and pod.node not in observed.lost_nodes
    }
    servers_ready = _servers_ready(observed, wanted, assignments)
    return tuple(
        entry
        for entry in assignments
        if entry in stored
        and not entry.uid
        and entry.pod not in observed.pods
        and (entry.role, entry.index) not in taken
        and (entry.role, entry.index) in wanted
        and (servers_ready or wanted[entry.role, entry.index].kind not in _CLIENT_KINDS)
    )


def _servers_ready(
    observed: Observed, wanted: _Wanted, assignments: tuple[Assignment, ...]
) -> bool:
    pods = _pods(observed, assignments)
    return all(
        is_fine(pods.get(key), role)
        for key, role in wanted.items()
        # Those that have no node yet are more than there were: what is there serves without them.
        if role.kind not in _CLIENT_KINDS and key in pods
    )


def _to_delete(
    status: Status,
    observed: Observed,
    assignments: tuple[Assignment, ...],
    wanted: _Wanted,
) -> tuple[PodDeletion, ...]:
    """Return the pods that no assignment names any more.

    A pod that is to be replaced is deleted once the replacement is stored: its end may count
    against a limit, and could not be seen again.
    """
    current = {
        entry.pod
        for entry in (*status.assignments, *assignments)
        if (entry.role, entry.index) in wanted
    }
    return tuple(
        PodDeletion(pod.name, pod.uid)
        for name, pod in sorted(observed.pods.items())
        if name not in current and not pod.is_deleting
    )


def _pods(
    observed: Observed, assignments: Sequence[Assignment]
) -> dict[tuple[str, int], PodView | None]:
    return {(entry.role, entry.index): observed.pods.get(entry.pod) for entry in assignments}


def _num_unplaced(wanted: _Wanted, assignments: tuple[Assignment, ...]) -> int:
    known = {(entry.role, entry.index) for entry in assignments}
    return sum(role.is_placed and key not in known for key, role in wanted.items())


def _is_ready(
    observed: Observed,
    wanted: _Wanted,
    assignments: tuple[Assignment, ...],
) -> bool:
    pods = _pods(observed, assignments)
    return all(is_fine(pods.get(key), role) for key, role in wanted.items())


def _not_ready(
    observed: Observed,
    wanted: _Wanted,
    assignments: tuple[Assignment, ...],
) -> list[str]:
    found = []
    for entry in assignments:
        role = wanted.get((entry.role, entry.index))
        pod = observed.pods.get(entry.pod)
        if role is None or is_fine(pod, role):
            continue
        where = f" on node {entry.node}" if entry.node else ""
        is_going = pod is not None and (pod.is_deleting or pod.has_ended)
        what = "is being replaced" if is_going else "is not ready"
        problem = f": {pod.problem}" if pod is not None and pod.problem else ""
        found.append(f"{entry.role} {entry.index}{where} {what}{problem}")
    return found


def _role_statuses(
    roles: Sequence[Role],
    status: Status,
    observed: Observed,
    assignments: tuple[Assignment, ...],
    view: _View,
) -> tuple[RoleStatus, ...]:
    before = {entry.name: entry.restarts for entry in status.role_statuses}
    ready = {role.name: 0 for role in roles}
    kinds = {role.name: role for role in roles}
    for entry in assignments:
        role = kinds.get(entry.role)
        if role is not None and is_fine(observed.pods.get(entry.pod), role):
            ready[role.name] += 1
    restarted = {role for role, _ in view.stale}
    return tuple(
        RoleStatus(
            role.name,
            role.replicas,
            ready[role.name],
            before.get(role.name, 0) + (role.name in restarted),
        )
        for role in roles
    )
