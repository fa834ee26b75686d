"""`tinsmith hyperparams`: what to begin a training with."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from tinsmith import hyperparams as advice_on
from tinsmith.cli.output import AsJson, show_json
from tinsmith.planning.known_models import find_shape


def hyperparams(
    model: Annotated[
        str, typer.Argument(help="A name such as Qwen/Qwen3-8B, or a model's directory.")
    ],
    num_examples: Annotated[int, typer.Option(help="Examples of the data.")] = 0,
    num_trained_tokens: Annotated[
        int, typer.Option(help="Tokens of the data that are trained on.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Advise learning rate, rank, batch and steps for a model; no server is asked."""
    shape = find_shape(model)
    advice = advice_on.advise(
        shape, num_examples=num_examples, num_trained_tokens=num_trained_tokens
    )
    if as_json:
        show_json(dataclasses.asdict(advice))
        return
    print(
        f"{shape.family}, hidden size {shape.hidden_size}, "
        f"{shape.num_parameters / 1e6:,.0f} M parameters"
    )
    epochs = f", {advice.num_epochs:.1f} epochs" if advice.num_epochs else ""
    for name, value in (
        ("learning rate", f"{advice.learning_rate:.3g} of an adapter"),
        ("", f"{advice.full_learning_rate:.3g} of all weights"),
        ("rank", f"{advice.rank}, {advice.num_adapter_parameters / 1e6:,.1f} M parameters"),
        ("batch size", f"{advice.batch_size}"),
        ("steps", f"{advice.num_steps} at least{epochs}; ten times as many are often better"),
    ):
        print(f"  {name:<15}{value}")
    if advice.note:
        print(f"  {'note':<15}{advice.note}")
    rate = advice.learning_rate
    print(f"  {'sweep':<15}learning_rate={rate / 3:.1g},{rate:.1g},{rate * 3:.1g}")
