"""Fixtures and settings of all tests."""

import gc
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.fakes.postgres import postgres as postgres
from tests.fakes.postgres import postgres_url as postgres_url
from tests.tiers import QUARANTINE, read_tiers

# No test is timed, and the same commit has the same result everywhere: a machine may be busy.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

# A shell lets what runs in the background ignore Ctrl-C, which programs of tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

UNUSED_LINES = pytest.StashKey[list[str]]()
"""Lines of the tables of tiers that decide about no test that was collected."""

_MEMORY = Path("/dev/shm")
_MIN_MEMORY_BYTES = 4 * 2**30
_own_basetemp = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--order-seed", type=int, help="run files, and tests in them, in another order"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Keep files of tests in memory where there is room: a slow disk fails no test.

    `--basetemp` says otherwise; what it names is kept.
    """
    if hasattr(config, "workerinput") or config.option.basetemp is not None:
        return
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _MIN_MEMORY_BYTES:
        folder = Path(tempfile.mkdtemp(prefix="tinsmith-tests-", dir=_MEMORY))
        config.stash[_own_basetemp] = folder
        config.option.basetemp = str(folder)


def pytest_unconfigure(config: pytest.Config) -> None:
    folder = config.stash.get(_own_basetemp, None)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test its tier; leave out what is in quarantine unless it was asked for."""
    tiers = read_tiers()
    for item in items:
        tier = tiers.tier_of(item.nodeid)
        if tier is not None:
            item.add_marker(tier)
    config.stash[UNUSED_LINES] = tiers.unused_lines(item.nodeid for item in items)
    seed = config.option.order_seed
    if seed is not None:
        _shuffle(items, random.Random(seed))
    if not config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker(QUARANTINE)]
        items[:] = [item for item in items if not item.get_closest_marker(QUARANTINE)]
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of every later look of the collector."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_import_paths() -> Iterator[None]:
    """Take back the folders in which a test made Python look for modules."""
    before = list(sys.path)
    yield
    sys.path[:] = before


def _shuffle(items: list[pytest.Item], numbers: random.Random) -> None:
    """Change the order of files, and of tests within each file."""
    places = {file: numbers.random() for file in sorted({item.path for item in items})}
    order = {item.nodeid: numbers.random() for item in items}
    items.sort(key=lambda item: (places[item.path], order[item.nodeid]))
