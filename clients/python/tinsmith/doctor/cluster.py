"""Checks of a cluster, by `kubectl`: whether jobs can be handed to it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tinsmith.doctor.findings import Finding, good, note, problem

_DEFINITIONS = ("trainingjobs.tinsmith.dev", "trainerpools.tinsmith.dev")
_TIMEOUT_S = 20.0
_DETAIL = 200

Kubectl = Callable[[Sequence[str]], dict[str, Any]]


class KubectlError(Exception):
    """`kubectl` is missing, or could not be answered."""


def check_cluster(kubectl: Kubectl | None = None) -> Iterator[Finding]:
    """Look at the cluster of the current context.

    Args:
        kubectl: Runs a command of it and returns its JSON; that of this machine by default.

    Yields:
        What was found.
    """
    kubectl = kubectl or run_kubectl
    try:
        kubectl(["get", "--raw", "/version"])
    except KubectlError as error:
        yield problem(
            "cluster", f"no cluster answers: {error}", "check kubectl and its current context"
        )
        return
    try:
        for definition in _DEFINITIONS:
            if not _exists(kubectl, definition):
                yield problem(
                    "definitions",
                    f"the cluster does not know {definition}",
                    "helm install tinsmith helm/tinsmith, or kubectl apply -k k8s",
                )
                return
        yield from _controllers(kubectl)
        yield from _stuck_jobs(kubectl)
    except KubectlError as error:
        yield problem("cluster", str(error), "ask for the rights to get jobs, pods and definitions")


def run_kubectl(words: Sequence[str]) -> dict[str, Any]:
    """Run `kubectl` and return its JSON.

    Raises:
        KubectlError: If it is missing, fails, or does not answer in time.
    """
    try:
        done = subprocess.run(
            ["kubectl", *words], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise KubectlError("kubectl is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise KubectlError(f"no answer within {_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise KubectlError(" ".join(done.stderr.split())[:_DETAIL])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _exists(kubectl: Kubectl, definition: str) -> bool:
    words = ["get", "customresourcedefinitions", "--ignore-not-found", "-o", "json", definition]
    try:
        return bool(kubectl(words))
    except json.JSONDecodeError:
        return False


def _controllers(kubectl: Kubectl) -> Iterator[Finding]:
    label = "app.kubernetes.io/component=controller,app.kubernetes.io/name=tinsmith"
    pods = kubectl(["get", "pods", "--all-namespaces", "-l", label, "-o", "json"])["items"]
    ready = [pod for pod in pods if _is_ready(pod)]
    if ready:
        yield good("controller", f"{len(ready)} of {len(pods)} controllers are ready")
        return
    yield problem(
        "controller",
        f"none of {len(pods)} controllers is ready: no job begins",
        f"kubectl describe pods --all-namespaces -l {label}",
    )


def _stuck_jobs(kubectl: Kubectl) -> Iterator[Finding]:
    jobs = kubectl(["get", "trainingjobs", "--all-namespaces", "-o", "json"])["items"]
    for job in jobs:
        status = job.get("status", {})
        if status.get("phase") not in ("Pending", "Queued", "Failed"):
            continue
        where = f"{job['metadata']['namespace']}/{job['metadata']['name']}"
        messages = [
            condition.get("message", "")
            for condition in status.get("conditions", ())
            if condition.get("message")
        ]
        tell = problem if status["phase"] == "Failed" else note
        yield tell(
            "jobs",
            f"{where} is {status['phase']}: {messages[-1] if messages else 'no reason is given'}",
            f"kubectl describe trainingjob -n {where.replace('/', ' ')}",
        )
    yield good("jobs", f"{len(jobs)} jobs")


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
