"""Settings of a trainer of several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith_runtime.errors import ConfigError
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.torchrun import check_alone, runs_ranked


def test_a_sharded_base_needs_several_processes(tmp_path: Path) -> None:
    check_alone(TrainerConfig(data_dir=tmp_path))
    with pytest.raises(ConfigError, match="torchrun"):
        check_alone(TrainerConfig(data_dir=tmp_path, shard_base=True))


def test_the_deadline_between_ranks_is_positive(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rank_timeout_s"):
        TrainerConfig(data_dir=tmp_path, rank_timeout_s=0)


def test_torchrun_tells_how_many_there_are() -> None:
    assert not runs_ranked({})
    assert not runs_ranked({"WORLD_SIZE": "1"})
    assert runs_ranked({"WORLD_SIZE": "2"})
