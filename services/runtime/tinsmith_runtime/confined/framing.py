"""How the two sides of a confined process tell where a message ends."""

HEAD_BYTES = 4
"""Length of the length before each message, big-endian."""


def framed(body: bytes) -> bytes:
    """Return a message with its length before it."""
    return len(body).to_bytes(HEAD_BYTES, "big") + body
