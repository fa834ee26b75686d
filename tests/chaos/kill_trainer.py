"""`make chaos`: kill the server again and again while it trains; nothing acknowledged may be lost.

Two servers train the same supervised run from the same seed. One is left alone. The other is killed
with SIGKILL at random moments, always while operations are acknowledged and unfinished, and started
again; its client only retries. At the end every operation must have been applied exactly once;
every result and the final weights and moments must have the same bits.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import json
import platform
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import tinsmith
from tests.chaos.server_process import WatchedServer
from tinsmith.recipes import pig_latin
from tinsmith.recipes.conversations import conversation_to_datum, scale_weights
from tinsmith_local.tiny_model import build_tiny_model

_BATCH = 8
_STEPS_PER_KILL = 6
_IN_FLIGHT = 12
_RESULTS = Path("bench/results/chaos.json")


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


def main() -> int:
    """Run both trainings and compare; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tinsmith-chaos-"))
    model = build_tiny_model(folder / "model")
    num_steps = max(arguments.kills * _STEPS_PER_KILL, 20)
    calm_server = WatchedServer(folder / "calm", model)
    calm_server.start()
    try:
        calm = _train(calm_server, num_steps)
    finally:
        calm_server.stop()
    # Commits take a little longer, so that some kills fall into them.
    server = WatchedServer(folder / "killed", model, failpoints="trainer.commit=sleep:0.01")
    server.start()
    killer = Killer(server, num_kills=arguments.kills, seed=arguments.seed)
    killer.start()
    try:
        killed = _train(server, num_steps)
    finally:
        killer.finish()
        server.stop()
    rows = _compare(calm, killed, num_steps, server.data_dir)
    rows.append(_row("kills", len(killer.kills), arguments.kills))
    _report(rows, killer.kills)
    is_good = all(row["value"] == row["target"] for row in rows)
    if is_good:
        shutil.rmtree(folder)
    else:
        print(f"kept for inspection: {folder}")
    return 0 if is_good else 1


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
                tinsmith.OperationFuture[tinsmith.ForwardResult],
                tinsmith.OperationFuture[tinsmith.OptimStepResult],
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
    gradient: tinsmith.OperationFuture[tinsmith.ForwardResult],
    update: tinsmith.OperationFuture[tinsmith.OptimStepResult],
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
    rows = _query(data_dir, "SELECT num_attempts FROM operations WHERE state = 'pending'")
    return [int(attempts) for (attempts,) in rows]


def _num_finished(data_dir: Path) -> int:
    return _count(data_dir, "SELECT COUNT(*) FROM operations WHERE state != 'pending'")


def _count(data_dir: Path, query: str) -> int:
    return int(_query(data_dir, query)[0][0])


def _query(data_dir: Path, query: str) -> list[tuple[int, ...]]:
    """Read the ledger as it is on disk, beside the server."""
    uri = f"file:{data_dir / 'trainer.db'}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=10)) as connection:
        return connection.execute(query).fetchall()


def _compare(
    calm: Training, killed: Training, num_steps: int, data_dir: Path
) -> list[dict[str, object]]:
    num_unfinished = _count(data_dir, "SELECT COUNT(*) FROM operations WHERE state != 'succeeded'")
    num_diverged = _count(data_dir, "SELECT COUNT(*) FROM runs WHERE replay_diverged")
    num_different = sum(a != b for a, b in zip(calm.results, killed.results, strict=True))
    different_files = sum(
        killed.checkpoint_sha256.get(name) != sha256
        for name, sha256 in calm.checkpoint_sha256.items()
    )

    return [
        _row("acknowledged operations lost", num_unfinished, 0),
        _row("optimizer steps applied", killed.version, num_steps),
        _row("results that differ from the calm run", num_different, 0),
        _row("weight and moment files that differ", different_files, 0),
        _row("runs marked as diverged", num_diverged, 0),
    ]


def _row(name: str, value: object, target: object) -> dict[str, object]:
    return {"name": name, "value": value, "target": target, "unit": "count", "better": "equal"}


def _report(rows: list[dict[str, object]], kills: list[Kill]) -> None:
    phases = collections.Counter(kill.phase.removeprefix("trainer.") for kill in kills)
    print(f"{len(kills)} kills; interrupted while: {dict(phases)}")
    print(
        f"acknowledged and unfinished at the kills: {sum(k.num_queued for k in kills)} queued, "
        f"{sum(k.num_running for k in kills)} running or committing"
    )
    for row in rows:
        print(f"  {row['name']:<42} {row['value']!s:>6}  (target {row['target']})")
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    content = {
        "machine": {"platform": platform.platform(), "python": platform.python_version()},
        "commit": revision.stdout.strip(),
        "kills": len(kills),
        "phases": dict(phases),
        "rows": rows,
    }
    _RESULTS.parent.mkdir(parents=True, exist_ok=True)
    _RESULTS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
