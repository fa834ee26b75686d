"""A request as a span: how long it waited, read its prompt and decoded.

Names are those of OpenTelemetry's conventions for generative AI, where it has them. Neither prompts
nor completions are among them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tinsmith.tracing import spans
from tinsmith_engine import SampledSequence, SampleRequest

_SERVICE = "sampler"


def begin_sample(request: SampleRequest, base_model: str) -> spans.Span | None:
    """Begin the span of a request; None if it belongs to no trace."""
    if not spans.is_on() or spans.current() is None:
        return None
    attributes: dict[str, spans.Value] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tinsmith",
        "gen_ai.request.model": base_model,
        "gen_ai.request.choice.count": request.num_samples,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.usage.input_tokens": len(request.prompt_tokens),
    }
    if request.weights is not None:
        attributes["tinsmith.version"] = request.weights.version
    return spans.begin(f"sample {base_model}", service=_SERVICE, attributes=attributes)


def end_sample(
    span: spans.Span,
    request: SampleRequest,
    sequences: Sequence[SampledSequence],
    *,
    begin_s: float,
    problem: str,
) -> None:
    """End the span of a request, with parts for its wait, its prompt and its decoding.

    An engine that keeps no times has no such parts.
    """
    end_s = time.time()
    timeline = request.timeline
    if timeline is not None and timeline.begin_s is not None:
        _part(span, "wait in the queue", begin_s, timeline.begin_s)
        read_s = timeline.read_s if timeline.read_s is not None else end_s
        _part(span, "prefill", timeline.begin_s, read_s)
        if timeline.read_s is not None:
            _part(span, "decode", timeline.read_s, end_s)
    reasons = sorted({sequence.finish_reason or "unfinished" for sequence in sequences})
    span.set(
        {
            "gen_ai.usage.output_tokens": sum(len(sequence.tokens) for sequence in sequences),
            "gen_ai.response.finish_reasons": reasons,
        }
    )
    span.end(problem=problem, end_s=end_s)


def _part(span: spans.Span, name: str, begin_s: float, end_s: float) -> None:
    part = spans.begin(name, service=_SERVICE, parent=span, begin_s=begin_s)
    part.end(end_s=max(begin_s, end_s))
