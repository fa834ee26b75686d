"""Settings, queue, election, informers and the queues file, with clocks and servers of our own."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.support.clock import Clock
from tests.support.metrics import metric
from tests.support.wait import TIMEOUT_S
from tests.unit.controller.controller_settings import REQUIRED

from tinsmith_controller.assignment.queue_config import QueueConfigFile, parse_queue_config
from tinsmith_controller.assignment.types import QueueConfig, Share
from tinsmith_controller.config import ControllerConfig
from tinsmith_controller.kube.api_client import JOBS, ApiError, Json, Resource
from tinsmith_controller.kube.informer import Informer
from tinsmith_controller.kube.leader_election import BELIEF, LeaderElection, NotLeaderError
from tinsmith_controller.kube.work_queue import WorkQueue
from tinsmith_jobs.plan.limits import Limits
from tinsmith_jobs.quantities import QuantityError, Resources, parse_quantity
from tinsmith_runtime.errors import ConfigError


def test_what_is_set_about_plans_reaches_them() -> None:
    config = ControllerConfig(
        **REQUIRED,
        backoff_base_s=1.0,
        backoff_max_s=2.0,
        refusal_s=3.0,
    )

    assert config.limits() == Limits(
        backoff_base_s=1.0, backoff_max_s=2.0, refusal_s=3.0, endpoint="gateway:7077"
    )


class TestWorkQueue:
    def test_a_key_that_is_added_twice_is_taken_once(self) -> None:
        work: WorkQueue[str] = WorkQueue(Clock())
        work.add("a")
        work.add("a", 5.0)

        assert work.take(0) == "a"
        assert work.take(0) is None

    def test_a_key_that_a_worker_has_waits_until_it_is_done(self) -> None:
        work: WorkQueue[str] = WorkQueue(Clock())
        work.add("a")
        work.take(0)
        work.add("a")

        assert work.take(0) is None
        work.done("a")
        assert work.take(0) == "a"

    def test_the_earliest_of_two_delays_counts(self) -> None:
        clock = Clock()
        work: WorkQueue[str] = WorkQueue(clock)
        work.add("a", 10.0)
        work.add("a", 1.0)
        clock.now_s += 1.0

        assert work.take(0) == "a"
        work.done("a")
        clock.now_s += 20.0
        assert work.take(0) is None

    def test_failures_come_again_later_each_time(self) -> None:
        clock = Clock()
        work: WorkQueue[str] = WorkQueue(clock)
        work.add("a")
        pauses = []
        for _ in range(5):
            begin_s = clock.now_s
            while work.take(0) is None:
                clock.now_s += 0.01
            pauses.append(clock.now_s - begin_s)
            work.done("a", failed=True)

        assert pauses[0] == 0
        # Half to all of a pause that doubles; the clock ticks in steps of 0.01.
        for count, pause_s in enumerate(pauses[1:]):
            assert 0.05 * 2**count <= pause_s <= 0.1 * 2**count + 0.02

    def test_closing_wakes_those_who_wait(self) -> None:
        work: WorkQueue[str] = WorkQueue(Clock())
        found: queue.Queue[str | None] = queue.Queue()
        waiting = threading.Thread(target=lambda: found.put(work.take(60.0)))
        waiting.start()
        work.close()

        assert found.get(timeout=10) is None
        waiting.join(10)


class FakeLeases:
    """A server with one Lease, that checks resource versions."""

    def __init__(self) -> None:
        self.lease: Json | None = None
        self.is_away = False
        self.is_asked = threading.Event()
        self.is_passing = threading.Event()
        self.is_passing.set()
        self._version = 0

    def get(self, resource: Resource, namespace: str, name: str) -> Json:
        self._check()
        if self.lease is None:
            raise ApiError(404, "NotFound", "no lease")
        return copy.deepcopy(self.lease)

    def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        self._check()
        if self.lease is not None:
            raise ApiError(409, "AlreadyExists", "there is one")
        return self._store(body)

    def replace(
        self, resource: Resource, namespace: str, body: Json, *, subresource: str = ""
    ) -> Json:
        self._check()
        assert self.lease is not None
        if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "changed")
        return self._store(body)

    def _store(self, body: Json) -> Json:
        self._version += 1
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = str(self._version)
        return copy.deepcopy(self.lease)

    def _check(self) -> None:
        self.is_asked.set()
        assert self.is_passing.wait(TIMEOUT_S)
        if self.is_away:
            raise ApiError(0, "Unreachable", "away")


class TestElection:
    def _replica(self, server: FakeLeases, clock: Clock, name: str) -> LeaderElection:
        return LeaderElection(
            server, namespace="n", name="lease", identity=name, ttl_s=10.0, clock=clock
        )

    def test_one_of_two_is_elected(self) -> None:
        server, clock = FakeLeases(), Clock()
        first, second = (self._replica(server, clock, name) for name in "ab")

        assert first.try_once()
        assert not second.try_once()
        first.require()
        with pytest.raises(NotLeaderError):
            second.require()

    def test_a_holder_stops_believing_before_another_takes_over(self) -> None:
        server, clock = FakeLeases(), Clock()
        first, second = (self._replica(server, clock, name) for name in "ab")
        first.try_once()
        second.try_once()
        clock.now_s += BELIEF * 10.0

        assert not first.is_leader
        assert not second.try_once(), "the lease has not run out yet"
        clock.now_s += 10.0
        assert second.try_once()
        assert not first.try_once()

    def test_a_holder_that_can_not_renew_is_none_in_time(self) -> None:
        server, clock = FakeLeases(), Clock()
        first = self._replica(server, clock, "a")
        first.try_once()
        server.is_away = True
        clock.now_s += 5.0
        assert first.try_once(), "it still holds what it has"
        clock.now_s += 1.0
        assert not first.try_once()

    def test_a_holder_makes_way_though_it_fails_by_a_bug(self) -> None:
        server, lost = FakeLeases(), threading.Event()
        first = LeaderElection(server, namespace="n", name="lease", identity="a", ttl_s=0.05)
        first.try_once()
        assert metric("tinsmith_controller_is_leader") == 1
        server.lease = {}  # not even metadata

        first.keep(lost.set)

        assert lost.is_set()
        assert metric("tinsmith_controller_is_leader") == 0

    def test_a_lease_that_was_given_back_is_taken_at_once(self) -> None:
        server, clock = FakeLeases(), Clock()
        first, second = (self._replica(server, clock, name) for name in "ab")
        first.try_once()
        first.stop()

        assert metric("tinsmith_controller_is_leader") == 0
        assert second.try_once()

    def test_a_lease_that_is_taken_as_the_replica_is_stopped_is_given_back(self) -> None:
        server, clock = FakeLeases(), Clock()
        first, second = (self._replica(server, clock, name) for name in "ab")
        server.is_passing.clear()
        electing = threading.Thread(target=first.wait_elected)
        electing.start()
        assert server.is_asked.wait(TIMEOUT_S)
        stopping = threading.Thread(target=first.stop)
        stopping.start()
        server.is_passing.set()
        for thread in (electing, stopping):
            thread.join(TIMEOUT_S)

        assert not first.is_leader
        assert not first.try_once(), "it was stopped"
        assert second.try_once()

    def test_a_slow_clock_of_another_machine_does_not_matter(self) -> None:
        server, clock = FakeLeases(), Clock()
        first, second = (self._replica(server, clock, name) for name in "ab")
        first.try_once()
        assert server.lease is not None
        server.lease["spec"]["renewTime"] = "1970-01-01T00:00:00.000000Z"

        assert not second.try_once()


class FakeServer:
    """Lists and watches what a test says."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self.version = "10"
        self.events: queue.Queue[tuple[str, Json] | ApiError] = queue.Queue()
        self.num_lists = 0

    def list(self, resource: Resource, namespace: str = "") -> tuple[list[Json], str]:
        self.num_lists += 1
        return list(self.items), self.version

    def watch(
        self, resource: Resource, namespace: str, version: str, *, timeout_s: int
    ) -> Iterator[tuple[str, Json]]:
        while True:
            event = self.events.get(timeout=20)
            if isinstance(event, ApiError):
                raise event
            yield event


