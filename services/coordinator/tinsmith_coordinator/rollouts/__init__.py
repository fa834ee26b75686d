"""Rollouts: batches that are asked for, what plays their episodes, and how long results are kept.

Knows neither grpc nor stubs: what an episode is played with comes through `players`.
"""
