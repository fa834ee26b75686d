from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Mapping
from typing import Any

import pytest
from tests.support.metrics import metric
from tests.support.wait import eventually

from tinsmith.names import InstanceName
from tinsmith_environment import Action, Observation, StepResult
from tinsmith_environment.instances.instance import (
    InstanceLimits,
    InstanceState,
    InstanceView,
    NewInstance,
)
from tinsmith_environment.instances.instances import InstanceRegistry
from tinsmith_environment.registry import EnvironmentRegistry, EnvironmentSpec
from tinsmith_environment.workers.worker import Begun, WorkerLoss
from tinsmith_runtime.errors import (
    AbortedError,
    CapacityExhaustedError,
    EnvironmentFailedError,
    EnvironmentNotFoundError,
    FailedPreconditionError,
    InstanceNotFoundError,
    InvalidFieldError,
    RequestIdReusedError,
    TinsmithError,
)

GO = Action(text="go")


class FakeWorker:
    """Counts steps; `done` ends, `raise` fails, `refuse` is refused, `wait` waits for `gate`."""

    def __init__(self) -> None:
        self.num_instances = 0
        self.loss: WorkerLoss | None = None
        self.steps: list[str] = []
        self.closed: list[str] = []
        self.created: list[Mapping[str, Any]] = []
        self.gate = asyncio.Event()
        self.create_error: TinsmithError | None = None

    async def create(
        self, instance: str, class_path: str, settings: object, seed: int, config: Any
    ) -> Begun:
        await asyncio.sleep(0)
        if self.create_error is not None:
            raise self.create_error
        self.created.append(config)
        return Begun(Observation.of_user(f"seed {seed}"))

    async def step(self, instance: str, action: Action) -> StepResult:
        self.steps.append(str(action.text))
        await asyncio.sleep(0)
        match action.text:
            case "raise":
                raise EnvironmentFailedError("the environment failed: boom", cause="raised")
            case "refuse":
                raise InvalidFieldError("action", "is refused")
            case "wait":
                await self.gate.wait()
        return StepResult(
            Observation.of_user(f"after {len(self.steps)}"), 0.5, action.text == "done"
        )

    async def close(self, instance: str) -> None:
        self.closed.append(instance)


class Rig:
    def __init__(self, **limits: Any) -> None:
        self.now_s = 1000.0
        self.worker = FakeWorker()
        spec = EnvironmentSpec(name="task", class_path="m:C", default_config={"level": 1})
        self.registry = InstanceRegistry(
            EnvironmentRegistry([spec]),
            self,
            InstanceLimits(**{"ttl_s": 60.0, **limits}),
            clock=lambda: self.now_s,
            now=lambda: datetime.datetime.fromtimestamp(self.now_s, datetime.UTC),
        )
        self._num_requests = 0

    async def assign(self, project: str) -> FakeWorker:
        return self.worker

    async def create(self, project: str = "p", **fields: Any) -> InstanceView:
        self._num_requests += 1
        request_id = f"r{self._num_requests}"
        identity = {
            "request_id": fields.pop("request_id", request_id),
            "digest": fields.pop("digest", b"d"),
        }
        wished = {"environment": "task", "seed": 1, "config": {}, **fields}
        return await self.registry.create(NewInstance(project=project, **wished), **identity)

    async def step(self, view: InstanceView, index: int, text: str = "go") -> StepResult:
        return await self.registry.step(view.name.project, view.name, index, Action(text=text))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def of_resets(part: str) -> float:
    """Return the number, or the time, of all creations that went well."""
    name = f"tinsmith_environment_reset_duration_seconds_{part}"
    return metric(name, environment="task", outcome="ok")


async def test_an_episode_from_begin_to_end(rig: Rig) -> None:
    begin_s, before_s, num_before = time.perf_counter(), of_resets("sum"), of_resets("count")
    view = await rig.create(seed=5, config={"level": 2})
    assert of_resets("count") == num_before + 1
    assert 0 <= of_resets("sum") - before_s <= time.perf_counter() - begin_s
    assert view.state is InstanceState.ACTIVE
    assert view.observation.messages[0].content == "seed 5"
    assert rig.worker.created == [{"level": 2}]
    assert (await rig.step(view, 0)).done is False
    assert rig.registry.get("p", view.name).num_steps == 1
    assert (await rig.step(view, 1, "done")).done is True
    after = rig.registry.get("p", view.name)
    assert (after.state, after.num_steps) == (InstanceState.FINISHED, 2)
    await asyncio.sleep(0)
    assert rig.worker.closed == [view.name.instance]
    assert rig.worker.num_instances == 0
    with pytest.raises(FailedPreconditionError, match="over after 2 steps"):
        await rig.step(view, 2)


async def test_a_repeated_step_is_applied_once(rig: Rig) -> None:
    view = await rig.create()
    first = await rig.step(view, 0)
    assert await rig.step(view, 0) == first
    last = await rig.step(view, 1, "done")
    assert await rig.step(view, 1, "done") == last
    assert rig.worker.steps == ["go", "done"]