def thing(name: str, version: int, uid: str = "u") -> Json:
    return {"metadata": {"name": name, "uid": uid, "resourceVersion": str(version)}}


class TestInformer:
    @pytest.fixture
    def server(self) -> FakeServer:
        server = FakeServer()
        server.items = [thing("a", 5)]
        return server

    @pytest.fixture
    def changes(self) -> queue.Queue[tuple[Any, Any]]:
        return queue.Queue()

    @pytest.fixture
    def informer(
        self, server: FakeServer, changes: queue.Queue[tuple[Any, Any]]
    ) -> Iterator[Informer[int]]:
        informer = Informer(
            server,
            JOBS,
            ("",),
            lambda content: int(content["metadata"]["resourceVersion"]),
            lambda before, after: changes.put((before, after)),
        )
        informer.start()
        assert informer.wait_synced(10)
        assert changes.get(timeout=10) == (None, 5)
        yield informer
        informer.stop()
        server.events.put(ApiError(410, "Gone", "the test is over"))

    def test_follows_changes(
        self, server: FakeServer, informer: Informer[int], changes: queue.Queue[tuple[Any, Any]]
    ) -> None:
        server.events.put(("MODIFIED", thing("a", 11)))
        assert changes.get(timeout=10) == (5, 11)
        server.events.put(("DELETED", thing("a", 12)))
        assert changes.get(timeout=10) == (11, None)
        assert not informer.snapshot()

    def test_what_was_written_is_not_overtaken_by_what_was_before(
        self, server: FakeServer, informer: Informer[int], changes: queue.Queue[tuple[Any, Any]]
    ) -> None:
        informer.put(thing("a", 20))
        assert changes.get(timeout=10) == (5, 20)
        server.events.put(("MODIFIED", thing("a", 15)))
        server.events.put(("ADDED", thing("b", 21)))

        assert changes.get(timeout=10) == (None, 21)
        assert informer.get(("", "a")) == 20

    def test_what_was_deleted_does_not_come_back(
        self, server: FakeServer, informer: Informer[int], changes: queue.Queue[tuple[Any, Any]]
    ) -> None:
        informer.remove(thing("a", 20))
        assert changes.get(timeout=10) == (5, None)
        server.events.put(("MODIFIED", thing("a", 15)))
        server.events.put(("ADDED", thing("a", 21, uid="another")))

        assert changes.get(timeout=10) == (None, 21)

    def test_a_version_that_is_too_old_is_listed_anew(
        self, server: FakeServer, informer: Informer[int], changes: queue.Queue[tuple[Any, Any]]
    ) -> None:
        server.items, server.version = [thing("b", 30)], "30"
        server.events.put(ApiError(410, "Expired", "too old"))

        assert changes.get(timeout=10) == (None, 30)
        assert changes.get(timeout=10) == (5, None)
        assert set(informer.snapshot()) == {("", "b")}
        assert server.num_lists == 2

    def test_listeners_hear_of_changes_in_their_order_though_two_threads_make_them(self) -> None:
        heard: list[int | None] = []
        is_told, may_go_on = threading.Event(), threading.Event()

        def listen(before: int | None, after: int | None) -> None:
            if after is not None:
                is_told.set()
                may_go_on.wait(10)
            heard.append(after)

        informer = Informer(FakeServer(), JOBS, ("",), lambda _: 1, listen)
        writer = threading.Thread(target=lambda: informer.put(thing("a", 6)))
        writer.start()
        assert is_told.wait(10)
        watcher = threading.Thread(target=lambda: informer.remove(thing("a", 7)))
        watcher.start()
        watcher.join(0.2)  # time to overtake, if it could
        may_go_on.set()
        writer.join(10)
        watcher.join(10)

        assert heard == [1, None]


