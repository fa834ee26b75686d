"""What `model` may name, and what is sampled then. Pure.

| `model`                                                | what is sampled                     |
| ------------------------------------------------------ | ----------------------------------- |
| `Qwen/Qwen3-8B`, or an alias of the configuration      | a base model                        |
| `projects/p/trainingRuns/r/checkpoints/c`              | a checkpoint                        |
| `tinker://r/weights/c`, `tinker://r/sampler_weights/c` | a checkpoint                        |
| `projects/p/trainingRuns/r`, `r@latest`, `r`           | the live weights of a run, updated  |
|                                                        | between tokens                      |

A bare name is a base model if there is one of this name, else a run of the caller's project: a name
stands for several sources, which are tried in order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tinsmith import names

_LATEST = "@latest"
_TINKER = re.compile(r"tinker://([^/]+)/(weights|sampler_weights)/([^/]+)")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model as it was before training."""

    name: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A saved state of a run."""

    name: str


@dataclass(frozen=True, slots=True)
class LiveRun:
    """The newest weights of a run."""

    name: str


Source = BaseModel | Checkpoint | LiveRun


def candidates(model: str, *, project: str, aliases: Mapping[str, str]) -> tuple[Source, ...]:
    """Return what a name may stand for, in the order in which it is tried; empty for nothing.

    Args:
        model: As a request names it.
        project: Id of the caller's project.
        aliases: The base model behind each further name.
    """
    if model in aliases:
        return (BaseModel(aliases[model]),)
    if model.startswith("tinker://"):
        return tuple(Checkpoint(name) for name in tinker_checkpoints(model, project))
    is_latest = model.endswith(_LATEST)
    bare = model.removesuffix(_LATEST)
    if model.startswith("projects/"):
        if _is_name(names.RunName, bare):
            return (LiveRun(bare),)
        return (Checkpoint(model),) if _is_name(names.CheckpointName, model) else ()
    run = (LiveRun(str(names.RunName(project, bare))),) if names.is_valid_id(bare) else ()
    if is_latest:
        return run
    return (BaseModel(model), *run) if model else ()


def tinker_checkpoints(path: str, project: str) -> tuple[str, ...]:
    """Return the native names that a path of the Tinker wire may stand for; empty if it is none.

    Weights for sampling have a suffix of their own, because both kinds may have one name there; a
    checkpoint that was saved natively has none.
    """
    match = _TINKER.fullmatch(path)
    if match is None:
        return ()
    run, kind, checkpoint = match.groups()
    ids = [checkpoint] if kind == "weights" else [f"{checkpoint}.sampler", checkpoint]
    found = (str(names.CheckpointName(project, run, one)) for one in ids)
    return tuple(name for name in found if _is_name(names.CheckpointName, name))


def latest_of(run: str) -> str:
    """Return the short name of a run's live weights, as `/v1/models` lists it."""
    return names.RunName.parse(run).run + _LATEST


def _is_name(kind: type[names.ResourceName], value: str) -> bool:
    try:
        kind.parse(value)
    except names.InvalidNameError:
        return False
    return True
