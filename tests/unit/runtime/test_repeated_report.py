"""Reports that are repeated: one that fails ends nothing, and the last is sent at the end."""

from __future__ import annotations

import logging

import pytest
from tests.support.wait import eventually

from tinsmith_runtime.rpc.repeated_report import RepeatedReport


async def test_a_failed_report_is_followed_by_others(caplog: pytest.LogCaptureFixture) -> None:
    num_sent = 0

    async def send() -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 1:
            raise RuntimeError("the first one fails")

    report = RepeatedReport("what was counted", send, interval_s=0.001)
    with caplog.at_level(logging.ERROR):
        report.start()
        await eventually(lambda: num_sent >= 3)
        await report.stop()
    assert [record.message for record in caplog.records] == ["not reported"]


async def test_what_is_left_is_sent_at_the_end_and_once() -> None:
    waiting = ["a"]
    sent: list[str] = []

    async def send() -> None:
        sent.extend(waiting)
        waiting.clear()

    report = RepeatedReport("what was counted", send, interval_s=3600.0)
    report.start()
    await eventually(lambda: sent == ["a"])
    waiting.append("b")
    await report.stop()
    await report.stop()
    assert sent == ["a", "b"]
