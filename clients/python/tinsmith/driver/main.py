"""`python -m tinsmith.driver.main`: a recipe as the driver of a job.

It goes on where the part before ended, reports every step, and stops at SIGTERM once it has saved.
Exit codes: 0 done; 143 told to stop, and saved; 1 failed for good; 2 the description is wrong; 3
failed for a reason that may pass.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

from tinsmith.client import Client
from tinsmith.driver.agents import JobAgent, read_agents
from tinsmith.driver.context import STOPPED_EXIT_CODE, Job, JobEnvironment
from tinsmith.driver.methods import Method, read_method
from tinsmith.driver.readiness import wait_ready
from tinsmith.driver.state import DriverState
from tinsmith.errors import ConfigurationError, ErrorCode, NotFoundError, TinsmithError
from tinsmith.recipes.agents import RecipeAgent
from tinsmith.recipes.experiment.experiment import STATE_FILE
from tinsmith.recipes.experiment.observer import Observer, SavedState
from tinsmith.rollouts import RolloutError
from tinsmith.settings import RetryPolicy
from tinsmith.v1 import job_pb2

_LOG = logging.getLogger("tinsmith.job")

Outcome = job_pb2.TrainingJobReport

_FAILED, _MISCONFIGURED, _MAY_PASS = 1, 2, 3
_PASSING_CODES = frozenset(
    {
        ErrorCode.UNAVAILABLE,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.CANCELLED,
        ErrorCode.RESOURCE_EXHAUSTED,
    }
)
_PATIENCE_S = 1800.0
"""How long pods of the job may be away: a node is found, an image pulled, a model loaded."""
_PLAYING_INTERVAL_S = 5.0
"""Between two reports that answers come; the least `stallTimeoutSeconds` is twice that."""
_OPERATION_TIMEOUT_S = 24 * 3600.0
_TERMINATION_LOG = "/dev/termination-log"


class DriverObserver(Observer):
    """Reports what a recipe does, and stops it where that is safe.

    A job that is edited, to more steps or another learning rate, goes on as the same job.

    Args:
        job: What is reported to.
        client: Deletes saves that are not kept.
        directory: Where the recipe writes.
        method: How many saves are kept, and where a new run begins.
        state: What the part before kept.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        job: Job,
        client: Client,
        directory: Path,
        method: Method,
        state: DriverState,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.begin_from = method.resume_from
        self.may_change = True
        self._job = job
        self._client = client
        self._directory = directory
        self._method = method
        self._saves = list(state.saves)
        self._may_interrupt = False
        self._is_stopping = False
        self._clock = clock
        self._played_s = -_PLAYING_INTERVAL_S

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM: the first one saves, the second one ends the process."""
        del number, frame
        if self._job.should_stop:
            os._exit(STOPPED_EXIT_CODE)
        self._job.request_stop()
        if self._may_interrupt:
            raise KeyboardInterrupt

    def began(self, run: str, first_step: int) -> None:
        """Report the run."""
        if self._saves and first_step == 0:
            _LOG.warning("spec.model or spec.adapter has changed: another run begins")
            # They belong to the run before, and are no longer on the way.
            self._saves = []
        self._job.report(run=run, step=first_step, max_steps=self._method.config.num_steps)
        _LOG.info("run %s begins at step %d", run, first_step)

    def step_done(self, num_done: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Report a step; stop if the job is to."""
        self._job.report(step=num_done, max_steps=num_steps, metrics=metrics)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        _LOG.info("step %d/%d  %s", num_done, num_steps, shown)
        # Once: the recipe logs what is still on its way before it saves.
        if self._job.should_stop and not self._is_stopping:
            self._is_stopping = True
            raise KeyboardInterrupt

    def playing(self, num_done: int, num_steps: int) -> None:
        """Report now and then that scores come: one model may take longer than the stall rule."""
        now_s = self._clock()
        if now_s - self._played_s >= _PLAYING_INTERVAL_S:
            self._played_s = now_s
            self._job.report(step=num_done, max_steps=num_steps)

    def saved(self, state: SavedState) -> None:
        """Keep what the next part needs, then delete the saves that are not kept."""
        dropped: list[str] = []
        if state.step < self._method.config.num_steps:
            saves = [*self._saves, state.checkpoint]
            self._saves, dropped = (
                saves[-self._method.keep_last :],
                saves[: -self._method.keep_last],
            )
        kept = DriverState.collect(self._directory, self._saves)
        self._job.report(
            step=state.step,
            checkpoint=state.checkpoint,
            checkpoint_step=state.step,
            state=kept.encode(),
        )
        _LOG.info("saved %s", state.checkpoint)
        for checkpoint in dropped:
            with contextlib.suppress(NotFoundError):
                self._client.checkpoints.delete(checkpoint)

    def interruptible(self) -> AbstractContextManager[object]:
        """Let SIGTERM end what changes no weights."""
        return self._interruptible()

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        if self._job.should_stop:
            raise KeyboardInterrupt
        self._may_interrupt = True
        try:
            yield
        finally:
            self._may_interrupt = False


