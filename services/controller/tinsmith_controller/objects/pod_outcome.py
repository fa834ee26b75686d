"""The exit code and the problem of a pod, read from its status.

The kubelet reports a problem in several places: a reason of the pod, a reason of a container, and
the termination message of the container.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tinsmith_jobs.plan.termination import MAX_PROBLEM, describe_termination

_PULL_REASONS = frozenset(
    {
        *("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull"),
        *("ImageInspectError", "InvalidImageName", "RegistryUnavailable"),
    }
)
"""Why containers wait whose image a kubelet cannot get. It tries again, in growing intervals."""


def unpulled_image(spec: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """Return the image that a pod waits for and that cannot be pulled; empty if there is none."""
    for kind in ("initContainer", "container"):
        images = {entry.get("name"): entry.get("image") for entry in spec.get(f"{kind}s") or []}
        for entry in status.get(f"{kind}Statuses") or []:
            waiting = (entry.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") in _PULL_REASONS:
                return str(images.get(entry.get("name")) or entry.get("image") or "")
    return ""


def outcome(status: Mapping[str, Any]) -> tuple[int | None, str]:
    """Return the exit code and the problem of a pod: of the container that is worst off."""
    told = ": ".join(str(status[key]) for key in ("reason", "message") if status.get(key))
    before, own = (
        list(status.get(kind) or []) for kind in ("initContainerStatuses", "containerStatuses")
    )
    bad = [entry for entry in _terminated((*before, *own)) if entry.get("exitCode")]
    # One that came before and ended well says nothing of the pod, which goes on.
    for entry in bad or _terminated(own)[:1]:
        reason = str(entry.get("reason") or "")
        named = "" if reason in ("Error", "Completed") else reason
        text = describe_termination(str(entry.get("message") or ""))
        problem = told or ": ".join(filter(None, (named, text)))
        return int(entry.get("exitCode") or 0), problem[:MAX_PROBLEM]
    for entry in (*before, *own):
        waiting = (entry.get("state") or {}).get("waiting") or {}
        reason, text = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
        if reason and reason not in ("ContainerCreating", "PodInitializing"):
            return None, f"{reason}: {text}"[:MAX_PROBLEM] if text else reason
    return None, told[:MAX_PROBLEM]


def _terminated(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return how those of the containers ended that have."""
    states = [entry.get("state") or {} for entry in entries]
    return [state["terminated"] for state in states if state.get("terminated")]
