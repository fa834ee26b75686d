"""Images that cannot be pulled: a condition names them, and after a while their job fails.

A kubelet tries for ever, with the GPUs of the job held. A pool never fails: its replicas without an
image give their nodes back, and are tried again after a rest as long.
"""

from __future__ import annotations

import datetime
from dataclasses import replace

from tinsmith_jobs import conditions
from tinsmith_jobs.plan.actions import Event
from tinsmith_jobs.plan.limits import Limits
from tinsmith_jobs.plan.observed import Observed, PodView
from tinsmith_jobs.spec import JobSpec, PoolSpec, Template
from tinsmith_jobs.status import Failure, Status


def with_image_pulls(
    spec: JobSpec | PoolSpec, status: Status, observed: Observed, now: datetime.datetime
) -> tuple[Status, Event | None]:
    """Return a status that says which image cannot be pulled, and an event when that begins."""
    pod = _waiting(status, observed)
    old = status.condition(conditions.IMAGE_UNAVAILABLE)
    if pod is None:
        if old is None or not old.is_true:
            return status, None
        pulled = status.with_condition(
            conditions.IMAGE_UNAVAILABLE, False, conditions.IMAGE_PULLED, "images are there", now
        )
        return pulled, None
    message = _sentence(spec, pod)
    if old is not None and old.is_true and old.message != message:
        # Another pod or image: its time begins now.
        status = status.with_condition(
            conditions.IMAGE_UNAVAILABLE, False, conditions.IMAGE_PULLED, "images are there", now
        )
    status = status.with_condition(
        conditions.IMAGE_UNAVAILABLE, True, conditions.IMAGE_PULL_FAILED, message, now
    )
    if old is not None and old.is_true:
        return status, None
    return status, Event(conditions.IMAGE_PULL_FAILED, message, is_warning=True)


def unpulled(
    status: Status, observed: Observed, now: datetime.datetime, limits: Limits
) -> Failure | None:
    """Return the failure of a job that has held nodes for too long without an image.

    One that has trained or served waits: the image was there, and its registry may come back.
    """
    if status.progress is not None or status.endpoint:
        return None
    pod, found = _waiting(status, observed), status.condition(conditions.IMAGE_UNAVAILABLE)
    if pod is None or found is None or not found.is_true:
        return None
    if (now - found.transition_time).total_seconds() < limits.image_pull_s:
        return None
    problem = f" ({pod.problem})" if pod.problem else ""
    return Failure(
        conditions.IMAGE_PULL_FAILED,
        f"for {limits.image_pull_s:g} s, {found.message}{problem}",
        role=pod.role,
        pod=pod.name,
        node=pod.node,
    )


def with_rest(
    status: Status, observed: Observed, now: datetime.datetime, limits: Limits
) -> tuple[Status, Event | None]:
    """Return the status of a pool whose replicas rest that held nodes for too long without images.

    Their pods are deleted once that is stored. Those of other replicas go on.
    """
    found = status.condition(conditions.IMAGE_UNAVAILABLE)
    if _waiting(status, observed) is None or found is None or not found.is_true:
        return status, None
    if (now - found.transition_time).total_seconds() < limits.image_pull_s:
        return status, None
    kept = tuple(
        entry
        for entry in status.assignments
        if not ((pod := observed.pods.get(entry.pod)) and pod.unpulled_image)
    )
    message = (
        f"for {limits.image_pull_s:g} s, {found.message}. Its node was given back; it is tried "
        f"again after {limits.image_pull_s:g} s, or once the pool is changed"
    )
    status = replace(
        status,
        assignments=kept,
        failure=Failure(conditions.IMAGE_PULL_FAILED, message),
        last_restart_time=now,
    )
    return status, Event(conditions.IMAGE_PULL_FAILED, message, is_warning=True)


def rest_left_s(status: Status, now: datetime.datetime, limits: Limits) -> float:
    """Return how long a pool gets no nodes, since an image could not be pulled."""
    failure, since = status.failure, status.last_restart_time
    if failure is None or since is None or failure.reason != conditions.IMAGE_PULL_FAILED:
        return 0.0
    return max(0.0, limits.image_pull_s - (now - since).total_seconds())


def rested(status: Status, now: datetime.datetime) -> Status:
    """Return the status of a pool whose replicas are tried again."""
    if status.failure is None or status.failure.reason != conditions.IMAGE_PULL_FAILED:
        return status
    status = replace(status, failure=None, last_restart_time=None, waiting_for="")
    return status.with_condition(
        conditions.IMAGE_UNAVAILABLE, False, conditions.WAITING, "is tried again", now
    )


def _waiting(status: Status, observed: Observed) -> PodView | None:
    """Return a pod of the present assignments whose image cannot be pulled."""
    pods = (observed.pods.get(entry.pod) for entry in status.assignments)
    return next((pod for pod in pods if pod and pod.unpulled_image and not pod.is_deleting), None)


def _sentence(spec: JobSpec | PoolSpec, pod: PodView) -> str:
    role = spec.role(pod.role)
    template = role.template if role is not None else Template()
    images = {template.image, *(each.image for each in template.init_containers)}
    told = f"{pod.role} {pod.index} cannot pull the image {pod.unpulled_image}"
    if pod.unpulled_image not in images:
        return f"{told}, which is the deployment's: ask its operators (setting image_repository)"
    return (
        f"{told}: correct its name in the template of the {pod.role}, or name the Secret of its "
        "registry in imagePullSecrets there"
    )
