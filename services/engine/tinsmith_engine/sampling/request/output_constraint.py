"""Which tokens a sample may go on with, where its text has to keep a form.

The engine knows no grammars: what compiles and follows one is given with the request. A row's mask
is computed beside the model's forward, from the moment that its newest token is known. A row whose
mask takes longer waits by itself, and its logits with it: other rows get their tokens meanwhile.
Reported log-probabilities are those of the logits before the mask.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MASK_WAIT_S = 0.005
"""How long a step waits for masks, of all of its rows together."""
_WORD_BITS = 32


class RowConstraint(Protocol):
    """Follows one sample."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for the mask behind the newest token; return whether it is computed."""

    def words(self) -> NDArray[np.int32] | None:
        """Return a bit for each token that may come next, lowest first; None after a failure.

        The mask behind the newest token must be computed.
        """

    def note(self, token: int) -> None:
        """Take the next token of the sample in, and begin to compute the mask behind it."""

    def has_ended(self) -> bool:
        """Whether nothing may follow the newest token."""


class OutputConstraint(Protocol):
    """A form that samples of a request keep; made before the request begins."""

    def begin(self, project: str) -> RowConstraint:
        """Return what follows a new sample; projects take turns at their masks."""


def are_masked(rows: Sequence[RowConstraint | None], wait_s: float) -> list[bool]:
    """Return of each row whether it may go on: it keeps no form, or its mask is computed.

    Args:
        rows: What each row keeps; None for nothing.
        wait_s: How long to wait for the masks of all of them together.
    """
    deadline_s = time.monotonic() + wait_s
    return [one is None or one.wait(max(deadline_s - time.monotonic(), 0.0)) for one in rows]


def mask_logits(
    logits_RV: Tensor, rows: Sequence[RowConstraint | None]
) -> tuple[Tensor, frozenset[int]]:
    """Return logits without what may not come next, and the rows whose constraint has failed.

    Args:
        logits_RV: Float32 [R, V]; they stay as they are.
        rows: What each row keeps; None for nothing. Their masks are computed.
    """
    wanted = {row: one.words() for row, one in enumerate(rows) if one is not None}
    if not wanted:
        return logits_RV, frozenset()
    failed = frozenset(row for row, words in wanted.items() if words is None)
    # Rows that keep no form may go on with anything: one selection over all rows, and one copy.
    words = np.full((len(rows), -(-logits_RV.shape[1] // _WORD_BITS)), -1, dtype=np.int32)
    for row, found in wanted.items():
        if found is not None:
            words[row] = found
    allowed = _unpack(words, logits_RV.shape[1], logits_RV.device)
    return torch.where(allowed, logits_RV, -torch.inf), failed


def _unpack(words: NDArray[np.int32], num_bits: int, device: torch.device) -> Tensor:
    """Return the lowest bits of each row as booleans, [R, bits].

    NumPy does that several times as fast on a CPU; to a GPU words go, an eighth of the bytes.
    """
    if device.type == "cpu":
        octets = words.astype("<i4", copy=False).view(np.uint8)
        bits = np.unpackbits(octets, axis=1, count=num_bits, bitorder="little")
        return torch.from_numpy(bits).view(torch.bool)
    sent = torch.from_numpy(words).to(device)
    places = torch.arange(_WORD_BITS, dtype=torch.int32, device=device)
    return ((sent[:, :, None] >> places) & 1).bool().flatten(1)[:, :num_bits]
