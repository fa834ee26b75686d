"""How many objects a JSON body becomes, counted before it is parsed.

A parser makes an object of some sixty bytes of each list, object and member, which may take two
bytes of the body; and it lets nothing else run meanwhile.
"""

from __future__ import annotations

PARTS = b"[{:"
"""What lists, objects and members of objects begin with."""
VALUES = b","
"""What stands between values."""
COUNTED_AT_ONCE_BYTES = 2**16


def has_more(body: bytes, limit: int, marks: bytes) -> bool:
    """Return whether a body has more of some marks, outside its texts, than a limit."""
    if sum(body.count(mark) for mark in marks) <= limit:
        return False
    # Texts may hold as many as they like.
    return _num_outside_texts(body, marks) > limit


def _num_outside_texts(body: bytes, marks: bytes) -> int:
    # Without what is escaped, each quote begins or ends a text. A piece at a time, since each text
    # becomes an object: a body has millions.
    others = bytes(set(range(256)) - set(marks + b'"'))
    bare = body.replace(rb"\\", b"").replace(b'\\"', b"").translate(None, others)
    count, is_within = 0, False
    for start in range(0, len(bare), COUNTED_AT_ONCE_BYTES):
        pieces = bare[start : start + COUNTED_AT_ONCE_BYTES].split(b'"')
        count += sum(map(len, pieces[is_within::2]))
        is_within ^= len(pieces) % 2 == 0
    return count
