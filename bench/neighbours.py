"""What projects of one server do beside each other: acts of several kinds, in loops and floods.

`python -m bench.neighbours KIND ADDRESS KEYS LOOPS SECONDS` is a flood: a process of its own that
keeps so many loops going, shared out among keys that are parted by commas.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc.aio
import httpx
import numpy as np
from google.protobuf import duration_pb2

import tinsmith
from bench.paired_runs import VOCAB
from tinsmith.errors import ResourceExhaustedError
from tinsmith.rpc.error_codec import decode_rpc_error
from tinsmith.v1 import trainer_pb2, trainer_pb2_grpc

LARGE_TOKENS, LARGE_DATUMS = 257, 150
NUM_FLOOD_LOOPS = 100
FORMS_MODEL = "tiny"
NUM_RUNS = 16
"""Runs of a project that wants more than one thing at once."""
_NUM_TOKENS, _MAX_TOKENS = 32, 16
_POLL_S, _PAUSE_S = 2.0, 0.5
_ADAM = tinsmith.AdamParams(learning_rate=1e-4)

Act = Callable[[int], Awaitable[None]]
"""Does one thing for the loop of a number; raises `ResourceExhaustedError` if it was refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """A project in a benchmark, and how it acts.

    Attributes:
        client: Of its project.
        key: The client's, for what is sent without it.
        is_loud: Whether it takes large steps where the kind has them.
        num_runs: Runs that its loops share; a trainer works by run.
    """

    client: tinsmith.Client
    key: str
    is_loud: bool = False
    num_runs: int = 1

    def tokens(self, count: int = _NUM_TOKENS) -> list[int]:
        """Return a prompt."""
        return [int(token) for token in np.random.default_rng().integers(0, VOCAB, count)]

    async def runs(self, count: int = 1) -> list[tinsmith.TrainingRun]:
        """Make so many runs."""
        return [
            await self.client.create_lora_training_run_async("bench", rank=8, seed=1)
            for _ in range(count)
        ]


async def training(neighbour: Neighbour) -> Act:
    """Return what takes a small step on a run; loops share the runs."""
    return await _steps(neighbour, _NUM_TOKENS, 1)


async def large_steps(neighbour: Neighbour) -> Act:
    """Return the same, with large steps for the loud one."""
    if neighbour.is_loud:
        return await _steps(neighbour, LARGE_TOKENS, LARGE_DATUMS)
    return await training(neighbour)


async def _steps(neighbour: Neighbour, num_tokens: int, num_datums: int) -> Act:
    runs = await neighbour.runs(neighbour.num_runs)
    data = [
        tinsmith.Datum(
            tinsmith.ModelInput.from_ints(row[:-1]),
            {"target_tokens": np.array(row[1:]), "weights": np.ones(len(row) - 1, np.float32)},
        )
        for row in (neighbour.tokens(num_tokens) for _ in range(num_datums))
    ]

    async def train(loop: int) -> None:
        run = runs[loop % len(runs)]
        gradient = await run.forward_backward_async(data, "cross_entropy")
        step = await run.optim_step_async(_ADAM)
        await gradient
        await step

    return train


async def sampling(neighbour: Neighbour) -> Act:
    """Return what samples a few tokens."""
    sampler = await neighbour.client.create_sampler_async(base_model="bench")
    params = tinsmith.SamplingParams(max_tokens=_MAX_TOKENS, stop=[])

    async def sample(_: int) -> None:
        await sampler.sample_async(neighbour.tokens(), 1, params)

    return sample


async def completions(neighbour: Neighbour) -> Act:
    """Return what asks for a completion by OpenAI's protocol."""
    http = httpx.AsyncClient(
        base_url=f"http://{neighbour.client.address}/v1",
        headers={"authorization": f"Bearer {neighbour.key}"},
        timeout=300,
    )

    async def complete(_: int) -> None:
        body = {"model": "bench", "prompt": neighbour.tokens(), "max_tokens": _MAX_TOKENS}
        while (await http.post("/completions", json=body)).status_code == 429:
            await asyncio.sleep(_PAUSE_S)

    return complete


async def episodes(neighbour: Neighbour) -> Act:
    """Return what makes an episode, begins one and ends it, as an agent of each loop."""
    client = neighbour.client
    agents = [client.episodes.agent(client_id=f"agent-{n}") for n in range(NUM_FLOOD_LOOPS)]

    async def play(loop: int) -> None:
        agent = agents[loop % len(agents)]
        await client.episodes.create_async([tinsmith.EpisodeSpec({"q": "1"})])
        episode, _ = await agent.begin_episode_async()
        await agent.end_episode_async(episode, tinsmith.WorkflowOutput(1.0))

    return play


async def control(neighbour: Neighbour) -> Act:
    """Return what lists the runs."""

    async def ask(_: int) -> None:
        await neighbour.client.runs.list_async()

    return ask


