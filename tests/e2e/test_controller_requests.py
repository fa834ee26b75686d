"""What authors of jobs ask for: stopping, going on, scaling, deadlines, what a failure means."""

from __future__ import annotations

import pytest

from tests.e2e.cluster import Json, path
from tests.e2e.history import History, leftovers
from tests.e2e.lab import Lab, training


def test_a_job_that_ends_is_deleted_with_everything_after_its_ttl(lab: Lab) -> None:
    with lab.nodes(1) as kubelet, History(lab.cluster, [lab.namespace]) as history:
        lab.jobs.create("short", training(trainers=2, ttlSecondsAfterFinished=1))
        lab.jobs.wait_phase("short", "Running")
        assert len(lab.good_keys("short")) == 1
        lab.end(kubelet, "short", "driver", 0)
        lab.cluster.wait_for(
            lambda: not any(job["metadata"]["name"] == "short" for job in lab.jobs.all()),
            "the job to be deleted",
        )
        assert not lab.good_keys("short")
        # The cluster's collector learns of new kinds of owners every 30 s.
        lab.cluster.wait_for(lambda: not _everything(lab, "short"), "its things to go", 60.0)
    assert history.last_status("short")["phase"] == "Succeeded"
    assert not history.violations()


def test_a_suspended_job_holds_nothing_and_goes_on(lab: Lab) -> None:
    with lab.nodes(1), History(lab.cluster, [lab.namespace]) as history:
        lab.jobs.create("naps", training(trainers=2))
        first = lab.jobs.wait_phase("naps", "Running")
        lab.jobs.patch("naps", {"suspend": True})
        status = lab.jobs.wait_phase("naps", "Suspended")
        assert "assignments" not in status
        assert not lab.jobs.pods("naps")
        assert not lab.good_keys("naps")
        assert not leftovers(lab.cluster, lab.namespace, "naps")
        lab.jobs.patch("naps", {"suspend": False})
        again = lab.jobs.wait_phase("naps", "Running")
        assert again["epoch"] > first["epoch"]
        assert len(lab.good_keys("naps")) == 1
    assert not history.violations()


def test_a_cancelled_job_saves_first_and_never_runs_again(lab: Lab) -> None:
    with (
        lab.nodes(1, ending=lambda pod: 1.0 if _role(pod) == "driver" else 0.0),
        History(lab.cluster, [lab.namespace]) as history,
    ):
        lab.jobs.create("off", training())
        lab.jobs.wait_phase("off", "Running")
        lab.jobs.patch("off", {"cancel": True})
        lab.jobs.wait_phase("off", "Cancelling")
        lab.waits("off", "driver", "save")
        lab.jobs.wait_phase("off", "Cancelled")
        lab.cluster.wait_for(lambda: not lab.jobs.pods("off"))
        lab.cluster.wait_for(lambda: not leftovers(lab.cluster, lab.namespace, "off"))
        assert not lab.good_keys("off")
    trainers = [pod for pod in history.pods("off-trainer") if pod.is_deleting]
    drivers = [pod for pod in history.pods("off-driver") if pod.is_deleting]
    assert trainers
    assert drivers
    assert not history.violations()


def test_a_job_is_cancelled_while_it_waits(lab: Lab) -> None:
    with lab.nodes(1):
        lab.jobs.create("never", training(gpus=16))
        lab.jobs.wait_phase("never", "Queued")
        lab.jobs.patch("never", {"cancel": True})
        lab.jobs.wait_phase("never", "Cancelled")


def test_samplers_are_scaled_by_kubectl_while_the_rest_runs_on(lab: Lab) -> None:
    with lab.nodes(1), History(lab.cluster, [lab.namespace]) as history:
        lab.jobs.create("wide", training(samplers=1))
        lab.jobs.wait_phase("wide", "Running")
        trainer = lab.pod("wide", "trainer")["metadata"]["uid"]
        driver = lab.pod("wide", "driver")["metadata"]["uid"]
        for replicas in (4, 2):
            _scale(lab, "wide", replicas)
            _wait_scaled(lab, "wide", replicas)
            lab.jobs.wait_phase("wide", "Running")
        assert lab.pod("wide", "trainer")["metadata"]["uid"] == trainer
        assert lab.pod("wide", "driver")["metadata"]["uid"] == driver
        scale = lab.cluster.api.get(lab.jobs.url("wide", "scale"))
        selector = scale["status"]["selector"]
        url = path("v1", "pods", lab.namespace)
        lab.cluster.wait_for(lambda: len(lab.cluster.api.list(url, labelSelector=selector)) == 2)
    assert not history.violations()


