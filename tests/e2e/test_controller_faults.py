"""The controller among other writers, on a bad network, and beside a second replica."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.cluster import ApiError, Json, Kubelet, TestCluster, path
from tests.e2e.deployment import DrainedPod
from tests.e2e.history import History, leftovers
from tests.e2e.lab import Lab, lab_at_rest, training
from tests.e2e.reaper import Reaper
from tests.faults.proxy import Fault, FaultProxy
from tests.observability.prometheus_server import scraping
from tests.observability.scraped import Day, Scraped
from tests.support.pods import PodProcess
from tinsmith_local.process import free_port

_PATIENCE_S = 60.0
_LOST_EXIT_CODE = 3


@pytest.fixture
def proxy(cluster: TestCluster) -> Iterator[FaultProxy]:
    """A network between the controller and the API server."""
    host, _, port = cluster.api.server.removeprefix("https://").rpartition(":")
    with FaultProxy(host, int(port)) as proxy:
        yield proxy


def test_a_second_writer_does_not_stop_jobs_from_living(
    resources: TestCluster, namespace: str, tmp_path: Path
) -> None:
    with _lab(resources, namespace, tmp_path) as (lab, kubelet), lab.controller:
        with History(resources, [namespace]) as history, _second_writer(lab):
            _live(lab, kubelet)
        lab.check_log()
    _check(lab, history)


def test_cut_and_stalled_connections_do_not_stop_jobs_from_living(
    resources: TestCluster, namespace: str, tmp_path: Path, proxy: FaultProxy
) -> None:
    with _lab(resources, namespace, tmp_path, proxy) as (lab, kubelet), Reaper(lab.controller):
        with History(resources, [namespace]) as history, _bad_network(proxy):
            _live(lab, kubelet)
        _check_settled(lab)
    assert proxy.num_connections > 20
    _check(lab, history)


def test_what_happened_while_the_api_server_was_away_is_found_out_afterwards(
    resources: TestCluster, namespace: str, tmp_path: Path, proxy: FaultProxy
) -> None:
    with _lab(resources, namespace, tmp_path, proxy) as (lab, kubelet), Reaper(lab.controller):
        with History(resources, [namespace]) as history:
            for name in ("ends", "fails", "stays"):
                lab.jobs.create(name, training(gpus=2))
            for name in ("ends", "fails", "stays"):
                lab.jobs.wait_phase(name, "Running", timeout_s=_PATIENCE_S)
            with proxy.outage():
                lab.end(kubelet, "ends", "driver", 0)
                lab.end(kubelet, "fails", "trainer", 1)
                lab.jobs.create("new", training(gpus=2))
                time.sleep(10.0)
            lab.jobs.wait_phase("ends", "Succeeded", timeout_s=_PATIENCE_S)
            lab.jobs.wait_phase("new", "Running", timeout_s=_PATIENCE_S)
            resources.wait_for(lambda: lab.jobs.status("fails").get("restartCount") == 1)
            for name in ("fails", "stays"):
                lab.jobs.wait_phase(name, "Running", timeout_s=_PATIENCE_S)
        _check_settled(lab)
    _check(lab, history)


def test_of_two_replicas_one_decides_and_the_other_takes_over(
    resources: TestCluster, namespace: str, tmp_path: Path
) -> None:
    with _lab(resources, namespace, tmp_path) as (lab, kubelet):
        first, second = lab.controller, _replica(lab, 1)
        with first, second, History(resources, [namespace]) as history:
            lab.jobs.create("one", training(trainers=2, gpus=2))
            lab.jobs.wait_phase("one", "Running")
            leader, other = (first, second) if _was_elected(first) else (second, first)
            assert not _was_elected(other)

            # Frozen for longer than its lease, it finds out that another one decides, and ends.
            leader.send(signal.SIGSTOP)
            lab.jobs.create("two", training(trainers=2, gpus=2))
            lab.jobs.wait_phase("two", "Running", timeout_s=_PATIENCE_S)
            lab.end(kubelet, "two", "driver", 0)
            lab.jobs.wait_phase("two", "Succeeded", timeout_s=_PATIENCE_S)
            before = _settled_versions(lab)
            leader.send(signal.SIGCONT)
            assert leader.wait(20) == _LOST_EXIT_CODE
            assert _versions(lab) == before

            leader.start()
            other.kill()
            lab.end(kubelet, "one", "driver", 0)
            lab.jobs.wait_phase("one", "Succeeded", timeout_s=_PATIENCE_S)
            _check_settled(lab)
            for process in (first, second):
                assert "by a bug" not in process.log.read_text()
    _check(lab, history)


def test_every_panel_of_the_controller_has_data(
    resources: TestCluster, namespace: str, tmp_path: Path, proxy: FaultProxy
) -> None:
    address = f"127.0.0.1:{free_port()}"
    with (
        _lab(resources, namespace, tmp_path, proxy, metrics_address=address) as (lab, kubelet),
        lab.controller,
        scraping(tmp_path, [address]) as prometheus,
    ):
        begin_s = time.time()
        resources.wait_for(lab.was_elected, "a leader")
        lab.jobs.create("too-large", training(gpus=2, trainers=100))
        lab.jobs.create("ends", training(gpus=2))
        lab.jobs.wait_phase("ends", "Running", timeout_s=_PATIENCE_S)
        proxy.drop_connections()
        lab.end(kubelet, "ends", "driver", 0)
        lab.jobs.wait_phase("ends", "Succeeded", timeout_s=_PATIENCE_S)
        assert Scraped.since(prometheus, begin_s).empty(Day.CLUSTER) == []


def _live(lab: Lab, kubelet: Kubelet) -> None:
    """Let a few jobs run, stop, go on and end."""
    names = ("a", "b", "c")
    for name in names:
        lab.jobs.create(name, training(trainers=2, gpus=2, samplers=1))
    for name in names:
        lab.jobs.wait_phase(name, "Running", timeout_s=_PATIENCE_S)
    lab.jobs.patch("a", {"suspend": True})
    lab.jobs.wait_phase("a", "Suspended", timeout_s=_PATIENCE_S)
    lab.jobs.patch("a", {"suspend": False})
    node = lab.node(0)
    kubelet.lose_node(node)
    lab.cluster.wait_for(
        lambda: all(
            "deletionTimestamp" in pod["metadata"]
            for pod in lab.jobs.pods()
            if pod["spec"].get("nodeName") == node
        ),
        "everything to leave the lost node",
        _PATIENCE_S,
    )
    kubelet.return_node(node)
    for name in names:
        lab.jobs.wait_phase(name, "Running", timeout_s=_PATIENCE_S)
    lab.jobs.patch("b", {"cancel": True})
    lab.end(kubelet, "c", "driver", 0)
    lab.jobs.wait_phase("b", "Cancelled", timeout_s=_PATIENCE_S)
    lab.jobs.wait_phase("c", "Succeeded", timeout_s=_PATIENCE_S)
    lab.jobs.wait_phase("a", "Running", timeout_s=_PATIENCE_S)


def _check_settled(lab: Lab) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while left := leftovers(lab.cluster, lab.namespace):
        assert time.monotonic() < end_s, left
        time.sleep(0.1)


def _check(lab: Lab, history: History) -> None:
    assert not history.violations()
    log = lab.controller.log.read_text()
    assert "by a bug" not in log, log[log.index("by a bug") - 500 :][:4000]


def _lab(
    cluster: TestCluster,
    namespace: str,
    folder: Path,
    proxy: FaultProxy | None = None,
    **settings: Any,
) -> contextlib.AbstractContextManager[tuple[Lab, Kubelet]]:
    """Return a lab whose controller is not started yet, behind a proxy if there is one."""
    if proxy:
        settings["kubeconfig"] = _through(cluster, proxy, folder)
    return lab_at_rest(cluster, namespace, folder, **settings)


def _replica(lab: Lab, number: int) -> DrainedPod:
    identity = f"controller-{number}"
    settings = {**lab.controller.settings, "identity": identity}
    return DrainedPod(identity, lab.folder, settings)


def _through(cluster: TestCluster, proxy: FaultProxy, folder: Path) -> Path:
    """Return a kubeconfig whose server is behind a proxy."""
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = f"https://{proxy.address}"
    target = folder / "proxied.kubeconfig"
    target.write_text(yaml.safe_dump(config))
    return target


@contextlib.contextmanager
def _second_writer(lab: Lab) -> Iterator[None]:
    """Change labels, annotations and statuses of all jobs all the time."""

    def bump(number: int) -> None:
        for job in lab.jobs.all():
            name = job["metadata"]["name"]
            labels: Json = {"metadata": {"labels": {"bump": f"{number}"}}}
            with contextlib.suppress(ApiError):
                lab.cluster.api.patch(lab.jobs.url(name), labels)
                # A field that nothing depends on, in the part that the controller writes.
                status = {"status": {"endpoint": f"bump-{number}"}}
                lab.cluster.api.patch(lab.jobs.url(name, "status"), status)

    with _repeated(bump, 0.05):
        yield


@contextlib.contextmanager
def _bad_network(proxy: FaultProxy) -> Iterator[None]:
    """Cut every connection about each second; every third time let new ones hang for a while.

    No two pauses are alike: a controller whose start takes three of them would never get through.
    """
    pauses = random.Random(0)

    def strike(number: int) -> None:
        time.sleep(pauses.uniform(0.0, 1.0))
        if number % 3 == 2:
            with proxy.fault(Fault(stall=True)):
                time.sleep(0.7)
        else:
            proxy.drop_connections()

    with _repeated(strike, 0.5):
        yield


@contextlib.contextmanager
def _repeated(act: Callable[[int], None], pause_s: float) -> Iterator[None]:
    """Do something again and again, in a thread, within the context."""
    stopped = threading.Event()

    def run() -> None:
        number = 0
        while not stopped.wait(pause_s):
            act(number)
            number += 1

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(10)


def _was_elected(controller: PodProcess) -> bool:
    return '"event": "elected"' in controller.log.read_text()


def _settled_versions(lab: Lab) -> dict[str, str]:
    """Return the versions once they have not changed for a while."""
    _check_settled(lab)
    while True:
        before = _versions(lab)
        time.sleep(1.0)
        if _versions(lab) == before:
            return before


def _versions(lab: Lab) -> dict[str, str]:
    """Return the resource versions of everything of the namespace that controllers write."""
    return {
        item["metadata"]["uid"]: item["metadata"]["resourceVersion"]
        for items in (
            lab.jobs.all(),
            lab.jobs.pods(),
            lab.cluster.api.list(path("v1", "secrets", lab.namespace)),
        )
        for item in items
    }
