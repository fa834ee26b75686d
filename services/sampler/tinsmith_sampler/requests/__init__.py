"""Requests as the sampler holds them: sessions, streams of tokens, limits, and what they used.

Nothing here knows engines, weights or the wire.
"""
