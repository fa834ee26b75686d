"""Fields that jobs and their roles have as pods do: labels, node selectors, tolerations."""

from __future__ import annotations

import re

from tinsmith_jobs.spec import Toleration
from tinsmith_jobs.spec_reader import Reader

_NAME = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_EFFECTS = ("", "NoSchedule", "PreferNoSchedule", "NoExecute")


def read_annotations(reader: Reader, field: str) -> dict[str, str]:
    """Return texts whose names Kubernetes takes."""
    found = reader.texts_by_name(field)
    for name in found:
        if not _NAME.fullmatch(name):
            reader.refuse(
                f"{reader.path}.{field} names {name!r}; a name has at most 63 letters, digits and "
                "- _ . alone, behind a prefix with / or not"
            )
    return found


def read_labels(reader: Reader, field: str) -> dict[str, str]:
    """Return labels whose names and values Kubernetes takes."""
    found = read_annotations(reader, field)
    for name, value in found.items():
        if not _VALUE.fullmatch(value):
            reader.refuse(
                f"{reader.path}.{field}.{name} is {value!r}: a label has at most 63 letters, "
                "digits and - _ . alone, and begins and ends with a letter or digit"
            )
    return found


def read_tolerations(reader: Reader) -> tuple[Toleration, ...]:
    """Return the tolerations of what a reader is at."""
    return tuple(_toleration(entry) for entry in reader.objects("tolerations"))


def _toleration(reader: Reader) -> Toleration:
    found = Toleration(
        key=reader.text("key"),
        operator=reader.choice("operator", ("Exists", "Equal"), "Equal"),
        value=reader.text("value"),
        effect=reader.choice("effect", _EFFECTS),
        seconds=reader.optional_number("tolerationSeconds", least=0),
    )
    if not found.key and found.operator != "Exists":
        reader.refuse(f"{reader.path} without a key must have the operator Exists")
    if found.value and found.operator == "Exists":
        reader.refuse(
            f"{reader.path}.value is {found.value!r}: with the operator Exists there is none; drop "
            "it, or write Equal"
        )
    if found.seconds is not None and found.effect != "NoExecute":
        reader.refuse(f"{reader.path}.tolerationSeconds needs the effect NoExecute")
    return found
