"""Which tokens a sample may go on with, where its text has to keep a form.

The engine knows no grammars: what compiles and follows one is given with the request. A row's mask
is computed beside the model's forward, from the moment that its newest token is known. Reported
log-probabilities are those of the logits before the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORD_BITS = 32


class RowConstraint(Protocol):
    """Follows one sample."""

    def words(self) -> NDArray[np.int32] | None:
        """Return a bit for each token that may come next, lowest first; None after a failure.

        Waits until the mask behind the newest token is computed.
        """

    def note(self, token: int) -> None:
        """Take the next token of the sample in, and begin to compute the mask behind it."""

    def has_ended(self) -> bool:
        """Whether nothing may follow the newest token."""


class OutputConstraint(Protocol):
    """A form that samples of a request keep; made before the request begins."""

    def begin(self) -> RowConstraint:
        """Return what follows a new sample."""


def mask_logits(
    logits_RV: Tensor, rows: Sequence[RowConstraint | None]
) -> tuple[Tensor, frozenset[int]]:
    """Return logits without what may not come next, and the rows whose constraint has failed.

    Args:
        logits_RV: Float32 [R, V]; they stay as they are.
        rows: What each row keeps; None for nothing.
    """
    wanted = {row: one.words() for row, one in enumerate(rows) if one is not None}
    if not wanted:
        return logits_RV, frozenset()
    known = {row: words for row, words in wanted.items() if words is not None}
    if known:
        vocab_size = logits_RV.shape[1]
        device = logits_RV.device
        words = torch.from_numpy(np.stack(list(known.values()))).to(device)
        bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=device)
        allowed = ((words[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocab_size]
        places = torch.tensor(list(known), device=device)
        masked = logits_RV[places].masked_fill_(~allowed, -torch.inf)
        logits_RV = logits_RV.index_put((places,), masked)
    return logits_RV, frozenset(wanted) - frozenset(known)
