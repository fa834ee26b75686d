"""What is asked of a server: samples and new versions of adapters, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

FIRST_TOKEN = 16
"""Prompts hold no smaller ids: those are where tiny models keep their special tokens."""
_NUM_BEGINNINGS = 8
_STOPS = ("e", "th", "a", " ", "\n", "0")
_SAMPLES = (1, 1, 1, 1, 2, 4)
_TEMPERATURES = (0.0, 0.6, 1.0, 1.0, 1.4)
_TOP_P = (1.0, 1.0, 0.9, 0.5)
_TOP_K = (-1, -1, 20, 3)
_SEEDS = 2**31


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is asked for.

    Attributes:
        num_samples: Samples in all.
        num_adapters: Adapters that they are spread over.
        num_publishes: New versions of adapters that are made while samples are drawn.
        max_tokens: Longest sample.
        last_token: Largest id of a token in a prompt.
        images: Whether some prompts hold a picture.
    """

    num_samples: int
    num_adapters: int
    num_publishes: int = 0
    max_tokens: int = 24
    last_token: int = 200
    images: bool = False


@dataclass(frozen=True, slots=True)
class Publish:
    """A version of an adapter is to be made; 0 is its first."""

    adapter: int
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request for samples.

    Attributes:
        number: Names it.
        weights: What it samples from.
        prompt: Ids of tokens.
        picture: Seed of the picture in front of the prompt; None for none.
        stop: Strings that end a sample.
        scores_prompt: Whether log-probabilities of the prompt are asked for too.
        is_doubled: Whether a copy of it is sent beside it, and given up.
    """

    number: int
    weights: Publish
    prompt: tuple[int, ...]
    picture: int | None
    num_samples: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: tuple[str, ...]
    scores_prompt: bool
    is_doubled: bool


Step = Publish | Request


def make_plan(size: Size, seed: int) -> list[Step]:
    """Return what is done, in order of its beginning; a request comes behind its version."""
    chance = random.Random(seed)
    plan: list[Step] = [Publish(adapter, 0) for adapter in range(size.num_adapters)]
    requests = list(_requests(size, chance))
    newest = [0] * size.num_adapters
    num_published = 0
    for index, draw in enumerate(requests):
        while num_published * len(requests) < index * size.num_publishes:
            adapter = num_published % size.num_adapters
            newest[adapter] += 1
            num_published += 1
            plan.append(Publish(adapter, newest[adapter]))
        adapter = chance.randrange(size.num_adapters)
        weights = Publish(adapter, chance.randint(0, newest[adapter]))
        plan.append(_request(index, weights, draw, size, chance))
    return plan


def _requests(size: Size, chance: random.Random) -> Iterator[int]:
    """Yield how many samples each request is for."""
    left = size.num_samples
    while left:
        num_samples = min(left, chance.choice(_SAMPLES))
        yield num_samples
        left -= num_samples


def _request(
    number: int, weights: Publish, num_samples: int, size: Size, chance: random.Random
) -> Request:
    return Request(
        number=number,
        weights=weights,
        prompt=_prompt(size, chance),
        picture=chance.randrange(4) if size.images and chance.random() < 0.3 else None,
        num_samples=num_samples,
        max_tokens=chance.randint(1, size.max_tokens),
        temperature=chance.choice(_TEMPERATURES),
        top_p=chance.choice(_TOP_P),
        top_k=chance.choice(_TOP_K),
        seed=chance.randrange(_SEEDS),
        stop=tuple(chance.sample(_STOPS, chance.choice((0, 0, 1, 2)))),
        scores_prompt=chance.random() < 0.1,
        is_doubled=chance.random() < 0.1,
    )


def _prompt(size: Size, chance: random.Random) -> tuple[int, ...]:
    """Return a beginning that many prompts share, of up to three blocks of a cache, and an end."""
    beginning = random.Random(chance.randrange(_NUM_BEGINNINGS))
    shared = _tokens(size, beginning, beginning.randint(0, 200))
    return (*shared, *_tokens(size, chance, chance.randint(1, 24)))


def _tokens(size: Size, chance: random.Random, number: int) -> list[int]:
    return [chance.randint(FIRST_TOKEN, size.last_token) for _ in range(number)]
