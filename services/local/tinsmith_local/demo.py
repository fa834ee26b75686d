"""`make demo`: a language model learns, through real services, in a few minutes.

A server process is started with a model made on the spot, whose weights are random. Everything else
goes through its gRPC services, as any client's work would: a warm start with all weights trained,
then two adapters on the result: (a) supervised, Pig Latin, scored on words that were never trained
on; (b) reinforcement learning with groups on sums, scored on problems that were never trained on.

With `--model` the same two recipes run on any Hugging Face directory. `--data` is a JSONL file of
conversations or of problems in GSM8K's layout.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import tinsmith
from tinsmith.names import shorten
from tinsmith.recipes import rl, supervised
from tinsmith.recipes.experiment.curves import plot_curve
from tinsmith.recipes.experiment.run_log import METRICS, read_metrics
from tinsmith.recipes.tasks.arithmetic import MathFormatError, read_jsonl
from tinsmith.recipes.tasks.rl_problems import load_problems
from tinsmith_local.export_model import export_model
from tinsmith_local.process import ServerProcess
from tinsmith_local.tiny_model import build_tiny_model

TINY = "tiny"
WARM = "tiny-warm"

_WARM_START = "warm start: sums"
_PIG_LATIN = "Pig Latin: unseen words"
_SUPERVISED = "supervised"
_RL = "RL, seed"

_console = Console(highlight=False)


@dataclass(slots=True)
class Row:
    """One line of the table at the end."""

    what: str
    before: float
    after: float
    note: str
    seconds: float
    gain_lower: float
    """What must be above zero for something to have been learnt."""
    checkpoint: str = ""
    """Resource name of what was trained."""
    prompt: str = ""
    """Something to ask it; empty if there is nothing that it was taught."""


class _Parts:
    """Says which part begins, and how long what is left will take.

    Args:
        expected_s: Seconds that each part takes on two cores, by its name and in order.
    """

    def __init__(self, expected_s: Mapping[str, float]) -> None:
        self._expected_s = dict(expected_s)
        self._begin_s = time.monotonic()

    def begin(self, name: str) -> float:
        """Say that a part begins; return when, as `time.monotonic` has it."""
        names = list(self._expected_s)
        index = names.index(name)
        done_s = sum(self._expected_s[each] for each in names[:index])
        left_s = sum(self._expected_s.values()) - done_s
        now_s = time.monotonic()
        # This machine may be slower: what it did already says by how much.
        pace = (now_s - self._begin_s) / done_s if done_s else 1.0
        minutes = max(1, round(left_s * pace / 60))
        _console.print(f"part {index + 1} of {len(names)}: {name}; about {minutes} min left")
        return now_s


def new_folder(wanted: Path) -> Path:
    """Return a folder that holds no demo yet: the wanted one, or a numbered one in it."""
    if not (wanted / "work").exists():
        return wanted
    return next(
        folder for number in itertools.count(2) if not (folder := wanted / str(number)).exists()
    )


def next_commands(work: Path, rows: Sequence[Row], model: str | None) -> list[str]:
    """Return what can be done with what was trained, as commands that work as they stand.

    Args:
        work: Folder of the server and the models that were made.
        rows: What was trained; the last one of each kind is asked.
        model: What `--model` named.
    """
    tool = Path(sys.executable).parent / "tinsmith"
    command = os.path.relpath(tool) if tool.is_relative_to(Path.cwd()) else "tinsmith"
    made = sorted(path for path in (work / "models").glob("*") if path.is_dir())
    models = "".join(f" --model {path.name}={shlex.quote(str(path))}" for path in made)
    models += f" --model {shlex.quote(model)}" if model else ""
    lines = [
        "what was trained is kept; serve it in a terminal of its own, and ask it in another one:",
        f"  {command} up --data-dir {shlex.quote(str(work / 'server/data'))}{models}",
    ]
    lines += [
        f"  {command} sample {shlex.quote(row.prompt)} --checkpoint {shorten(row.checkpoint)}"
        for row in rows
        if row.prompt
    ]
    checkpoint = shorten(rows[-1].checkpoint)
    target = shlex.quote(str(work / "export"))
    lines.append(f"  {command} checkpoints export {checkpoint} --output {target}")
    if (work / "models" / WARM).is_dir():
        lines.append(f"  {command} eval base_model={WARM} checkpoint={checkpoint}")
    return lines


def unlearnt(rows: Sequence[Row]) -> list[str]:
    """Return what was not learnt: a part that got no better, or most seeds of the RL runs.

    A gain of RL counts if its 95 % interval lies above zero. One seed of three may miss.
    """
    rl_rows = [row for row in rows if row.what.startswith(_RL)]
    missing = [row.what for row in rows if row not in rl_rows and not row.gain_lower > 0]
    num_gained = sum(row.gain_lower > 0 for row in rl_rows)
    if 2 * num_gained <= len(rl_rows):
        missing.append(f"reinforcement learning: {num_gained} of {len(rl_rows)} seeds gained")
    return missing


def main() -> int:
    """Run the demo; return the exit code."""
    arguments = _parse_arguments()
    os.environ.setdefault("OMP_NUM_THREADS", str(arguments.threads or os.cpu_count() or 1))
    output = new_folder(arguments.output)
    if output != arguments.output:
        _console.print(f"{arguments.output} holds an earlier demo; this one goes to {output}")
    work = output / "work"
    # What ends a process from outside (timeout, a shutdown) stops as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begin_s = time.monotonic()
    try:
        if arguments.model or arguments.data:
            rows = _run_own(arguments, output, work)
        else:
            rows = _run_tiny(arguments, output, work)
    except KeyboardInterrupt:
        _console.print(f"stopped; what there is so far is in {output}")
        return 130
    except (tinsmith.TinsmithError, ValueError, RuntimeError) as error:
        _console.print(f"error: {error}", style="red", markup=False)
        return 1
    _print_table(rows, output, time.monotonic() - begin_s)
    for line in next_commands(work, rows, arguments.model):
        _console.print(line, soft_wrap=True, markup=False)
    if arguments.model or arguments.data:
        return 0
    missing = unlearnt(rows)
    _console.print(f"not learnt: {'; '.join(missing)}" if missing else "all of it was learnt")
    return 1 if missing and arguments.verdict else 0


def _run_tiny(arguments: argparse.Namespace, output: Path, work: Path) -> list[Row]:
    seeds = {f"{_RL} {seed}": 100.0 for seed in arguments.seeds}
    parts = _Parts({_WARM_START: 130.0, _PIG_LATIN: 70.0, **seeds})
    tiny = build_tiny_model(work / "models" / TINY)
    _console.print(f"made a model with random weights in {tiny}")
    rows = []
    server = ServerProcess(work / "server", {TINY: tiny}, num_threads=arguments.threads)
    _console.print(f"the log of the server is {server.log}", highlight=False)
    with server:
        begin_s = parts.begin(_WARM_START)
        with tinsmith.Client(server.address, server.api_key) as client:
            warm = _warm_start(client, output)
            manifest_uri = client.checkpoints.get(warm.checkpoint).manifest_uri
        rows.append(_row(_WARM_START, warm, "validation_accuracy", begin_s))
        _console.print("the result becomes a base model; the server restarts with it")
        server.stop()
        server.add_model(WARM, export_model(manifest_uri, tiny, work / "models" / WARM))
        server.start()
        with tinsmith.Client(server.address, server.api_key) as client:
            begin_s = parts.begin(_PIG_LATIN)
            summary = supervised.main(
                supervised.Config(base_model=WARM, output_dir=output / "pig_latin"), client
            )
            rows.append(_row(_PIG_LATIN, summary, "held_out_words", begin_s))
            _print_examples(summary)
            rows += _reinforce(
                client,
                output,
                rl.Config(base_model=WARM),
                parts,
                prompt=load_problems("arithmetic").validation[0].question,
                seeds=arguments.seeds,
            )
    _plot(output, [f"rl-{seed}" for seed in arguments.seeds])
    return rows


def _warm_start(client: tinsmith.Client, output: Path) -> supervised.Summary:
    _console.print(
        "warm start, all weights: sums as a pupil writes them who mostly forgets to carry, and "
        "copying of words"
    )
    config = supervised.Config(
        base_model=TINY,
        data="warm_start",
        adapter="full",
        learning_rate=3e-3,
        num_warmup_steps=50,
        num_steps=420,
        batch_size=102,
        save_every=0,
        output_dir=output / "warm_start",
    )
    return supervised.main(config, client)


def _run_own(arguments: argparse.Namespace, output: Path, work: Path) -> list[Row]:
    """Run the two recipes on the user's model or data."""
    model = arguments.model or str(build_tiny_model(work / "models" / TINY))
    name = Path(model).resolve().name if Path(model).is_dir() else model
    data = str(arguments.data) if arguments.data else ""
    has_problems = not data or _holds_problems(Path(data))
    seeds = [f"{_RL} {seed}" for seed in arguments.seeds] if has_problems else []
    # How long a step takes is not known of a model of one's own.
    parts = _Parts(dict.fromkeys([_SUPERVISED, *seeds], 60.0))
    rows = []
    with (
        ServerProcess(work / "server", {name: model}, num_threads=arguments.threads) as server,
        tinsmith.Client(server.address, server.api_key) as client,
    ):
        _console.print(f"the log of the server is {server.log}", highlight=False)
        begin_s = parts.begin(_SUPERVISED)
        config = supervised.Config(
            base_model=name,
            data=data or "pig_latin",
            learning_rate=arguments.learning_rate,
            num_steps=arguments.steps,
            batch_size=arguments.batch,
            output_dir=output / "supervised",
        )
        summary = supervised.main(config, client)
        key = next(iter(summary.after.metrics), "")
        rows.append(_row(f"{_SUPERVISED}: {key}", summary, key, begin_s))
        _print_examples(summary)
        if has_problems:
            settings = rl.Config(
                base_model=name,
                data=data or "arithmetic",
                learning_rate=arguments.learning_rate,
                num_steps=arguments.steps,
                num_problems=arguments.batch,
                max_tokens=arguments.max_tokens,
            )
            rows += _reinforce(client, output, settings, parts, seeds=arguments.seeds)
            _plot(output, [f"rl-{seed}" for seed in arguments.seeds])
    return rows


