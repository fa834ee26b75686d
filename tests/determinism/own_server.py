"""`make determinism`: servers of this repository, with one, two and three threads.

A server for each number of threads is held to its bits by each protocol, and behind pictures. All
plans and adapters are equal, so the answers of all servers have to be equal too. Prints a table,
and writes `bench/results/determinism.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import warnings
from pathlib import Path

import openai
from bench.report import Row, machine, show, write

import tinsmith
from tests.determinism.__main__ import connected, describe, parser
from tests.determinism.native_target import NativeTarget
from tests.determinism.openai_target import OpenAITarget
from tests.determinism.passes import Report, hold
from tests.determinism.plan import Size, make_plan
from tinsmith_local.made_models import TINY, make_model
from tinsmith_local.process import ServerProcess

VISION = "tiny-vl"
_CONCURRENCY = 64
_TIMEOUT_S = 600.0


def sizes_of(num_samples: int, num_adapters: int) -> dict[tuple[str, str], Size]:
    """Return how much each protocol and model is asked for: most natively, a part by others."""
    whole = Size(num_samples=num_samples, num_adapters=num_adapters, num_publishes=num_adapters)
    few = max(1, num_adapters // 4)
    part = Size(num_samples=max(1, num_samples // 10), num_adapters=few, num_publishes=few)
    seeing = Size(
        num_samples=max(1, num_samples // 20), num_adapters=few, num_publishes=few, images=True
    )
    return {
        ("native", TINY): whole,
        ("tinker", TINY): part,
        ("openai", TINY): part,
        ("native", VISION): seeing,
        ("openai", VISION): seeing,
    }


async def held(server: ServerProcess, protocol: str, model: str, size: Size) -> Report:
    """Hold a server to its bits by one protocol."""
    url = f"http://{server.address}"
    plan = make_plan(size, 0)
    if protocol == "openai":
        async with (
            tinsmith.Client(server.address, server.api_key) as client,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=server.api_key) as chat,
        ):
            target = OpenAITarget(chat, NativeTarget(client, model).publish)
            return await hold(target, plan, concurrency=_CONCURRENCY, timeout_s=_TIMEOUT_S)
    key = server.api_key.replace("tsk_", "tml-", 1) if protocol == "tinker" else server.api_key
    options = parser().parse_args(
        ["--base-url", url, "--key", key, "--protocol", protocol, "--model", model]
    )
    async with connected(options) as found:
        return await hold(found, plan, concurrency=_CONCURRENCY, timeout_s=_TIMEOUT_S)


def main() -> int:
    """Hold all servers to their bits; return 1 if one does not keep them."""
    options = argparse.ArgumentParser(prog="python -m tests.determinism.own_server")
    options.add_argument("--samples", type=int, default=10_000)
    options.add_argument("--adapters", type=int, default=64)
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2, 3])
    asked = options.parse_args()
    warnings.simplefilter("ignore", ResourceWarning)
    sizes = sizes_of(asked.samples, asked.adapters)
    reports: dict[tuple[str, str, int], Report] = {}
    with tempfile.TemporaryDirectory(prefix="tinsmith-determinism-") as name:
        folder = Path(name)
        models = {model: make_model(model, folder) for model in (TINY, VISION)}
        for num_threads in asked.threads:
            with ServerProcess(
                folder / str(num_threads), models, num_threads=num_threads
            ) as server:
                for (protocol, model), size in sizes.items():
                    print(f"{protocol}, {model}, {num_threads} threads", flush=True)
                    report = asyncio.run(held(server, protocol, model, size))
                    print(describe(report), flush=True)
                    reports[protocol, model, num_threads] = report
    rows = [row for key in sizes for row in _rows(*key, asked.threads, reports)]
    write("determinism", rows, machine())
    show("determinism", rows, machine())
    return 0 if all(row.is_met is not False for row in rows) else 1


def _rows(
    protocol: str, model: str, threads: list[int], reports: dict[tuple[str, str, int], Report]
) -> list[Row]:
    found = {number: reports[protocol, model, number] for number in threads}
    rows = []
    for number, report in found.items():
        what = f"{protocol}, {model}, {number} threads: {report.num_samples} samples"
        wrong = report.num_differ + report.num_scores_differ
        minutes = round((report.at_once_s + report.alone_s) / 60, 2)
        rows += [
            Row(name=f"{what}, that differ", value=wrong, unit="", better="lower", target=0),
            Row(
                name=f"{what}, calls that failed",
                value=report.num_failed,
                unit="",
                better="lower",
                target=0,
            ),
            Row(name=f"{what}, time", value=minutes, unit="minutes", better="lower"),
        ]
    num_answers = len({report.digest for report in found.values()})
    what = f"{protocol}, {model}: different sets of answers over {threads} threads"
    return [*rows, Row(name=what, value=num_answers, unit="", better="lower", target=1)]


if __name__ == "__main__":
    sys.exit(main())
