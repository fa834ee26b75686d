"""The embedded server on SQLite is killed again and again while it trains.

Two servers train the same supervised run from the same seed. One is left alone. The other is killed
with SIGKILL at random moments, always while operations are acknowledged and unfinished, and started
again; its client only retries. At the end every operation must have been applied exactly once;
every result and the final weights and moments must have the same bits.
"""

from __future__ import annotations

import collections
import hashlib
import json
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import tinsmith
from tests.chaos import sqlite_view
from tests.chaos.report import Findings, Row
from tests.chaos.scenario import Setting
from tests.chaos.server_process import WatchedServer
from tinsmith.recipes.tasks import pig_latin
from tinsmith.recipes.tasks.conversations import conversation_to_datum, scale_weights

_BATCH = 8
_STEPS_PER_KILL = 6
_IN_FLIGHT = 12


@dataclass(slots=True)
class Kill:
    """One kill and what it interrupted."""

    phase: str
    num_queued: int
    num_running: int


@dataclass(slots=True)
class Training:
    """What a training left behind."""

    results: list[str] = field(default_factory=list)
    version: int = 0
    checkpoint_sha256: dict[str, str] = field(default_factory=dict)


def run(setting: Setting) -> Findings:
    """Run both trainings and compare."""
    # The cluster has its own kills.
    num_kills = max(setting.num_kills // 2, 1)
    num_steps = max(num_kills * _STEPS_PER_KILL, 20)
    calm_server = WatchedServer(setting.folder / "calm", setting.model_dir)
    calm_server.start()
    try:
        calm = _train(calm_server, num_steps)
    finally:
        calm_server.stop()
    # Commits take a little longer, so that some kills fall into them.
    server = WatchedServer(
        setting.folder / "killed", setting.model_dir, failpoints="trainer.commit=sleep:0.01"
    )
    server.start()
    killer = Killer(server, num_kills=num_kills, seed=setting.seed)
    killer.start()
    try:
        killed = _train(server, num_steps)
    finally:
        killer.finish()
        server.stop()
    rows = _compare(calm, killed, num_steps, server.data_dir)
    rows.append(Row(name="kills", value=len(killer.kills), target=num_kills))
    phases = collections.Counter(kill.phase for kill in killer.kills)
    details = {
        "killed, by the failpoint it passed last": dict(sorted(phases.items())),
        "operations queued at the kills": sum(kill.num_queued for kill in killer.kills),
        "operations running or committing at the kills": sum(k.num_running for k in killer.kills),
    }
    return Findings(rows, details)


class Killer(threading.Thread):
    """Kills the server at random moments at which acknowledged operations are unfinished."""

    def __init__(self, server: WatchedServer, *, num_kills: int, seed: int) -> None:
        super().__init__(name="killer", daemon=True)
        self.kills: list[Kill] = []
        self._failure: BaseException | None = None
        self._is_over = threading.Event()
        self._server = server
        self._num_kills = num_kills
        self._random = random.Random(seed)

    def run(self) -> None:
        """Kill and restart until enough kills are done."""
        try:
            while len(self.kills) < self._num_kills and not self._is_over.is_set():
                self._wait_for_progress()
                time.sleep(self._random.uniform(0.0, 0.3))
                # Every third kill waits for a commit; the others come at any moment.
                if len(self.kills) % 3 == 2:
                    self._wait_for_commit()
                if not _unfinished(self._server.data_dir):
                    continue
                self._server.kill()
                unfinished = _unfinished(self._server.data_dir)
                if unfinished:
                    num_running = sum(attempts > 0 for attempts in unfinished)
                    queued = len(unfinished) - num_running
                    self.kills.append(Kill(self._server.phase, queued, num_running))
                self._server.start()
        except BaseException as error:
            self._failure = error

    def finish(self) -> None:
        """End, leaving the server running; raise what went wrong while killing."""
        self._is_over.set()
        self.join()
        if self._failure is not None:
            raise self._failure

    def _wait_for_progress(self) -> None:
        """Let one operation finish: an operation that dies three times counts as poison."""
        deadline_s = time.monotonic() + 30.0
        finished = _num_finished(self._server.data_dir)
        while _num_finished(self._server.data_dir) == finished and time.monotonic() < deadline_s:
            if self._is_over.is_set():
                return
            time.sleep(0.01)

    def _wait_for_commit(self) -> None:
        deadline_s = time.monotonic() + 1.0
        while self._server.phase != "trainer.commit" and time.monotonic() < deadline_s:
            pass


def _train(server: WatchedServer, num_steps: int) -> Training:
    """Train through the SDK with many steps in flight; the client knows nothing of kills."""
    training = Training()
    retry = tinsmith.RetryPolicy(budget_s=300.0)
    with tinsmith.Client(server.address, server.api_key, retry=retry) as client:
        run = client.create_lora_training_run("tiny", rank=16, seed=7)
        tokenizer = run.get_tokenizer()
        phrases = pig_latin.split_phrases(pig_latin.load_phrases()).train_phrases
        data = [conversation_to_datum(tokenizer, pig_latin.build_messages(p)) for p in phrases]
        waiting: collections.deque[
            tuple[
                tinsmith.OperationFuture[tinsmith.ForwardBackwardOutput],
                tinsmith.OperationFuture[tinsmith.OptimStepResponse],
            ]
        ] = collections.deque()
        for step in range(num_steps):
            begin = step * _BATCH % (len(data) - _BATCH)
            batch = scale_weights(data[begin : begin + _BATCH])
            gradient = run.forward_backward(batch, "cross_entropy")
            update = run.optim_step(tinsmith.AdamParams(learning_rate=5e-3))
            waiting.append((gradient, update))
            if len(waiting) > _IN_FLIGHT:
                _collect(training, *waiting.popleft())
        while waiting:
            _collect(training, *waiting.popleft())
        saved = run.save_state("end").result()
        folder = Path(saved.manifest_uri.removeprefix("file://")).parent
        training.checkpoint_sha256 = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.glob("*.safetensors"))
        }
    return training


