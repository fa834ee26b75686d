"""Tokens from the engine's thread to a reader: nothing lost, doubled or out of order."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tinsmith_engine import PromptLogprobs, SampledToken
from tinsmith_sampler.requests.token_stream import Delivery, Piece, TokenFeed

TIMEOUT_S = 60


def token(number: int) -> SampledToken:
    return SampledToken(number, -0.5 * number, 3, [])


def numbers(piece: Piece) -> list[int]:
    return [one.token for one in piece.tokens]


async def take(feed: TokenFeed) -> Delivery:
    async with asyncio.timeout(TIMEOUT_S):
        delivery = await feed.take()
    assert delivery is not None
    return delivery


async def test_what_piles_up_comes_together() -> None:
    feed = TokenFeed(2)
    scores = PromptLogprobs([None, -1.0], [])
    feed.begin(scores, 2, 3)
    for number in range(5):
        feed.token(0, token(number))
        feed.flush()
    feed.token(1, token(9))
    feed.end(1, "stop")
    feed.flush()
    first = await take(feed)
    assert first.prompt is not None
    assert (first.prompt.scores, first.prompt.num_cached_tokens) == (scores, 2)
    assert [(p.sample_index, p.token_index, numbers(p), p.reason) for p in first.pieces] == [
        (0, 0, [0, 1, 2, 3, 4], None),
        (1, 0, [9], "stop"),
    ]
    feed.token(0, token(5))
    feed.end(0, "length")
    feed.flush()
    last = await take(feed)
    assert last.prompt is None
    assert [(p.token_index, numbers(p), p.reason) for p in last.pieces] == [(5, [5], "length")]
    assert await feed.take() is None
    assert await feed.take() is None


async def test_what_was_not_flushed_does_not_arrive() -> None:
    feed = TokenFeed(1)
    reader = asyncio.create_task(take(feed))
    feed.token(0, token(1))
    await asyncio.sleep(0)
    assert not reader.done()
    feed.flush()
    assert numbers((await reader).pieces[0]) == [1]


@pytest.mark.parametrize("received", [1, 3, 8])
async def test_what_was_received_is_left_out(received: int) -> None:
    feed = TokenFeed(1, [received])
    for number in range(3):
        feed.token(0, token(number))
        feed.flush()
    feed.end(0, "length")
    feed.flush()
    (piece,) = (await take(feed)).pieces
    assert numbers(piece) == list(range(3))[received:]
    assert (piece.token_index, piece.reason) == (min(received, 3), "length")


async def test_a_failure_is_what_the_reader_gets() -> None:
    feed = TokenFeed(1)
    reader = asyncio.create_task(feed.take())
    await asyncio.sleep(0)
    feed.token(0, token(1))
    feed.fail(RuntimeError("gone"))
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(RuntimeError, match="gone"):
            await reader
    with pytest.raises(RuntimeError, match="gone"):
        await feed.take()


async def test_a_writer_and_a_reader_at_once() -> None:
    num_samples, num_tokens = 3, 2000
    feed = TokenFeed(num_samples)

    def write() -> None:
        feed.begin(None, 0, 1)
        for number in range(num_tokens):
            for sample in range(num_samples):
                feed.token(sample, token(number))
                if number + 1 == num_tokens:
                    feed.end(sample, "length")
            feed.flush()

    writer = threading.Thread(target=write)
    writer.start()
    found: list[list[int]] = [[] for _ in range(num_samples)]
    num_prompts = 0
    async with asyncio.timeout(TIMEOUT_S):
        while (delivery := await feed.take()) is not None:
            num_prompts += delivery.prompt is not None
            for piece in delivery.pieces:
                assert piece.token_index == len(found[piece.sample_index])
                found[piece.sample_index] += numbers(piece)
    writer.join()
    assert found == [list(range(num_tokens))] * num_samples
    assert num_prompts == 1


def test_a_reader_whose_loop_is_gone_hurts_nobody() -> None:
    async def build() -> TokenFeed:
        return TokenFeed(1)

    feed = asyncio.run(build())
    feed.token(0, token(1))
    feed.flush()
    feed.fail(RuntimeError())
