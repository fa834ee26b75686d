"""How the two sides of a confined process tell where a message ends."""

HEAD_BYTES = 4
"""Length of the length before each message, big-endian."""
