"""Servers in the states that the page has to show: empty, busy with failures, with 1,000 runs.

Runs, jobs, episodes, matches and checkpoints are real. Curves of reinforcement learning are drawn
by a formula and recorded as a client records them, because a picture needs curves of some length.
The rows of the 1,000 runs and of the 100,000 episodes are copies of real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import openai

import tinsmith
from tests.integration.servers import BASE_MODEL, Deployment, EmbeddedThread
from tinsmith.matches import MatchSpec, Member
from tinsmith.v1 import run_metrics_pb2, run_metrics_pb2_grpc

NUM_RUNS = 1000
LONG_RUN_STEPS = 100_000
NUM_TRAJECTORIES = 100_000
_STEPS_AT_ONCE = 1_000
_TIMEOUT_S = 60.0
_DATUM = tinsmith.Datum(
    tinsmith.ModelInput.from_ints([5, 6, 7]),
    {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},
)
_QUESTIONS = ("Repeat: tin", "2+3=", "Pig Latin: hello")


def curve_point(step: int, pace: float, noise: random.Random) -> dict[str, float]:
    """Return metrics of a step of a training that learns at some pace."""
    done = 1 - math.exp(-step * pace / 120)
    return {
        "reward": 0.12 + 0.78 * done + noise.gauss(0, 0.035),
        "loss": -0.02 * (1 - done) + noise.gauss(0, 0.006),
        "kl": 0.002 + 0.02 * done + abs(noise.gauss(0, 0.003)),
        "entropy": 1.9 * math.exp(-step * pace / 300) + 0.35 + noise.gauss(0, 0.02),
        "response_tokens": 90 + 130 * done + noise.gauss(0, 6),
        "grad_norm": 0.4 + 0.9 * math.exp(-step / 60) + abs(noise.gauss(0, 0.08)),
        "rating/learner": 900 * done - 300 + noise.gauss(0, 15),
        "rating/script": 150 - 300 * done,
    }


def step(run: tinsmith.TrainingRun) -> None:
    """Make one optimizer step."""
    run.forward_backward([_DATUM])
    run.optim_step(tinsmith.AdamParams(learning_rate=1e-3)).result()


class GrowingRun:
    """A run that gets a step now and then, until it is stopped."""

    def __init__(self, run: tinsmith.TrainingRun, first_step: int, noise: random.Random) -> None:
        self._run, self._step, self._noise = run, first_step, noise
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._go_on)
        self._thread.start()

    def stop(self) -> None:
        """End, and wait for it."""
        self._end.set()
        self._thread.join()

    def _go_on(self) -> None:
        while not self._end.wait(0.5):
            step(self._run)
            self._run.log_metrics(curve_point(self._step, 1.2, self._noise), step=self._step)
            self._step += 1


def play_episode(client: tinsmith.Client, question: str, *, reward: float | None) -> None:
    """Play one episode as an agent with the `openai` package does; None gives it up."""
    agent = client.episodes.agent(queue="page")
    with contextlib.suppress(RuntimeError), agent.episode() as episode:
        model = openai.OpenAI(
            base_url=episode.openai.base_url, api_key=episode.openai.api_key, max_retries=0
        )
        with model:
            for _ in range(2):
                model.chat.completions.create(
                    model=episode.openai.model,
                    messages=[{"role": "user", "content": question}],
                    max_tokens=48,
                )
        if reward is None:
            raise RuntimeError("the checker was not there")
        episode.end(tinsmith.WorkflowOutput(reward=reward))


def fill(client: tinsmith.Client) -> tinsmith.TrainingRun:
    """Make runs with curves, checkpoints with lineage, episodes, a match and jobs."""
    noise = random.Random(0)
    runs = []
    for name, pace in (("grpo lr 1e-5", 0.5), ("grpo lr 3e-5", 0.9), ("grpo lr 1e-4", 1.6)):
        run = client.create_lora_training_run(BASE_MODEL, rank=8, display_name=name)
        for number in range(260):
            run.log_metrics(curve_point(number, pace, noise), step=number)
        for _ in range(3):
            step(run)
        runs.append(run)
    saved = runs[0].save_state("step-260").result()
    child = client.create_training_run_from_checkpoint(saved, display_name="grpo, gone on")
    step(child)
    child.save_weights_for_sampler("final").result()
    for number in range(120):
        child.log_metrics(curve_point(number + 150, 1.2, noise), step=number)
    child.sampler().sample(
        tinsmith.ModelInput.from_ints([5, 6]),
        num_samples=1,
        sampling_params=tinsmith.SamplingParams(max_tokens=4),
    ).result()
    sampler = client.create_sampler(base_model=BASE_MODEL)
    client.episodes.create(
        [tinsmith.EpisodeSpec({"q": question}, task_id=question) for question in _QUESTIONS]
        + [tinsmith.EpisodeSpec({"q": "1"}, task_id="waits")],
        queue="page",
        sampler=sampler,
    )
    for question, reward in zip(_QUESTIONS, (1.0, 0.0, None), strict=True):
        play_episode(client, question, reward=reward)
    play_games(client)
    method = {"type": "supervised", "maxSteps": 400, "parameters": {"data": "pig_latin"}}
    for name, model in (("pig-latin", BASE_MODEL), ("waits", "not-served")):
        client.jobs.create(name, {"method": method, "model": {"name": model}})
    return child


def play_games(client: tinsmith.Client) -> None:
    """Play three games of a match, and open another one that waits for its agents."""
    spec = MatchSpec(agents=("learner", "script"), models={"script": "gomoku/careful"}, num_games=4)
    match = client.matches.create(spec)

    async def play(learner: Member, script: Member) -> None:
        await asyncio.gather(
            learner.arrive_async("rollout_start", 0), script.arrive_async("rollout_start", 0)
        )
        for game, reward in enumerate((1.0, -1.0, 1.0)):
            rewards = {"learner": reward, "script": -reward}
            await learner.take_turn_async(0, game, 0, "a1")
            await script.take_turn_async(0, game, 1, "b2", rewards=rewards)

    with (
        client.matches.join(match.name, "learner") as learner,
        client.matches.join(match.name, "script") as script,
    ):
        asyncio.run(play(learner, script))
    client.matches.create(MatchSpec(agents=("learner", "rival"), num_games=2))


@contextlib.contextmanager
def server(folder: Path, model_dir: Path, **overrides: dict[str, object]) -> Iterator[Deployment]:
    """Run a server with jobs."""
    embedded = EmbeddedThread(folder, model_dir, overrides)
    try:
        yield embedded.start()
    finally:
        embedded.stop()


def plant_runs(data_dir: Path) -> None:
    """Copy the newest run of a stopped server, as parked, active and failed ones."""
    with contextlib.closing(sqlite3.connect(data_dir / "scheduler.sqlite")) as database:
        database.row_factory = sqlite3.Row
        row = dict(database.execute("SELECT * FROM runs ORDER BY serial DESC LIMIT 1").fetchone())
        serial = row.pop("serial")
        columns = ", ".join(row)
        marks = ", ".join("?" for _ in row)
        for number in range(1, NUM_RUNS):
            name = f"{row['name'].rpartition('/')[0]}/sweep-{number:04d}"
            state = "failed" if number % 50 == 0 else "active"
            values = {**row, "name": name, "display_name": f"sweep {number}", "state": state}
            database.execute(
                f"INSERT INTO runs (serial, {columns}) VALUES (?, {marks})",
                (serial + number, *values.values()),
            )
        database.commit()


def plant_episodes(data_dir: Path) -> None:
    """Copy the newest submitted episode of a stopped server, with its calls, many times."""
    with contextlib.closing(sqlite3.connect(data_dir / "coordinator.sqlite")) as database:
        serial, name = database.execute(
            "SELECT serial, episode_id FROM episodes WHERE state = 'submitted' ORDER BY serial DESC"
        ).fetchone()
        (last,) = database.execute("SELECT max(serial) FROM episodes").fetchone()
        numbers = [(last + number, f"{name}-{number:06d}") for number in range(NUM_TRAJECTORIES)]
        database.execute("CREATE TEMP TABLE copies (new_serial INTEGER, new_id TEXT)")
        database.executemany("INSERT INTO copies VALUES (? + 1, ?)", numbers)
        replaced = {"serial": "new_serial", "episode_id": "new_id"}
        for table in ("episodes", "model_calls"):
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            values = ", ".join(replaced.get(column, f'"{column}"') for column in columns)
            database.execute(
                f"INSERT INTO {table} SELECT {values} FROM {table}, copies WHERE serial = ?",
                (serial,),
            )
        database.commit()


def record_long_run(deployment: Deployment, run: str) -> None:
    """Record curves of 100,000 steps, as a client does."""
    noise = random.Random(2)
    metadata = (("authorization", f"Bearer {deployment.api_key}"),)
    with grpc.insecure_channel(deployment.address) as channel:
        stub = run_metrics_pb2_grpc.RunMetricsServiceStub(channel)
        for first in range(0, LONG_RUN_STEPS, _STEPS_AT_ONCE):
            request = run_metrics_pb2.RecordRunMetricsRequest(run=run)
            for number in range(first, first + _STEPS_AT_ONCE):
                request.records.add(step=number, metrics=curve_point(number, 0.01, noise))
            stub.RecordRunMetrics(request, timeout=_TIMEOUT_S, metadata=metadata)


def write_trajectories(path: Path, num_lines: int, num_tokens: int) -> None:
    """Write a file of trajectories as recipes leave them."""
    noise = random.Random(0)
    words = [" the", " tin", " is", " bent", ",", " and", " 12", " =", "\n", " so"]
    texts = [noise.choice(words) for _ in range(num_tokens)]
    half = num_tokens // 3
    row = {
        "task": "arithmetic/17",
        "tokens": [noise.randrange(280) for _ in range(num_tokens)],
        "texts": texts,
        "mask": [0.0] * half + [1.0] * (num_tokens - half),
        "logprobs": [0.0] * half
        + [-round(noise.expovariate(0.7), 3) for _ in range(num_tokens - half)],
        "advantages": [0.0] * half + [round(noise.gauss(0, 1), 3)] * (num_tokens - half),
        "versions": [0] * half
        + [3 + (index > num_tokens // 4) for index in range(num_tokens - half)],
        "stop_reason": "done",
    }
    rest = json.dumps(row).removeprefix("{")
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_lines):
            file.write(f'{{"index": {number}, "reward": {number % 2}, {rest}\n')
