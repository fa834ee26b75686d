"""Supervised fine-tuning: a batch, a gradient, a step, and a look at data that was held out.

The loop keeps one step ahead of its results: the next batch is on its way while the last one is
computed, so the trainer never waits for this process. Ctrl-C saves; the same command goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tinsmith.client import Client
from tinsmith.recipes.dry_run import Preview, PreviewedRow
from tinsmith.recipes.experiment.beginnings import tokenizer_of
from tinsmith.recipes.experiment.curves import Curve
from tinsmith.recipes.experiment.display import show_weights
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.rates import choose_rate, with_rate
from tinsmith.recipes.experiment.settings import TrainingConfig
from tinsmith.recipes.fitting import Summary, fit
from tinsmith.recipes.gradient_step import rate_of, submit_data
from tinsmith.recipes.steps_ahead import SentStep
from tinsmith.recipes.tasks.conversations import Conversation, read_conversations
from tinsmith.recipes.tasks.row_layouts import ASSISTANT
from tinsmith.recipes.tasks.supervised_tasks import SHIPPED, RowRules, SupervisedTask, make_task
from tinsmith.text.named_templates import tokenizer_with
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.training.run_forms import TrainingRun

__all__ = ["Config", "Summary", "main", "preview"]

CURVE = Curve("loss", "loss per trained token", held_out="held_out_loss")

_MADE_MODELS_RATE = 1e-2
"""For small models with random weights, such as `tiny`."""


@dataclass(frozen=True, kw_only=True)
class Config(TrainingConfig):
    """Settings of the recipe."""

    data: str = "pig_latin"
    """`pig_latin`, `warm_start`, or a JSONL file of conversations or question and answer."""
    chat_template: str = ""
    """`role_colon` or a file that ends with `.jinja`; that of the base model if it is empty."""
    learning_rate: float | None = None
    """Its peak; if it is left out, what `tinsmith hyperparams` advises for the model."""
    num_warmup_steps: int = 30
    learning_rate_floor: float = 0.05
    num_steps: int = 240
    batch_size: int = 32
    save_every: int = 100
    max_tokens: int = 128
    """Longest answer to a held-out question of a file."""
    train_on: str = "last"
    """`last` answer or `all` answers of a line; marks of the line itself (`weight`) go before."""
    too_long: str = "refuse"
    """`refuse`, `leave_out` or `cut` a line of a file that is longer than the model's context."""


def main(config: Config, client: Client, observer: Observer | None = None) -> Summary:
    """Train, and score what was held out before and after; see `fit`.

    Raises:
        ConfigurationError: If the data cannot be read, or `output_dir` holds another experiment.
        KeyboardInterrupt: After Ctrl-C, once the state is saved; the same call resumes.
    """
    # All that can be wrong with the data is found before anything is made on the server.
    begin_from = observer.begin_from if observer is not None and observer.has_sampler else ""
    tokenizer, rules = _read_model(config, client, begin_from)
    task = _make_task(config, tokenizer, rules)
    chosen = choose_rate(
        config.learning_rate, config.base_model, config.adapter, default=_MADE_MODELS_RATE
    )

    def submit(run: TrainingRun, step: int) -> SentStep:
        rate = rate_of(config, step, peak=chosen.value, num_steps=config.num_steps)
        submitted = submit_data(config, run, task.batch(step), "cross_entropy", rate)
        return SentStep(rate, submitted, lambda result: {"loss": result.loss})

    return fit(
        "supervised",
        with_rate(config, chosen.value),
        client,
        task,
        CURVE,
        lambda progress: lambda step: submit(progress.run, step),
        observer,
        first=[show_weights(tokenizer, task.batch(0)[0])],
        note=chosen.note,
    )


def preview(config: Config, client: Client) -> Preview:
    """Return the data as the model would read them; nothing is made on the server.

    Raises:
        ConfigurationError: If the data cannot be read.
    """
    tokenizer, rules = _read_model(config, client)
    if config.data in SHIPPED:
        batch = _make_task(config, tokenizer, rules).batch(0)
        rows = [
            PreviewedRow(
                where=f"{config.data}, {number}",
                layout="shipped",
                data=[datum],
                num_answers=1,
                num_trained=1,
            )
            for number, datum in enumerate(batch, start=1)
        ]
        source, turns = f"the first batch of {config.data}", "the last of each row"
    else:
        conversations = read_conversations(Path(config.data))
        rows = [_preview_row(each, tokenizer, config.train_on) for each in conversations]
        num_marked = sum(each.weights is not None for each in conversations)
        source = config.data
        turns = f"train_on={config.train_on}; {num_marked} rows say themselves which"
    return Preview(
        source=source,
        rows=rows,
        turns=turns,
        tokenizer=tokenizer,
        max_context_tokens=rules.max_context_tokens,
        too_long=config.too_long,
    )


def _preview_row(conversation: Conversation, tokenizer: Tokenizer, train_on: str) -> PreviewedRow:
    return PreviewedRow(
        where=conversation.where,
        layout=conversation.layout,
        data=conversation.to_data(tokenizer, train_on),
        num_answers=sum(message["role"] == ASSISTANT for message in conversation.messages),
        num_trained=sum(weight > 0 for weight in conversation.weights_of(train_on)),
    )


def _read_model(config: Config, client: Client, begin_from: str = "") -> tuple[Tokenizer, RowRules]:
    tokenizer = tokenizer_of(client, config.base_model, begin_from or config.begin_from)
    if config.chat_template:
        tokenizer = tokenizer_with(tokenizer, config.chat_template)
    served = {model.base_model: model for model in client.list_models()}
    rules = RowRules(
        train_on=config.train_on,
        too_long=config.too_long,
        max_context_tokens=served[config.base_model].max_context_tokens,
    )
    return tokenizer, rules


def _make_task(config: Config, tokenizer: Tokenizer, rules: RowRules) -> SupervisedTask:
    return make_task(
        config.data,
        tokenizer,
        batch_size=config.batch_size,
        seed=config.seed,
        max_tokens=config.max_tokens,
        rules=rules,
    )