def _reinforce(
    client: tinsmith.Client,
    output: Path,
    config: rl.Config,
    parts: _Parts,
    *,
    prompt: str = "",
    seeds: list[int],
) -> list[Row]:
    rows = []
    for seed in seeds:
        begin_s = parts.begin(f"{_RL} {seed}")
        settings = dataclasses.replace(config, seed=seed, output_dir=output / f"rl-{seed}")
        summary = rl.main(settings, client)
        rows.append(
            Row(
                f"{_RL} {seed}: {summary.num_validation} unseen problems",
                summary.before,
                summary.after,
                f"gain ≥ {summary.gain_lower_95:.3f} (95 %)",
                time.monotonic() - begin_s,
                summary.gain_lower_95,
                summary.checkpoint,
                prompt if seed == seeds[-1] else "",
            )
        )
    return rows


def _row(what: str, summary: supervised.Summary, metric: str, begin_s: float) -> Row:
    before, after = (
        scores.metrics.get(metric, float("nan")) for scores in (summary.before, summary.after)
    )
    return Row(
        what,
        before,
        after,
        f"loss {summary.losses[0]:.2f} → {summary.losses[-1]:.2f}" if summary.losses else "",
        time.monotonic() - begin_s,
        after - before,
        summary.checkpoint,
        summary.after.examples[0].prompt if summary.after.examples else "",
    )


