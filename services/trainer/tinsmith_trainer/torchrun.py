"""One trainer as several processes: `torchrun --nproc-per-node 2 -m tinsmith_trainer`.

Rank 0 is the trainer: it serves, and has the ledger. The others hold their parts of the models and
do what rank 0 sends (`tinsmith_engine.distributed`). They end when rank 0 says so: a SIGTERM, which
torchrun sends to all, must not take them away while rank 0 still parks its runs. If any rank is
lost, all end at once and are to be started again. The runs are then restored from the ledger, which
has everything that was acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

from tinsmith_engine.base.memory import keep_freed_memory
from tinsmith_engine.distributed.leader_commands import Leader, follow
from tinsmith_engine.distributed.process_group import RankFault, Ranks
from tinsmith_engine.distributed.sharded_engine import ShardedEngine
from tinsmith_engine.distributed.sharded_loading import load_sharded_engine
from tinsmith_engine.host import EngineHost, load_engines
from tinsmith_runtime.errors import ConfigError, RanksLostError
from tinsmith_runtime.pod.main import write_termination_reason
from tinsmith_trainer.config import TrainerConfig

logger = logging.getLogger(__name__)

RANKS_LOST_EXIT_CODE = 5


def runs_ranked(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun started this process beside others."""
    return int(environment.get("WORLD_SIZE", "1")) > 1


def check_alone(config: TrainerConfig) -> None:
    """Raise ConfigError for settings that one process cannot fulfil."""
    if config.shard_base:
        raise ConfigError(
            "shard_base needs several processes: start the trainer with "
            "torchrun --nproc-per-node N -m tinsmith_trainer"
        )


class RankedTrainer:
    """Rank 0's engines, and their hold on the other ranks."""

    def __init__(self, host: EngineHost, leader: Leader, ranks: Ranks) -> None:
        self.host = host
        self._leader = leader
        self._ranks = ranks

    @classmethod
    async def start(cls, config: TrainerConfig, stopped: asyncio.Task[None]) -> RankedTrainer:
        """Load; a stop that comes before ends the process, since nothing was served yet.

        Raises:
            ConfigError: See `load`.
            ModelNotFoundError: See `load`.
        """
        loading = asyncio.create_task(asyncio.to_thread(cls.load, config))
        either: set[asyncio.Task[Any]] = {loading, stopped}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            _exit_unstarted()
        return loading.result()

    @classmethod
    def load(cls, config: TrainerConfig) -> RankedTrainer:
        """Meet the other ranks and load the base models together with them.

        Raises:
            ConfigError: The ranks would compute different bits.
            ModelNotFoundError: A base model is neither a directory nor a model of the hub.
        """
        try:
            ranks = Ranks.start(config.device, timeout_s=config.rank_timeout_s)
            leader = Leader(ranks, on_lost=_exit_lost)
            host = load_engines(
                config, max_resident_runs=config.max_resident_runs, load=_loader(config, ranks)
            )
        except RankFault as fault:
            _exit_fault(fault)
        for name, engine in host.engines.items():
            if isinstance(engine, ShardedEngine):
                engine.lead(leader, name)
        leader.start()
        return cls(host, leader, ranks)

    def close(self) -> None:
        """Let the other ranks end, after the engines' thread did."""
        self._leader.stop()
        self._ranks.close()


async def serve_follower(config: TrainerConfig) -> None:
    """Be a rank other than 0 until rank 0 stops."""
    loop = asyncio.get_running_loop()
    is_following = threading.Event()

    def on_signal() -> None:
        if not is_following.is_set():
            _exit_unstarted()
        logger.info("waiting for rank 0 to stop")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await asyncio.to_thread(_follow, config, is_following)


def _follow(config: TrainerConfig, is_following: threading.Event) -> None:
    keep_freed_memory()
    try:
        ranks = Ranks.start(config.device, timeout_s=config.rank_timeout_s)
        load = _loader(config, ranks)
        engines = {
            name: load(
                source,
                dtype=config.dtype,
                device=config.device,
                max_resident_runs=config.max_resident_runs,
                num_threads=config.num_threads or None,
                exact=config.exact,
                compiled=config.compiled,
            )
            for name, source in config.models().items()
        }
        is_following.set()
        logger.info("following", extra={"rank": ranks.rank})
        follow(ranks, engines)
    except RankFault as fault:
        _exit_fault(fault)
    except RanksLostError as error:
        _exit_lost(error)
    ranks.close()


def _loader(config: TrainerConfig, ranks: Ranks) -> Any:
    def load(source: Any, *, device: str, **settings: Any) -> ShardedEngine:
        # The device is the rank's own.
        del device
        return load_sharded_engine(ranks, source, shard_base=config.shard_base, **settings)

    return load


def _exit_fault(fault: RankFault) -> NoReturn:
    _exit_lost(RanksLostError(f"the ranks of this trainer could not start: {fault}"))


def _exit_unstarted() -> NoReturn:
    """End before anything was served; the thread that waits for other ranks cannot be ended."""
    logger.info("stopped while starting")
    os._exit(0)


def _exit_lost(error: RanksLostError) -> NoReturn:
    """End at once: what was not committed is done again after the restart, from the ledger."""
    logger.critical("ranks lost", extra={"problem": error.message})
    write_termination_reason(error.message)
    os._exit(RANKS_LOST_EXIT_CODE)
