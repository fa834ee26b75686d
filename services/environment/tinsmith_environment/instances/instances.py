"""Live instances: create, step, look, delete, expire.

Everything that changes an instance runs in a task of its own, shielded from the caller: a client
that hangs up in the middle of a step finds its answer when it sends the step again. The last answer
of an instance is kept for that; `step_index` tells a repeat from a new step.

An episode that is over leaves its worker at once, its record stays until it is deleted or expires.
Only live episodes count against the limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from tinsmith.names import InstanceName
from tinsmith.tracing import spans
from tinsmith_environment.environment import Action, JsonValue, Observation, StepResult
from tinsmith_environment.instances.capacity import Capacity
from tinsmith_environment.instances.clients import Clients
from tinsmith_environment.instances.idempotency import Creations
from tinsmith_environment.instances.instance import (
    AppliedStep,
    InstanceLimits,
    InstanceState,
    InstanceView,
    LiveInstance,
    NewInstance,
    begin_step_span,
)
from tinsmith_environment.instances.statistics import (
    JobStatistics,
    Statistics,
    StatisticsKey,
)
from tinsmith_environment.metrics import (
    ACTIVE_INSTANCES,
    EPISODE_REWARD,
    EPISODES,
    EXPIRED_INSTANCES,
    FAILURES,
    RESET_SECONDS,
    STEP_SECONDS,
)
from tinsmith_environment.registry import EnvironmentRegistry, EnvironmentSpec
from tinsmith_environment.workers.worker import RAISED, Begun, Worker, Workers
from tinsmith_runtime.errors import (
    AbortedError,
    EnvironmentFailedError,
    FailedPreconditionError,
    InstanceNotFoundError,
    TinsmithError,
)
from tinsmith_runtime.shielded import start

logger = logging.getLogger(__name__)

# Records of episodes that are over, for each live one that is allowed.
_ENDED_FACTOR = 4


class InstanceRegistry:
    """The instances of a pod.

    Args:
        environments: What can be created.
        workers: Where instances live.
        limits: How many there may be, and for how long.
        tag: What the ids of instances begin with, so that calls find this pod among several.
        clock: Monotonic seconds.
        now: Time of day, for what clients are told.
    """

    def __init__(
        self,
        environments: EnvironmentRegistry,
        workers: Workers,
        limits: InstanceLimits,
        *,
        tag: str = "",
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._environments = environments
        self._workers = workers
        self._limits = limits
        self._tag = tag
        self._clock = clock
        self._now = now
        self._instances: dict[InstanceName, LiveInstance] = {}
        self._ended: dict[InstanceName, None] = {}
        self._capacity = Capacity(limits, self._notice_losses)
        self._creations = Creations[InstanceView](clock)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.clients = Clients(limits.client_grace_s, clock)
        """Clients that have a stream of steps."""
        self.statistics = Statistics(now)
        """What the episodes of each job came to."""

    async def create(self, new: NewInstance, *, request_id: str, digest: bytes) -> InstanceView:
        """Create and reset an instance; the same request gives the same instance.

        Args:
            new: What is wished for.
            request_id: Identifies the request within the project.
            digest: Hash of the whole request.

        Raises:
            EnvironmentNotFoundError: If no environment has this name.
            InvalidFieldError: If the config is wrong.
            RequestIdReusedError: If the id was used with another body, or its instance is gone.
            CapacityExhaustedError: If too many instances live, or are being started.
            EnvironmentFailedError: If the environment failed.
        """
        key = (new.project, request_id)
        created = self._creations.find(key, digest)
        if created is None:
            spec = self._environments.get(new.environment)
            merged = spec.merge_config(new.config)
            created = self._spawn(self._create(new, spec, merged))
            self._creations.add(key, digest, created)
        view = await asyncio.shield(created)
        if view.name not in self._instances:
            self._creations.raise_gone(key, str(view.name))
        return view

    async def step(
        self, project: str, name: InstanceName, step_index: int, action: Action
    ) -> StepResult:
        """Apply an action; repeating the last one gives the same answer.

        Raises:
            InstanceNotFoundError: If the instance is unknown, foreign or expired.
            InvalidFieldError: If the environment has no such kind of action.
            FailedPreconditionError: If the episode is over.
            AbortedError: If the index is neither the next nor a repeat of the last.
            EnvironmentFailedError: If the environment failed.
        """
        return await asyncio.shield(self.begin_step(project, name, step_index, action))

    def begin_step(
        self, project: str, name: InstanceName, step_index: int, action: Action
    ) -> asyncio.Task[StepResult]:
        """Do as `step`, without waiting; the task goes on if its caller leaves."""
        instance = self._find(project, name)
        self._touch(instance)
        last = instance.last_step
        if last is not None and last.index == step_index and last.action == action:
            return last.task
        self._check_step(instance, step_index)
        task = self._spawn(self._step(instance, step_index, action))
        instance.last_step = AppliedStep(step_index, action, task)
        return task

    def get(self, project: str, name: InstanceName) -> InstanceView:
        """Return an instance.

        Raises:
            InstanceNotFoundError: If it is unknown, foreign or expired.
        """
        return self._view(self._find(project, name))

    def delete(self, project: str, name: InstanceName) -> None:
        """Remove an instance; one that is gone, or foreign, is left as it is."""
        with contextlib.suppress(InstanceNotFoundError):
            self._remove(self._find(project, name))

    def expire(self) -> int:
        """Remove what was not used for a while; return how many."""
        now_s = self._clock()
        gone = self.clients.take_gone()
        expired = [
            instance
            for instance in self._instances.values()
            if not instance.is_busy and (instance.expires_s <= now_s or instance.client in gone)
        ]
        for instance in expired:
            self._remove(instance)
        EXPIRED_INSTANCES.inc(len(expired))
        self._creations.expire()
        return len(expired)

    async def stop(self) -> None:
        """Drop everything; steps that run end with their workers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._instances.clear()
        ACTIVE_INSTANCES.set(0)

    async def _create(
        self, new: NewInstance, spec: EnvironmentSpec, config: Mapping[str, JsonValue]
    ) -> InstanceView:
        drawn = secrets.token_hex(12)
        name = InstanceName(new.project, spec.name, f"{self._tag}-{drawn}" if self._tag else drawn)
        with self._capacity.starting(new.project):
            begin_s = time.perf_counter()
            outcome = "error"
            statistics = self.statistics.begin(StatisticsKey(new.project, new.job, spec.name))
            try:
                worker, begun = await self._start(name, spec, new.seed, config)
                outcome = "ok"
            except EnvironmentFailedError as error:
                statistics.num_episodes += 1
                self._report_failure(spec.name, statistics, error)
                raise
            finally:
                RESET_SECONDS.labels(spec.name, outcome).observe(time.perf_counter() - begin_s)
        statistics.num_episodes += 1
        instance = LiveInstance(
            name,
            worker,
            begun.observation,
            self._clock() + self._limits.ttl_s,
            statistics,
            (new.project, new.client_id) if new.client_id else None,
            action_kinds=begun.action_kinds,
            span=spans.current() if spans.is_on() else None,
        )
        self._instances[name] = instance
        self._capacity.add(new.project)
        ACTIVE_INSTANCES.set(self._capacity.num_live)
        while len(self._ended) > self._limits.max_instances * _ENDED_FACTOR:
            self._remove(self._instances[next(iter(self._ended))])
        return self._view(instance)

    async def _start(
        self, name: InstanceName, spec: EnvironmentSpec, seed: int, config: Mapping[str, JsonValue]
    ) -> tuple[Worker, Begun]:
        worker = await self._workers.assign(name.project)
        worker.num_instances += 1
        try:
            begun = await worker.create(name.instance, spec.class_path, spec.settings, seed, config)
        except BaseException:
            worker.num_instances -= 1
            raise
        return worker, begun

    async def _step(self, instance: LiveInstance, index: int, action: Action) -> StepResult:
        environment = instance.name.environment
        begin_s = time.perf_counter()
        outcome = "error"
        span = begin_step_span(instance, index) if spans.is_on() else None
        try:
            result = await instance.worker.step(instance.name.instance, action)
            outcome = "ok"
        except EnvironmentFailedError as error:
            self._fail(instance, error)
            raise
        except TinsmithError:
            # Refused before it was applied: the next step still has this index.
            instance.last_step = None
            raise
        finally:
            time_s = time.perf_counter() - begin_s
            STEP_SECONDS.labels(environment, outcome).observe(time_s)
            if span is not None:
                span.end(problem="" if outcome == "ok" else outcome)
        instance.num_steps = index + 1
        instance.observation = result.observation
        instance.reward += result.reward
        instance.statistics.add_step(time_s)
        if result.done:
            instance.state = InstanceState.FINISHED
            instance.statistics.add_end(instance.reward)
            EPISODES.labels(environment, InstanceState.FINISHED.value).inc()
            EPISODE_REWARD.labels(environment).observe(instance.reward)
            self._release(instance)
        self._touch(instance)
        return result

    def _check_step(self, instance: LiveInstance, step_index: int) -> None:
        if instance.failure is not None:
            raise instance.failure
        if instance.state is InstanceState.FINISHED:
            raise FailedPreconditionError(
                f"the episode of {instance.name} is over after {instance.num_steps} steps; create "
                "a new instance",
                instance=instance.name,
                state=instance.state.value,
            )
        if step_index != instance.num_steps or instance.is_busy:
            running = " (which runs)" if instance.is_busy else ""
            raise AbortedError(
                f"step_index {step_index} of {instance.name} is neither the next, "
                f"{instance.num_steps}{running}, nor a repeat of the last with the same action",
                instance=instance.name,
                expected=instance.num_steps,
            )

    def _find(self, project: str, name: InstanceName) -> LiveInstance:
        instance = self._instances.get(name)
        if instance is not None and instance.expires_s <= self._clock() and not instance.is_busy:
            self._remove(instance)
            EXPIRED_INSTANCES.inc()
            instance = None
        if instance is None or project != name.project:
            raise instance_not_found(name)
        self._notice_loss(instance)
        return instance

    def _notice_losses(self) -> None:
        for instance in list(self._instances.values()):
            self._notice_loss(instance)

    def _notice_loss(self, instance: LiveInstance) -> None:
        """Fail an instance whose worker is gone."""
        loss = instance.worker.loss
        if loss is not None and instance.state is InstanceState.ACTIVE and not instance.is_busy:
            message = f"the episode is lost: {loss.message}; create a new instance"
            self._fail(instance, EnvironmentFailedError(message, cause=loss.cause))

    def _fail(self, instance: LiveInstance, error: EnvironmentFailedError) -> None:
        error.metadata["instance"] = str(instance.name)
        instance.state = InstanceState.FAILED
        instance.failure = error
        instance.observation = Observation()
        self._report_failure(instance.name.environment, instance.statistics, error)
        self._release(instance)

    def _report_failure(
        self, environment: str, statistics: JobStatistics, error: EnvironmentFailedError
    ) -> None:
        cause = error.metadata.get("cause", RAISED)
        statistics.num_failures[cause] += 1
        FAILURES.labels(environment, cause).inc()
        EPISODES.labels(environment, InstanceState.FAILED.value).inc()
        logger.warning("episode lost", extra={"environment": environment, "cause": cause})

    def _release(self, instance: LiveInstance) -> None:
        """Take an instance out of its worker."""
        if not instance.in_worker:
            return
        instance.in_worker = False
        instance.worker.num_instances -= 1
        if instance.worker.loss is None:
            self._spawn(instance.worker.close(instance.name.instance))
        self._ended[instance.name] = None
        self._capacity.remove(instance.name.project)
        ACTIVE_INSTANCES.set(self._capacity.num_live)

    def _remove(self, instance: LiveInstance) -> None:
        if instance.state is InstanceState.ACTIVE and instance.in_worker:
            instance.statistics.num_abandoned += 1
            EPISODES.labels(instance.name.environment, "abandoned").inc()
        self._release(instance)
        self._instances.pop(instance.name, None)
        self._ended.pop(instance.name, None)

    def _touch(self, instance: LiveInstance) -> None:
        instance.expires_s = self._clock() + self._limits.ttl_s

    def _view(self, instance: LiveInstance) -> InstanceView:
        left = datetime.timedelta(seconds=instance.expires_s - self._clock())
        return InstanceView(
            name=instance.name,
            state=instance.state,
            observation=instance.observation,
            num_steps=instance.num_steps,
            expire_time=self._now() + left,
            action_kinds=instance.action_kinds,
        )

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return start(work, self._tasks)


def instance_not_found(name: InstanceName | str) -> InstanceNotFoundError:
    """Return the error for an instance that is unknown, foreign or expired."""
    return InstanceNotFoundError(
        f"instance {name} does not exist or expired; create a new one", instance=name
    )
