"""Files as a whole: written at once or not at all, and their digests."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_whole(path: Path, content: bytes, *, is_secret: bool = False) -> None:
    """Write a file; a reader finds what was there before, or all of it.

    Args:
        path: Where; its folder is there.
        content: What it holds.
        is_secret: Whether its owner alone may read it; it is on the disk before this returns.
    """
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(temporary, flags, 0o600 if is_secret else 0o666), "wb") as file:
        file.write(content)
        if is_secret:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)


def sha256_of(path: Path) -> str:
    """Return the digest of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
