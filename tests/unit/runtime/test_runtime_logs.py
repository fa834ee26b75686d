from __future__ import annotations

import asyncio
import io
import json
import logging
import stat
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.trainer_harness import make_datum

from tinsmith_runtime.observability.logs import (
    JsonFormatter,
    bind_log_fields,
    configure_logging,
    log_to_file,
)


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


@pytest.fixture
def log_file(stream: io.StringIO, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "server.log"
    path.touch(mode=0o644)
    log_to_file("local", path, max_bytes=1_000)
    yield path
    end_file_logs()


def end_file_logs() -> None:
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, RotatingFileHandler):
            root.removeHandler(handler)
            handler.close()


def test_a_file_has_the_lines_of_the_stream(stream: io.StringIO, log_file: Path) -> None:
    logging.getLogger("x").warning("refused", extra={"run": "r"})
    (line,) = lines(stream)
    assert json.loads(log_file.read_text()) == {**line, "pod": "local"}


def test_a_file_is_bounded_and_for_its_user_alone(log_file: Path) -> None:
    for number in range(100):
        logging.getLogger("x").warning("refused", extra={"number": number})
    earlier = log_file.with_name("server.log.1")
    assert sorted(log_file.parent.iterdir()) == [log_file, earlier]
    kept = []
    for path in (earlier, log_file):
        assert path.stat().st_size <= 1_000
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        kept += [json.loads(line)["number"] for line in path.read_text().splitlines()]
    assert kept == list(range(kept[0], 100))


def test_a_server_that_starts_again_goes_on_in_its_file(log_file: Path) -> None:
    logging.getLogger("x").warning("first")
    end_file_logs()
    log_to_file("local", log_file)
    logging.getLogger("x").warning("second")
    events = [json.loads(line)["event"] for line in log_file.read_text().splitlines()]
    assert events == ["first", "second"]
