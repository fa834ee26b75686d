"""A status write that is done and not answered, while the watches are cut: no GPU is given twice.

Two faults are enough for a controller that forgets such a write. The first status of `a` comes
late, so that `b` or `c` is decided about before it. The answer to that decision is lost, and so is
the watch that would have told of it. Then `a` comes first, and is given the same GPUs.
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

pytestmark = pytest.mark.timeout(300)


class Script:
    """Which requests the faults of this test strike.

    Attributes:
        is_lost: Set once the answer to an assignment was lost.
    """

    def __init__(self) -> None:
        self.is_lost = threading.Event()
        self._counts = dict.fromkeys(_NAMES, 0)

    def is_first_status_of_a(self, request: Request) -> bool:
        """Whether a request queues `a`."""
        return _is_status_write(request, "a")

    def is_assignment_of_another(self, request: Request) -> bool:
        """Whether a request gives nodes to `b` or `c`: their second status, after Queued."""
        for name in _NAMES[1:]:
            if _is_status_write(request, name):
                self._counts[name] += 1
                if self._counts[name] == 2 and not self.is_lost.is_set():
                    self.is_lost.set()
                    return True
        return False

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
                proxy.add(Fault(matches=script.is_first_status_of_a, delay_s=0.25, times=1))
                proxy.cut_watches_at(
                    Fault(matches=script.is_assignment_of_another, cut_response_after=0)
                )
                proxy.add(Fault(matches=script.is_list_after_it, delay_s=0.5, times=1))
                _live(lab)
    assert script.is_lost.is_set(), "the faults did not strike"
    assert not history.violations()


def _live(lab: Lab) -> None:
    for name in _NAMES:
        lab.jobs.create(name, training(trainers=2, gpus=2, samplers=1))
    for name in _NAMES:
        lab.jobs.wait_phase(name, "Running", timeout_s=_PATIENCE_S)


def _is_status_write(request: Request, name: str) -> bool:
    return request.method == "PUT" and request.target.endswith(f"/{name}/status")
