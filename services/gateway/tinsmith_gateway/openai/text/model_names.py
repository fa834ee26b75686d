"""What `model` may name, and what is sampled then. Pure.

| `model`                                                | what is sampled                     |
| ------------------------------------------------------ | ----------------------------------- |
| `Qwen/Qwen3-8B`, or an alias of the configuration      | a base model                        |
| `projects/p/trainingRuns/r/checkpoints/c`, `r/c`       | a checkpoint                        |
| `tinker://r/weights/c`, `tinker://r/sampler_weights/c` | a checkpoint: the newest save       |
| `projects/p/trainingRuns/r`, `r@latest`, `r`           | the live weights of a run, updated  |
|                                                        | between tokens                      |

A run of the Tinker wire may be named as that wire does, `session:train:0`.

A bare name is a base model if there is one of this name, else a run or a checkpoint of the caller's
project. So a name stands for several sources, which are tried in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tinsmith import names
from tinsmith_gateway.tinker.wire.ids import TinkerPath, run_id_of
from tinsmith_runtime.errors import InvalidFieldError

_TINKER = "tinker://"


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model as it was before training."""

    name: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A saved state of a run."""

    name: str


@dataclass(frozen=True, slots=True)
class LatestWeights:
    """The newest weights of a run, as a source of samples."""

    name: str


@dataclass(frozen=True, slots=True)
class SavedPath:
    """A checkpoint by the name that the Tinker wire has for it; which one it is has to be asked."""

    path: TinkerPath


Source = BaseModel | Checkpoint | LatestWeights


def candidates(
    model: str, *, project: str, aliases: Mapping[str, str]
) -> tuple[Source | SavedPath, ...]:
    """Return what a name may stand for, in the order in which it is tried; empty for nothing.

    Args:
        model: As a request names it.
        project: Id of the caller's project.
        aliases: The base model behind each further name.
    """
    if model in aliases:
        return (BaseModel(aliases[model]),)
    if model.startswith(_TINKER):
        return _saved_path(model)
    is_latest = model.endswith(names.LATEST)
    bare = model.removesuffix(names.LATEST)
    if model.startswith("projects/"):
        if _is_name(names.RunName, bare):
            return (LatestWeights(bare),)
        return (Checkpoint(model),) if _is_name(names.CheckpointName, model) else ()
    run = _run(bare, project)
    if is_latest:
        return run
    whole = names.whole_checkpoint(model, project)
    saved = (Checkpoint(whole),) if whole != model else ()
    return (BaseModel(model), *run, *saved) if model else ()


def latest_of(run: str) -> str:
    """Return the short name of a run's live weights, as `/v1/models` lists it."""
    return names.RunName.parse(run).run + names.LATEST


def _saved_path(model: str) -> tuple[SavedPath, ...]:
    try:
        path = TinkerPath.parse(model)
        run_id_of(path.model_id)
    except InvalidFieldError:
        return ()
    return (SavedPath(path),)


def _run(model: str, project: str) -> tuple[LatestWeights, ...]:
    try:
        return (LatestWeights(str(names.RunName(project, run_id_of(model)))),)
    except InvalidFieldError:
        return ()


def _is_name(kind: type[names.ResourceName], value: str) -> bool:
    try:
        kind.parse(value)
    except names.InvalidNameError:
        return False
    return True
