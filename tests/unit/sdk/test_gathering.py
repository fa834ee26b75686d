"""Waiting for many futures: in order, as they end, with failures in their place."""

from __future__ import annotations

import concurrent.futures

import pytest

import tinsmith
from tinsmith.rpc.event_loop_thread import BackgroundLoop
from tinsmith.rpc.futures import ResultFuture

Source = concurrent.futures.Future[int]


@pytest.fixture
def background() -> BackgroundLoop:
    return BackgroundLoop()


def make_futures(
    background: BackgroundLoop, count: int
) -> tuple[list[Source], list[ResultFuture[int]]]:
    sources = [Source() for _ in range(count)]
    futures = [
        ResultFuture(background, what=f"call {index}", default_timeout_s=30.0, future=source)
        for index, source in enumerate(sources)
    ]
    return sources, futures


def test_results_come_in_the_order_given_whatever_the_order_of_their_ends(
    background: BackgroundLoop,
) -> None:
    sources, futures = make_futures(background, 3)
    for index in (2, 0, 1):
        sources[index].set_result(index * 10)
    assert tinsmith.gather(futures) == [0, 10, 20]
    assert tinsmith.gather([]) == []


def test_futures_are_yielded_as_they_end(background: BackgroundLoop) -> None:
    sources, futures = make_futures(background, 3)
    sources[1].set_result(1)
    ending = tinsmith.as_completed(futures)
    assert next(ending) is futures[1]
    sources[2].set_result(2)
    assert next(ending) is futures[2]
    sources[0].set_exception(tinsmith.NotFoundError("gone"))
    assert next(ending) is futures[0]
    assert next(ending, None) is None


def test_the_first_failure_by_order_is_raised_once_all_have_ended(
    background: BackgroundLoop,
) -> None:
    sources, futures = make_futures(background, 3)
    sources[2].set_exception(tinsmith.NotFoundError("the last"))
    sources[1].set_exception(tinsmith.NotFoundError("the second"))
    sources[0].set_result(1)
    with pytest.raises(tinsmith.NotFoundError, match="the second"):
        tinsmith.gather(futures)
    first, second, third = tinsmith.gather(futures, return_exceptions=True)
    assert first == 1
    assert isinstance(second, tinsmith.NotFoundError)
    assert isinstance(third, tinsmith.NotFoundError)


def test_what_does_not_arrive_is_counted_and_goes_on(background: BackgroundLoop) -> None:
    sources, futures = make_futures(background, 2)
    sources[0].set_result(1)
    with pytest.raises(tinsmith.OperationTimeoutError, match=r"1 of 2 ended within 0.01 s"):
        tinsmith.gather(futures, timeout=0.01)
    sources[1].set_result(2)
    assert tinsmith.gather(futures) == [1, 2]


def test_a_future_says_what_it_is_and_how_it_stands(background: BackgroundLoop) -> None:
    sources, futures = make_futures(background, 3)
    assert repr(futures[0]) == "ResultFuture(call 0, running)"
    sources[0].set_result(1)
    sources[1].set_exception(tinsmith.NotFoundError("no such run"))
    sources[2].cancel()
    assert repr(futures[0]) == "ResultFuture(call 0, succeeded)"
    assert repr(futures[1]) == "ResultFuture(call 1, failed: no such run)"
    assert repr(futures[2]) == "ResultFuture(call 2, cancelled)"
