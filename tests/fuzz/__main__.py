"""`python -m tests.fuzz --count 20000 --seed 0`: hostile requests against a server of their own."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.attack import attack
from tests.integration.servers import BASE_MODEL, create_key, embedded_server
from tinsmith_local.tiny_model import TinyModelConfig, build_tiny_model


def main() -> int:
    """Attack, print the counts, and return 1 if something broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="tinsmith-fuzz-") as name:
        folder = Path(name)
        model_dir = build_tiny_model(
            folder / "model", TinyModelConfig(hidden_size=32, num_layers=1)
        )
        with embedded_server(
            folder / "data", model_dir, gateway={"long_poll_s": 0.05}
        ) as deployment:
            tally = asyncio.run(
                attack(
                    f"http://{deployment.address}",
                    deployment.api_key,
                    create_key(deployment, "neighbour"),
                    BASE_MODEL,
                    count=arguments.count,
                    seed=arguments.seed,
                )
            )
    for (sort, status), number in sorted(tally.statuses.items()):
        print(f"{sort:40} {status:>10} {number:>8}")
    print(f"{arguments.count} requests in {time.perf_counter() - begin_s:.0f} s")
    for failure in tally.failures:
        print(f"FAILED {failure}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