def test_samplers_that_do_not_fit_wait_and_hold_nobody_up(lab: Lab) -> None:
    with lab.nodes(1, gpus=4):
        lab.jobs.create("tall", training(samplers=1))
        lab.jobs.wait_phase("tall", "Running")
        _scale(lab, "tall", 9)
        lab.waits("tall", "GPU")
        _scale(lab, "tall", 1)
        lab.jobs.wait_phase("tall", "Running")


def test_exit_code_42_ends_the_job_where_the_policy_says_so(lab: Lab) -> None:
    rules = [{"action": "FailJob", "roles": ["driver"], "exitCodes": [42]}]
    with lab.nodes(1) as kubelet:
        lab.jobs.create("answer", training(failurePolicy={"rules": rules}))
        lab.jobs.wait_phase("answer", "Running")
        lab.end(kubelet, "answer", "driver", 42)
        status = lab.jobs.wait_phase("answer", "Failed")
        assert status["failure"]["exitCode"] == 42
        assert status["failure"]["reason"] == "FailurePolicy"
        lab.cluster.wait_for(lambda: len(lab.jobs.pods("answer")) == 1, "only the driver's log")
        lab.cluster.wait_for(lambda: not leftovers(lab.cluster, lab.namespace, "answer"))


def test_a_job_fails_after_its_backoff_limit(lab: Lab) -> None:
    with lab.nodes(1) as kubelet, History(lab.cluster, [lab.namespace]) as history:
        lab.jobs.create("stubborn", training(backoffLimit=1))
        lab.jobs.wait_phase("stubborn", "Running")
        first = lab.end(kubelet, "stubborn", "driver", 1)
        _wait_replaced(lab, "stubborn", "driver", first)
        lab.jobs.wait_phase("stubborn", "Running")
        assert len(lab.good_keys("stubborn")) == 1
        lab.end(kubelet, "stubborn", "driver", 1)
        status = lab.jobs.wait_phase("stubborn", "Failed")
        assert status["failure"]["reason"] == "BackoffLimitExceeded"
        assert "backoffLimit is 1" in status["failure"]["message"]
    assert not history.violations()


def test_an_ignored_failure_restarts_and_does_not_count(lab: Lab) -> None:
    rules = [{"action": "Ignore", "exitCodes": [7]}]
    spec = training(samplers=2, backoffLimit=0, failurePolicy={"rules": rules})
    with lab.nodes(1) as kubelet, History(lab.cluster, [lab.namespace]) as history:
        lab.jobs.create("calm", spec)
        lab.jobs.wait_phase("calm", "Running")
        gone = lab.end(kubelet, "calm", "sampler", 7, index=1)
        _wait_replaced(lab, "calm", "sampler", gone, index=1)
        status = lab.jobs.wait_phase("calm", "Running")
        assert status.get("restartCount", 0) == 0
    assert not history.violations()


@pytest.mark.parametrize(
    ("action", "replaced"),
    [
        pytest.param("RestartRole", {"sampler"}, id="the-role"),
        pytest.param("RestartJob", {"sampler", "trainer", "driver"}, id="the-job"),
    ],
)
def test_a_restart_takes_the_old_pods_away_before_it_makes_new_ones(
    lab: Lab, action: str, replaced: set[str]
) -> None:
    rules = [{"action": action, "exitCodes": [9]}]
    with (
        lab.nodes(1, ending=lambda _: 0.7) as kubelet,
        History(lab.cluster, [lab.namespace]) as history,
    ):
        lab.jobs.create("anew", training(samplers=2, failurePolicy={"rules": rules}))
        before = _uids(lab.jobs.wait_phase("anew", "Running"))
        gone = lab.end(kubelet, "anew", "sampler", 9)
        _wait_replaced(lab, "anew", "sampler", gone)
        after = _uids(lab.jobs.wait_phase("anew", "Running"))

        assert {place[0] for place in before if before[place] != after[place]} == replaced
    assert not history.violations()


