"""What the demo calls learnt, where it goes, and what it says at its end."""

from pathlib import Path

import pytest

from tinsmith_local.demo import Row, new_folder, next_commands, unlearnt


def rows(*gains: float, pig_latin: float = 0.5) -> list[Row]:
    parts = [Row("Pig Latin: unseen words", 0.0, pig_latin, "", 1.0, pig_latin)]
    return parts + [
        Row(f"RL, seed {n}: 9", 0.3, 0.5, "", 1.0, gain) for n, gain in enumerate(gains)
    ]


@pytest.mark.parametrize(
    ("gains", "missing"),
    [
        ((0.1, 0.1, 0.1), []),
        ((0.1, -0.1, 0.1), []),
        ((0.1, -0.1, 0.0), ["reinforcement learning: 1 of 3 seeds gained"]),
        ((0.0,), ["reinforcement learning: 0 of 1 seeds gained"]),
    ],
)
def test_most_seeds_must_gain(gains: tuple[float, ...], missing: list[str]) -> None:
    assert unlearnt(rows(*gains)) == missing


@pytest.mark.parametrize("gain", [0.0, -0.1, float("nan")])
def test_a_part_that_got_no_better_is_named(gain: float) -> None:
    assert unlearnt(rows(0.1, pig_latin=gain)) == ["Pig Latin: unseen words"]


def test_a_second_demo_leaves_the_first_one_alone(tmp_path: Path) -> None:
    wanted = tmp_path / "demo"
    folders = []
    for _ in range(3):
        folders.append(new_folder(wanted))
        (folders[-1] / "work").mkdir(parents=True)
    assert folders == [wanted, wanted / "2", wanted / "3"]


def test_what_was_trained_is_served_asked_and_exported(tmp_path: Path) -> None:
    (tmp_path / "models/tiny-warm").mkdir(parents=True)
    name = "projects/default/trainingRuns/run-{}/checkpoints/final"
    trained = [
        Row("Pig Latin: unseen words", 0, 1, "", 1, 1, name.format(1), "it's"),
        Row("RL, seed 0: 9", 0, 1, "", 1, 1, name.format(2), "1+1="),
    ]
    _, up, *others = next_commands(tmp_path, trained, None)
    assert f"up --data-dir {tmp_path}/server/data --model tiny-warm=" in up
    assert [line.split(" ", 3)[3] for line in others] == [
        """sample 'it'"'"'s' --checkpoint run-1/final""",
        "sample 1+1= --checkpoint run-2/final",
        f"checkpoints export run-2/final --output {tmp_path}/export",
        "eval base_model=tiny-warm checkpoint=run-2/final",
    ]
    [up] = [line for line in next_commands(tmp_path, trained, "org/model") if " up " in line]
    assert up.endswith(" --model org/model")
