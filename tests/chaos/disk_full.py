"""The disk of the embedded server fills up while it trains, and is freed again.

What was acknowledged waits; what is submitted meanwhile is refused with an error that says so.
The disk is a small file system in memory where that may be mounted, else a limit on the size of the
server's files.
"""

from __future__ import annotations

import contextlib
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import tinsmith
from tests.chaos import sqlite_view
from tests.chaos.cluster import BASE_MODEL
from tests.chaos.report import Findings, Row
from tests.chaos.scenario import Setting
from tests.chaos.server_process import WatchedServer
from tests.chaos.tenants import Training, compare, supervised, supervised_datum

_DISK_BYTES = 24 * 2**20
_REASON = "STORAGE_FULL"
_RETRY_S = 180.0
_STILL_S = 2.0
_WAIT_S = 60.0
_POLL_S = 0.1
_PROBE_NUM_ROWS = 64
_PROBE_NUM_TOKENS = 100


class Disk(Protocol):
    """Where a server keeps its data."""

    def fill(self, server: WatchedServer) -> None:
        """Leave no room."""

    def free(self, server: WatchedServer) -> None:
        """Give the room back."""


class SmallDisk:
    """A file system of its own in memory."""

    def __init__(self, folder: Path) -> None:
        self._ballast = folder / "ballast"

    def fill(self, server: WatchedServer) -> None:
        """Write until nothing fits any more."""
        with self._ballast.open("ab", buffering=0) as file:
            for size in (2**20, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def free(self, server: WatchedServer) -> None:
        """Remove what was written."""
        self._ballast.unlink()


class SizeLimit:
    """No file of the server may grow beyond what its ledger has now."""

    def fill(self, server: WatchedServer) -> None:
        """Set the limit."""
        size = (server.data_dir / "trainer.db-wal").stat().st_size
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def free(self, server: WatchedServer) -> None:
        """Lift it."""
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, unlimited)


def run(setting: Setting) -> Findings:
    """Fill the disk, once or several times, and compare with a calm run."""
    num_times = 5 if setting.is_long else 1
    folder = setting.folder / "filled"
    with _disk(folder / "data") as disk:
        server = WatchedServer(folder, setting.model_dir)
        server.start()
        try:
            training = BackgroundTraining(server)
            refusals = []
            for number in range(num_times):
                refusals.append(_fill_and_free(disk, server, training, kills=number % 2 == 1))
                setting.say(f"filled and freed {number + 1} times; refusal: {refusals[-1]}")
            disturbed = training.end()
            lost = sqlite_view.count(
                server.data_dir,
                f"operations WHERE state <> 'succeeded' AND run = '{disturbed.run}'",
            )
            num_diverged = sqlite_view.count(server.data_dir, "runs WHERE replay_diverged")
        finally:
            server.stop()
    setting.say("every result is there; now the calm run")
    calm_server = WatchedServer(setting.folder / "calm", setting.model_dir)
    calm_server.start()
    try:
        calm = BackgroundTraining(calm_server, num_rounds=disturbed.num_rounds).end()
    finally:
        calm_server.stop()
    rows = [
        Row(
            name=f"times that submitters were told {_REASON}",
            value=sum(refusal == _REASON for refusal in refusals),
            target=num_times,
        ),
        Row(name="acknowledged operations without a good result", value=lost, target=0),
        Row(name="runs marked as diverged", value=num_diverged, target=0),
        *compare({"": calm}, {"": disturbed}),
    ]
    return Findings(rows, {"disk": type(disk).__name__, "filled": num_times})


class BackgroundTraining:
    """A training of many steps in flight, whose client only retries.

    Args:
        server: Where.
        num_rounds: How long; until `end` by default.
    """

    def __init__(self, server: WatchedServer, *, num_rounds: int | None = None) -> None:
        self._server = server
        self._num_rounds = num_rounds
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._training = self._pool.submit(self._train)

    @property
    def is_broken(self) -> bool:
        """Whether the client was given an error, which `end` raises."""
        return self._training.done()

    def end(self) -> Training:
        """Have the training come to its end."""
        if self._num_rounds is None:
            self._is_over.set()
        return self._training.result()

    def _train(self) -> Training:
        with _client(self._server, retry_s=_RETRY_S) as client:
            return supervised(client, 41, self._goes_on)

    def _goes_on(self, number: int) -> bool:
        if self._num_rounds is not None:
            return number < self._num_rounds
        return not self._is_over.is_set()


def _fill_and_free(
    disk: Disk, server: WatchedServer, training: BackgroundTraining, *, kills: bool
) -> str:
    """Fill the disk until the training stands still; return what another submitter was told.

    Args:
        disk: Of the data.
        server: Whose data they are.
        training: Must go on in the end.
        kills: Whether the server is killed and started again on the full disk.
    """
    with _client(server, retry_s=0.0) as client:
        run = client.create_lora_training_run(BASE_MODEL, rank=4, seed=1)
        _wait_for(lambda num: num > 0, server, training)
        disk.fill(server)
        try:
            refusal = _refusal(run)
            _wait_still(server)
            if kills:
                server.kill()
                server.start()
        finally:
            disk.free(server)
    num_finished = _num_finished(server)
    _wait_for(lambda num: num > num_finished + 4, server, training)
    return refusal


def _refusal(run: tinsmith.TrainingRun) -> str:
    """Submit large requests until one is refused; return the reason."""
    data = [
        supervised_datum(2, 0, row, num_tokens=_PROBE_NUM_TOKENS) for row in range(_PROBE_NUM_ROWS)
    ]
    end_s = time.monotonic() + _WAIT_S
    while time.monotonic() < end_s:
        try:
            run.forward(data).result()
        except tinsmith.TinsmithError as error:
            cause = error.__cause__
            return cause.reason if isinstance(cause, tinsmith.TinsmithError) else error.reason
    return "nothing"


def _wait_still(server: WatchedServer) -> None:
    """Return once nothing is finished any more for a while, or after a while of both."""
    end_s = time.monotonic() + _WAIT_S
    num_finished, since_s = _num_finished(server), time.monotonic()
    while time.monotonic() - since_s < _STILL_S and time.monotonic() < end_s:
        time.sleep(_POLL_S)
        if (now_finished := _num_finished(server)) != num_finished:
            num_finished, since_s = now_finished, time.monotonic()


def _wait_for(
    condition: Callable[[int], bool], server: WatchedServer, training: BackgroundTraining
) -> None:
    end_s = time.monotonic() + _WAIT_S
    while not condition(_num_finished(server)) and not training.is_broken:
        if time.monotonic() > end_s:
            raise TimeoutError("the training does not go on")
        time.sleep(_POLL_S)


def _num_finished(server: WatchedServer) -> int:
    return sqlite_view.count(server.data_dir, "operations WHERE state = 'succeeded'")


def _client(server: WatchedServer, *, retry_s: float) -> tinsmith.Client:
    return tinsmith.Client(
        server.address,
        server.api_key,
        operation_timeout_s=_RETRY_S,
        retry=tinsmith.RetryPolicy(budget_s=retry_s),
    )


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[Disk]:
    """Give a folder a disk of its own, where that is allowed."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        yield SizeLimit()
        return
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
