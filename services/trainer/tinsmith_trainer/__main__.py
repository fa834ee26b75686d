"""`python -m tinsmith_trainer [--config FILE]`: one trainer as its own process.

Or as several, by `torchrun --nproc-per-node N -m tinsmith_trainer [--config FILE]`; see `torchrun`.
"""

from __future__ import annotations

import asyncio
import os
import sys

from tinsmith_engine.base.hardware import placed
from tinsmith_engine.distributed.process_group import end_process
from tinsmith_engine.host import load_engines
from tinsmith_runtime.ledger.records import FencedError
from tinsmith_runtime.pod.main import end_at_once, run_pod
from tinsmith_runtime.rpc.server import wait_for_signal
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.pod import TrainerPod
from tinsmith_trainer.torchrun import RankedTrainer, check_alone, runs_ranked, serve_follower

_FAILED_EXIT_CODE = 4


async def _serve(config: TrainerConfig) -> None:
    config = placed(config)
    if not runs_ranked(os.environ):
        check_alone(config)
        await _serve_clients(config, is_ranked=False)
    elif os.environ["RANK"] == "0":
        await _serve_clients(config, is_ranked=True)
    else:
        await serve_follower(config)


async def _serve_clients(config: TrainerConfig, *, is_ranked: bool) -> None:
    stopped = asyncio.create_task(wait_for_signal())
    ranked = await RankedTrainer.start(config, stopped) if is_ranked else None
    if ranked is not None:
        host = ranked.host
    else:
        host = await asyncio.to_thread(
            load_engines, config, max_resident_runs=config.max_resident_runs
        )
    pod = TrainerPod(config, host, on_fenced=_exit_fenced, on_failed=_exit_failed)
    await pod.start()
    await stopped
    await pod.stop()
    await asyncio.to_thread(host.thread.close, config.drain_timeout_s)
    if ranked is not None:
        await asyncio.to_thread(ranked.close)


def _exit_fenced(error: FencedError) -> None:
    """End at once: another process holds a run, and nothing of this one may count any more."""
    end_at_once(error.message)


def _exit_failed(error: Exception) -> None:
    """End at once, to be started again: the ledger has everything that was acknowledged."""
    end_at_once(f"the trainer cannot go on: {error!r}", exit_code=_FAILED_EXIT_CODE)


if __name__ == "__main__":
    exit_code = run_pod("trainer", TrainerConfig, _serve)
    if runs_ranked(os.environ):
        end_process(exit_code)
    sys.exit(exit_code)
