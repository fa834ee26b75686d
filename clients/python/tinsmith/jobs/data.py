"""Where the data of a job is: a path that its author wrote is not one that its driver can open.

A driver of `tinsmith up` runs in a folder of the server. On this machine a path is therefore made
absolute when the job is handed in, and one that leads nowhere is refused. A cluster has files of
its own, and a path of its pods is passed on as it is.
"""

from __future__ import annotations

from pathlib import Path

from tinsmith.addresses import is_loopback
from tinsmith.errors import ConfigurationError
from tinsmith.v1 import job_pb2

BUILT_IN = frozenset(
    {
        "pig_latin",
        "warm_start",
        "arithmetic",
        "small_sums",
        "larger_number",
        "gomoku",
        "kuhn",
        "rock_paper_scissors",
    }
)
"""Data that recipes bring along; anything else is a path."""

RECIPE_METHODS = frozenset(
    {"supervised", "rl", "rl_episodes", "self_play", "match", "dpo", "distillation"}
)
"""Values of `spec.method.type` that are a recipe, by its name."""


def find_data(spec: job_pb2.TrainingJobSpec, address: str, local_address: str) -> None:
    """Make the paths of a job's data absolute, if its driver runs on this machine.

    Args:
        spec: Of the job; is changed.
        address: Of the server.
        local_address: Of the server that `tinsmith up` runs here; empty if none does. Only there a
            missing absolute path is known to be missing: a loopback address may be a tunnel.

    Raises:
        ConfigurationError: If there is no such file.
    """
    if spec.method.type not in RECIPE_METHODS or not is_loopback(address):
        return
    may_refuse = address == local_address
    parameters = spec.method.parameters
    if "data" in parameters and isinstance(parameters["data"], str):
        parameters["data"] = _find(parameters["data"], "spec.method.parameters.data", may_refuse)
    if spec.data.name:
        spec.data.name = _find(spec.data.name, "spec.data.name", may_refuse)


def _find(text: str, field: str, may_refuse: bool) -> str:
    path = Path(text).expanduser()
    if text in BUILT_IN or (path.is_absolute() and not may_refuse):
        return text
    if not path.exists():
        raise ConfigurationError(
            f"{field}: {path} is not there",
            remedy="give the path of a file on this machine",
        )
    return str(path.absolute())
