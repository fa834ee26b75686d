"""A status write that is done and not answered, while the watches are cut: no GPU is given twice.

Two faults are enough for a controller that forgets such a write. `a` waits for its PriorityClass,
so that `b` or `c` is decided about before it. The answer to that decision is lost, and so is the
watch that would have told of it. Then the class is made, `a` comes first, and is given the same
GPUs.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.e2e.api_proxy import ApiProxy
from tests.e2e.cluster import TestCluster
from tests.e2e.history import History
from tests.e2e.lab import Lab, lab_at_rest, training
from tests.e2e.reaper import Reaper
from tests.faults.proxy import Fault, Request

_PATIENCE_S = 60.0
_NAMES = ("a", "b", "c")
_PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"
_LATE_CLASS = "test-lost-answers-late"

pytestmark = pytest.mark.timeout(300)


class Script:
    """Which requests the faults of this test strike.

    Attributes:
        is_lost: Set once the answer to an assignment was lost.
    """

    def __init__(self) -> None:
        self.is_lost = threading.Event()

    def is_assignment_of_another(self, request: Request) -> bool:
        """Whether a request gives nodes to `b` or `c`: their first status."""
        is_first = any(_is_status_write(request, name) for name in _NAMES[1:])
        if not is_first or self.is_lost.is_set():
            return False
        self.is_lost.set()
        return True

    def is_list_after_it(self, request: Request) -> bool:
        """Whether a request lists the jobs anew."""
        is_list = "/trainingjobs?" in request.target and "watch=" not in request.target
        return is_list and self.is_lost.is_set()


def test_no_gpu_is_given_twice_when_an_answer_is_lost_with_the_watches(
    resources: TestCluster, namespace: str, tmp_path: Path
) -> None:
    script = Script()
    with ApiProxy(resources) as proxy:
        proxied = proxy.kubeconfig(resources.kubeconfig, tmp_path / "proxied.kubeconfig")
        with (
            lab_at_rest(resources, namespace, tmp_path, kubeconfig=proxied) as (lab, _),
            Reaper(lab.controller),
        ):
            resources.wait_for(lab.was_elected, "the controller to be elected")
            with History(resources, [namespace]) as history:
                proxy.cut_watches_at(
                    Fault(matches=script.is_assignment_of_another, cut_response_after=0)
                )
                proxy.add(Fault(matches=script.is_list_after_it, delay_s=1.0, times=1))
                _live(lab, script)
    assert script.is_lost.is_set(), "the faults did not strike"
    assert not history.violations()


def _live(lab: Lab, script: Script) -> None:
    late = training(trainers=2, gpus=2, samplers=1, scheduling={"priorityClassName": _LATE_CLASS})
    lab.jobs.create("a", late)
    lab.jobs.wait_phase("a", "Queued")
    for name in _NAMES[1:]:
        lab.jobs.create(name, training(trainers=2, gpus=2, samplers=1))
    assert script.is_lost.wait(_PATIENCE_S)
    manifest = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1000}
    lab.cluster.api.create(_PRIORITIES, {**manifest, "metadata": {"name": _LATE_CLASS}})
    try:
        for name in _NAMES:
            lab.jobs.wait_phase(name, "Running", timeout_s=_PATIENCE_S)
    finally:
        lab.cluster.api.delete(f"{_PRIORITIES}/{_LATE_CLASS}")


def _is_status_write(request: Request, name: str) -> bool:
    return request.method == "PUT" and request.target.endswith(f"/{name}/status")
