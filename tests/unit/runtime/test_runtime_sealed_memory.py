"""Memory that is written once and mapped by other processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith_runtime.sealed_memory import (
    MemoryLocation,
    SealedMemory,
    map_sealed,
    memory_domain,
)

_READ = """
import sys
from tinsmith_runtime.sealed_memory import MemoryLocation, map_sealed, memory_domain
view = map_sealed(MemoryLocation(*map(int, sys.argv[1:4])), int(sys.argv[4]))
sys.stdout.write(memory_domain() + " " + bytes(view).hex())
"""


def sealed(content: bytes) -> SealedMemory:
    return SealedMemory([memoryview(content)], len(content))


def located(memory: SealedMemory) -> MemoryLocation:
    assert memory.location is not None
    return memory.location


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=5000), min_size=1).filter(any))
def test_parts_lie_one_behind_another(parts: list[bytes]) -> None:
    content = b"".join(parts)
    memory = SealedMemory([memoryview(part) for part in parts], len(content))
    assert bytes(memory.view) == content
    assert bytes(map_sealed(located(memory), len(content))) == content


def test_another_process_of_the_user_maps_it() -> None:
    memory = sealed(b"weights")
    where = located(memory)
    arguments = [str(where.pid), str(where.descriptor), str(where.inode), "7"]
    answer = subprocess.run(
        [sys.executable, "-c", _READ, *arguments], capture_output=True, check=True, timeout=60
    )
    assert answer.stdout.decode() == f"{memory_domain()} {b'weights'.hex()}"


def test_what_a_reader_writes_is_its_own() -> None:
    memory = sealed(b"weights")
    mapped = map_sealed(located(memory), 7)
    mapped[0] = 0
    assert bytes(memory.view) == b"weights"
    assert bytes(map_sealed(located(memory), 7)) == b"weights"


def test_sealed_memory_cannot_be_written_or_cut() -> None:
    where = located(memory := sealed(b"weights"))
    with pytest.raises(PermissionError):
        os.pwrite(where.descriptor, b"W", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(where.descriptor, 3)
    assert bytes(memory.view) == b"weights"


def test_readers_go_on_after_the_memory_is_closed() -> None:
    memory = sealed(b"weights")
    where = located(memory)
    mapped, view = map_sealed(where, 7), memory.view
    memory.close()
    memory.close()
    assert bytes(mapped) == bytes(view) == b"weights"
    assert memory.location is None
    with pytest.raises(FileNotFoundError):
        map_sealed(where, 7)


def test_memory_of_another_size_or_without_seals_is_refused(tmp_path: os.PathLike[str]) -> None:
    memory = sealed(b"weights")
    where = located(memory)
    with pytest.raises(OSError, match="other memory"):
        map_sealed(MemoryLocation(where.pid, where.descriptor, where.inode + 1), 7)
    with pytest.raises(OSError, match="7 bytes, not 8"):
        map_sealed(located(memory), 8)
    descriptor = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    path = os.path.join(tmp_path, "file")
    with open(path, "wb") as file:
        file.write(b"weights")
        file.flush()
        os.write(descriptor, b"weights")
        try:
            for each in (descriptor, file.fileno()):
                with pytest.raises(OSError, match=r"not sealed|Invalid argument"):
                    map_sealed(MemoryLocation(os.getpid(), each, os.fstat(each).st_ino), 7)
        finally:
            os.close(descriptor)


def test_parts_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="7 bytes, not 9"):
        SealedMemory([memoryview(b"weights")], 9)
