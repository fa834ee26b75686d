"""Where the data of a job is: a path that its author wrote is not one that its driver can open.

A driver of `tinsmith up` runs in a folder of the server. On this machine a path is therefore made
absolute when the job is handed in, and one that leads nowhere is refused. A cluster has files of
its own, and a path of its pods is passed on as it is.
"""

from __future__ import annotations

import re
from pathlib import Path

from tinsmith.addresses import is_loopback
from tinsmith.errors import ConfigurationError
from tinsmith.jobs.methods import BUILT_IN_DATA, RECIPE_METHODS
from tinsmith.v1 import job_pb2

_HUB = "hf://"
_FETCHED = (_HUB, "s3://")
"""Begin what a driver's pod fetches."""
_FOLDER = re.compile(r"hf://(\.[^:?]*)(.*)")
"""A folder with the files of a data set, as seen from here, and what the address says of it."""


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
        field = "spec.method.parameters.data"
        parameters["data"] = _find(parameters["data"], spec.method.type, field, may_refuse)
    if spec.data.name:
        spec.data.name = _find(spec.data.name, spec.method.type, "spec.data.name", may_refuse)


def _find(text: str, method: str, field: str, may_refuse: bool) -> str:
    if folder := _FOLDER.fullmatch(text):
        path = Path(folder[1])
        if not path.is_dir():
            raise ConfigurationError(
                f"{field}: there is no folder {path}", remedy="give a folder of this machine"
            )
        return f"{_HUB}{path.absolute()}{folder[2]}"
    if text in BUILT_IN_DATA[method] or text.startswith(_FETCHED):
        return text
    # A game of the author's own is FILE.py:CLASS.
    place, colon, name = text.partition(".py:")
    path = Path(f"{place}.py" if colon else text).expanduser()
    if path.is_absolute() and not may_refuse:
        return text
    if not path.exists():
        raise ConfigurationError(
            f"{field}: {path} is not there",
            remedy="give the path of a file on this machine, or what comes with "
            f"{method}: {', '.join(BUILT_IN_DATA[method])}",
        )
    return f"{path.absolute()}:{name}" if colon else str(path.absolute())
