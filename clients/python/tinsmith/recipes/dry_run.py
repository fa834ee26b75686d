"""What a recipe would train on, without a run: rows by layout, lengths, and the first row."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import rich.console
from rich.text import Text

from tinsmith.recipes.experiment.display import show_weights
from tinsmith.recipes.tasks.lengths import REFUSE, fit_length
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.types import Datum

_NUM_NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewedRow:
    """A row of the data, rendered and not yet held against the context.

    Attributes:
        where: File and line.
        layout: How it is written.
        data: What it would be trained on as.
        num_answers: Turns of the assistant.
        num_trained: Of them, those that are trained on.
    """

    where: str
    layout: str
    data: Sequence[Datum]
    num_answers: int
    num_trained: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """The data of a recipe as the model would read them.

    Attributes:
        source: Where the rows are from, in words.
        rows: In their order.
        turns: Which turns are trained on, in words.
        tokenizer: Of the model.
        max_context_tokens: Of the model.
        too_long: What is done with a row that is longer, see `tasks.lengths`.
    """

    source: str
    rows: Sequence[PreviewedRow]
    turns: str
    tokenizer: Tokenizer
    max_context_tokens: int
    too_long: str = REFUSE


def print_preview(preview: Preview) -> None:
    """Print what there is, with colours on a terminal alone.

    Raises:
        ConversationFormatError: At its end, if a run would be refused for a row that is too long.
    """
    console = rich.console.Console(highlight=False, soft_wrap=True)
    has_colours = console.is_terminal and not console.no_color
    for text in _describe(preview):
        console.print(text if has_colours else Text(text.plain))
    for row in preview.rows:
        limit, too_long = preview.max_context_tokens, preview.too_long
        fit_length(row.data, row.where, max_tokens=limit, too_long=too_long)


def _describe(preview: Preview) -> Iterator[Text]:
    rows = preview.rows
    layouts = Counter(row.layout for row in rows).most_common()
    counts = ", ".join(f"{count} as {name}" for name, count in layouts)
    yield Text(f"rows: {len(rows)} of {preview.source} ({counts})")
    num_trained = sum(row.num_trained for row in rows)
    num_answers = sum(row.num_answers for row in rows)
    yield Text(f"trained on: {num_trained} of {num_answers} answers, {preview.turns}")
    lengths = [len(datum.model_input.to_ints()) for row in rows for datum in row.data]
    num_weighted = sum(
        int((datum.loss_fn_inputs["weights"] != 0).sum()) for row in rows for datum in row.data
    )
    yield Text(
        f"tokens: {min(lengths)} min, {statistics.median(lengths):g} median, {max(lengths)} max; "
        f"{num_weighted} of {sum(lengths)} trained on"
    )
    yield Text(_describe_too_long(preview))
    yield Text("first row, of which is trained on what stands between ⟦ and ⟧:")
    for datum in rows[0].data:
        yield show_weights(preview.tokenizer, datum)


def _describe_too_long(preview: Preview) -> str:
    limit = preview.max_context_tokens
    names = [
        row.where
        for row in preview.rows
        if any(len(datum.model_input.to_ints()) > limit for datum in row.data)
    ]
    text = f"longer than the context of {limit} tokens: {len(names)}"
    if not names:
        return text
    more = ", ..." if len(names) > _NUM_NAMED else ""
    return f"{text} ({', '.join(names[:_NUM_NAMED])}{more}); too_long={preview.too_long}"
