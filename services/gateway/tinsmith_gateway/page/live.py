"""Server-sent events: lists and curves, sent when they change.

A reader says what it shows: lists by name, curves by run with the width and revision that it has.
The pods are asked in intervals that grow with what is watched, so that a page costs little.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from tinsmith_gateway.page.encoding import Json, encode_error
from tinsmith_gateway.page.resources import Ask, Resources, parse_number
from tinsmith_gateway.serving.shutdown import Drain
from tinsmith_runtime.errors import (
    ErrorCode,
    InvalidFieldError,
    NotFoundError,
    TinsmithError,
)

MAX_CHARTS = 64
MAX_STREAM_S = 600.0
"""How long a stream lasts; its reader goes on with another."""
_LISTS_INTERVAL_S = 2.0
_CURVES_INTERVAL_S = 1.0
_CHARTS_PER_S = 8
_PING_INTERVAL_S = 15.0
_POLL_S = 0.25
_FATAL = frozenset({ErrorCode.UNAUTHENTICATED, ErrorCode.PERMISSION_DENIED})


@dataclass(slots=True)
class Chart:
    """The curves of a run that a reader has.

    Attributes:
        run: Id of the run.
        width: Of its buckets.
        revision: Of its newest point.
    """

    run: str
    width: int
    revision: int


def parse_charts(ask: Ask) -> list[Chart]:
    """Return the curves that a reader watches: parameters `chart`, `<run>:<width>:<revision>`.

    Raises:
        InvalidFieldError: If one is not of this form, or there are too many.
    """
    texts = ask.query.get("chart", ())
    if len(texts) > MAX_CHARTS:
        raise InvalidFieldError("chart", f"must be at most {MAX_CHARTS}")
    charts = []
    for text in texts:
        run, *numbers = text.split(":")
        if not run or len(numbers) != 2:
            raise InvalidFieldError("chart", "must be <run>:<bucket_steps>:<revision>")
        width, revision = (parse_number("chart", number) for number in numbers)
        charts.append(Chart(run, width, revision))
    return charts


def parse_topics(ask: Ask, resources: Resources) -> list[str]:
    """Return the lists that a reader watches: parameters `topic`.

    Raises:
        InvalidFieldError: If there is no such list.
    """
    topics = sorted(set(ask.query.get("topic", ())))
    unknown = [topic for topic in topics if topic not in resources.lists]
    if unknown:
        raise InvalidFieldError("topic", f"must be one of {', '.join(resources.lists)}")
    return topics


async def watch(resources: Resources, ask: Ask, drain: Drain) -> AsyncGenerator[Json]:
    """Yield what a reader watches, first whole and then as it changes.

    An error that does not pass is the last event: such as that a key was revoked meanwhile.

    Raises:
        InvalidFieldError: Before the first event, if it is not said what is watched.
    """
    charts, topics = parse_charts(ask), parse_topics(ask, resources)
    if not charts and not topics:
        raise InvalidFieldError("topic", "or chart must say what is watched")
    yield {"type": "begin"}
    try:
        async for event in _changes(resources, ask, drain, charts, topics):
            yield event
    except TinsmithError as error:
        yield {"type": "error", "error": encode_error(error)}


async def _changes(
    resources: Resources, ask: Ask, drain: Drain, charts: list[Chart], topics: list[str]
) -> AsyncGenerator[Json]:
    sent: dict[str, str] = {}
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    curves_due_s = lists_due_s = begin_s
    curves_interval_s = max(_CURVES_INTERVAL_S, len(charts) / _CHARTS_PER_S)
    ping_due_s = begin_s + _PING_INTERVAL_S
    while loop.time() - begin_s < MAX_STREAM_S and not drain.has_begun:
        if charts and loop.time() >= curves_due_s:
            for chart in charts:
                async for event in _new_curves(resources, ask, chart):
                    yield event
            curves_due_s = loop.time() + curves_interval_s
        if topics and loop.time() >= lists_due_s:
            for topic in topics:
                event = await _read(resources, ask, topic)
                text = json.dumps(event, sort_keys=True)
                if sent.get(topic) != text:
                    sent[topic] = text
                    yield event
            lists_due_s = loop.time() + _LISTS_INTERVAL_S
        if loop.time() >= ping_due_s:
            ping_due_s = loop.time() + _PING_INTERVAL_S
            yield {"type": "ping"}
        await asyncio.sleep(_POLL_S)


async def _new_curves(resources: Resources, ask: Ask, chart: Chart) -> AsyncGenerator[Json]:
    try:
        found = await resources.curves(
            ask, chart.run, width=chart.width, after_revision=chart.revision
        )
    except NotFoundError as error:
        if chart.revision >= 0:
            chart.revision = -1
            yield {"type": "gone", "run": chart.run, "error": encode_error(error)}
        return
    except TinsmithError as error:
        if error.code in _FATAL or error.code is ErrorCode.INVALID_ARGUMENT:
            raise
        # It passes, and the next round sends what came meanwhile.
        return
    # A reader that has nothing yet is told so, too, of a run that has no curves.
    if found["revision"] != chart.revision or not chart.width:
        chart.revision = found["revision"]
        chart.width = found["bucket_steps"]
        yield {"type": "curves", "run": chart.run, **found}


async def _read(resources: Resources, ask: Ask, topic: str) -> Json:
    try:
        return {"type": topic, "content": await resources.lists[topic](ask)}
    except TinsmithError as error:
        if error.code in _FATAL:
            raise
        return {"type": topic, "error": encode_error(error)}
