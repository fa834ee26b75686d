"""All requests at once, then each of them alone, and what differs between the two."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tests.determinism.plan import Publish, Request, Step
from tests.determinism.target import Answer, Sample, Target

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What came of holding a server to its bits.

    Attributes:
        num_samples: Samples that were compared.
        num_differ: Those whose bits were others when their request was alone.
        num_scores_differ: Prompts whose scores were others.
        num_failed: Requests and versions that failed.
        num_given_up: Requests that were given up.
        num_published: Versions of adapters that were made.
        first_difference: Which came first, and how it differs; empty if none does.
        first_failure: Likewise.
        digest: SHA-256 of all answers; equal plans of equal weights have equal ones.
        at_once_s: Time that all took at once.
        alone_s: Time that they took one by one.
    """

    num_samples: int
    num_differ: int
    num_scores_differ: int
    num_failed: int
    num_given_up: int
    num_published: int
    first_difference: str
    first_failure: str
    digest: str
    at_once_s: float
    alone_s: float

    @property
    def is_met(self) -> bool:
        """Whether all was answered, and by the same bits."""
        return not (self.num_differ or self.num_scores_differ or self.num_failed)


@dataclass(slots=True)
class _Pass:
    """The answers of one pass by the numbers of their requests, and what failed."""

    target: Target
    timeout_s: float
    answers: dict[int, Answer] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    num_given_up: int = 0

    async def ask(self, name: str, request: Request) -> None:
        """Ask for the answer to a request, and keep it."""
        answer = await self.attempt(_name_of(request), self.target.sample(name, request))
        if answer is not None:
            self.answers[request.number] = answer

    async def give_up(self, name: str, request: Request) -> None:
        """Begin a request and give it up."""

        async def work() -> bool:
            await self.target.give_up(name, request)
            return True

        done = await self.attempt(f"{_name_of(request)}, given up,", work())
        self.num_given_up += bool(done)

    async def attempt(self, what: str, work: Coroutine[Any, Any, ResultT]) -> ResultT | None:
        """Return what the work returns; None if it fails, which is noted."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await work
        except Exception as error:  # Whatever it is, it is what the program reports.
            self.failures.append(f"{what} failed: {type(error).__name__}: {error}")
            return None


class _Versions:
    """Makes versions, those of one adapter in order; each is made once and waited for by many."""

    def __init__(self, found: _Pass, group: asyncio.TaskGroup) -> None:
        self._found = found
        self._group = group
        self._made: dict[Publish, asyncio.Task[str | None]] = {}

    def begin(self, weights: Publish) -> None:
        """Begin to make a version."""
        self._made[weights] = self._group.create_task(self._make(weights))

    async def name(self, weights: Publish) -> str | None:
        """Return the name of a version once it is there; None if it cannot be made."""
        return await asyncio.shield(self._made[weights])

    def names(self) -> dict[Publish, str]:
        """Return those that were made."""
        names = {weights: made.result() for weights, made in self._made.items()}
        return {weights: name for weights, name in names.items() if name is not None}

    async def _make(self, weights: Publish) -> str | None:
        if weights.version:
            await self.name(Publish(weights.adapter, weights.version - 1))
        return await self._found.attempt(str(weights), self._found.target.publish(weights))


async def hold(
    target: Target, plan: Sequence[Step], *, concurrency: int, timeout_s: float, seed: int = 0
) -> Report:
    """Carry a plan out at once and one by one, and compare.

    Args:
        target: The server.
        plan: What is asked of it.
        concurrency: Requests that are on their way at once; new versions are made beside them.
        timeout_s: Time that one request or version may take.
        seed: Of the order in which requests are sent alone.
    """
    begin_s = time.monotonic()
    at_once = _Pass(target, timeout_s)
    names = await _all_at_once(at_once, plan, concurrency)
    middle_s = time.monotonic()
    requests = [step for step in plan if isinstance(step, Request)]
    random.Random(seed).shuffle(requests)
    alone = _Pass(target, timeout_s)
    for request in requests:
        if request.weights in names:
            await alone.ask(names[request.weights], request)
    end_s = time.monotonic()
    samples, scores, num_samples = [], [], 0
    for request in sorted(requests, key=lambda one: one.number):
        one, other = (each.answers.get(request.number) for each in (at_once, alone))
        if one is not None and other is not None:
            num_samples += len(one.samples)
            samples += [f"{_name_of(request)}, {text}" for text in _sample_differences(one, other)]
            scores += [f"{_name_of(request)}, {text}" for text in _score_differences(one, other)]
    failures = [*at_once.failures, *alone.failures]
    return Report(
        num_samples=num_samples,
        num_differ=len(samples),
        num_scores_differ=len(scores),
        num_failed=len(failures),
        num_given_up=at_once.num_given_up,
        num_published=len(names),
        first_difference=next(iter([*samples, *scores]), ""),
        first_failure=next(iter(failures), ""),
        digest=_digest(at_once.answers),
        at_once_s=middle_s - begin_s,
        alone_s=end_s - middle_s,
    )


async def _all_at_once(found: _Pass, plan: Sequence[Step], concurrency: int) -> dict[Publish, str]:
    """Begin each step once there is room for it, and return the names of all versions."""
    room = asyncio.Semaphore(concurrency)

    async def work(request: Request, *, gives_up: bool) -> None:
        try:
            name = await versions.name(request.weights)
            if name is None:
                found.failures.append(f"{_name_of(request)} has no weights")
            elif gives_up:
                await found.give_up(name, request)
            else:
                await found.ask(name, request)
        finally:
            room.release()

    async with asyncio.TaskGroup() as group:
        versions = _Versions(found, group)
        for step in plan:
            if isinstance(step, Publish):
                versions.begin(step)
                continue
            for gives_up in (False, True) if step.is_doubled else (False,):
                await room.acquire()
                group.create_task(work(step, gives_up=gives_up))
    return versions.names()


def _sample_differences(at_once: Answer, alone: Answer) -> Iterator[str]:
    """Yield a line for each sample whose bits differ."""
    if len(at_once.samples) != len(alone.samples):
        yield f"{len(at_once.samples)} samples at once, {len(alone.samples)} alone"
    for index, (one, other) in enumerate(zip(at_once.samples, alone.samples, strict=False)):
        # The text of a float has all its bits, and is the same for any NaN.
        if repr(one) != repr(other):
            yield f"sample {index}, {_difference(one, other)}"


def _score_differences(at_once: Answer, alone: Answer) -> Iterator[str]:
    """Yield a line if the prompt was scored otherwise."""
    one, other = at_once.prompt_logprobs, alone.prompt_logprobs
    if repr(one) != repr(other):
        yield f"scores of the prompt, from position {_first_place(one, other)} on"


def _difference(at_once: Sample, alone: Sample) -> str:
    place = min(
        _first_place(at_once.tokens, alone.tokens), _first_place(at_once.logprobs, alone.logprobs)
    )
    found = [
        f"{how} {each.tokens[place]!r} ({each.logprobs[place]!r})"
        if place < min(len(each.tokens), len(each.logprobs))
        else f"{how} the end, {each.reason}, of {each.text!r}"
        for how, each in (("at once", at_once), ("alone", alone))
    ]
    return f"token {place}: {', '.join(found)}"


def _first_place(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the first position where two sequences differ, or the length of the shorter one."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if repr(a) != repr(b)), min(len(one), len(other)))


def _digest(answers: Mapping[int, Answer]) -> str:
    text = "\n".join(f"{number} {answers[number]!r}" for number in sorted(answers))
    return hashlib.sha256(text.encode()).hexdigest()


def _name_of(request: Request) -> str:
    weights = request.weights
    return f"request {request.number} of adapter {weights.adapter}, version {weights.version}"
