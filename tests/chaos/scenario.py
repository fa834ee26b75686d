"""What every scenario is given, and the deployment that most of them disturb."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.cluster import Cluster
from tests.fakes.postgres import PostgresServer, new_server

# Shared memory that a killed server leaves in its data folder goes with the folder.
POSTGRES_SETTINGS: Mapping[str, str] = {"dynamic_shared_memory_type": "mmap"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How a scenario is to run.

    Attributes:
        folder: Its own; kept for inspection if a target is missed.
        model_dir: The base model.
        is_long: Whether to take minutes to hours instead of seconds.
        num_kills: Kills of the scenarios that kill at random moments.
        seed: Of every random choice.
        begin_s: When the scenario began, monotonic.
    """

    folder: Path
    model_dir: Path
    is_long: bool
    num_kills: int
    seed: int
    begin_s: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Show progress."""
        print(f"  [{time.monotonic() - self.begin_s:6.1f} s] {text}", flush=True)


@dataclass(frozen=True, slots=True)
class Deployed:
    """A deployment on a PostgreSQL server of its own."""

    cluster: Cluster
    postgres: PostgresServer
    database: str


@contextlib.contextmanager
def deployment(
    setting: Setting,
    *,
    num_trainers: int = 2,
    num_samplers: int = 1,
    settings: Mapping[str, Mapping[str, object]] | None = None,
) -> Iterator[Deployed]:
    """Run a database server and pods of its own."""
    postgres = new_server(POSTGRES_SETTINGS)
    try:
        url = postgres.create_database("tinsmith")
        with Cluster(
            setting.folder / "pods",
            setting.model_dir,
            database_url=url,
            num_trainers=num_trainers,
            num_samplers=num_samplers,
            settings=settings,
        ) as cluster:
            setting.say("the pods serve")
            yield Deployed(cluster, postgres, "tinsmith")
    finally:
        postgres.remove()
