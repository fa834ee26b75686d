"""The folder of an experiment: which training it holds, how far that is, and what came of it.

A folder holds one experiment and no other. The same command finds its own folder again, after
Ctrl-C or `kill -9`, because the folder says with which settings it was begun. Another command gets
a folder of its own, or is refused where it names one that is taken. A lock that ends with its
process keeps two processes from writing into one folder.

| file | holds |
| --- | --- |
| `config.json` | recipe, run and settings: there as soon as the run is |
| `state.json` | the last save |
| `checkpoints.jsonl` | every save: its name, step and resource name |
| `samples.jsonl` | answers to some held-out questions, at each score |
| `opponents.json` | of games: what else plays, as of the last two saves |
| `before.json`, `warm_start.json`, `after.json` | of RL: what each validation task earned |
| `rollouts/` | what was played, by phase and step; only with `keep_rollouts` |
| `summary.json` | what came out; only of an experiment that ended |
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from tinsmith.errors import ConfigurationError
from tinsmith.names import shorten
from tinsmith.recipes.experiment.json_files import append_line, damaged, read_json, write_json
from tinsmith.recipes.experiment.observer import Observer, SavedState
from tinsmith.recipes.experiment.settings import TrainingConfig
from tinsmith.recipes.tasks.hub_data import data_name
from tinsmith.rollouts.records.files import SUFFIXES
from tinsmith.whole_files import sha256_of

with contextlib.suppress(ImportError):  # Windows has none, and then no lock.
    import fcntl

STATE_FILE = "state.json"
CONFIG_FILE = "config.json"
SUMMARY_FILE = "summary.json"
CHECKPOINTS_FILE = "checkpoints.jsonl"
SAMPLES_FILE = "samples.jsonl"
OPPONENTS_FILE = "opponents.json"
FIRST_SCORES_FILES = ("before.json", "warm_start.json")
LAST_SCORES_FILE = "after.json"
ROLLOUTS = "rollouts"
"""Folder of the rollouts that are kept."""

_ROOT = Path("runs")
_DATA = "data_sha256"
"""Of a file of data, beside the settings: what is in it decides what is trained."""
_LOCK_FILE = ".lock"
_NUMBERED = re.compile(r"(.+)-(\d+)")
_FREE = frozenset(
    {
        "output_dir",
        "overwrite",
        "num_steps",
        "save_every",
        "eval_every",
        "evaluators",
        "rare_evaluators",
        "rare_eval_every",
        "evaluator_timeout_s",
        "keep_rollouts",
        "checkpoint",
        "log_to",
        "step_timeout_s",
    }
)
"""Settings that may change on the way: they say how long and where, not what is trained."""


class Experiment(AbstractContextManager["Experiment"]):
    """An experiment and its folder, which no other process writes into while it is open.

    Args:
        recipe: Name of the recipe.
        config: Its settings. Without `output_dir` the folder is `runs/<recipe>-<data>-<n>`: the one
            that this experiment was begun in, else a new one.
        observer: Says whether settings may change on the way.

    Attributes:
        folder: Where everything goes.
        state: The save that is gone on from; None at the beginning.
        is_unchanged: Whether what was trained so far was trained with these settings.
        summary: What came out, of an experiment that ended; else None.
        note: A sentence about what is gone on from; may be empty.

    Raises:
        ConfigurationError: If the folder holds another experiment, another process writes into it,
            or it cannot be written.
    """

    def __init__(
        self, recipe: str, config: TrainingConfig, observer: Observer | None = None
    ) -> None:
        self._recipe = recipe
        self._config = config
        self._observer = observer or Observer()
        self._settings = {**describe_settings(config), _DATA: _digest(Path(config.data))}
        self._defaults = {**describe_settings(type(config)()), _DATA: ""}
        self.fingerprint = _fingerprint(recipe, self._settings)
        self.weights = _describe_weights(config)
        self._lock_fd: int | None = None
        self.state: SavedState | None = None
        self.summary: dict[str, Any] | None = None
        self.is_unchanged = False
        self.note = ""
        try:
            if config.output_dir is not None:
                self.folder = config.output_dir
                self._lock()
            else:
                self.folder = self._find_folder()
            self._look()
        except OSError as error:
            self.close()
            raise ConfigurationError(
                f"the folder {self.folder} cannot be written: {error.strerror}",
                remedy="choose another folder with output_dir=...",
            ) from error
        except BaseException:
            self.close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let others use the folder; one in which nothing was begun goes away."""
        descriptor, self._lock_fd = self._lock_fd, None
        if descriptor is None:
            return
        with contextlib.suppress(OSError):
            if [path.name for path in self.folder.iterdir()] == [_LOCK_FILE]:
                (self.folder / _LOCK_FILE).unlink()
                self.folder.rmdir()
        os.close(descriptor)

    def begin(self, run: str) -> None:
        """Note the run, from now on the one of this folder."""
        if self.state is None:
            # What is left over from a part that saved nothing, or is to be replaced.
            self._remove(STATE_FILE, OPPONENTS_FILE, *FIRST_SCORES_FILES, "metrics.jsonl")
            self._remove(CHECKPOINTS_FILE, SAMPLES_FILE)
            remove_rollouts(self.folder)
            self._remove("loss.png", "reward.png")
        self._remove(SUMMARY_FILE, LAST_SCORES_FILE)
        content = {"recipe": self._recipe, "run": run, **self._settings}
        write_json(self.folder / CONFIG_FILE, {**content, "num_steps": self._config.num_steps})

    def save(self, state: SavedState) -> None:
        """Keep a save: from now on it is gone on from."""
        write_json(self.folder / STATE_FILE, asdict(state))
        self.append(
            CHECKPOINTS_FILE,
            {
                "name": state.checkpoint.rpartition("/")[2],
                "step": state.step,
                "state_path": state.checkpoint,
                "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            },
        )

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Write a line of a JSONL file of the folder."""
        append_line(self.folder / name, row)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings, as `config.json` has them."""
        return self._settings

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Note the end, and what came out."""
        write_json(self.folder / SUMMARY_FILE, dict(summary))

    def _find_folder(self) -> Path:
        """Return the folder of this experiment, locked: the latest that fits, else a new one."""
        stem = f"{self._recipe}-{slug(self._config)}"
        taken = sorted(_numbered(stem), reverse=True)
        for number in taken:
            self.folder = _ROOT / f"{stem}-{number}"
            if self._is_mine():
                self._lock()
                return self.folder
        number = taken[0] if taken else 0
        while True:
            number += 1
            self.folder = _ROOT / f"{stem}-{number}"
            with contextlib.suppress(_LockedError):
                self._lock()
                if not (self.folder / CONFIG_FILE).is_file():
                    return self.folder
                self.close()

    def _is_mine(self) -> bool:
        """Whether the folder holds this experiment, and has not gone further than it shall."""
        try:
            begun = read_json(self.folder / CONFIG_FILE)
            state = _read_state(self.folder)
        except ConfigurationError:
            # A damaged folder is no experiment, and must not keep others from beginning.
            return False
        if begun is None or self._differences(begun):
            return False
        return state is None or state.step <= self._config.num_steps

    def _lock(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except NameError:
            pass
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(descriptor)
                raise _LockedError(
                    f"another process trains in {self.folder}",
                    remedy="wait for it, or choose another folder with output_dir=...",
                ) from error
            # A file system without locks: what is not kept apart there never was.
        self._lock_fd = descriptor

    def _look(self) -> None:
        """Find out what is gone on from, or refuse."""
        state = _read_state(self.folder)
        if state is None or self._config.overwrite:
            return
        if self._observer.may_change:
            self.is_unchanged = state.fingerprint == self.fingerprint
            if self.is_unchanged or state.weights == self.weights:
                self.state = state
            return
        begun = read_json(self.folder / CONFIG_FILE) or {}
        differences = self._differences(begun)
        if differences:
            raise ConfigurationError(
                f"{self.folder} holds another experiment, {shorten(state.run)} after step "
                f"{state.step}: {'; '.join(differences)}",
                remedy="choose another folder with output_dir=..., repeat those settings to go on, "
                "or replace it with --overwrite",
            )
        num_steps = self._config.num_steps
        if state.step > num_steps:
            raise ConfigurationError(
                f"{self.folder} holds {shorten(state.run)}, which has {state.step} steps already, "
                f"more than num_steps={num_steps}",
                remedy="choose another folder with output_dir=..., a larger num_steps to go on, or "
                "replace it with --overwrite",
            )
        self.state = state
        self.is_unchanged = True
        summary = read_json(self.folder / SUMMARY_FILE)
        is_final = state.checkpoint.rpartition("/")[2] == self._config.checkpoint
        if summary is not None and state.step == num_steps and is_final:
            self.summary = summary
        elif begun.get("num_steps") != num_steps:
            self.note = (
                f"num_steps was {begun.get('num_steps')} and is {num_steps}: from here on the "
                f"learning rate follows the schedule of {num_steps} steps"
            )

    def _differences(self, begun: Mapping[str, Any]) -> list[str]:
        """Return in which settings an experiment differs from this one, in words."""
        if not begun:
            return ["it was made by an earlier release"]
        if begun.get("recipe") != self._recipe:
            return [f"its recipe is {begun.get('recipe')}"]
        # A setting that a later release brought along was what its default is.
        before = {**self._defaults, **begun}
        changed = [
            name
            for name, value in self._settings.items()
            if name not in _FREE and before[name] != value
        ]
        if changed == [_DATA]:
            return [f"{self._config.data} had another content"]
        return [
            f"{name} was {before[name]!r} and is {self._settings[name]!r}"
            for name in changed
            if name != _DATA
        ]

    def _remove(self, *names: str) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)


class _LockedError(ConfigurationError):
    """Another process holds the folder."""


def describe_settings(config: Any) -> dict[str, Any]:
    """Return settings as JSON has them, but for where they are written."""
    values = {
        name: value
        for name, value in asdict(config).items()
        if name not in ("output_dir", "overwrite")
    }
    settings: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return settings


def _digest(path: Path) -> str:
    """Return the hash of a file; nothing if the data is none."""
    return sha256_of(path) if path.is_file() else ""


def remove_rollouts(folder: Path) -> None:
    """Remove the rollouts that an earlier experiment left in a folder."""
    for path in (folder / ROLLOUTS).glob("*-[0-9]*.*"):
        if path.suffix in SUFFIXES:
            path.unlink()


def _fingerprint(recipe: str, settings: Mapping[str, Any]) -> str:
    """Name the settings that decide what is trained."""
    values = {name: value for name, value in settings.items() if name not in _FREE}
    text = json.dumps({"recipe": recipe, **values}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _describe_weights(config: TrainingConfig) -> str:
    """Name what a checkpoint must have been trained as for this configuration to go on from it."""
    adapter = f"lora of rank {config.rank}" if config.adapter == "lora" else config.adapter
    return f"{config.base_model}, {adapter}"


def slug(config: Any) -> str:
    """Return what the experiment is about, as part of a folder's name."""
    return (
        slugify(getattr(config, "environment", "") or Path(data_name(config.data)).stem) or "data"
    )


def slugify(text: str) -> str:
    """Return a text as part of a file's name; empty if nothing of it can be."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")


def _numbered(stem: str) -> Iterator[int]:
    """Yield the numbers of the folders of a stem that hold an experiment."""
    if not _ROOT.is_dir():
        return
    for path in _ROOT.iterdir():
        match = _NUMBERED.fullmatch(path.name)
        if match and match[1] == stem and (path / CONFIG_FILE).is_file():
            yield int(match[2])


def _read_state(folder: Path) -> SavedState | None:
    content = read_json(folder / STATE_FILE)
    try:
        return None if content is None else SavedState(**content)
    except TypeError as error:
        raise damaged(folder / STATE_FILE) from error
