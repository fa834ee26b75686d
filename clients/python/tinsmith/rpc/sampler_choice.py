"""Why a call went to one of several samplers: said with the call, and again in its answer.

The process that chooses, a client or a gateway, sends the reason as metadata. The sampler puts it
into its answer beside its own name, so that it arrives by every way that an answer takes. A reason
decides nothing; a word that is not known is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tinsmith.v1 import sampler_pb2

HEADER = "x-tinsmith-sampler-choice"

_CHOICES = {
    name.removeprefix("SAMPLER_CHOICE_").lower(): number
    for name, number in sampler_pb2.SamplerChoice.items()
    if number
}
_NAMES = {number: name for name, number in _CHOICES.items()}


def choice_metadata(reason: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call that says why its sampler was chosen.

    Args:
        reason: See `replicas.Choice`.
    """
    return ((HEADER, reason),)


def choice_of(metadata: Iterable[Any] | None) -> sampler_pb2.SamplerChoice.ValueType:
    """Return why a call came, as its metadata says; unspecified if they do not."""
    for key, value in metadata or ():
        if key == HEADER and value in _CHOICES:
            return _CHOICES[value]
    return sampler_pb2.SAMPLER_CHOICE_UNSPECIFIED


def choice_name(choice: sampler_pb2.SamplerChoice.ValueType) -> str:
    """Return the word for a choice, such as `sticky`; empty if it was not said."""
    return _NAMES.get(choice, "")
