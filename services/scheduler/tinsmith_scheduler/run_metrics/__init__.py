"""Metrics of runs: blocks of points, their statements, and what may be recorded.

Knows runs by their rows, and no wire.
"""
