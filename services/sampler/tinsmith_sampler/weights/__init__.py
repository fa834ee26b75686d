"""Weights on their way into an engine: from a trainer, the store, or the same process.

Decides which version a request is sampled with. Trainers are known by a protocol alone.
"""
