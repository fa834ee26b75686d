"""From the logits of sequences to their next tokens, with the log-probability of each.

Penalties, held stop tokens and forms change what is drawn from, and not what is reported. Each row
is drawn by itself: a sequence gets the same token whatever is drawn beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tinsmith_engine.model.lm_head import log_probabilities
from tinsmith_engine.sampling.decode.logit_shaping import shape_logits
from tinsmith_engine.sampling.decode.token_selection import pick
from tinsmith_engine.sampling.request.output_constraint import mask_logits
from tinsmith_engine.sampling.request.sample_request import SampledToken
from tinsmith_engine.sampling.schedule.sequences import ActiveSequence


def draw_tokens(
    sequences: Sequence[ActiveSequence], logits_RV: Tensor, versions: Sequence[int]
) -> list[SampledToken | None]:
    """Return the next token of each sequence; None where its form cannot be followed any more.

    Args:
        sequences: None of them waits for its mask.
        logits_RV: Behind the newest token of each, float32 [R, V]; they stay as they are.
        versions: Of the weights that each row is of.
    """
    shaped_RV = shape_logits(logits_RV, [sequence.shaping for sequence in sequences])
    shaped_RV = _without_stops(shaped_RV, sequences)
    shaped_RV, failed = mask_logits(shaped_RV, [one.constraint for one in sequences])
    chosen_R = pick(shaped_RV, [sequence.rule() for sequence in sequences])
    log_softmax_RV = log_probabilities(logits_RV)
    logprobs_R = log_softmax_RV.gather(1, chosen_R[:, None])[:, 0]
    return [
        None
        if row in failed
        else SampledToken(
            token,
            logprob,
            versions[row],
            _likeliest(log_softmax_RV[row], sequences[row].state.request.topk_sample_logprobs),
        )
        for row, (token, logprob) in enumerate(
            zip(chosen_R.tolist(), logprobs_R.tolist(), strict=True)
        )
    ]


def _without_stops(logits_RV: Tensor, sequences: Sequence[ActiveSequence]) -> Tensor:
    """Return logits without the stop tokens of samples that may not end yet."""
    held = [
        (row, list(one.state.request.stop_tokens))
        for row, one in enumerate(sequences)
        if len(one.logprobs) < one.state.request.min_tokens and one.state.request.stop_tokens
    ]
    if not held:
        return logits_RV
    masked_RV = logits_RV.clone()
    for row, tokens in held:
        masked_RV[row, tokens] = float("-inf")
    return masked_RV


def _likeliest(log_softmax_V: Tensor, count: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens of one row, likeliest first."""
    if count == 0:
        return []
    # One row at a time: which of two equal tokens `topk` returns may depend on the shape.
    values, ids = log_softmax_V.topk(count)
    return list(zip(ids.tolist(), values.tolist(), strict=True))
