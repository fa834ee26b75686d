"""What a server is asked for, whatever it speaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tests.determinism.plan import Publish, Request


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of an answer.

    Attributes:
        tokens: Ids, or texts where the protocol has no ids.
        logprobs: Of each token.
        reason: Why it ended.
        text: What it says; empty where the protocol has ids alone.
    """

    tokens: tuple[int | str, ...]
    logprobs: tuple[float | None, ...]
    reason: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """The samples of one request, and the scores of its prompt if it asked for them."""

    samples: tuple[Sample, ...]
    prompt_logprobs: tuple[float | None, ...] = ()


class Target(Protocol):
    """A server that samples."""

    async def publish(self, weights: Publish) -> str:
        """Make a version of an adapter, which stays what it is; return its name."""

    async def sample(self, name: str, request: Request) -> Answer:
        """Return the answer to a request, sampled from a version by its name."""

    async def give_up(self, name: str, request: Request) -> None:
        """Begin the same, and give it up once it is on its way."""