def _print_examples(summary: supervised.Summary) -> None:
    table = Table("held out", "model", "wanted", title="after training")
    for example in summary.after.examples:
        table.add_row(example.prompt, example.completion, example.expected)
    _console.print(table)


def _print_table(rows: list[Row], output: Path, seconds: float) -> None:
    table = Table("what", "before", "after", "", "seconds")
    for row in rows:
        table.add_row(
            row.what, f"{row.before:.3f}", f"{row.after:.3f}", row.note, f"{row.seconds:.0f}"
        )
    _console.print(table)
    pictures = ", ".join(str(path) for path in sorted(output.glob("*.png")))
    _console.print(f"{seconds:.0f} s in all; metrics below {output}, pictures: {pictures}")


def _plot(output: Path, folders: list[str]) -> None:
    for folder in ("warm_start", "pig_latin", "supervised"):
        picture = output / folder / "loss.png"
        if picture.is_file():
            shutil.copyfile(picture, output / f"{folder}.png")
    series = {
        folder: [(row["step"], row["reward"]) for row in read_metrics(output / folder / METRICS)]
        for folder in folders
    }
    plot_curve(
        output / "rl.png",
        "reinforcement learning on sums",
        series,
        y_label="mean reward of the samples",
    )


def _holds_problems(path: Path) -> bool:
    try:
        return bool(read_jsonl(path))
    except MathFormatError:
        return False


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the RL runs")
    parser.add_argument(
        "--verdict", action="store_true", help="end with 1 if the made model did not learn"
    )
    parser.add_argument("--model", help="a Hugging Face directory or hub id")
    parser.add_argument("--data", type=Path, help="a JSONL file of conversations or problems")
    parser.add_argument("--output", type=Path, default=Path("demo"))
    parser.add_argument("--threads", type=int, default=1, help="of one operation; 0: all cores")
    parser.add_argument("--steps", type=int, default=50, help="with --model or --data")
    parser.add_argument("--batch", type=int, default=16, help="with --model or --data")
    parser.add_argument("--max-tokens", type=int, default=64, help="with --model or --data")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="with --model or --data")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
