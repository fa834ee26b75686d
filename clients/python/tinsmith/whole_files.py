"""Files as a whole: written at once or not at all, and their digests."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path


def write_whole(path: Path, content: bytes, *, is_secret: bool = False) -> None:
    """Write a file; a reader finds what was there before, or all of it.

    Args:
        path: Where; its folder is there.
        content: What it holds.
        is_secret: Whether its owner alone may read it. Its content is on the disk before the file
            has its name.
    """
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    descriptor = os.open(temporary, flags, 0o600 if is_secret else 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if is_secret:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sha256_of(path: Path) -> str:
    """Return the digest of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
