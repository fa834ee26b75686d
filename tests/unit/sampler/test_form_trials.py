"""A form that takes too long to compile is refused in time, and delays its own project alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.metrics import metric
from tests.unit.test_tool_forms import Writer

from tinsmith_engine.sampling.request.sample_request import OutputFormat
from tinsmith_runtime.errors import InvalidFieldError, WorkerUnavailableError
from tinsmith_sampler.forms import grammars as form_grammars
from tinsmith_sampler.forms import trials as form_trials
from tinsmith_sampler.forms.grammars import Grammar, Grammars
from tinsmith_sampler.forms.trials import FormTrials

SLOW = OutputFormat("regex", "a?" * 32_000)
"""Takes minutes, of which the compiler's own limits count nothing."""
ENDED = "tinsmith_confined_ends_total"


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[FormTrials]:
    monkeypatch.setattr(form_trials, "MAX_COMPILE_S", 1.0)
    made = FormTrials()
    yield made
    made.close()


@pytest.fixture
def grammars(trials: FormTrials, tmp_path: Path) -> Grammars:
    Writer(tmp_path, are_special=True)
    return Grammars(trials, tmp_path, 262, [0])


async def test_a_form_that_takes_too_long_is_refused_and_ends_its_process(
    grammars: Grammars,
) -> None:
    num_before = metric(ENDED, work="form")
    with pytest.raises(InvalidFieldError, match=r"took more than 1 s.*send a smaller form"):
        await grammars.get(SLOW, project="evil")
    assert metric(ENDED, work="form") == num_before + 1
    # The next form, of the same project too, has a new process.
    assert (await grammars.get(OutputFormat("regex", "ab"), project="evil")).begin(
        "p"
    ).words() is not None


async def test_another_project_does_not_wait_for_slow_forms(grammars: Grammars) -> None:
    slow = [
        asyncio.create_task(
            grammars.get(OutputFormat("regex", SLOW.source + str(i)), project="evil")
        )
        for i in range(20)
    ]
    for number in range(10):
        await grammars.get(OutputFormat("regex", f"good{number}"), project="good")
    # They are tried one by one, a second each.
    assert sum(task.done() for task in slow) < len(slow)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_a_caller_that_leaves_does_not_give_its_place_away(grammars: Grammars) -> None:
    num_before = metric(ENDED, work="form")
    left = asyncio.create_task(grammars.get(SLOW, project="evil"))
    await asyncio.sleep(0.05)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    await grammars.get(OutputFormat("regex", "next"), project="evil")
    # What it sent was ended first.
    assert metric(ENDED, work="form") == num_before + 1


async def test_equal_forms_are_compiled_once(grammars: Grammars) -> None:
    form = OutputFormat("json_schema", '{"type": "integer"}')
    found = await asyncio.gather(*(grammars.get(form, project="p") for _ in range(5)))
    assert all(grammar is found[0] for grammar in found)


async def test_what_is_no_form_is_told_as_the_compiler_tells_it(grammars: Grammars) -> None:
    with pytest.raises(InvalidFieldError, match="is no json_schema"):
        await grammars.get(OutputFormat("json_schema", "{"))


async def test_that_the_process_did_not_come_up_is_no_fault_of_the_form(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Too little for an interpreter: the process ends before it has seen the form.
    monkeypatch.setattr(form_trials, "MAX_COMPILE_BYTES", 2**24)
    trials = FormTrials()
    Writer(tmp_path, are_special=True)
    grammars = Grammars(trials, tmp_path, 262, [0])
    with pytest.raises(WorkerUnavailableError, match=r"did not come up: .*again") as caught:
        await grammars.get(OutputFormat("regex", "ab"), project="p")
    assert "smaller" not in caught.value.message
    trials.close()


async def test_forms_of_a_project_take_no_place_of_anothers(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form_grammars, "MAX_KEPT_GRAMMARS", 8)

    async def get(project: str, number: int) -> Grammar:
        return await grammars.get(OutputFormat("regex", f"{project}{number}"), project=project)

    first = [await get("good", number) for number in range(3)]
    for number in range(20):
        await get("evil", number)
    assert [await get("good", number) for number in range(3)] == first
    # An equal part is its own, and no more while others want theirs.
    more = [await get("good", number) for number in range(4)]
    evil = [await get("evil", number) for number in range(16, 20)]
    assert [await get("good", number) for number in range(4)] == more
    assert [await get("evil", number) for number in range(16, 20)] == evil
