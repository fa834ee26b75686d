"""The loop of reinforcement learning: a warm start, then play, a step, a look at what is held out.

Every recipe of reinforcement learning is this loop over a source of experience. Its first
`num_imitation_steps` steps are supervised, on what a teacher says. They are steps of the run like
all others, in its curve and its metrics. The gain that is reported begins behind them, so that it
is what rewards taught. Each of the two phases has a schedule of the learning rate of its own.

A source may train several policies that play each other, each with a run and an optimizer of its
own. The first one's run is that of the experiment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tinsmith.client import Client
from tinsmith.errors import ConfigurationError
from tinsmith.recipes.experience import Scores, Source
from tinsmith.recipes.experiment.curves import Curve
from tinsmith.recipes.experiment.evaluators import Evaluators
from tinsmith.recipes.experiment.experiment import LAST_SCORES_FILE, Experiment
from tinsmith.recipes.experiment.interrupts import uninterrupted
from tinsmith.recipes.experiment.json_files import write_json
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.pictures import Picture
from tinsmith.recipes.experiment.rates import choose_rate, with_rate
from tinsmith.recipes.experiment.resume import ResumableRun
from tinsmith.recipes.experiment.run_log import RunLog, open_log, say_finished
from tinsmith.recipes.experiment.settings import RewardedConfig
from tinsmith.recipes.gradient_step import rate_of, submit_data
from tinsmith.recipes.policy_gradient import (
    KL,
    mean_of,
    paired_lower_95,
    submit_step,
    wait_for_imitation,
    wait_for_step,
)
from tinsmith.rollouts import DatumArrays
from tinsmith.tracing import spans
from tinsmith.training.run_forms import TrainingRun

_MADE_MODELS_RATE = 4e-3
"""For small models with random weights, if no rate is given."""
BEFORE, WARM_START = "before", "warm_start"
"""Names of the scores that are taken once."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What came out for one policy.

    Attributes:
        before: Mean reward on validation tasks of the untrained run, greedily.
        warm_start: The same after the warm start; `before` without one.
        after: The same at the end.
        gain_lower_95: Lower end of the 95 % interval of `after - warm_start`, paired by task.
        num_validation: Tasks scored.
    """

    run: str
    checkpoint: str
    before: float
    warm_start: float
    after: float
    gain_lower_95: float
    num_validation: int


@dataclass(frozen=True, slots=True)
class About:
    """What an experiment is called.

    Attributes:
        recipe: Name of the recipe.
        task: What is learned.
        plays: What is rewarded: `plays`, `games`.
    """

    recipe: str
    task: str
    plays: str = "plays"


def learn(
    about: About,
    config: RewardedConfig,
    client: Client,
    make_source: Callable[[ResumableRun, Experiment], Source],
    observer: Observer | None = None,
) -> list[Summary]:
    """Train, and score what is held out: before, after the warm start, on the way and at the end.

    Of an experiment that ended, nothing is repeated: what came out is returned.

    Args:
        about: What it is called.
        config: Settings.
        client: Of the service.
        make_source: Returns what is played, for a run that begins or goes on.
        observer: Of a job.

    Returns:
        What came out, for each policy of the source.

    Raises:
        ConfigurationError: If `output_dir` holds another experiment, settings disagree, or an
            evaluator cannot be had.
        KeyboardInterrupt: After Ctrl-C, once the state is saved; the same call resumes.
    """
    if config.num_imitation_steps > config.num_steps:
        raise ConfigurationError(
            f"num_imitation_steps is {config.num_imitation_steps}, more than num_steps="
            f"{config.num_steps}",
            remedy="the warm start is part of the run: raise num_steps",
        )
    evaluators = Evaluators(config)
    chosen = choose_rate(
        config.learning_rate, config.base_model, config.adapter, default=_MADE_MODELS_RATE
    )
    # The folder keeps the rate that is trained with, given or advised.
    config = with_rate(config, chosen.value)
    with Experiment(about.recipe, config, observer) as experiment:
        if experiment.summary is not None:
            summaries = _read_summaries(experiment.summary)
            say_finished(experiment, _describe(summaries))
            return summaries
        progress = ResumableRun(config, client, experiment, observer)
        source = make_source(progress, experiment)
        title = f"{about.recipe} {about.task} seed {config.seed}"
        picture = Picture(
            f"{about.recipe}: {about.task}, seed {config.seed}",
            Curve("reward", f"mean reward of the {about.plays}", True, held_out="validation"),
            source.agents if len(source.agents) > 1 else ("",),
        )
        log = open_log(experiment, config, title, progress, observer, picture)
        with log, progress.explained(log.say):
            log.say_begin(progress.describe(), *source.plan, *filter(None, [chosen.note]))
            before = _scored_once(BEFORE, source, progress, progress.first_step)
            log.note_scores(0, _named(source, [each.metrics for each in before]))
            loop = _Loop(config, chosen.value, source, progress, log, evaluators)
            loop.train()
            checkpoints = [
                *source.save(progress.last_step),
                progress.save(progress.last_step, config.checkpoint),
            ]
            # The experiment's own run is saved last: from then on the step is done for all.
            checkpoints = [checkpoints[-1], *checkpoints[:-1]]
            after = source.score(config.num_steps)
            log.note_scores(config.num_steps, _named(source, [each.metrics for each in after]))
            write_json(experiment.folder / LAST_SCORES_FILE, [asdict(each) for each in after])
            warm = loop.warm_start or before
            summaries = [
                Summary(
                    run.name,
                    checkpoint,
                    mean_of(first.rewards),
                    mean_of(start.rewards),
                    mean_of(last.rewards),
                    paired_lower_95(start.rewards, last.rewards),
                    len(last.rewards),
                )
                for run, checkpoint, first, start, last in zip(
                    _runs(progress, source), checkpoints, before, warm, after, strict=True
                )
            ]
            progress.finish(
                {**asdict(summaries[0]), "partners": [asdict(each) for each in summaries[1:]]},
                log.say,
                *source.partners,
            )
            lines = [*_describe(summaries), *source.results]
            log.say_end(lines, summaries[0].run, summaries[0].checkpoint)
    return summaries


class _Loop:
    """The steps of one part of a run."""

    def __init__(
        self,
        config: RewardedConfig,
        learning_rate: float,
        source: Source,
        progress: ResumableRun,
        log: RunLog,
        evaluators: Evaluators,
    ) -> None:
        self._evaluators = evaluators
        self._config = config
        self._learning_rate = learning_rate
        self._source = source
        self._progress = progress
        self._log = log
        self._done = progress.first_step
        # A part of a run that begins behind the warm start has its score from an earlier part.
        self.warm_start = _read_scores(progress.kept(WARM_START) or [])

    def train(self) -> None:
        """Do the steps that are left."""
        config = self._config
        try:
            for step in range(self._done, config.num_steps):
                is_warming = step < config.num_imitation_steps
                with spans.block("step", {"tinsmith.step": step}, begins=True):
                    metrics = self._imitate(step) if is_warming else self._reinforce(step)
                self._source.end_step(self._done)
                metrics |= self._look() | self._evaluate()
                self._log.add(step, metrics)
                is_due = config.save_every and self._done % config.save_every == 0
                if is_due and self._done < config.num_steps:
                    self._save()
        except KeyboardInterrupt:
            if self._done > self._progress.first_step:
                self._progress.begin_last_save(self._done, self._log.say)
                self._save()
            raise

    def _imitate(self, step: int) -> dict[str, float]:
        parts = self._source.imitate(step)
        rate = rate_of(
            self._config,
            step,
            peak=self._config.imitation_learning_rate,
            num_steps=self._config.num_imitation_steps,
        )
        with uninterrupted():
            submitted = [
                submit_data(self._config, run, _supervised(part), "cross_entropy", rate)
                for run, part in zip(self._runs, parts, strict=True)
            ]
            # From here on a save contains the step, whether its result was seen or not.
            self._done = step + 1
        return self._named([wait_for_imitation(each) for each in submitted])

    def _reinforce(self, step: int) -> dict[str, float]:
        config = self._config
        with self._progress.interruptible():
            parts = self._source.play(step)
        rate = rate_of(
            config,
            step - config.num_imitation_steps,
            peak=self._learning_rate,
            num_steps=config.num_steps - config.num_imitation_steps,
        )
        with uninterrupted():
            submitted = [
                submit_step(config, run, part, rate)
                for run, part in zip(self._runs, parts, strict=True)
            ]
            self._done = step + 1
        found = [wait_for_step(part, each) for part, each in zip(parts, submitted, strict=True)]
        self._log.health.note_trained(sum(len(part.sequences) for part in parts))
        return self._named(found)

    def _look(self) -> dict[str, float]:
        """Score what is held out, if that is due; the end of the warm start always is."""
        config = self._config
        if _is_warm(config) and self._done == config.num_imitation_steps:
            scores = self.warm_start = _scored_once(
                WARM_START, self._source, self._progress, self._done
            )
        elif config.eval_every and self._done % config.eval_every == 0:
            scores = self._source.score(self._done)
        else:
            return {}
        return self._named([each.metrics for each in scores])

    def _evaluate(self) -> dict[str, float]:
        """Call the evaluators that are due, for each policy."""
        if not self._evaluators.are_due(self._done):
            return {}
        say = self._log.say
        return self._named([self._evaluators.run(self._done, run, say) for run in self._runs])

    def _save(self) -> None:
        self._source.save(self._done)
        self._progress.save(self._done)

    def _named(self, parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
        for part in parts:
            if "grad_norm" in part:
                self._log.health.note_gradient(part["grad_norm"])
            if KL in part:
                self._log.health.note_kl(part[KL])
        return _named(self._source, parts)

    @property
    def _runs(self) -> list[TrainingRun]:
        return _runs(self._progress, self._source)


def _named(source: Source, parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of all policies, under the names that they have in a row."""
    return {
        f"{source.prefix(index)}{name}": value
        for index, part in enumerate(parts)
        for name, value in part.items()
    }


