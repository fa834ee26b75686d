"""`tinsmith runs fork`, `replay`, `bisect` and `keep`: the past of a run, as the ledger has it."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from tinsmith.cli.connection import connect
from tinsmith.cli.durations import parse_duration
from tinsmith.cli.output import AsJson, show_json
from tinsmith.errors import TinsmithError
from tinsmith.names import RunName
from tinsmith.training.past_steps import MetricTurn, ReplayedOperation, StepReplay

Moment = Annotated[
    str,
    typer.Argument(
        metavar="RUN@STEP",
        help="A run and how many optimizer steps it had; 0 is its beginning.",
    ),
]
_EXIT_DIFFERS = 3
"""A replay that gave other bits: told apart from a command that failed."""


def parse_moment(text: str) -> tuple[str, int]:
    """Return the run and the step of `RUN@STEP`.

    Raises:
        BadParameter: If it is not written so.
    """
    run, _, step = text.rpartition("@")
    if not run or not (step.isascii() and step.isdecimal()):
        raise typer.BadParameter(f"{text!r} is no RUN@STEP, such as run-1@120")
    return run, int(step)


def fork_run(
    moment: Moment,
    run_id: Annotated[str, typer.Option(help="Id of the fork; drawn if empty.")] = "",
    display_name: Annotated[str, typer.Option(help="What the fork is, for people.")] = "",
    as_json: AsJson = False,
) -> None:
    """Create a run that is what another one was after a step, bit for bit."""
    name, step = parse_moment(moment)
    with connect("tinsmith runs fork") as client:
        fork = client.runs.fork(name, step, run_id=run_id, display_name=display_name)
    if as_json:
        show_json(fork.info)
        return
    print(f"forked {moment}: {fork.name}")
    print(f"go on with it: client.runs.get({RunName.parse(fork.name).run!r})")


def replay_step(moment: Moment, as_json: AsJson = False) -> None:
    """Play a step of a run again with its inputs; the results beside the recorded ones.

    Ends with 3 if a result differs from the recorded one.
    """
    name, step = parse_moment(moment)
    with connect("tinsmith runs replay") as client:
        replay = client.runs.replay(name, step)
    if as_json:
        show_json({**dataclasses.asdict(replay), "is_equal": replay.is_equal})
    else:
        _show_replay(replay)
    if not replay.is_equal:
        raise typer.Exit(_EXIT_DIFFERS)


def keep_run(
    run: Annotated[str, typer.Argument(help="Resource name or id of a run.")],
    history_retention: Annotated[
        str, typer.Option("--for", help="How long after each operation: 12d, 720h.")
    ],
    as_json: AsJson = False,
) -> None:
    """Set how long the past of a run is kept, to be forked and played again.

    A longer time keeps what is still there; a shorter one drops what is older.
    """
    seconds = parse_duration(history_retention)
    with connect("tinsmith runs keep") as client:
        info = client.runs.update(run, history_retention_seconds=seconds)
    if as_json:
        show_json(info)
        return
    print(f"{info.name}: its past is kept for {info.history_retention_seconds / 3600.0:g} h")


def bisect_run(
    run: Annotated[str, typer.Argument(help="Resource name or id of a run.")],
    metric: Annotated[str, typer.Option(help="Its name; `trainer/` may be left out.")] = "loss",
    above: Annotated[float | None, typer.Option(help="What it must not exceed.")] = None,
    below: Annotated[float | None, typer.Option(help="What it must not fall short of.")] = None,
    good: Annotated[int | None, typer.Option(help="A step where it was well.")] = None,
    bad: Annotated[int | None, typer.Option(help="A later step where it was not.")] = None,
    replay: Annotated[bool, typer.Option(help="Play the step again, to confirm it.")] = True,
    as_json: AsJson = False,
) -> None:
    """Find the step where a metric turned, play it again, and say how to fork before it.

    Give `--above`, `--below`, or `--good` with `--bad`.
    """
    with connect("tinsmith runs bisect") as client:
        turn = client.runs.find_turn(run, metric, above=above, below=below, good=good, bad=bad)
        replayed, problem = None, ""
        if replay:
            try:
                replayed = client.runs.replay(run, turn.step + 1)
            except TinsmithError as error:
                problem = error.message
    fork = f"tinsmith runs fork {run}@{turn.step}"
    if as_json:
        show_json({"turn": turn, "replay": replayed, "problem": problem, "fork": fork})
        return
    _show_turn(turn)
    if replayed is not None:
        _show_replay(replayed)
    elif problem:
        print(f"not played again: {problem}")
    print(f"fork before it: {fork}")


def _show_turn(turn: MetricTurn) -> None:
    before = (
        ""
        if turn.previous_step is None
        else (f", after {turn.previous_value:g} at step {turn.previous_step}")
    )
    print(f"{turn.metric} turned at step {turn.step}: {turn.value:g}{before}")
    print(f"threshold: {turn.threshold:g}")


def _show_replay(replay: StepReplay) -> None:
    short = RunName.parse(replay.run).run
    for operation in replay.operations:
        print(_headline(operation))
        for name in sorted({*operation.recorded, *operation.replayed}):
            now = operation.replayed.get(name)
            recorded = operation.recorded.get(name)
            mark = "equal" if now == recorded or not _told(operation, name) else "DIFFERS"
            print(f"  {name:<28} now {_figure(now):<24} recorded {_figure(recorded):<24} {mark}")
        for difference in operation.differences:
            print(f"  differs: {difference}")
    outcome = "equal to the bit" if replay.is_equal else "NOT equal to what is recorded"
    print(f"{short}@{replay.step}: {outcome}")


def _headline(operation: ReplayedOperation) -> str:
    size = f", {operation.num_datums} datums, {operation.num_tokens} tokens"
    return f"operation {operation.sequence_number}: {operation.kind}" + (
        size if operation.num_datums else ""
    )


def _told(operation: ReplayedOperation, metric: str) -> bool:
    """Whether a difference of a metric is one that the comparison told, as NaN equals NaN."""
    return any(difference.startswith(f"{metric}:") for difference in operation.differences)


def _figure(value: float | None) -> str:
    return "-" if value is None else repr(value)
