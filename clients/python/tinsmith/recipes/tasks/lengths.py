"""Data that are longer than the model's context: found before anything is made on the server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tinsmith.recipes.tasks.row_layouts import ConversationFormatError
from tinsmith.types import Datum, ModelInput

REFUSE, LEAVE_OUT, CUT = "refuse", "leave_out", "cut"
TOO_LONG = (REFUSE, LEAVE_OUT, CUT)
"""What is done with a line that is longer: it is refused, left out, or its end is cut off."""


def fit_length(data: Sequence[Datum], where: str, *, max_tokens: int, too_long: str) -> list[Datum]:
    """Return the data of a line that fit into a context; what trains nothing then is left out.

    Raises:
        ConversationFormatError: If one does not fit and `too_long` is `refuse`; names the line.
    """
    fitting = []
    for datum in data:
        num_tokens = len(datum.model_input.to_ints())
        if num_tokens <= max_tokens:
            fitting.append(datum)
        elif too_long == REFUSE:
            raise ConversationFormatError(
                f"{where}: has {num_tokens} tokens, and the model's context {max_tokens}",
                remedy="shorten it; supervised takes too_long=leave_out and too_long=cut as well",
            )
        elif too_long == CUT:
            cut = _cut(datum, max_tokens)
            if np.any(cut.loss_fn_inputs["weights"]):
                fitting.append(cut)
    return fitting


def _cut(datum: Datum, max_tokens: int) -> Datum:
    inputs = {name: values[:max_tokens] for name, values in datum.loss_fn_inputs.items()}
    return Datum(ModelInput.from_ints(datum.model_input.to_ints()[:max_tokens]), inputs)
