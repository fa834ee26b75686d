"""`python -m tinsmith_runtime.storage.fetch URI FILE MAX_BYTES`: an object of a store as a file.

It runs before the driver of a job, which has neither a client of object stores nor its keys. Exit
codes: 0 done; 1 no repeat would help; 3 the store does not answer for now.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from tinsmith_runtime import storage
from tinsmith_runtime.errors import ConfigError, TinsmithError, UnavailableError, sentence_of

_FAILED, _MAY_PASS = 1, 3


def fetch(uri: str, file: Path, max_bytes: int) -> None:
    """Write an object into a file, never wholly in memory.

    Args:
        uri: `s3://bucket/path`, with the settings of its store behind a `?`.
        file: Replaced if it is there.
        max_bytes: What the object may have.

    Raises:
        ConfigError: If the URI names no object, or the store refuses this process.
        DataLossError: If the object is larger, or was replaced meanwhile.
        ObjectNotFoundError: If there is none.
        StorageUnavailableError: If the store does not answer in time.
        OSError: If the file cannot be written.
    """
    place, mark, settings = uri.partition("?")
    folder, _, name = place.rpartition("/")
    store = storage.open(f"{folder}{mark}{settings}")
    with file.open("wb") as target:
        for chunk in store.read_chunks(unquote(name), max_bytes=max_bytes):
            target.write(chunk)


def main(arguments: Sequence[str]) -> int:
    """Fetch an object; say why it cannot be, in one sentence, and return the exit code."""
    uri, file, max_bytes = arguments
    try:
        fetch(uri, Path(file), int(max_bytes))
    except (TinsmithError, ConfigError, OSError, ValueError) as error:
        sys.stderr.write(f"{uri.partition('?')[0]} cannot be fetched: {sentence_of(error)}\n")
        return _MAY_PASS if isinstance(error, UnavailableError) else _FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
