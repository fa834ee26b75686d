"""Signals are held back from what has to happen as a whole."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator

import pytest

from tinsmith.recipes.experiment.interrupts import uninterrupted


def stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    # An interrupt that arrives inside a callback of the collector, as hypothesis has one, is lost.
    gc.disable()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, stop)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    gc.enable()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_the_block(number: signal.Signals) -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            signal.raise_signal(number)
            signal.raise_signal(number)
            done.append("second half")
        done.append("never here")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["second half"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


def test_an_error_of_the_block_is_not_lost() -> None:
    with pytest.raises(ValueError, match="of the block"), uninterrupted():
        raise ValueError("of the block")
    assert signal.getsignal(signal.SIGTERM) is stop


def test_what_is_left_to_the_system_stays_there() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uninterrupted():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_have_no_signals_to_hold_back() -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            done.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [stop]
