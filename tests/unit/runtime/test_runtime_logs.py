from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from tests.fakes.trainer_harness import make_datum

from tinsmith_runtime.observability.logs import JsonFormatter, bind_log_fields, configure_logging


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logging("trainer", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_an_event_with_fields(stream: io.StringIO) -> None:
    logging.getLogger("tinsmith.x").info("step done", extra={"run": "r", "duration_s": 0.5})
    (line,) = lines(stream)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "pod": "trainer",
        "logger": "tinsmith.x",
        "event": "step done",
        "run": "r",
        "duration_s": 0.5,
    }


def test_objects_are_dropped_so_that_no_prompt_slips_in(stream: io.StringIO) -> None:
    class Prompt:
        def __repr__(self) -> str:
            return "secret"

    extra = {"request": make_datum(), "prompt": Prompt(), "tokens": [1, 2], "raw": b"secret"}
    logging.getLogger("x").warning("refused", extra={**extra, "run": "r", "seed": None})
    (line,) = lines(stream)
    assert not extra.keys() & line.keys()
    assert (line["run"], line["seed"]) == ("r", None)
    assert "secret" not in stream.getvalue()


def test_a_trace_stays_in_one_line(stream: io.StringIO) -> None:
    try:
        raise RuntimeError("first\nsecond")
    except RuntimeError:
        logging.getLogger("x").exception("failed")
    (line,) = lines(stream)
    assert line["trace"].startswith("Traceback")
    assert "first\nsecond" in line["trace"]


async def test_fields_of_a_call_are_on_each_of_its_lines_and_on_no_other(
    stream: io.StringIO,
) -> None:
    async def serve(run: str) -> None:
        bind_log_fields(resource=run, request_id="")
        await asyncio.sleep(0)
        bind_log_fields(method="Forward")
        logging.getLogger("x").info(run)

    await asyncio.gather(*(asyncio.create_task(serve(run)) for run in ("a", "b")))
    logging.getLogger("x").info("none")
    found = {line["event"]: line for line in lines(stream)}
    assert {found[run]["resource"] for run in ("a", "b")} == {"a", "b"}
    assert found["a"]["method"] == "Forward"
    assert "request_id" not in found["a"]
    assert "resource" not in found["none"]


def test_levels_below_the_configured_one_are_silent(stream: io.StringIO) -> None:
    logging.getLogger("x").debug("noise")
    assert stream.getvalue() == ""


def test_time_has_milliseconds() -> None:
    record = logging.makeLogRecord({"created": 1.0625, "msecs": 62.5, "msg": "m"})
    assert json.loads(JsonFormatter("p").format(record))["time"] == "1970-01-01T00:00:01.062Z"
