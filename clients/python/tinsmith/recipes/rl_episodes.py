"""Reinforcement learning from remote agents: register groups of episodes, wait, take a step.

The loop knows nothing of how agents play. It registers each task `group_size` times; agents
anywhere claim the episodes, talk to the model through the OpenAI endpoint with the key of the
episode, and submit a reward:

    agent = tinsmith.Client().episodes.agent(queue="rl")
    while True:
        with agent.episode() as episode:
            openai = OpenAI(base_url=episode.openai.base_url, api_key=episode.openai.api_key)
            answer = openai.chat.completions.create(
                model=episode.openai.model, messages=episode.task["messages"]
            )
            is_right = episode.task["answer"] in answer.choices[0].message.content
            episode.end(tinsmith.WorkflowOutput(reward=float(is_right)))

A list of rewards is one for each call; their sum is what is compared in the group. `is_success` and
`log_metrics` of an outcome are in the metrics of the step, as those of environments are.

Validation is played by the same agents: an agent takes episodes of both types, and `episode.type`
says which it got. It is played before and after, and every `eval_every` steps, while no other
episode is open. What was sampled is trained on token by token as the server recorded it. Episodes
that are open while weights change go on; each token knows the version that sampled it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from tinsmith.client import Client
from tinsmith.episodes.types import RecordedTrajectory
from tinsmith.errors import FailedPreconditionError
from tinsmith.images import ImageRules
from tinsmith.recipes.episode_groups import EpisodeGroups, PlayedGroups
from tinsmith.recipes.experience import Scores, outcome_metrics
from tinsmith.recipes.experiment.curves import Curve
from tinsmith.recipes.experiment.evaluators import Evaluators
from tinsmith.recipes.experiment.experiment import Experiment
from tinsmith.recipes.experiment.interrupts import uninterrupted
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.pictures import Picture
from tinsmith.recipes.experiment.resume import ResumableRun
from tinsmith.recipes.experiment.run_log import RunLog, open_log, say_finished
from tinsmith.recipes.experiment.settings import TrainingConfig
from tinsmith.recipes.gradient_step import SubmittedStep, rate_of, submit_data
from tinsmith.recipes.kept_episodes import EpisodeKeeper, end_of
from tinsmith.recipes.kept_rollouts import TRAIN, VALIDATION, RolloutKeeper
from tinsmith.recipes.policy_gradient import compare_logprobs
from tinsmith.recipes.tasks.episode_tasks import AgentTask, TaskSet, load_tasks
from tinsmith.rollouts import center_rewards
from tinsmith.tracing import spans
from tinsmith.training.run_forms import TrainingRun
from tinsmith.types import Datum


@dataclass(frozen=True, kw_only=True)
class Config(TrainingConfig):
    """Settings of the recipe."""

    data: str = "arithmetic"
    """`arithmetic`, or a JSONL file with one task of any form on each line."""
    queue: str = "rl"
    """Where agents claim; of this loop alone."""
    model: str = "policy"
    """The name that agents give as `model`."""
    loss: str = "importance_sampling"
    learning_rate: float = 1e-3
    num_steps: int = 50
    num_tasks: int = 16
    """Tasks of a step."""
    group_size: int = 8
    """Episodes of each."""
    step_timeout_s: float = 1800.0
    """What has not ended by then is cancelled, and the step goes on without it."""
    num_validation: int = 64
    """Held-out tasks that are scored, at most; 0 scores nothing."""
    eval_every: int = 0
    """Steps between scores, for which agents play the held-out tasks; 0: before and after only."""
    save_every: int = 10
    keep_rollouts: str = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """What came out of a run.

    Attributes:
        before: Mean reward of the validation tasks that were played before training.
        after: The same after training.
        num_validation: Tasks that were played both times.
    """

    run: str
    checkpoint: str
    before: float
    after: float
    num_validation: int


def main(config: Config, client: Client, observer: Observer | None = None) -> Summary:
    """Train on what agents play, and let them play validation tasks before and after.

    Of an experiment that ended, nothing is repeated: what came out is returned.

    Raises:
        ConfigurationError: If the data cannot be read, an evaluator cannot be had, or `output_dir`
            holds another experiment.
        OperationTimeoutError: If no agent plays.
        KeyboardInterrupt: After Ctrl-C, once the state is saved; the same call resumes.
    """
    tasks = load_tasks(config.data)
    evaluators = Evaluators(config)
    with Experiment("rl_episodes", config, observer) as experiment:
        if experiment.summary is not None:
            summary = Summary(**experiment.summary)
            say_finished(experiment, [_describe_scores(summary)])
            return summary
        progress = ResumableRun(config, client, experiment, observer)
        name = Path(config.data).name
        title = f"rl_episodes {name} seed {config.seed}"
        picture = Picture(
            f"rl_episodes: {name}, seed {config.seed}",
            Curve("reward", "mean reward of the episodes", True, held_out="validation"),
        )
        log = open_log(experiment, config, title, progress, observer, picture)
        with log, progress.explained(log.say):
            log.say_begin(progress.describe())
            sampler = progress.run.sampler()
            groups = EpisodeGroups(
                client.episodes,
                queue=config.queue,
                sampler=sampler,
                model=config.model,
                say=log.say,
            )
            models = {model.base_model: model for model in client.list_models()}
            kept = EpisodeKeeper(
                RolloutKeeper(experiment.folder, config.keep_rollouts, sampler),
                sampler.get_tokenizer(),
                config.queue,
                models[sampler.base_model].images,
            )

            def score(num_done: int) -> _Score:
                return _score(config, groups, tasks, kept, num_done)

            def look(num_done: int) -> dict[str, float]:
                """Score what is held out, and call the evaluators, where that is due."""
                # After the last step agents play the held-out tasks in any case, and once.
                is_due = config.eval_every and num_done % config.eval_every == 0
                is_scored = is_due and num_done < config.num_steps
                with progress.interruptible():
                    found = score(num_done).metrics if is_scored else {}
                    return {**found, **evaluators.run(num_done, progress.run, log.say)}

            before = _Score(progress.once("before", lambda: score(progress.first_step).rewards))
            log.note_scores(0, before.metrics)
            _train(config, groups, tasks, progress, log, kept, look)
            checkpoint = progress.save(progress.last_step, config.checkpoint)
            after = score(config.num_steps)
            log.note_scores(config.num_steps, after.metrics)
            summary = _summarize(progress.run, checkpoint, before.rewards, after.rewards)
            progress.finish(asdict(summary), log.say)
            log.say_end([_describe_scores(summary)], summary.run, summary.checkpoint)
    return summary


def _describe_scores(summary: Summary) -> str:
    return (
        f"validation reward {summary.before:.3f} -> {summary.after:.3f} on "
        f"{summary.num_validation} tasks"
    )


def _train(
    config: Config,
    groups: EpisodeGroups,
    tasks: TaskSet,
    progress: ResumableRun,
    log: RunLog,
    kept: EpisodeKeeper,
    look: Callable[[int], dict[str, float]],
) -> None:
    done = progress.first_step
    try:
        for step in range(done, config.num_steps):
            with spans.block("step", {"tinsmith.step": step}, begins=True):
                with progress.interruptible():
                    played = groups.play(
                        tasks.draw(step, num_tasks=config.num_tasks, seed=config.seed),
                        group_size=config.group_size,
                        episode_type="train",
                        timeout_s=config.step_timeout_s,
                    )
                samples = trained_samples(played, kept.images)
                kept.keep(TRAIN, step, played)
                with uninterrupted():
                    submitted = _submit(config, progress.run, step, samples)
                    # From here on a save contains the step, whether its result was seen or not.
                    done = step + 1
                metrics = _describe(played, samples)
                metrics |= {} if submitted is None else _wait_for_step(samples, submitted)
            log.health.note_trained(len(samples))
            if "grad_norm" in metrics:
                log.health.note_gradient(metrics["grad_norm"])
            try:
                metrics |= look(done)
            finally:
                # A step that is done has its row, also where a look at it is given up.
                log.add(step, metrics)
            if config.save_every and done % config.save_every == 0 and done < config.num_steps:
                progress.save(done)
    except KeyboardInterrupt:
        if done > progress.first_step:
            progress.begin_last_save(done, log.say)
            progress.save(done)
        raise


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """A recorded trajectory and what its tokens are worth."""

    trajectory: RecordedTrajectory
    advantage: float
    images: ImageRules | None = None
    """How the model turns images of prompts into tokens."""

    def to_datum(self) -> Datum:
        """Return the training sequence."""
        return self.trajectory.to_datum(self.advantage, images=self.images)


def trained_samples(played: PlayedGroups, images: ImageRules | None = None) -> list[TrainedSample]:
    """Return what there is to learn from: trajectories of groups whose rewards differ.

    An advantage is a reward minus the mean of its group, divided by the number of episodes, since
    the service sums over tokens.

    Raises:
        FailedPreconditionError: If no episode recorded a model call: agents must use its key.
    """
    episodes = [episode for group in played.groups for episode in group]
    if episodes and not any(episode.trajectories for episode in episodes):
        raise FailedPreconditionError(
            f"none of {len(episodes)} episodes recorded a model call",
            remedy="agents must call base_url with the api_key of the episode",
        )
    advantages_PG = center_rewards(played.rewards_PG) / max(len(episodes), 1)
    return [
        TrainedSample(trajectory, float(advantage), images)
        for group, advantages in zip(played.groups, advantages_PG, strict=True)
        for episode, advantage in zip(group, advantages, strict=False)
        if advantage
        for trajectory in episode.trajectories
        if trajectory.num_sampled_tokens
    ]


def _submit(
    config: Config, run: TrainingRun, step: int, samples: Sequence[TrainedSample]
) -> SubmittedStep | None:
    """Send an optimizer step, unless there is nothing to learn from."""
    if not samples:
        return None
    rate = rate_of(config, step, peak=config.learning_rate, num_steps=config.num_steps)
    return submit_data(config, run, [sample.to_datum() for sample in samples], config.loss, rate)


def _wait_for_step(samples: Sequence[TrainedSample], submitted: SubmittedStep) -> dict[str, float]:
    """Wait for a step, and return what it says."""
    masks = [sample.trajectory.mask > 0 for sample in samples]
    outputs = submitted.gradient.result().outputs
    result = submitted.update.result()
    oldest = min(
        int(sample.trajectory.versions[mask].min())
        for sample, mask in zip(samples, masks, strict=True)
    )
    return {
        "grad_norm": result.metrics["grad_norm"],
        **compare_logprobs(
            [sample.trajectory.logprobs for sample in samples],
            [
                output.logprobs[-sample.trajectory.tokens.size :]
                for sample, output in zip(samples, outputs, strict=True)
            ],
            masks,
        ),
        "staleness": float(result.version - 1 - oldest),
    }


def _describe(played: PlayedGroups, samples: Sequence[TrainedSample]) -> dict[str, float]:
    episodes = [episode for group in played.groups for episode in group]
    calls = [episode.num_model_calls for episode in episodes]
    return {
        "reward": _mean(played.rewards_PG),
        "trained": float(len(samples)),
        "calls": float(np.mean(calls)) if calls else 0.0,
        **outcome_metrics(end_of(each.outcome) for each in episodes if each.outcome is not None),
        **_lengths([each for episode in episodes for each in episode.trajectories]),
        "replaced": float(played.num_replaced),
        "lost": float(played.num_lost),
        "late": float(played.num_late),
    }


def _lengths(trajectories: Sequence[RecordedTrajectory]) -> dict[str, float]:
    """Return the mean length of what a call sampled; recorded calls do not say why they ended."""
    num_calls = sum(len(each.call_ends) for each in trajectories)
    num_tokens = sum(each.num_sampled_tokens for each in trajectories)
    return {"response_tokens": num_tokens / num_calls} if num_calls else {}


@dataclass(frozen=True, slots=True)
class _Score:
    """What agents earned on validation tasks.

    Attributes:
        rewards: Of each task; None where its episode was lost.
        successes: Whether it was solved, of each that says so.
    """

    rewards: list[float | None]
    successes: list[float] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, float]:
        """The figures of what was played."""
        return Scores([each for each in self.rewards if each is not None], self.successes).metrics


def _score(
    config: Config, groups: EpisodeGroups, tasks: TaskSet, kept: EpisodeKeeper, num_done: int
) -> _Score:
    """Let agents play the validation tasks."""
    chosen: Sequence[AgentTask] = tasks.validation[: config.num_validation]
    if not chosen:
        return _Score([])
    played = groups.play(chosen, group_size=1, episode_type="eval", timeout_s=config.step_timeout_s)
    kept.keep(VALIDATION, num_done, played)
    outcomes = [episode.outcome for group in played.groups for episode in group]
    return _Score(
        [None if np.isnan(reward) else float(reward) for reward in played.rewards_PG[:, 0]],
        [float(each.is_success) for each in outcomes if each and each.is_success is not None],
    )


def _summarize(
    run: TrainingRun,
    checkpoint: str,
    before: Sequence[float | None],
    after: Sequence[float | None],
) -> Summary:
    """Compare the tasks that were played both times."""
    pairs = [
        (first, second)
        for first, second in zip(before, after, strict=True)
        if first is not None and second is not None
    ]
    return Summary(
        run.name,
        checkpoint,
        before=_mean(np.asarray([first for first, _ in pairs])),
        after=_mean(np.asarray([second for _, second in pairs])),
        num_validation=len(pairs),
    )


def _mean(rewards: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    """Return the mean of what is there; NaN if there is nothing."""
    present = rewards[~np.isnan(rewards)]
    return float(present.mean()) if present.size else float("nan")
