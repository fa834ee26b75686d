"""Direct preference optimization: of two answers to a prompt, the preferred one becomes likelier.

The loss is `-log sigmoid(beta * (log-ratio of chosen - log-ratio of rejected))`, averaged over the
pairs of a batch. A log-ratio compares what the trained weights say to an answer with what the
reference says, the weights of the beginning. `beta` holds the trained weights near the reference.
Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7.

Data: `larger_number`, which a tiny model learns; a JSONL file of `prompt`, `chosen` and
`rejected`; a folder of them; or `hf://NAME[:CONFIG]`. `begin_from` takes a checkpoint, such as that
of supervised fine-tuning before. Metrics have the cookbook's names: `dpo_loss`, `accuracy`,
`margin`, `chosen_reward`, `rejected_reward`. Those that begin with `held_out_` are of pairs that no
batch contains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.client import Client
from tinsmith.errors import ConfigurationError
from tinsmith.recipes.dry_run import Preview, PreviewedRow
from tinsmith.recipes.experiment.beginnings import tokenizer_of
from tinsmith.recipes.experiment.curves import Curve
from tinsmith.recipes.experiment.display import show_weights
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.rates import choose_rate, with_rate
from tinsmith.recipes.experiment.resume import ResumableRun
from tinsmith.recipes.experiment.settings import TrainingConfig
from tinsmith.recipes.fitting import Summary, fit
from tinsmith.recipes.gradient_step import rate_of, submit_data
from tinsmith.recipes.steps_ahead import SentStep
from tinsmith.recipes.tasks.lengths import REFUSE, fit_length
from tinsmith.recipes.tasks.preferences import PreferencePair, load_preferences
from tinsmith.recipes.tasks.supervised_tasks import EpochDraw, Evaluation, target_logprobs
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.training.custom_loss import CustomLoss, numpy_loss
from tinsmith.types import Datum

__all__ = ["Config", "Summary", "main", "preview"]

CURVE = Curve("dpo_loss", "loss per pair", held_out="held_out_dpo_loss")
METRICS = ("dpo_loss", "accuracy", "margin", "chosen_reward", "rejected_reward")

_Array = NDArray[np.float64]

_MADE_MODELS_RATE = 3e-3
_ADVISED_RATE = 1e-5
"""With which tinker-cookbook begins: far less than for supervised steps, which copy an answer."""


@dataclass(frozen=True, kw_only=True)
class Config(TrainingConfig):
    """Settings of the recipe."""

    data: str = "larger_number"
    """`larger_number`, a JSONL file or folder of prompt, chosen and rejected, or `hf://NAME`."""
    begin_from: str = ""
    """A checkpoint to begin from, `run-1/final`, which is then the reference; the base model if it
    is empty."""
    beta: float = 0.1
    """How much leaving the reference costs."""
    learning_rate: float | None = None
    """Its peak; 1e-5 for models that are known, if it is left out."""
    learning_rate_floor: float = 0.0
    batch_size: int = 16
    """Pairs of a step."""


def main(config: Config, client: Client, observer: Observer | None = None) -> Summary:
    """Train, and score held-out pairs before and after; see `fit`.

    Raises:
        ConfigurationError: If the data cannot be read, the run has no sampler, or `output_dir`
            holds another experiment.
        KeyboardInterrupt: After Ctrl-C, once the state is saved; the same call resumes.
    """
    if observer is not None and not observer.has_sampler:
        raise ConfigurationError(
            "the reference of DPO is scored by a sampler, and there is none",
            remedy="give the job a sampler",
        )
    begin_from = (observer.begin_from if observer else "") or config.begin_from
    reference = client.create_sampler(
        base_model="" if begin_from else config.base_model, checkpoint=begin_from
    )
    tokenizer = reference.get_tokenizer()
    served = {model.base_model: model for model in client.list_models()}
    pairs = _Pairs(
        config, tokenizer, reference, max_tokens=served[config.base_model].max_context_tokens
    )
    chosen = choose_rate(
        config.learning_rate,
        config.base_model,
        config.adapter,
        default=_MADE_MODELS_RATE,
        advised=_ADVISED_RATE,
    )

    def submit(progress: ResumableRun, step: int) -> SentStep:
        data, reference_logprobs = pairs.batch(step)
        rate = rate_of(config, step, peak=chosen.value, num_steps=config.num_steps)
        loss = dpo_loss(reference_logprobs, config.beta)
        return SentStep(
            rate,
            submit_data(config, progress.run, data, loss, rate),
            lambda result: {name: result.metrics[name] for name in METRICS},
        )

    return fit(
        "dpo",
        with_rate(config, chosen.value),
        client,
        pairs,
        CURVE,
        lambda progress: lambda step: submit(progress, step),
        observer,
        first=[show_weights(tokenizer, datum) for datum in pairs.first],
        note=chosen.note,
    )


def preview(config: Config, client: Client) -> Preview:
    """Return the pairs as the model would read them; nothing is made on the server.

    Raises:
        ConfigurationError: If the data cannot be read.
    """
    tokenizer = tokenizer_of(client, config.base_model, config.begin_from)
    served = {model.base_model: model for model in client.list_models()}
    pairs = load_preferences(config.data)
    return Preview(
        source=config.data,
        rows=[
            PreviewedRow(
                where=pair.chosen.where,
                layout="pairs",
                data=pair.to_data(tokenizer),
                num_answers=2,
                num_trained=2,
            )
            for pair in [*pairs.train, *pairs.held_out]
        ],
        turns="the chosen and the rejected one of each row",
        tokenizer=tokenizer,
        max_context_tokens=served[config.base_model].max_context_tokens,
    )


def dpo_loss(reference_logprobs: Sequence[float], beta: float) -> CustomLoss:
    """Return the loss of a batch in which each chosen answer stands before its rejected one.

    Args:
        reference_logprobs: Of each answer under the reference, in the order of the batch.
        beta: How much leaving the reference costs.
    """

    @numpy_loss
    def loss(data: Sequence[Datum], logprobs: list[Any]) -> tuple[Any, ...]:
        weights = [datum.loss_fn_inputs["weights"] for datum in data]
        rewards = beta * (_sums(weights, logprobs) - np.asarray(reference_logprobs))
        metrics, slope = _measure(rewards, beta)
        # Chosen answers go up and rejected ones down, by the same slope.
        gradients = [
            np.float32(slope[index // 2] * (-1) ** index) * weight
            for index, weight in enumerate(weights)
        ]
        return metrics["dpo_loss"], gradients, metrics

    return loss


def _measure(rewards: _Array, beta: float) -> tuple[dict[str, float], _Array]:
    """Return the metrics of pairs, and the derivative of the loss by each chosen log-probability.

    Args:
        rewards: Of each answer, the chosen before the rejected: [2 * P].
        beta: As in the loss.
    """
    chosen, rejected = rewards[0::2], rewards[1::2]
    margins = chosen - rejected
    losses = np.logaddexp(0.0, -margins)
    metrics = {
        "dpo_loss": losses.mean(),
        "accuracy": (margins > 0).mean(),
        "margin": margins.mean(),
        "chosen_reward": chosen.mean(),
        "rejected_reward": rejected.mean(),
    }
    # sigmoid(-m) as exp(-log(1 + e^m)): it cannot overflow.
    slope = -beta * np.exp(-np.logaddexp(0.0, margins)) / len(margins)
    return {name: float(value) for name, value in metrics.items()}, slope


class _Pairs:
    """The pairs of the data with what the reference says to them."""

    def __init__(
        self, config: Config, tokenizer: Tokenizer, reference: Sampler, *, max_tokens: int
    ) -> None:
        pairs = load_preferences(config.data)

        def data_of(pair: PreferencePair) -> tuple[Datum, Datum]:
            chosen, rejected = fit_length(
                pair.to_data(tokenizer), pair.chosen.where, max_tokens=max_tokens, too_long=REFUSE
            )
            return chosen, rejected

        # All of the data is rendered before anything is trained: a bad line is found at once.
        self._train = [data_of(pair) for pair in pairs.train]
        self._held_out = [datum for pair in pairs.held_out for datum in data_of(pair)]
        self._draw = EpochDraw(
            len(self._train), min(config.batch_size, len(self._train)), config.seed
        )
        self._reference = reference
        self._beta = config.beta
        self._known: dict[int, list[float]] = {}
        self._held_out_known: list[float] = []
        self.description = (
            f"{len(pairs.train)} pairs of {config.data}, {len(pairs.held_out)} held out"
        )

    @property
    def first(self) -> tuple[Datum, Datum]:
        """The first pair, to look at."""
        return self._train[0]

    def batch(self, step: int) -> tuple[list[Datum], list[float]]:
        """Return the data of a step, and the log-probability of each under the reference."""
        indices = self._draw.indices(step)
        missing = [index for index in indices if index not in self._known]
        found = self._score(self._reference, [each for i in missing for each in self._train[i]])
        for place, index in enumerate(missing):
            self._known[index] = list(found[2 * place : 2 * place + 2])
        data = [datum for index in indices for datum in self._train[index]]
        return data, [logprob for index in indices for logprob in self._known[index]]

    def evaluate(self, sampler: Sampler) -> Evaluation:
        """Compare held-out answers under the live weights with the reference."""
        if not self._held_out_known:
            self._held_out_known = list(self._score(self._reference, self._held_out))
        logprobs = self._score(sampler, self._held_out)
        rewards = self._beta * (logprobs - np.asarray(self._held_out_known))
        metrics, _ = _measure(rewards, self._beta)
        return Evaluation({f"held_out_{name}": value for name, value in metrics.items()})

    def _score(self, sampler: Sampler, data: Sequence[Datum]) -> _Array:
        weights = [datum.loss_fn_inputs["weights"] for datum in data]
        return _sums(weights, target_logprobs(sampler, data))


def _sums(weights: Sequence[Any], logprobs: Sequence[Any]) -> _Array:
    """Return the log-probability of each answer: the sum over its tokens."""
    return np.array([float((w * each).sum()) for w, each in zip(weights, logprobs, strict=True)])