def _runs(progress: ResumableRun, source: Source) -> list[TrainingRun]:
    return [progress.run, *source.partners]


def _is_warm(config: RewardedConfig) -> bool:
    return config.num_imitation_steps > 0


def _scored_once(name: str, source: Source, progress: ResumableRun, num_done: int) -> list[Scores]:
    """Return a score of the whole run, taken in the part of it that came there first."""
    stored = progress.once(name, lambda: [asdict(each) for each in source.score(num_done)])
    return _read_scores(stored)


def _read_scores(stored: list[Any]) -> list[Scores]:
    if stored and not isinstance(stored[0], dict):
        # An earlier release kept the rewards of its one policy alone.
        return [Scores([float(reward) for reward in stored])]
    return [Scores(**each) for each in stored]


def _supervised(sequences: Sequence[DatumArrays]) -> list[Any]:
    """Return what was said as data to imitate."""
    # The service sums over tokens; the mean over them is the recipe's choice.
    num_tokens = np.float32(sum(arrays.mask.sum() for arrays in sequences))
    return [
        replace(arrays, mask=arrays.mask / num_tokens).to_supervised_datum() for arrays in sequences
    ]


def _read_summaries(content: Mapping[str, Any]) -> list[Summary]:
    first = {name: value for name, value in content.items() if name != "partners"}
    # An earlier release had no warm start in its summary.
    first = {"warm_start": first["before"], **first}
    return [Summary(**first), *(Summary(**each) for each in content.get("partners", ()))]


def _describe(summaries: Sequence[Summary]) -> list[str]:
    """Return a line for each policy; it names the run where there are several."""
    return [
        (f"{each.run.rpartition('/')[2]}: " if len(summaries) > 1 else "")
        + f"validation reward {each.before:.3f} -> "
        + (f"{each.warm_start:.3f} by the warm start -> " * (each.warm_start != each.before))
        + f"{each.after:.3f} on {each.num_validation} tasks "
        f"(gain at least {each.gain_lower_95:.3f}, 95 %)"
        for each in summaries
    ]
