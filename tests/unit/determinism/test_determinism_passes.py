"""A server that changes its bits under load is found, and one that does not is not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from tests.determinism.__main__ import describe
from tests.determinism.passes import Report, hold
from tests.determinism.plan import Publish, Request, Size, make_plan
from tests.determinism.target import Answer, Sample

SIZE = Size(num_samples=60, num_adapters=4, num_publishes=6)

Change = Callable[[int, Request, Answer], Answer]


def same(num_others: int, request: Request, answer: Answer) -> Answer:
    return answer


def other_last_bit(num_others: int, request: Request, answer: Answer) -> Answer:
    if not num_others or request.number != 7:
        return answer
    first, *rest = answer.samples
    logprobs = (first.logprobs[0], 0.1 + 0.2, *first.logprobs[2:])
    return Answer((Sample(first.tokens, logprobs, first.reason), *rest), answer.prompt_logprobs)


def other_scores(num_others: int, request: Request, answer: Answer) -> Answer:
    if not num_others or not request.scores_prompt:
        return answer
    return Answer(answer.samples, (None, -0.0))


def one_too_few(num_others: int, request: Request, answer: Answer) -> Answer:
    return Answer(answer.samples[:-1]) if num_others and request.num_samples > 1 else answer


def broken(num_others: int, request: Request, answer: Answer) -> Answer:
    if request.number == 3:
        raise RuntimeError("out of order")
    return answer


class FakeServer:
    """Answers by seed and weights; a change may look at how many others are answered beside."""

    def __init__(self, change: Change = same, *, cannot_publish: Publish | None = None) -> None:
        self.change = change
        self.cannot_publish = cannot_publish
        self.num_running = 0
        self.most_running = 0
        self.published: list[Publish] = []
        self.given_up: list[int] = []

    async def publish(self, weights: Publish) -> str:
        await asyncio.sleep(0)
        if weights == self.cannot_publish:
            raise RuntimeError("no room")
        self.published.append(weights)
        return f"{weights.adapter}-{weights.version}"

    async def sample(self, name: str, request: Request) -> Answer:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
            return self.change(self.num_running - 1, request, self._answer(name, request))
        finally:
            self.num_running -= 1

    async def give_up(self, name: str, request: Request) -> None:
        self.given_up.append(request.number)

    def _answer(self, name: str, request: Request) -> Answer:
        chance = random.Random(f"{name} {request.seed}")
        return Answer(
            tuple(
                Sample((chance.randrange(9), 1), (-chance.random(), 0.3), "length")
                for _ in range(request.num_samples)
            ),
            (None, 0.0) if request.scores_prompt else (),
        )


def held(server: FakeServer, *, seed: int = 2) -> Report:
    plan = make_plan(SIZE, seed)
    return asyncio.run(hold(server, plan, concurrency=8, timeout_s=30))


def test_a_server_that_keeps_its_bits_passes() -> None:
    server = FakeServer()
    report = held(server)
    assert report.is_met
    assert (report.num_samples, report.num_differ, report.num_failed) == (60, 0, 0)
    assert server.most_running == 8
    assert report.num_given_up == len(server.given_up) > 0
    assert report.num_published == 10
    versions = [weights.version for weights in server.published if weights.adapter == 1]
    assert versions == sorted(versions)
    assert held(FakeServer()).digest == report.digest
    assert held(FakeServer(), seed=3).digest != report.digest


@pytest.mark.parametrize(
    ("change", "num_differ", "num_scores_differ", "said"),
    [
        (other_last_bit, 1, 0, "token 1: at once 1 (0.30000000000000004), alone 1 (0.3)"),
        (other_scores, 0, None, "scores of the prompt, from position 1 on"),
        (one_too_few, None, None, "3 samples at once, 4 alone"),
    ],
)
def test_other_bits_are_found_and_shown(
    change: Change, num_differ: int | None, num_scores_differ: int | None, said: str
) -> None:
    report = held(FakeServer(change))
    assert not report.is_met
    assert num_differ in (None, report.num_differ)
    assert num_scores_differ in (None, report.num_scores_differ)
    assert report.num_differ + report.num_scores_differ > 0
    assert said in report.first_difference
    assert report.first_difference in describe(report)


def test_requests_that_fail_are_counted() -> None:
    report = held(FakeServer(broken))
    assert (report.num_failed, report.num_differ) == (2, 0)
    assert not report.is_met
    assert "request 3 of adapter" in report.first_failure
    assert "RuntimeError: out of order" in describe(report)


def test_requests_of_a_version_that_cannot_be_made_fail_and_nothing_hangs() -> None:
    server = FakeServer(cannot_publish=Publish(1, 0))
    report = held(server)
    assert not report.is_met
    assert "Publish(adapter=1, version=0) failed: RuntimeError: no room" in report.first_failure
    assert report.num_samples < 60


def test_a_plan_has_all_that_was_asked_for_in_an_order_that_can_be_followed() -> None:
    size = Size(num_samples=500, num_adapters=5, num_publishes=12, images=True)
    plan = make_plan(size, 0)
    assert plan == make_plan(size, 0)
    requests = [step for step in plan if isinstance(step, Request)]
    assert sum(request.num_samples for request in requests) == 500
    assert {request.weights.adapter for request in requests} == set(range(5))
    assert any(request.stop for request in requests)
    assert any(request.picture is not None for request in requests)
    begun = set()
    for step in plan:
        if isinstance(step, Publish):
            assert step.version == 0 or Publish(step.adapter, step.version - 1) in begun
            begun.add(step)
        else:
            assert step.weights in begun
    assert len(begun) == 17