class TestPolicyFile:
    def test_reads_queues_and_projects(self) -> None:
        content = b"[queues.research]\nmax_gpus = 64\n[projects.a]\nweight = 2.0\n"

        assert parse_queue_config(content, "file") == QueueConfig(
            queues={"research": Share(64, 1.0)}, projects={"a": Share(None, 2.0)}
        )

    @pytest.mark.parametrize(
        "content",
        [
            b"queue = 1",
            b"[queues.a]\ngpus = 1",
            b"[queues.a]\nmax_gpus = -1",
            b"[projects.a]\nweight = 0",
            b"[projects.a]\nweight = true",
            b"backfill_patience_s = 'long'",
            b"not toml",
            b"\xff",
        ],
    )
    def test_refuses_what_it_does_not_know(self, content: bytes) -> None:
        with pytest.raises(ConfigError):
            parse_queue_config(content, "file")

    def test_a_change_that_is_wrong_changes_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "queues.toml"
        path.write_text("[queues.a]\nmax_gpus = 1\n")
        policy = QueueConfigFile(path)
        before = policy.current()
        path.write_text("[queues.a]\nmax_gpus = -1\n")
        assert policy.current() == before
        path.write_text("[queues.a]\nmax_gpus = 2\n")

        assert policy.current().queues == {"a": Share(2)}


class TestQuantities:
    @pytest.mark.parametrize(
        ("text", "value"),
        [("500m", "0.5"), ("2", "2"), ("4Gi", str(4 * 2**30)), ("1e3", "1000"), ("1.5k", "1500")],
    )
    def test_reads_what_kubernetes_writes(self, text: str, value: str) -> None:
        assert parse_quantity(text) == Decimal(value)

    @pytest.mark.parametrize("text", ["", "NaN", "inf", "4 GB", "1ee3", True, None, "9" * 100, "m"])
    def test_refuses_what_is_none(self, text: object) -> None:
        with pytest.raises(QuantityError):
            parse_quantity(text)

    def test_what_is_not_asked_for_may_be_overdrawn(self) -> None:
        assert Resources(gpus=1).fits_in(Resources(cpu_milli=-500, gpus=1))
        assert not Resources(cpu_milli=1, gpus=1).fits_in(Resources(cpu_milli=-500, gpus=1))
