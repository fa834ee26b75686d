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
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import tinsmith
from tinsmith.recipes import rl, supervised
from tinsmith.recipes.experiment.curves import plot_curve
from tinsmith.recipes.experiment.run_log import METRICS, read_metrics
from tinsmith.recipes.tasks.arithmetic import MathFormatError, read_jsonl
from tinsmith_local.export_model import export_model
from tinsmith_local.process import ServerProcess
from tinsmith_local.tiny_model import build_tiny_model

TINY = "tiny"
WARM = "tiny-warm"

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
    output: Path = arguments.output
    work = output / "work"
    shutil.rmtree(work, ignore_errors=True)
    begin_s = time.monotonic()
    try:
        if arguments.model or arguments.data:
            rows = _run_own(arguments, output, work)
        else:
            rows = _run_tiny(arguments, output, work)
    except KeyboardInterrupt:
        _console.print("stopped")
        return 130
    except (tinsmith.TinsmithError, ValueError, RuntimeError) as error:
        _console.print(f"error: {error}", style="red", markup=False)
        return 1
    _print_table(rows, output, time.monotonic() - begin_s)
    if arguments.model or arguments.data:
        return 0
    missing = unlearnt(rows)
    _console.print(f"not learnt: {'; '.join(missing)}" if missing else "all of it was learnt")
    return 1 if missing and arguments.verdict else 0


def _run_tiny(arguments: argparse.Namespace, output: Path, work: Path) -> list[Row]:
    tiny = build_tiny_model(work / "models" / TINY)
    _console.print(f"made a model with random weights in {tiny}")
    rows = []
    server = ServerProcess(work / "server", {TINY: tiny}, num_threads=arguments.threads)
    with server:
        begin_s = time.monotonic()
        with tinsmith.Client(server.address, server.api_key) as client:
            warm = _warm_start(client, output)
            manifest_uri = client.checkpoints.get(warm.checkpoint).manifest_uri
        rows.append(_row("warm start: sums", warm, "validation_accuracy", begin_s))
        _console.print("the result becomes a base model; the server restarts with it")
        server.stop()
        server.add_model(WARM, export_model(manifest_uri, tiny, work / "models" / WARM))
        server.start()
        with tinsmith.Client(server.address, server.api_key) as client:
            begin_s = time.monotonic()
            summary = supervised.main(
                supervised.Config(base_model=WARM, output_dir=output / "pig_latin", overwrite=True),
                client,
            )
            rows.append(_row("Pig Latin: unseen words", summary, "held_out_words", begin_s))
            _print_examples(summary)
            rows += _reinforce(client, output, rl.Config(base_model=WARM), seeds=arguments.seeds)
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
        # The server of each demo is a new one, which knows nothing of an earlier one's runs.
        overwrite=True,
    )
    return supervised.main(config, client)


def _run_own(arguments: argparse.Namespace, output: Path, work: Path) -> list[Row]:
    """Run the two recipes on the user's model or data."""
    model = arguments.model or str(build_tiny_model(work / "models" / TINY))
    name = Path(model).resolve().name if Path(model).is_dir() else model
    data = str(arguments.data) if arguments.data else ""
    rows = []
    with (
        ServerProcess(work / "server", {name: model}, num_threads=arguments.threads) as server,
        tinsmith.Client(server.address, server.api_key) as client,
    ):
        begin_s = time.monotonic()
        config = supervised.Config(
            base_model=name,
            data=data or "pig_latin",
            learning_rate=arguments.learning_rate,
            num_steps=arguments.steps,
            batch_size=arguments.batch,
            output_dir=output / "supervised",
            overwrite=True,
        )
        summary = supervised.main(config, client)
        key = next(iter(summary.after.metrics), "")
        rows.append(_row(f"supervised: {key}", summary, key, begin_s))
        _print_examples(summary)
        if not data or _holds_problems(Path(data)):
            settings = rl.Config(
                base_model=name,
                data=data or "arithmetic",
                learning_rate=arguments.learning_rate,
                num_steps=arguments.steps,
                num_problems=arguments.batch,
                max_tokens=arguments.max_tokens,
            )
            rows += _reinforce(client, output, settings, seeds=arguments.seeds)
            _plot(output, [f"rl-{seed}" for seed in arguments.seeds])
    return rows


def _reinforce(
    client: tinsmith.Client, output: Path, config: rl.Config, *, seeds: list[int]
) -> list[Row]:
    rows = []
    for seed in seeds:
        begin_s = time.monotonic()
        settings = dataclasses.replace(
            config, seed=seed, output_dir=output / f"rl-{seed}", overwrite=True
        )
        summary = rl.main(settings, client)
        rows.append(
            Row(
                f"{_RL} {seed}: {summary.num_validation} unseen problems",
                summary.before,
                summary.after,
                f"gain ≥ {summary.gain_lower_95:.3f} (95 %)",
                time.monotonic() - begin_s,
                summary.gain_lower_95,
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
