"""Holds a server to the same bits, whatever it does at once; `python -m tests.determinism`."""
