"""What an evaluation shows: answers side by side, a table, and a picture of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.box
import rich.console
import rich.table

from tinsmith.recipes.evaluation.summaries import Played, Summary
from tinsmith.recipes.experiment.curves import draw_figure
from tinsmith.rollouts.records import EpisodeRecord

_NUM_SHOWN = 3
PICTURE = "comparison.png"


def side_by_side(plays: Mapping[str, Played]) -> list[dict[str, Any]]:
    """Return a row for each task: what was asked, and what each of those that played it said.

    Of each that played there is an answer for each play.
    """
    tasks = dict.fromkeys(task for played in plays.values() for task in played.records)
    rows = []
    for task in tasks:
        episodes = {
            weights: each.records[task] for weights, each in plays.items() if task in each.records
        }
        answers = {
            weights: [
                {"answer": _texts(episode, mask=1), "reward": episode.reward} for episode in found
            ]
            for weights, found in episodes.items()
        }
        prompt = _texts(next(iter(episodes.values()))[0], mask=0)
        rows.append({"prompt": prompt, "answers": answers})
    return rows


def draw(folder: Path, title: str, summaries: Sequence[Summary]) -> Path | None:
    """Draw the rewards of several with their intervals, and pass@k where there is one.

    Returns:
        The path; None of one alone, and without matplotlib.
    """
    if len(summaries) < 2:
        return None
    has_chances = any(each.pass_at for each in summaries)

    def fill(figure: Any) -> None:
        axes = figure.add_subplot(1, 2 if has_chances else 1, 1)
        axes.set_title("mean reward, 95 %", fontsize="medium")
        for place, each in enumerate(reversed(summaries)):
            reach = [[each.reward - each.reward_low], [each.reward_high - each.reward]]
            axes.errorbar([each.reward], [place], xerr=reach, fmt="o", capsize=4, color="C0")
        names = [_plain(each.weights) for each in reversed(summaries)]
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(-0.5, len(names) - 0.5)
        axes.grid(alpha=0.3)
        if not has_chances:
            return
        axes = figure.add_subplot(1, 2, 2)
        axes.set_title("pass@k, 95 %", fontsize="medium")
        for each in summaries:
            ks, chances = list(each.pass_at), list(each.pass_at.values())
            axes.plot(
                ks, [chance.mean for chance in chances], marker="o", label=_plain(each.weights)
            )
            ends = [chance.low for chance in chances], [chance.high for chance in chances]
            axes.fill_between(ks, *ends, alpha=0.15)
        axes.set_xlabel("k")
        axes.set_xscale("log", base=2)
        shown = sorted({k for each in summaries for k in each.pass_at})
        axes.set_xticks(shown, list(map(str, shown)))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")

    size = (11.0 if has_chances else 7.0, 1.6 + 0.5 * max(len(summaries), 3))
    return draw_figure(folder / PICTURE, title, size, fill)


def _plain(name: str) -> str:
    """Return a name in which dollars, which are mathematics to matplotlib, stand for themselves."""
    return name.replace("$", r"\$")


def _texts(record: EpisodeRecord, *, mask: int) -> str:
    columns = zip(record.texts, record.mask, strict=True)
    return "".join(text for text, is_sampled in columns if is_sampled == mask)


def show(
    title: str, summaries: Sequence[Summary], answers: Sequence[Mapping[str, Any]], folder: Path
) -> None:
    """Print a table, why plays ended, and a few tasks with all answers."""
    table = rich.table.Table(title=title, box=rich.box.SIMPLE)
    most = max((k for each in summaries for k in each.pass_at), default=0)
    table.add_column("weights", overflow="fold")
    for name in ("tasks", "reward, 95 %", "solved"):
        table.add_column(name)
    if most:
        table.add_column(f"pass@{most}, 95 %")
    if len(summaries) > 1:
        table.add_column(f"above {summaries[0].weights}, 95 %")
    for each in summaries:
        cells = [
            each.weights,
            str(each.num_tasks),
            f"{each.reward:.3f} ± {each.reward - each.reward_low:.3f}",
            "" if each.is_success is None else f"{each.is_success:.1%}",
        ]
        if most:
            chance = each.pass_at.get(most)
            cells.append(
                "" if chance is None else f"{chance.mean:.3f} ± {chance.mean - chance.low:.3f}"
            )
        if each.gain is not None and each.gain_low is not None:
            cells.append(f"{each.gain:+.3f} ± {each.gain - each.gain_low:.3f}")
        table.add_row(*cells)
    console = rich.console.Console()
    console.print(table)
    for each in summaries:
        ends = ", ".join(f"{count} {reason}" for reason, count in each.ends.items())
        console.print(
            f"{each.weights} ended: {ends}", highlight=False, markup=False, soft_wrap=True
        )
    for row in _telling(answers):
        console.print(f"{row['prompt']!r}", highlight=False, markup=False)
        for weights, plays in row["answers"].items():
            for said in plays[:_NUM_SHOWN]:
                text = f"  {said['reward']:g}  {weights}: {said['answer']!r}"
                console.print(text, highlight=False, markup=False)
    console.print(f"written to {folder}", highlight=False, markup=False, soft_wrap=True)


def _telling(answers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a few tasks, those first that not all earned the same on."""
    return sorted(
        answers,
        key=lambda row: (
            len({said["reward"] for plays in row["answers"].values() for said in plays}) < 2
        ),
    )[:_NUM_SHOWN]
