"""Which samplers answered a request, and why these: headers of its answer.

A stream sends its headers with its first chunk. They name the samplers that had answered by then.
"""

from __future__ import annotations

from tinsmith.rpc.sampler_choice import choice_name
from tinsmith.v1 import sampler_pb2

SAMPLER_HEADER = "x-tinsmith-sampler"
CHOICE_HEADER = "x-tinsmith-sampler-choice"


class AnsweredBy:
    """The samplers of one request, in the order in which they answered."""

    def __init__(self) -> None:
        self._choices: dict[str, str] = {}

    def note(self, about: sampler_pb2.SampleResponse) -> None:
        """Take note of what an answer says of its sampler."""
        if about.sampler:
            self._choices[about.sampler] = choice_name(about.sampler_choice)

    @property
    def headers(self) -> dict[str, str]:
        """The headers: names and reasons in the same order, separated by commas."""
        if not self._choices:
            return {}
        return {
            SAMPLER_HEADER: ", ".join(self._choices),
            CHOICE_HEADER: ", ".join(self._choices.values()),
        }
