"""Training data as a person reads it: which tokens are trained on, and by how much."""

from __future__ import annotations

from rich.text import Text

from tinsmith.text.tokenizer import Tokenizer
from tinsmith.types import Datum

_TRAINED, _PUSHED_DOWN, _READ = "bold green", "bold red", "yellow"
_BEGIN, _END = "⟦", "⟧"


def show_weights(tokenizer: Tokenizer, datum: Datum) -> Text:
    """Return the text of a datum: what is trained on is green, what is only read is yellow.

    Tokens with a negative weight or advantage, which are made less likely, are red. What is trained
    on stands between `⟦` and `⟧` as well, so that it shows where there are no colours.
    """
    inputs = datum.loss_fn_inputs
    weights = inputs["weights"] if "weights" in inputs else inputs["advantages"]
    tokens = [*datum.model_input.to_ints(), int(inputs["target_tokens"][-1])]
    signs = [0, *((weight > 0) - (weight < 0) for weight in map(float, weights))]
    text = Text()
    begin = 0
    for end in range(1, len(tokens) + 1):
        if end < len(tokens) and signs[end] == signs[begin]:
            continue
        # Characters may be split between tokens, so a stretch is decoded as a whole.
        part = tokenizer.decode(tokens[begin:end])
        sign = signs[begin]
        style = _TRAINED if sign > 0 else _PUSHED_DOWN if sign else _READ
        text.append(f"{_BEGIN}{part}{_END}" if sign else part, style=style)
        begin = end
    return text