def test_a_start_that_takes_too_long_fails_with_what_is_missing(lab: Lab) -> None:
    spec = training(startupDeadlineSeconds=2)
    # No node has this label, so the driver is never bound.
    spec["roles"]["driver"]["resources"] = {"requests": {"cpu": "4000"}}
    with lab.nodes(1):
        lab.jobs.create("late", spec)
        status = lab.jobs.wait_phase("late", "Failed")
        assert status["failure"]["reason"] == "StartupDeadlineExceeded"
        assert "driver 0" in status["failure"]["message"]


def test_a_job_that_runs_too_long_fails(lab: Lab) -> None:
    with lab.nodes(1):
        lab.jobs.create("long", training(activeDeadlineSeconds=2))
        status = lab.jobs.wait_phase("long", "Failed")
        assert status["failure"]["reason"] == "DeadlineExceeded"


def test_a_pod_that_somebody_deletes_is_made_again(lab: Lab) -> None:
    with lab.nodes(1), History(lab.cluster, [lab.namespace]) as history:
        lab.jobs.create("mended", training())
        lab.jobs.wait_phase("mended", "Running")
        name = lab.pod("mended", "trainer")["metadata"]["name"]
        lab.cluster.kubectl("delete", "pod", name, "-n", lab.namespace)
        _wait_replaced(lab, "mended", "trainer", name)
        lab.jobs.wait_phase("mended", "Running")
    assert not history.violations()


def test_a_job_that_is_deleted_takes_everything_with_it(lab: Lab) -> None:
    with lab.nodes(1):
        lab.jobs.create("wiped", training(trainers=2))
        lab.jobs.wait_phase("wiped", "Running")
        lab.cluster.kubectl("delete", "trainingjob", "wiped", "-n", lab.namespace)
        lab.cluster.wait_for(lambda: not _everything(lab, "wiped"), "its things to go", 60.0)
        lab.cluster.wait_for(lambda: not lab.good_keys("wiped"), "its keys to be revoked")


def _scale(lab: Lab, job: str, replicas: int) -> None:
    lab.cluster.kubectl("scale", "trainingjob", job, f"--replicas={replicas}", "-n", lab.namespace)


def _wait_scaled(lab: Lab, job: str, replicas: int) -> None:
    def is_scaled() -> bool:
        has = int(lab.jobs.status(job)["samplerReplicas"])
        return has == _ready(lab, job, "sampler") == replicas

    lab.cluster.wait_for(is_scaled, f"{replicas} samplers")


def _ready(lab: Lab, job: str, role: str) -> int:
    entries = lab.jobs.status(job).get("roleStatuses", [])
    return int(next((entry["ready"] for entry in entries if entry["name"] == role), 0))


def _uids(status: Json) -> dict[tuple[str, int], str]:
    return {(e["role"], e["index"]): e["uid"] for e in status["assignments"]}


def _wait_replaced(lab: Lab, job: str, role: str, pod: str, index: int = 0) -> None:
    def is_replaced() -> bool:
        return any(
            (entry["role"], entry["index"]) == (role, index) and entry["pod"] != pod
            for entry in lab.jobs.status(job).get("assignments", [])
        )

    lab.cluster.wait_for(is_replaced, f"{pod} to be replaced")


def _everything(lab: Lab, job: str) -> list[Json]:
    return [
        item
        for plural in ("pods", "secrets", "services")
        for item in lab.cluster.api.list(
            path("v1", plural, lab.namespace), labelSelector=f"tinsmith.dev/workload={job}"
        )
    ]


def _role(pod: Json) -> str:
    return str(pod["metadata"]["labels"].get("tinsmith.dev/role", ""))