def _collect(
    training: Training,
    gradient: tinsmith.OperationFuture[tinsmith.ForwardBackwardOutput],
    update: tinsmith.OperationFuture[tinsmith.OptimStepResponse],
) -> None:
    result = gradient.result()
    digest = hashlib.sha256(json.dumps(result.metrics, sort_keys=True).encode())
    for output in result.outputs:
        digest.update(output.logprobs.tobytes())
    step = update.result()
    training.results += [digest.hexdigest(), json.dumps(step.metrics, sort_keys=True)]
    training.version = step.version


def _unfinished(data_dir: Path) -> list[int]:
    """Return the attempts of each acknowledged operation without a result."""
    rows = sqlite_view.rows(data_dir, "SELECT num_attempts FROM operations WHERE state = 'pending'")
    return [int(attempts) for (attempts,) in rows]


def _num_finished(data_dir: Path) -> int:
    return sqlite_view.count(data_dir, "operations WHERE state != 'pending'")


def _compare(calm: Training, killed: Training, num_steps: int, data_dir: Path) -> list[Row]:
    num_unfinished = sqlite_view.count(data_dir, "operations WHERE state != 'succeeded'")
    num_diverged = sqlite_view.count(data_dir, "runs WHERE replay_diverged")
    num_different = sum(a != b for a, b in zip(calm.results, killed.results, strict=True))
    different_files = sum(
        killed.checkpoint_sha256.get(name) != sha256
        for name, sha256 in calm.checkpoint_sha256.items()
    )

    return [
        Row(name="acknowledged operations lost", value=num_unfinished, target=0),
        Row(name="optimizer steps applied", value=killed.version, target=num_steps),
        Row(name="results that differ from the calm run", value=num_different, target=0),
        Row(name="weight and moment files that differ", value=different_files, target=0),
        Row(name="runs marked as diverged", value=num_diverged, target=0),
    ]
