"""A sweep: a recipe with several values of some settings, all variants at once on one base model.

`learning_rate=1e-4,3e-4,1e-3 rank=8,32` of any recipe is one. The trainer computes what waits
together in one pass, so that sixteen adapters cost far less than sixteen runs one after the other.
Every variant has a folder and a run of its own, and goes on after Ctrl-C by the same command. A
table and a curve compare how they ended: over learning rates it has the form of a U.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import threading
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import rich.console

from tinsmith.client import Client
from tinsmith.config_values import load_config
from tinsmith.errors import ConfigurationError, TinsmithError
from tinsmith.recipes.experiment.curves import Curve
from tinsmith.recipes.experiment.experiment import slug
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.run_log import METRICS, read_metrics
from tinsmith.recipes.sweep_outcomes import VariantOutcome, compare

MAX_VARIANTS = 64

_ROOT = Path("runs")
_REWARD = Curve("reward", "mean reward", rises=True)
"""What recipes of reinforcement learning are compared by."""
_LAST_SHARE = 0.1
"""Of the steps, the share at the end whose mean is compared: single steps are noisy."""
_LINE_INTERVAL_S = 5.0

RunRecipe = Callable[[Any, Client, Observer], object]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is compared.

    Attributes:
        recipe: Name of the recipe.
        module: The recipe.
        axes: Values by setting, as they were written.
        words: The other settings.
        file: Of settings.
    """

    recipe: str
    module: ModuleType
    axes: Mapping[str, Sequence[str]]
    words: Sequence[str]
    file: Path | None = None

    def variants(self) -> list[Variant]:
        """Return every combination of the values, with its settings.

        Raises:
            ConfigurationError: If a setting is refused, or there are too many.
        """
        num_variants = 1
        for values in self.axes.values():
            num_variants *= len(values)
        if num_variants > MAX_VARIANTS:
            raise ConfigurationError(
                f"{num_variants} variants are more than a sweep may have, {MAX_VARIANTS}",
                remedy="give fewer values",
            )
        found = []
        for combination in itertools.product(*self.axes.values()):
            chosen = dict(zip(self.axes, combination, strict=True))
            settings = [f"{name}={value}" for name, value in chosen.items()]
            config = load_config(self.module.Config, self.file, [*self.words, *settings])
            name = ",".join(settings)
            folder = self.folder(config) / name
            found.append(Variant(name, chosen, dataclasses.replace(config, output_dir=folder)))
        return found

    def folder(self, config: Any) -> Path:
        """Return where everything goes: the same for the same command."""
        if config.output_dir is not None:
            return Path(config.output_dir)
        words = [word for word in self.words if word != "overwrite=true"]
        axes = [f"{name}={','.join(values)}" for name, values in self.axes.items()]
        text = "\n".join([*sorted([*words, *axes]), self.file.read_text() if self.file else ""])
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return _ROOT / f"sweep-{self.recipe}-{slug(config)}-{digest}"


@dataclass(frozen=True, slots=True)
class Variant:
    """One combination of values.

    Attributes:
        name: Of its folder.
        values: As they were written, by setting.
        config: Its settings.
    """

    name: str
    values: Mapping[str, str]
    config: Any


class _VariantObserver(Observer):
    """Counts the steps of a variant, and stops it behind one."""

    def __init__(self, name: str) -> None:
        self.label = f"{name}: "
        self.should_stop = threading.Event()
        self.num_done = 0
        self._is_stopping = False

    def began(self, run: str, first_step: int) -> None:
        del run
        self.num_done = first_step

    def step_done(self, num_done: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        del num_steps, metrics
        self.num_done = num_done
        # Once: the recipe logs what is still on its way before it saves.
        if self.should_stop.is_set() and not self._is_stopping:
            self._is_stopping = True
            raise KeyboardInterrupt


def read_axes(
    config_class: type[Any], words: Sequence[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the settings that have several values, and the words of the others.

    A number with commas is a list of values to compare; commas of other settings are their own.
    """
    hints = typing.get_type_hints(config_class)
    axes: dict[str, list[str]] = {}
    rest: list[str] = []
    for word in words:
        name, _, text = word.partition("=")
        values = [part.strip() for part in text.split(",") if part.strip()]
        if len(values) > 1 and _is_number(hints.get(name.strip())):
            axes[name.strip()] = list(dict.fromkeys(values))
        else:
            rest.append(word)
    return axes, rest


def run_sweep(sweep: Sweep, client: Client, run_recipe: RunRecipe) -> list[VariantOutcome]:
    """Run all variants at once, and compare how they ended.

    Args:
        sweep: What is compared.
        client: Of the service, for all of them.
        run_recipe: Runs one variant: settings, client and observer.

    Raises:
        ConfigurationError: If settings are refused, before any variant begins.
        TinsmithError: The first failure of a variant, once the others ended.
        KeyboardInterrupt: After Ctrl-C, once every variant saved; the same call resumes.
    """
    variants = sweep.variants()
    observers = [_VariantObserver(variant.name) for variant in variants]
    errors: dict[str, BaseException] = {}

    def run_one(variant: Variant, observer: _VariantObserver) -> None:
        try:
            run_recipe(variant.config, client, observer)
        except BaseException as error:
            errors[variant.name] = error

    console = rich.console.Console()
    console.print(f"sweep of {len(variants)} variants", highlight=False)
    threads = [
        threading.Thread(target=run_one, args=pair, name=pair[0].name, daemon=True)
        for pair in zip(variants, observers, strict=True)
    ]
    for thread in threads:
        thread.start()
    is_stopped, said = False, ""
    while any(thread.is_alive() for thread in threads):
        try:
            _wait(threads)
            done = ", ".join(str(observer.num_done) for observer in observers)
            if done != said:
                console.print(f"steps done: {done}", highlight=False, soft_wrap=True)
            said = done
        except KeyboardInterrupt:
            if is_stopped:
                raise
            is_stopped = True
            for observer in observers:
                observer.should_stop.set()
    if is_stopped:
        raise KeyboardInterrupt
    outcomes = [_outcome(sweep, variant, errors.get(variant.name)) for variant in variants]
    folder = variants[0].config.output_dir.parent
    compare(sweep.recipe, list(sweep.axes), _curve(sweep), outcomes, folder, console)
    if errors:
        raise next(iter(errors.values()))
    return outcomes


def _wait(threads: Sequence[threading.Thread]) -> None:
    """Wait until one of the threads that run has ended, or for a few seconds."""
    alive = [thread for thread in threads if thread.is_alive()]
    alive[0].join(_LINE_INTERVAL_S)


def _outcome(sweep: Sweep, variant: Variant, error: BaseException | None) -> VariantOutcome:
    metric = _curve(sweep).metric
    folder = variant.config.output_dir
    values = [row[metric] for row in read_metrics(folder / METRICS) if metric in row]
    last = values[-max(1, round(len(values) * _LAST_SHARE)) :]
    is_whole = error is None and bool(last)
    return VariantOutcome(
        variant.values,
        sum(last) / len(last) if is_whole else None,
        folder,
        "" if error is None else _sentence(error),
    )


def _curve(sweep: Sweep) -> Curve:
    curve: Curve = getattr(sweep.module, "CURVE", _REWARD)
    return curve


def _is_number(hint: object) -> bool:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_is_number(part) for part in typing.get_args(hint))
    return hint in (int, float)


def _sentence(error: BaseException) -> str:
    return error.message if isinstance(error, TinsmithError) else f"{type(error).__name__}: {error}"
