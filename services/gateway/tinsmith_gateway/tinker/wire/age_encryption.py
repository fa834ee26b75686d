"""Encryption of downloads for age recipients, as https://age-encryption.org/v1 has it.

A checkpoint remembers its recipients; its files are encrypted on their way out, each time anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pyrage

from tinsmith_runtime.errors import InvalidFieldError

Recipient: TypeAlias = Any
"""`pyrage.x25519.Recipient` or `pyrage.ssh.Recipient`, which have no types."""

SUFFIX = ".age"
_LABEL = "tinsmith.age_recipient."


def parse_recipient(text: str) -> Recipient:
    """Return a recipient: an X25519 key `age1...` or an SSH public key.

    Raises:
        InvalidFieldError: If it is neither.
    """
    parse = pyrage.x25519.Recipient if text.startswith("age1") else pyrage.ssh.Recipient
    try:
        return parse.from_str(text)
    except pyrage.RecipientError as error:
        raise InvalidFieldError(
            "age_encryption_recipients", f"holds no age or SSH public key: {text[:80]!r}"
        ) from error


def encode_labels(recipients: Sequence[str]) -> dict[str, str]:
    """Return recipients as labels of a checkpoint.

    Raises:
        InvalidFieldError: If one is no key.
    """
    for recipient in recipients:
        parse_recipient(recipient)
    return {f"{_LABEL}{index}": recipient for index, recipient in enumerate(recipients)}


def decode_labels(labels: Mapping[str, str]) -> list[str]:
    """Return the recipients among the labels of a checkpoint, in their order."""
    names = sorted((name for name in labels if name.startswith(_LABEL)), key=_index)
    return [labels[name] for name in names]


def is_label(name: str) -> bool:
    """Return whether a label is one of ours, and so none of the user's."""
    return name.startswith(_LABEL)


def _index(name: str) -> int:
    digits = name.removeprefix(_LABEL)
    return int(digits) if digits.isdigit() else 0
