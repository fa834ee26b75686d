"""What the controller reads of a pod that a kubelet reports."""

from __future__ import annotations

from typing import Any

import pytest

from tinsmith_controller.objects.conversion import pod_record
from tinsmith_controller.objects.pod_outcome import outcome
from tinsmith_jobs.plan.observed import DISRUPTION

_GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/app/loop.py", line 3, in <module>
  |     asyncio.run(main())
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/app/loop.py", line 9, in play
    |     raise ValueError("no such player")
    | ValueError: no such player
    +------------------------------------
"""
_INVALID = """  File "/app/loop.py", line 3, in <module>
    Config(steps="many")
pydantic_core.ValidationError: 1 validation error for Config
steps
  Input should be a valid integer
"""
_ABORTED = """double free or corruption (fasttop)
Fatal Python error: Aborted

Current thread 0x00007f2a (most recent call first):
  File "/app/loop.py", line 3 in load

Extension modules: numpy._core._multiarray_umath (total: 1)
"""
_TRACEBACK = """Traceback (most recent call last):
  File "/app/loop.py", line 3, in <module>
    load("/models")
    ^^^^^^^^^^^^^^^
  File "/app/model.py", line 7, in load
    raise ModelError(folder)
loop.ModelError: the model is broken:
  its file is empty
"""


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        pytest.param(
            {"exitCode": 2, "reason": "Error", "message": "no such data"},
            "no such data",
            id="what the program wrote",
        ),
        pytest.param(
            {"exitCode": 1, "reason": "Error", "message": _TRACEBACK},
            "loop.ModelError: the model is broken: its file is empty",
            id="the error of a traceback",
        ),
        pytest.param(
            {"exitCode": 1, "reason": "Error", "message": _TRACEBACK[60:]},
            "loop.ModelError: the model is broken: its file is empty",
            id="the error of a traceback whose head the kubelet cut off",
        ),
        pytest.param(
            {"exitCode": 1, "reason": "Error", "message": f"{_TRACEBACK}wandb: synced\nDone\n"},
            "loop.ModelError: the model is broken: its file is empty",
            id="what is logged after the error",
        ),
        pytest.param(
            {"exitCode": 1, "reason": "Error", "message": _INVALID},
            "pydantic_core.ValidationError: 1 validation error for Config steps Input should be a "
            "valid integer",
            id="an error of several lines",
        ),
        pytest.param(
            {"exitCode": 134, "reason": "Error", "message": _ABORTED},
            "Fatal Python error: Aborted; its log has the stacks",
            id="native code aborted",
        ),
        pytest.param(
            {"exitCode": 134, "reason": "Error", "message": _ABORTED[70:]},
            "Fatal Python error; its log has the stacks",
            id="native code aborted in many threads",
        ),
        pytest.param(
            {"exitCode": 1, "reason": "Error", "message": _GROUP},
            "ValueError: no such player",
            id="the error of a task in a group",
        ),
        pytest.param(
            {
                "exitCode": 3,
                "reason": "Error",
                "message": '{"level": "critical", "event": "fenced", "problem": "run moved"}',
            },
            "fenced: run moved",
            id="a log line of ours",
        ),
        pytest.param(
            {"exitCode": 1, "reason": "Error", "message": "step 1\nstep 2\nno space left\n\n"},
            "no space left",
            id="the last line of a log",
        ),
        pytest.param(
            {"exitCode": 137, "reason": "OOMKilled", "message": "step 1\nstep 2\n"},
            "OOMKilled: step 2",
            id="what the kubelet knows and the program could not say",
        ),
        pytest.param({"exitCode": 137, "reason": "OOMKilled"}, "OOMKilled", id="no message"),
        pytest.param({"exitCode": 1, "reason": "Error"}, "", id="nothing"),
    ],
)
def test_the_problem_of_a_pod_that_ended_is_one_sentence(
    ended: dict[str, Any], expected: str
) -> None:
    status = {"phase": "Failed", "containerStatuses": [{"state": {"terminated": ended}}]}

    view = pod_record({"metadata": {"name": "pod"}, "status": status}).view

    assert view.exit_code == ended["exitCode"]
    assert view.problem == expected


@pytest.mark.parametrize(
    ("reason", "message", "is_turned_away", "is_refused", "is_disruption"),
    [
        pytest.param("OutOfnvidia.com/gpu", "not enough", True, True, False, id="refused"),
        pytest.param("UnexpectedAdmissionError", "no device", True, True, False, id="by a device"),
        pytest.param(
            "Evicted", "The node was low on resource: memory.", True, False, True, id="put out"
        ),
        pytest.param(
            "Evicted", "Pod used more than 1Mi.", True, False, False, id="by its own fault"
        ),
        pytest.param(
            "Shutdown", "Node is shutting down.", True, False, True, id="the node goes down"
        ),
        pytest.param("DeadlineExceeded", "too long", False, False, False, id="its own deadline"),
        pytest.param("", "why", False, False, False, id="a program that failed"),
    ],
)
def test_what_the_node_did_is_told_from_what_the_program_did(
    reason: str, message: str, is_turned_away: bool, is_refused: bool, is_disruption: bool
) -> None:
    status = {"phase": "Failed", "reason": reason, "message": message}

    view = pod_record({"metadata": {"name": "pod"}, "status": status}).view

    assert view.is_turned_away is is_turned_away
    assert view.is_refused is is_refused
    assert (DISRUPTION in view.conditions) is is_disruption
    assert view.problem == ": ".join(filter(None, (reason, message)))


def test_an_init_container_that_ended_well_hides_nothing() -> None:
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "keys" not found'}
    status: dict[str, Any] = {
        "initContainerStatuses": [
            {"name": "tinsmith-data", "state": {"terminated": {"exitCode": 0}}}
        ],
        "containerStatuses": [{"name": "driver", "state": {"waiting": waiting}}],
    }
    assert outcome(status) == (None, 'CreateContainerConfigError: secret "keys" not found')
    status["initContainerStatuses"][0]["state"]["terminated"] = {
        "exitCode": 2,
        "message": "no keys",
    }
    assert outcome(status) == (2, "no keys")
    status["containerStatuses"] = [{"name": "driver", "state": {"terminated": {"exitCode": 0}}}]
    status["initContainerStatuses"] = []
    assert outcome(status) == (0, "")
