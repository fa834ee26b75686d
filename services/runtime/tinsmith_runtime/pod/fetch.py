"""`python -m tinsmith_runtime.pod.fetch URI FILE MAX_BYTES`: an object of a store as a file.

It runs before the driver of a job, which has neither a client of object stores nor its keys. Its
exit codes are those of a driver: 0 done; 2 a repeat would not help; 3 failed for a reason that may
pass.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tinsmith_runtime import storage
from tinsmith_runtime.errors import (
    DataLossError,
    StorageRefusedError,
    TinsmithError,
    UnavailableError,
    sentence_of,
)
from tinsmith_runtime.pod.main import write_termination_reason
from tinsmith_runtime.storage.objects import ObjectNotFoundError, ObjectTooLargeError

_MISCONFIGURED, _MAY_PASS = 2, 3
_UNFINISHED = ".unfinished"
_REMEDIES: dict[type[Exception], str] = {
    ObjectNotFoundError: "put it there, or correct spec.data.name",
    ObjectTooLargeError: (
        "give it as a file on a volume (spec.data.pvc), or ask the operators for more (setting "
        "volume_size)"
    ),
}
"""Of what only the author of the job, or its operators, can mend; other sentences have theirs."""


def fetch(uri: str, file: Path, max_bytes: int) -> None:
    """Write an object into a file, never wholly in memory; the file is complete or absent.

    Args:
        uri: `s3://bucket/path`, with the settings of its store behind a `?`.
        file: Replaced if it is there.
        max_bytes: What the object may have.

    Raises:
        ConfigError: If the URI or a setting of the store is wrong, or there are no credentials.
        DataLossError: If the object was replaced meanwhile.
        ObjectNotFoundError: If there is none.
        ObjectTooLargeError: If it has more bytes.
        StorageRefusedError: If the store refuses this process, or has no such bucket.
        StorageUnavailableError: If the store does not answer in time.
        OSError: If the file cannot be written.
    """
    place = urlsplit(uri)
    store = storage.open(place._replace(path="").geturl())
    unfinished = file.with_name(_UNFINISHED)
    # The volume has room for one.
    file.unlink(missing_ok=True)
    with unfinished.open("wb") as target:
        for chunk in store.read_chunks(unquote(place.path[1:]), max_bytes=max_bytes):
            target.write(chunk)
    unfinished.replace(file)


def main(arguments: Sequence[str]) -> int:
    """Fetch an object; if it cannot be, say why in one sentence. Return the exit code."""
    uri, file, max_bytes = arguments
    try:
        fetch(uri, Path(file), int(max_bytes))
    except (TinsmithError, OSError, ValueError) as error:
        remedy = _REMEDIES.get(type(error), "")
        problem = f"{sentence_of(error)}; {remedy}" if remedy else sentence_of(error)
        sentence = f"spec.data.name cannot be fetched with the keys of spec.checkpoint: {problem}"
        sys.stderr.write(f"{' '.join(sentence.split())}\n")
        write_termination_reason(sentence)
        return _MAY_PASS if _may_pass(error) else _MISCONFIGURED
    return 0


def _may_pass(error: Exception) -> bool:
    """Whether the same fetch may succeed later, or on another node."""
    if isinstance(error, StorageRefusedError | ObjectTooLargeError):
        return False
    return isinstance(error, UnavailableError | DataLossError | OSError)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