async def test_a_step_that_nobody_waited_for_is_found_by_its_repeat(rig: Rig) -> None:
    view = await rig.create()
    waiting = asyncio.create_task(rig.step(view, 0, "wait"))
    await eventually(lambda: rig.worker.steps)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    repeat = asyncio.create_task(rig.step(view, 0, "wait"))
    await asyncio.sleep(0)
    rig.worker.gate.set()
    assert (await repeat).reward == 0.5
    assert rig.worker.steps == ["wait"]


@pytest.mark.parametrize(
    ("index", "text"),
    [
        pytest.param(0, "other", id="other-action"),
        pytest.param(2, "go", id="gap"),
    ],
)
async def test_a_wrong_index_is_aborted(rig: Rig, index: int, text: str) -> None:
    view = await rig.create()
    await rig.step(view, 0)
    with pytest.raises(AbortedError) as caught:
        await rig.step(view, index, text)
    assert type(caught.value) is AbortedError
    assert caught.value.metadata["expected"] == "1"


async def test_a_step_behind_a_running_one_is_aborted(rig: Rig) -> None:
    view = await rig.create()
    running = asyncio.create_task(rig.step(view, 0, "wait"))
    await asyncio.sleep(0)
    with pytest.raises(AbortedError, match="which runs"):
        await rig.step(view, 1)
    rig.worker.gate.set()
    await running


async def test_a_refused_action_leaves_the_episode_as_it_was(rig: Rig) -> None:
    view = await rig.create()
    with pytest.raises(InvalidFieldError):
        await rig.step(view, 0, "refuse")
    assert (await rig.step(view, 0)).reward == 0.5


async def test_a_failed_environment_fails_its_episode_only(rig: Rig) -> None:
    view, other = await rig.create(), await rig.create()
    for _ in range(2):
        with pytest.raises(EnvironmentFailedError, match="boom") as caught:
            await rig.step(view, 0, "raise")
    assert caught.value.metadata["instance"] == str(view.name)
    assert rig.worker.steps == ["raise"]
    assert rig.registry.get("p", view.name).state is InstanceState.FAILED
    with pytest.raises(EnvironmentFailedError):
        await rig.step(view, 1)
    assert (await rig.step(other, 0)).reward == 0.5


async def test_a_lost_worker_fails_its_instances(rig: Rig) -> None:
    view = await rig.create()
    rig.worker.loss = WorkerLoss("crashed", "its worker process died with signal SIGKILL")
    assert rig.registry.get("p", view.name).state is InstanceState.FAILED
    with pytest.raises(EnvironmentFailedError, match="SIGKILL"):
        await rig.step(view, 0)
    assert rig.worker.num_instances == 0


async def test_a_foreign_instance_does_not_exist(rig: Rig) -> None:
    view = await rig.create("p")
    with pytest.raises(InstanceNotFoundError):
        rig.registry.get("q", view.name)
    with pytest.raises(InstanceNotFoundError):
        await rig.registry.step("q", view.name, 0, GO)
    rig.registry.delete("q", view.name)
    renamed = InstanceName("q", "task", view.name.instance)
    with pytest.raises(InstanceNotFoundError):
        rig.registry.get("q", renamed)
    assert rig.registry.get("p", view.name).state is InstanceState.ACTIVE


async def test_deleting_twice_succeeds(rig: Rig) -> None:
    view = await rig.create()
    rig.registry.delete("p", view.name)
    rig.registry.delete("p", view.name)
    with pytest.raises(InstanceNotFoundError):
        await rig.step(view, 0)
    assert rig.worker.num_instances == 0


async def test_an_idle_instance_expires_and_a_used_one_does_not(rig: Rig) -> None:
    num_before = metric("tinsmith_environment_expired_instances_total")
    idle, used = await rig.create(), await rig.create()
    assert used.expire_time == datetime.datetime.fromtimestamp(1060.0, datetime.UTC)
    rig.now_s += 40
    await rig.step(used, 0)
    rig.now_s += 40
    with pytest.raises(InstanceNotFoundError):
        rig.registry.get("p", idle.name)
    assert rig.registry.get("p", used.name).num_steps == 1
    rig.now_s += 40
    assert rig.registry.expire() == 1
    assert rig.worker.num_instances == 0
    # The one that was asked for counts as well.
    assert metric("tinsmith_environment_expired_instances_total") == num_before + 2


async def test_a_running_step_keeps_its_instance(rig: Rig) -> None:
    view = await rig.create()
    running = asyncio.create_task(rig.step(view, 0, "wait"))
    await asyncio.sleep(0)
    rig.now_s += 100
    assert rig.registry.expire() == 0
    rig.worker.gate.set()
    await running
    assert rig.registry.expire() == 0


async def test_a_repeated_create_gives_the_same_instance(rig: Rig) -> None:
    views = await asyncio.gather(*(rig.create(request_id="same") for _ in range(3)))
    assert len({view.name for view in views}) == 1
    assert len(rig.worker.created) == 1
    other = await rig.create("q", request_id="same")
    assert other.name != views[0].name


