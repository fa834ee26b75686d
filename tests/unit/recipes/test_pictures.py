"""The picture of an experiment: which panels it has, and that it is drawn on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith.recipes.experiment import pictures
from tinsmith.recipes.experiment.curves import Curve, Panel
from tinsmith.recipes.experiment.pictures import Picture
from tinsmith.recipes.experiment.run_log import RunLog

REWARD = Curve("reward", "mean reward", rises=True, held_out="validation")
LOSS = Curve("loss", "loss per trained token", held_out="held_out_loss")
PLAYED = {
    "reward": 0.5,
    "grad_norm": 1.0,
    "optim/kl_sample_train_v1": 0.1,
    "optim/kl_sample_train_v2": 0.2,
    "optim/entropy": 2.0,
    "response_tokens": 7.0,
    "truncated_fraction": 0.25,
}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[list[Panel]]:
    """The panels of each picture, in the place of drawing them."""
    found: list[list[Panel]] = []

    def keep(path: Path, title: str, panels: list[Panel]) -> Path:
        del title
        found.append(panels)
        return path

    monkeypatch.setattr(pictures, "plot_panels", keep)
    return found


def labels(panels: list[Panel]) -> list[str]:
    return [panel.label for panel in panels]


def test_reinforcement_shows_reward_kl_entropy_and_lengths(
    tmp_path: Path, drawn: list[list[Panel]]
) -> None:
    rows = [{"step": 0, **PLAYED}, {"step": 1, **PLAYED, "validation": 0.75}]
    path = Picture("rl", REWARD).draw(tmp_path, rows, [(0, {"validation": 0.25})])
    assert path == tmp_path / "reward.png"
    [[reward, kl, entropy, lengths]] = drawn
    assert reward.lines == {"training": [(0, 0.5), (1, 0.5)]}
    # A score is of the weights that a step left behind.
    assert reward.held_out == {"held out": [(0, 0.25), (2, 0.75)]}
    assert set(kl.lines) == {"mean difference", "half the mean square"}
    assert entropy.lines == {"entropy": [(0, 2.0), (1, 2.0)]}
    assert lengths.lines == {"tokens": [(0, 7.0), (1, 7.0)]}
    assert lengths.right == {"cut off at the limit": [(0, 0.25), (1, 0.25)]}


def test_panels_without_values_are_left_out(tmp_path: Path, drawn: list[list[Panel]]) -> None:
    row = {"step": 0, "loss": 3.0, "grad_norm": 1.0, "learning_rate": 0.1}
    Picture("supervised", LOSS).draw(tmp_path, [row], [])
    Picture("supervised", LOSS).draw(tmp_path, [row], [(0, {"held_out_words": 0.5})])
    Picture("supervised", LOSS).draw(tmp_path, [], [])
    assert [labels(panels) for panels in drawn] == [
        ["loss per trained token", "gradient norm", "learning rate"],
        ["loss per trained token", "gradient norm", "learning rate", "held-out score"],
        ["loss per trained token"],
    ]


def test_each_policy_has_a_line(tmp_path: Path, drawn: list[list[Panel]]) -> None:
    row = {f"{agent}/{name}": value for agent in "ab" for name, value in PLAYED.items()}
    Picture("match", REWARD, ("a", "b")).draw(tmp_path, [{"step": 0, **row}], [])
    [[reward, kl, entropy, _]] = drawn
    assert set(reward.lines) == {"a, training", "b, training"}
    assert len(kl.lines) == len("ab") * 2
    assert set(entropy.lines) == {"a, entropy", "b, entropy"}


def test_a_picture_is_drawn_on_the_way_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "reward.png"
    with RunLog(tmp_path, title="t", num_steps=9, picture=Picture("t", REWARD)) as log:
        log.add(0, PLAYED)
        assert not path.exists()
        monkeypatch.setattr("tinsmith.recipes.experiment.run_log.PICTURE_INTERVAL_S", 0.0)
        log.add(1, PLAYED)
        first = path.read_bytes()
        log.note_scores(9, {"validation": 1.0})
        log.say_end([], "run", "projects/p/trainingRuns/r/checkpoints/c")
    assert first.startswith(b"\x89PNG")
    assert path.read_bytes() != first
    # Nothing is left of the file that a picture is written into first.
    assert {each.name for each in tmp_path.iterdir()} == {"metrics.jsonl", "reward.png"}
