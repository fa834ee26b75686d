"""The base model of a job, a pool or an agent."""

from __future__ import annotations

import re

from tinsmith_jobs.spec import AUTO_DTYPE, DTYPES, Model
from tinsmith_jobs.spec_reader import Reader

_SOURCE = re.compile(
    r"^(hf://[^/@,=]+/[^/@,=]+|pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[^,=]+|file:///[^,=]+)$",
    re.ASCII,
)
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


def read_model(reader: Reader, is_local: bool = False) -> Model:
    """Return a base model.

    Args:
        reader: At the model.
        is_local: Whether one machine runs the job, in pods that have loaded the model already.
    """
    name = reader.required("name")
    source = reader.text("source") if is_local else reader.required("source")
    if name and not _MODEL_NAME.fullmatch(name):
        reader.refuse(f"{reader.path}.name may have letters, digits and . _ / - alone")
    if source and not _SOURCE.fullmatch(source):
        reader.refuse(
            f"{reader.path}.source must be hf://organisation/name, pvc://claim/path or "
            "file:///path, without commas and equals signs"
        )
    check_path(reader, "source", source)
    token = reader.at("hubTokenSecretRef")
    dtype = reader.choice("dtype", DTYPES, AUTO_DTYPE)
    if is_local and dtype != AUTO_DTYPE:
        reader.refuse(
            f"{reader.path}.dtype: the model is served already; start the server with --dtype "
            f"{dtype}, and drop the field"
        )
    return Model(name, source, token.text("name"), reader.text("cacheClaimName"), dtype)


def check_path(reader: Reader, name: str, path: str) -> None:
    """Refuse a path that leaves the folder that it is meant for."""
    if ".." in path.split("/"):
        reader.refuse(f"{reader.path}.{name} must not go up by ..")