def run_job(
    client: Client,
    environment: JobEnvironment,
    directory: Path,
    agents: Sequence[JobAgent] = (),
) -> int:
    """Do what a job is for, and return the exit code.

    Args:
        client: Calls with the key of the job.
        environment: Which job.
        directory: Where the recipe writes.
        agents: The agents of the job.

    Raises:
        TinsmithError: If it cannot go on.
    """
    job = Job(client, environment)
    try:
        method = read_method(job.method, directory, agents)
        outcome = _drive(client, job, method, directory, agents)
    except Exception as error:
        if not _may_pass(error):
            job.end(Outcome.OUTCOME_FAILED, _sentence(error))
        raise
    if outcome == Outcome.OUTCOME_SAVED:
        return job.stopped()
    job.end(outcome)
    return 0


def _drive(
    client: Client, job: Job, method: Method, directory: Path, agents: Sequence[JobAgent]
) -> job_pb2.TrainingJobReport.Outcome.ValueType:
    state = DriverState.decode(job.state)
    state.restore(directory)
    saved = _last_save(directory)
    if saved is not None and _is_last(saved, method):
        # Ended after its last save, and before it could say so.
        return Outcome.OUTCOME_SUCCEEDED

    def say(text: str) -> None:
        _LOG.info("%s", text)
        job.report(message=text)

    with contextlib.ExitStack() as clients:
        policies = [
            _open_policy(agent, clients) for agent in (agents if method.takes_agents else ())
        ]
        return _run_recipe(client, job, method, directory, state, saved, policies, say)


def _run_recipe(
    client: Client,
    job: Job,
    method: Method,
    directory: Path,
    state: DriverState,
    saved: SavedState | None,
    policies: Sequence[RecipeAgent],
    say: Callable[[str], None],
) -> job_pb2.TrainingJobReport.Outcome.ValueType:
    models = {policy.client: policy.base_model for policy in policies}
    has_sampler = wait_ready(
        models or {client: method.base_model}, method, timeout_s=_PATIENCE_S, say=say
    )
    job.report(message="")
    if saved is None and job.run:
        # Begun and never saved: it is of no further use.
        with contextlib.suppress(NotFoundError):
            client.runs.delete(job.run)
    observer = DriverObserver(job, client, directory, method, state)
    observer.has_sampler = has_sampler
    signal.signal(signal.SIGTERM, observer.stop)
    try:
        further = {"agents": policies} if policies else {}
        method.recipe.main(method.config, client, observer, **further)
    except KeyboardInterrupt:
        _LOG.info("told to stop")
        return Outcome.OUTCOME_SAVED
    return Outcome.OUTCOME_SUCCEEDED


def main() -> int:
    """Drive the job of this process; return its exit code."""
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(message)s", force=True
    )
    # Until the recipe runs there is nothing to save.
    signal.signal(signal.SIGTERM, _end_at_once)
    directory = Path(os.environ.get("TINSMITH_JOB_DIR") or tempfile.mkdtemp(prefix="tinsmith-job-"))
    try:
        environment = JobEnvironment.read()
        with Client(
            display_name=environment.name,
            operation_timeout_s=_OPERATION_TIMEOUT_S,
            retry=RetryPolicy(budget_s=_PATIENCE_S),
        ) as client:
            return run_job(client, environment, directory, read_agents())
    except Exception as error:
        is_explained = isinstance(error, TinsmithError | ValueError | OSError)
        # An error of a rollout has its cause in code that a user wrote.
        if not is_explained or isinstance(error, RolloutError):
            traceback.print_exc()
        sentence = _sentence(error)
        _LOG.error("%s", sentence)
        _write_termination_log(sentence)
        if isinstance(error, ConfigurationError):
            return _MISCONFIGURED
        return _MAY_PASS if _may_pass(error) else _FAILED


def _open_policy(agent: JobAgent, clients: contextlib.ExitStack) -> RecipeAgent:
    client = agent.open_client(
        operation_timeout_s=_OPERATION_TIMEOUT_S, retry=RetryPolicy(budget_s=_PATIENCE_S)
    )
    clients.enter_context(client)
    return RecipeAgent(agent.name, client, agent.base_model, agent.adapter, agent.rank)


def _is_last(saved: SavedState, method: Method) -> bool:
    """Whether a save is the one at the end, rather than one before a change of maxSteps."""
    is_final: bool = saved.checkpoint.rpartition("/")[2] == method.config.checkpoint
    has_all: bool = saved.step >= method.config.num_steps
    return is_final and has_all


def _last_save(directory: Path) -> SavedState | None:
    path = directory / STATE_FILE
    return SavedState(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def _may_pass(error: Exception) -> bool:
    return isinstance(error, TinsmithError) and (
        error.code in _PASSING_CODES or error.retry_after_s is not None
    )


def _sentence(error: Exception) -> str:
    text = str(error) if isinstance(error, TinsmithError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _write_termination_log(sentence: str) -> None:
    """Leave the cause where the cluster reads it; without one, such as at a desk, it is logged."""
    path = Path(os.environ.get("TINSMITH_TERMINATION_LOG") or _TERMINATION_LOG)
    try:
        path.write_text(sentence[:4000], encoding="utf-8")
    except OSError as error:
        _LOG.debug("no termination log: %s", error)


def _end_at_once(number: int, frame: FrameType | None) -> Any:
    del number, frame
    raise SystemExit(STOPPED_EXIT_CODE)


if __name__ == "__main__":
    sys.exit(main())
