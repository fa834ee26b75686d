"""Rollouts as they are kept: one record for each episode, in JSONL or Parquet (docs/rollouts.md).

A record holds the exact columns of tokens and what it takes to play the episode again. The page's
view of trajectories reads the same lines. Nothing here talks to a server.
"""

from tinsmith.rollouts.records.errors import RolloutFileError
from tinsmith.rollouts.records.files import read_records, rollout_files, write_records
from tinsmith.rollouts.records.making import make_record, record_result
from tinsmith.rollouts.records.record import EpisodeRecord, Origin, RecordedImage, RecordedTurn
from tinsmith.rollouts.records.replaying import Replay, compare

__all__ = [
    "EpisodeRecord",
    "Origin",
    "RecordedImage",
    "RecordedTurn",
    "Replay",
    "RolloutFileError",
    "compare",
    "make_record",
    "read_records",
    "record_result",
    "rollout_files",
    "write_records",
]