async def test_a_reused_request_id_is_refused(rig: Rig) -> None:
    view = await rig.create(request_id="same")
    with pytest.raises(RequestIdReusedError, match="another body"):
        await rig.create(request_id="same", digest=b"other")
    rig.registry.delete("p", view.name)
    with pytest.raises(RequestIdReusedError, match="deleted or expired"):
        await rig.create(request_id="same")


async def test_a_failed_create_keeps_its_answer_and_a_refused_one_does_not(rig: Rig) -> None:
    rig.worker.create_error = EnvironmentFailedError("boom", cause="raised")
    for _ in range(2):
        with pytest.raises(EnvironmentFailedError):
            await rig.create(request_id="failed")
    rig.worker.create_error = InvalidFieldError("config.level", "is wrong")
    with pytest.raises(InvalidFieldError):
        await rig.create(request_id="refused")
    rig.worker.create_error = None
    assert await rig.create(request_id="refused")
    with pytest.raises(EnvironmentFailedError):
        await rig.create(request_id="failed")
    assert rig.worker.num_instances == 1


@pytest.mark.parametrize(
    ("limits", "whose"),
    [
        pytest.param({"max_instances": 2}, "pod", id="pod"),
        pytest.param({"max_project_instances": 2}, "project p", id="project"),
    ],
)
async def test_capacity(limits: dict[str, int], whose: str) -> None:
    rig = Rig(**limits)
    results = await asyncio.gather(*(rig.create() for _ in range(3)), return_exceptions=True)
    views = [result for result in results if isinstance(result, InstanceView)]
    (refused,) = [result for result in results if isinstance(result, CapacityExhaustedError)]
    assert whose in refused.message
    assert refused.retry_after_s
    # An episode that is over makes room.
    await rig.step(views[0], 0, "done")
    await rig.create()


async def test_unknown_names_and_settings(rig: Rig) -> None:
    with pytest.raises(EnvironmentNotFoundError):
        await rig.create(environment="nothing")
    with pytest.raises(InvalidFieldError, match="known are: level"):
        await rig.create(config={"levle": 1})


@pytest.mark.parametrize(
    ("limits", "whose"),
    [
        pytest.param({"max_starting": 2}, "the pod", id="pod"),
        pytest.param({"max_project_starting": 2}, "project p", id="project"),
    ],
)
async def test_those_that_start_are_limited_apart(limits: dict[str, int], whose: str) -> None:
    rig = Rig(**limits)
    for _ in range(2):
        # Those that live do not count.
        results = await asyncio.gather(*(rig.create() for _ in range(3)), return_exceptions=True)
        (refused,) = [result for result in results if isinstance(result, CapacityExhaustedError)]
        assert f"of {whose} are being started, the limit is 2" in refused.message
        assert refused.retry_after_s == 0.2


async def test_instances_go_with_their_client() -> None:
    rig = Rig(ttl_s=1000.0)
    for _ in range(2):
        # A client that comes back counts anew.
        view, other = await rig.create(client_id="c"), await rig.create()
        with rig.registry.clients.present(("p", "c")), rig.registry.clients.present(("p", "c")):
            rig.now_s += 31
            assert rig.registry.expire() == 0
        rig.now_s += 29
        assert rig.registry.expire() == 0
        assert (await rig.step(view, 0)).reward == 0.5
        await rig.step(other, 0)
        rig.now_s += 1
        assert rig.registry.expire() == 1
        with pytest.raises(InstanceNotFoundError):
            rig.registry.get("p", view.name)
        rig.registry.delete("p", other.name)
    await rig.create("q", client_id="c")
    rig.now_s += 40
    assert rig.registry.expire() == 0


async def test_statistics_by_job(rig: Rig) -> None:
    finished = await rig.create(job="one")
    await rig.step(finished, 0)
    await rig.step(finished, 1, "done")
    failed = await rig.create(job="one")
    with pytest.raises(EnvironmentFailedError):
        await rig.step(failed, 0, "raise")
    rig.registry.delete("p", (await rig.create(job="one")).name)
    await rig.create(job="two")
    await rig.create("q", job="one")
    (one, counted), (two, _) = rig.registry.statistics.of("p")
    assert (one.job, one.environment, two.job) == ("one", "task", "two")
    assert (counted.num_episodes, counted.num_finished, counted.num_abandoned) == (3, 1, 1)
    assert counted.num_failures == {"raised": 1}
    assert (counted.num_steps, counted.mean_reward) == (2, 1.0)
    assert 0 < counted.step_time_s(0.5) <= counted.step_time_s(0.99)
    rig.registry.statistics.reset("p", "one")
    assert [key.job for key, _ in rig.registry.statistics.of("p")] == ["two"]
    rig.registry.statistics.reset("p")
    assert rig.registry.statistics.of("p") == []
    assert len(rig.registry.statistics.of("q")) == 1


async def test_a_failed_start_counts_as_a_failed_episode(rig: Rig) -> None:
    rig.worker.create_error = EnvironmentFailedError("boom", cause="raised")
    with pytest.raises(EnvironmentFailedError):
        await rig.create(job="one")
    ((_, counted),) = rig.registry.statistics.of("p", "one")
    assert (counted.num_episodes, counted.num_failures) == (1, {"raised": 1})
