"""An experiment on data that is there beforehand: score, train, score, and say what came out.

Recipes of this kind differ in their data and in how a step is made of it. What they share is here:
the folder, the run that goes on after Ctrl-C, the curve, and scores of what was held out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rich.text import Text

from tinsmith.client import Client
from tinsmith.errors import ConfigurationError
from tinsmith.recipes.experiment.curves import Curve
from tinsmith.recipes.experiment.evaluators import Evaluators
from tinsmith.recipes.experiment.experiment import SAMPLES_FILE, Experiment
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.pictures import Picture
from tinsmith.recipes.experiment.resume import ResumableRun
from tinsmith.recipes.experiment.run_log import open_log, say_finished
from tinsmith.recipes.experiment.settings import TrainingConfig
from tinsmith.recipes.steps_ahead import SentStep, train_ahead
from tinsmith.recipes.tasks.hub_data import data_name
from tinsmith.recipes.tasks.supervised_tasks import Evaluation, Example
from tinsmith.sampling.sampler_forms import Sampler


class HeldOut(Protocol):
    """What is held out.

    Attributes:
        description: The data, in words.
    """

    description: str

    def evaluate(self, sampler: Sampler) -> Evaluation:
        """Score data that no batch contains."""
        ...


@dataclass(frozen=True, slots=True)
class Summary:
    """What came out of a run."""

    run: str
    checkpoint: str
    before: Evaluation
    after: Evaluation
    losses: list[float]


def fit(
    recipe: str,
    config: TrainingConfig,
    client: Client,
    held_out: HeldOut,
    curve: Curve,
    make_submit: Callable[[ResumableRun], Callable[[int], SentStep]],
    observer: Observer | None = None,
    *,
    first: Sequence[Text] = (),
    note: str = "",
) -> Summary:
    """Train, and score what was held out before and after.

    Of an experiment that ended, nothing is repeated: what came out is returned.

    Args:
        recipe: Its name.
        config: Its settings.
        client: Of the service.
        held_out: What is scored.
        curve: What is drawn; the metric's values are the `losses` of the summary.
        make_submit: Returns what sends a step of a run, by its number from 0.
        observer: Of a job.
        first: The first data, as `show_weights` gives them.
        note: What to say at the beginning.

    Raises:
        ConfigurationError: If `output_dir` holds another experiment, or an evaluator cannot be had.
        KeyboardInterrupt: After Ctrl-C, once the state is saved; the same call resumes.
    """
    # Logs of jobs hold no prompts and no answers, and variants of a sweep have the same data.
    is_at_a_desk = observer is None
    evaluators = Evaluators(config)
    if evaluators and observer is not None and not observer.has_sampler:
        raise ConfigurationError(
            "evaluators sample, and there is no sampler", remedy="give the job a sampler"
        )
    with Experiment(recipe, config, observer) as experiment:
        if experiment.summary is not None:
            summary = _read_summary(experiment.summary)
            say_finished(experiment, _describe(summary))
            return summary
        progress = ResumableRun(config, client, experiment, observer)
        title = f"{recipe} {data_name(config.data)}"
        picture = Picture(f"{recipe}: {config.data}", curve)
        log = open_log(experiment, config, title, progress, observer, picture)

        def score(num_done: int) -> Evaluation:
            """Score what was held out, unless no sampler is there, and keep some answers."""
            if not progress.has_sampler:
                return Evaluation({})
            found = held_out.evaluate(progress.run.sampler())
            for example in found.examples:
                experiment.append(SAMPLES_FILE, {"step": num_done, **asdict(example)})
            for example in found.examples[: 1 if is_at_a_desk else 0]:
                log.say(f"after step {num_done}, {example.prompt!r} -> {example.completion!r}")
            return found

        def is_held_out_due(num_done: int) -> bool:
            """Whether what was held out is scored on the way; at the end it is in any case."""
            is_time = config.eval_every and num_done % config.eval_every == 0
            return bool(is_time) and num_done < config.num_steps

        def look(num_done: int) -> dict[str, float]:
            found = score(num_done).metrics if is_held_out_due(num_done) else {}
            return {**found, **evaluators.run(num_done, progress.run, log.say)}

        with log, progress.explained(log.say):
            log.say_begin(
                progress.describe(),
                f"trains on {held_out.description}",
                *filter(None, [note]),
            )
            for text in first if is_at_a_desk else ():
                log.show("data, of which is trained on what stands between ⟦ and ⟧:", text)
            before = Evaluation(progress.once("before", lambda: score(0).metrics))
            log.note_scores(0, before.metrics)
            train_ahead(
                config,
                progress,
                log,
                make_submit(progress),
                lambda step: is_held_out_due(step) or evaluators.are_due(step),
                look,
            )
            checkpoint = progress.save(progress.last_step, config.checkpoint)
            after = score(progress.last_step)
            log.note_scores(progress.last_step, after.metrics)
            losses = [row[curve.metric] for row in log.rows]
            summary = Summary(progress.run.name, checkpoint, before, after, losses)
            progress.finish(asdict(summary), log.say)
            log.say_end(_describe(summary), summary.run, summary.checkpoint)
    return summary


def _describe(summary: Summary) -> list[str]:
    return [
        f"{key}: {summary.before.metrics.get(key, float('nan')):.3f} -> {value:.3f}"
        for key, value in summary.after.metrics.items()
    ]


def _read_summary(content: Mapping[str, Any]) -> Summary:
    """Return what came out of an experiment that ended."""
    before, after = (
        Evaluation(part["metrics"], [Example(**example) for example in part["examples"]])
        for part in (content["before"], content["after"])
    )
    return Summary(content["run"], content["checkpoint"], before, after, content["losses"])
