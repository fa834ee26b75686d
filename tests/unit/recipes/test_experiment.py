"""Folders of experiments: each has its own, finds it again, and is never replaced by another."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tinsmith.errors import ConfigurationError
from tinsmith.recipes import rl, supervised
from tinsmith.recipes.experiment.experiment import Experiment
from tinsmith.recipes.experiment.observer import Observer, SavedState

CONFIG = supervised.Config(data="chats/chat.jsonl", num_steps=60, learning_rate=1e-2)
RUN = "projects/default/trainingRuns/run-1"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(
    config: Any = CONFIG,
    *,
    to_step: int = 60,
    finish: bool = False,
    recipe: str = "supervised",
    observer: Observer | None = None,
) -> Path:
    """Do what a recipe does with a folder, up to a save; return the folder."""
    with Experiment(recipe, config, observer) as experiment:
        experiment.begin(RUN)
        name = config.checkpoint if finish else f"step-{to_step}"
        experiment.save(
            SavedState(
                RUN,
                f"{RUN}/checkpoints/{name}",
                to_step,
                experiment.fingerprint,
                experiment.weights,
            )
        )
        if finish:
            experiment.finish({"loss": 1.0})
        return experiment.folder


def test_each_experiment_has_a_folder_of_its_own() -> None:
    assert train(finish=True) == Path("runs/supervised-chat-1")
    changed = dataclasses.replace(CONFIG, learning_rate=1e-3)
    assert train(changed) == Path("runs/supervised-chat-2")
    assert train(rl.Config(data="arithmetic"), recipe="rl") == Path("runs/rl-arithmetic-1")
    begun = json.loads(Path("runs/supervised-chat-1/config.json").read_text())
    assert (begun["recipe"], begun["run"], begun["learning_rate"]) == ("supervised", RUN, 1e-2)


def test_the_same_command_finds_its_folder_whatever_was_begun_meanwhile() -> None:
    first = train(to_step=20)
    train(dataclasses.replace(CONFIG, seed=1), to_step=30)
    with Experiment("supervised", CONFIG) as experiment:
        assert experiment.folder == first
        assert experiment.state is not None
        assert experiment.state.step == 20
        assert (experiment.is_unchanged, experiment.note) == (True, "")


def test_a_command_that_was_killed_before_its_first_save_finds_its_folder() -> None:
    with Experiment("supervised", CONFIG) as experiment:
        experiment.begin(RUN)
        (experiment.folder / "metrics.jsonl").write_text("{}")
    with Experiment("supervised", CONFIG) as again:
        assert again.folder == experiment.folder
        assert again.state is None
        again.begin(RUN)
    assert not (experiment.folder / "metrics.jsonl").exists()


def test_an_experiment_that_ended_has_nothing_left_to_do() -> None:
    folder = train(finish=True)
    with Experiment("supervised", CONFIG) as experiment:
        assert (experiment.folder, experiment.summary) == (folder, {"loss": 1.0})
    # The save of the last step alone is no end: its score is still missing.
    other = dataclasses.replace(CONFIG, seed=1)
    train(other)
    with Experiment("supervised", other) as experiment:
        assert experiment.summary is None
        assert experiment.state is not None


def test_more_steps_go_on_and_say_so_and_fewer_are_another_experiment() -> None:
    folder = train(finish=True)
    longer = dataclasses.replace(CONFIG, num_steps=120)
    with Experiment("supervised", longer) as experiment:
        assert experiment.folder == folder
        assert experiment.summary is None
        assert experiment.state is not None
        assert experiment.note.startswith("num_steps was 60 and is 120")
    assert train(dataclasses.replace(CONFIG, num_steps=50), to_step=50) != folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"learning_rate": 1e-3}, "learning_rate was 0.01 and is 0.001", id="another-setting"
        ),
        pytest.param({"num_steps": 50}, "has 60 steps already, more than num_steps=50", id="fewer"),
    ],
)
def test_a_named_folder_is_not_taken_over(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "mine"
    config = dataclasses.replace(CONFIG, output_dir=folder)
    train(config, finish=True)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigurationError, match=message) as caught:
        Experiment("supervised", dataclasses.replace(config, **changes))
    assert "run-1" in str(caught.value)
    assert "output_dir=" in caught.value.remedy
    assert "--overwrite" in caught.value.remedy
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    train(dataclasses.replace(config, **changes, overwrite=True), to_step=5)
    assert json.loads((folder / "state.json").read_text())["step"] == 5
    assert not (folder / "summary.json").exists()


def test_a_folder_of_another_recipe_or_an_earlier_release_is_not_taken_over(
    tmp_path: Path,
) -> None:
    config = dataclasses.replace(CONFIG, output_dir=tmp_path)
    train(config)
    with pytest.raises(ConfigurationError, match="its recipe is supervised"):
        Experiment("rl", rl.Config(output_dir=tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigurationError, match="made by an earlier release"):
        Experiment("supervised", config)


class Editable(Observer):
    may_change = True


def test_a_job_that_is_edited_goes_on_with_the_weights_that_fit(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, output_dir=tmp_path)
    train(config, to_step=20, observer=Editable())
    edited = dataclasses.replace(config, learning_rate=1e-3)
    with Experiment("supervised", edited, Editable()) as experiment:
        assert experiment.state is not None
        assert not experiment.is_unchanged
    other = dataclasses.replace(config, rank=2)
    with Experiment("supervised", other, Editable()) as experiment:
        assert experiment.state is None


def test_two_processes_never_write_into_one_folder() -> None:
    script = (
        "import sys; from tinsmith.recipes import supervised;"
        "from tinsmith.recipes.experiment.experiment import Experiment;"
        "config = supervised.Config(data='chats/chat.jsonl', num_steps=60, learning_rate=1e-2);"
        "held = Experiment('supervised', config);"
        f"held.begin({RUN!r}); print('held', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(ConfigurationError, match="another process trains in runs/supervised-"):
            Experiment("supervised", CONFIG)
        with Experiment("supervised", dataclasses.replace(CONFIG, seed=1)) as other:
            assert other.folder == Path("runs/supervised-chat-2")
    finally:
        child.kill()
        child.communicate()
    with Experiment("supervised", CONFIG) as experiment:
        assert experiment.folder == Path("runs/supervised-chat-1")


def test_a_start_that_fails_leaves_no_folder() -> None:
    with Experiment("supervised", CONFIG) as experiment:
        assert experiment.folder.is_dir()
    assert not experiment.folder.exists()


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = dataclasses.replace(CONFIG, output_dir=tmp_path / "file" / "below")
    with pytest.raises(ConfigurationError, match=r"file/below cannot be written: .*output_dir="):
        Experiment("supervised", config)
    train(dataclasses.replace(CONFIG, output_dir=tmp_path / "damaged"))
    (tmp_path / "damaged" / "state.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"state\.json is damaged"):
        Experiment("supervised", dataclasses.replace(CONFIG, output_dir=tmp_path / "damaged"))


def test_a_setting_of_a_later_release_was_its_default(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, output_dir=tmp_path)
    train(config, to_step=20)
    begun = json.loads((tmp_path / "config.json").read_text())
    del begun["grad_clip_norm"]
    (tmp_path / "config.json").write_text(json.dumps(begun))
    with Experiment("supervised", config) as experiment:
        assert experiment.state is not None
    with pytest.raises(ConfigurationError, match=r"grad_clip_norm was 1\.0 and is 2\.0"):
        Experiment("supervised", dataclasses.replace(config, grad_clip_norm=2.0))


def test_a_damaged_folder_keeps_no_other_experiment_from_beginning() -> None:
    folder = train()
    (folder / "state.json").write_text("{")
    assert train() == Path("runs/supervised-chat-2")


def test_a_file_that_was_edited_is_another_experiment(tmp_path: Path) -> None:
    path = Path("chats/chat.jsonl")
    path.parent.mkdir()
    path.write_text("first")
    assert train(finish=True) == Path("runs/supervised-chat-1")
    path.write_text("second")
    assert train() == Path("runs/supervised-chat-2")
    path.write_text("first")
    with Experiment("supervised", CONFIG) as experiment:
        assert experiment.summary is not None
    named = dataclasses.replace(CONFIG, output_dir=tmp_path / "named")
    train(named)
    path.write_text("third")
    with pytest.raises(ConfigurationError, match=r"chats/chat\.jsonl had another content"):
        Experiment("supervised", named)