async def polls(neighbour: Neighbour) -> Act:
    """Return what holds a long poll, in which nothing happens."""
    (run,) = await neighbour.runs()
    stub = trainer_pb2_grpc.TrainerServiceStub(grpc.aio.insecure_channel(neighbour.client.address))
    metadata = [("authorization", f"Bearer {neighbour.key}")]
    request = trainer_pb2.WaitOperationsRequest(
        run=run.name, after_revision=10**6, timeout=duration_pb2.Duration(seconds=int(_POLL_S))
    )

    async def poll(_: int) -> None:
        try:
            await stub.WaitOperations(request, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise decode_rpc_error(error) from None

    return poll


async def forms(neighbour: Neighbour) -> Act:
    """Return what samples in a form that was never used."""
    sampler = await neighbour.client.create_sampler_async(base_model=FORMS_MODEL)

    async def sample(_: int) -> None:
        params = tinsmith.SamplingParams(max_tokens=2, stop=[], regex=f"{uuid.uuid4().hex}[a-z]*")
        await sampler.sample_async([1, 2, 3], 1, params)

    return sample


async def uploads(neighbour: Neighbour) -> Act:
    """Return what uploads an adapter, and deletes the checkpoint that it has become."""
    (run,) = await neighbour.runs()
    holder = tempfile.TemporaryDirectory(prefix="tinsmith-bench-")
    saved = await run.save_state(f"s{uuid.uuid4().hex}")
    export = await neighbour.client.checkpoints.export_async(saved.name, "peft")
    await neighbour.client.checkpoints.download_async(export, holder.name)
    await neighbour.client.checkpoints.delete_async(saved.name)

    async def upload(_: int) -> None:
        checkpoint = await neighbour.client.checkpoints.import_adapter_async(
            holder.name, run, f"u{uuid.uuid4().hex}"
        )
        await neighbour.client.checkpoints.delete_async(checkpoint)

    return upload


async def stored(neighbour: Neighbour) -> Act:
    """Return what saves a checkpoint that is kept."""
    (run,) = await neighbour.runs()

    async def save(_: int) -> None:
        await run.save_state(f"s{uuid.uuid4().hex}")

    return save


KINDS = {
    "training": training,
    "sampling": sampling,
    "openai": completions,
    "episodes": episodes,
    "control": control,
    "large": large_steps,
    "polls": polls,
    "forms": forms,
    "uploads": uploads,
    "stored": stored,
}
"""What makes the act of each kind."""


async def loops(acts: Sequence[Act], num_loops: int, duration_s: float) -> int:
    """Keep so many loops going for a time, shared out among acts; return how often one was done."""
    end_s = time.monotonic() + duration_s
    done = 0

    async def loop(index: int) -> None:
        nonlocal done
        while time.monotonic() < end_s:
            try:
                await acts[index % len(acts)](index // len(acts))
            except ResourceExhaustedError:
                await asyncio.sleep(_PAUSE_S)
            else:
                done += time.monotonic() < end_s

    await asyncio.gather(*(loop(index) for index in range(num_loops)))
    return done


class Flood:
    """A process that keeps loops of a kind going, until it is told to stop.

    Args:
        address: Of the server.
        keys: Of one project; the loops share them.
        kind: One of `KINDS`.
        num_loops: How many.
        duration_s: How long.

    Raises:
        RuntimeError: If it does not begin.
    """

    def __init__(
        self,
        address: str,
        keys: Sequence[str],
        kind: str,
        *,
        num_loops: int = NUM_FLOOD_LOOPS,
        duration_s: float = 3600,
    ) -> None:
        arguments = [kind, address, ",".join(keys), str(num_loops), str(duration_s)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.neighbours", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._read() != "ready":
            raise RuntimeError("the flood did not begin")

    def begin(self) -> None:
        """Let it go."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def result(self) -> int:
        """Return how much it did, once its time is over."""
        return int(self._read())

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


async def _flood(
    kind: str, address: str, keys: Sequence[str], num_loops: int, duration_s: float
) -> None:
    retry = tinsmith.RetryPolicy(budget_s=3600)
    with contextlib.ExitStack() as stack:
        acts = []
        for key in keys:
            client = stack.enter_context(
                tinsmith.Client(address, key, retry=retry, operation_timeout_s=3600)
            )
            num_runs = NUM_RUNS // len(keys)
            neighbour = Neighbour(client=client, key=key, is_loud=True, num_runs=num_runs)
            acts.append(await KINDS[kind](neighbour))
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print(await loops(acts, num_loops, duration_s), flush=True)


if __name__ == "__main__":
    _kind, _address, _keys, _num_loops, _duration_s = sys.argv[1:]
    asyncio.run(_flood(_kind, _address, _keys.split(","), int(_num_loops), float(_duration_s)))
