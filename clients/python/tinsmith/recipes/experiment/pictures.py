"""The picture of an experiment: what it is drawn by, and what explains it, in four panels.

The first panel has the metric of the recipe and the scores of what was held out. The others are the
first of a list that the recipe has values for, so that no panel is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinsmith.recipes.experiment.curves import Curve, Panel, Points, plot_panels

_NUM_PANELS = 4

Scored = Sequence[tuple[int, Mapping[str, float]]]
"""Scores of what was held out, by the steps that were done before."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A panel that is drawn of the metrics which are there.

    Attributes:
        label: What the axis shows.
        lines: What each metric is called.
        held_out: The same of scores.
        right: The same of shares, which have an axis of their own.
        right_label: What that axis shows.
    """

    label: str
    lines: Mapping[str, str] = field(default_factory=dict)
    held_out: Mapping[str, str] = field(default_factory=dict)
    right: Mapping[str, str] = field(default_factory=dict)
    right_label: str = ""


_KINDS = (
    _Kind(
        "KL of sampler and trainer, nats",
        {
            "optim/kl_sample_train_v1": "mean difference",
            "optim/kl_sample_train_v2": "half the mean square",
        },
    ),
    _Kind("entropy, nats", {"optim/entropy": "entropy"}),
    _Kind(
        "tokens of an answer",
        {"response_tokens": "tokens"},
        right={"truncated_fraction": "cut off at the limit"},
        right_label="share of the answers",
    ),
    _Kind(
        "pairs that are told apart",
        {"accuracy": "trained on"},
        held_out={"held_out_accuracy": "held out"},
    ),
    _Kind("reward of an answer", {"chosen_reward": "chosen", "rejected_reward": "rejected"}),
    _Kind("gradient norm", {"grad_norm": "before clipping"}),
    _Kind("learning rate", {"learning_rate": "learning rate"}),
    _Kind(
        "held-out score",
        held_out={
            "held_out_words": "words",
            "validation_accuracy": "accuracy",
            "validation_is_success": "solved",
        },
    ),
)


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn of an experiment.

    Attributes:
        title: Of the picture.
        curve: What the experiment is drawn by; the file has the metric's name.
        agents: Names of the policies; metrics begin with them where there are several.
    """

    title: str
    curve: Curve
    agents: Sequence[str] = ("",)

    def draw(
        self, folder: Path, rows: Sequence[Mapping[str, float]], scored: Scored
    ) -> Path | None:
        """Draw what the rows of `metrics.jsonl` have, and return the path.

        Args:
            folder: Where the picture goes.
            rows: Of the steps.
            scored: What was scored beside the steps: before them, and at the end.
        """
        curve = self.curve
        points = [*((row["step"] + 1, row) for row in rows), *scored]
        first = _Kind(
            curve.label,
            {curve.metric: "training"},
            held_out={curve.held_out: "held out"} if curve.held_out else {},
        )
        panels = [self._panel(kind, rows, points) for kind in (first, *_KINDS)]
        drawn = [panel for panel in panels[1:] if panel.lines or panel.held_out]
        return plot_panels(
            folder / f"{curve.metric}.png", self.title, [panels[0], *drawn][:_NUM_PANELS]
        )

    def _panel(
        self,
        kind: _Kind,
        rows: Sequence[Mapping[str, float]],
        points: Sequence[tuple[float, Mapping[str, float]]],
    ) -> Panel:
        steps = [(row["step"], row) for row in rows]
        return Panel(
            kind.label,
            self._named(kind.lines, steps),
            self._named(kind.held_out, points),
            self._named(kind.right, steps),
            kind.right_label,
        )

    def _named(
        self, names: Mapping[str, str], values: Sequence[tuple[float, Mapping[str, float]]]
    ) -> dict[str, Points]:
        """Return the points of each metric and policy that has any."""
        found: dict[str, Points] = {}
        for agent in self.agents:
            for name, label in names.items():
                metric = f"{agent}/{name}" if agent else name
                points = sorted((x, row[metric]) for x, row in values if metric in row)
                if points:
                    found[", ".join(filter(None, [agent, label]))] = points
        return found
