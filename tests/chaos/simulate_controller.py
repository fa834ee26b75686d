"""Random lives of jobs under the controller, on a bad network, in one process: nothing is real.

`python -m tests.chaos.simulate_controller --seeds 10000` tells what was found, and at which seeds.
`--first 17 --seeds 1 --trace` tells one life step by step.
"""

from __future__ import annotations

import argparse
import functools
import logging
import multiprocessing
import os
import sys
import time

from tests.unit.controller.lives import Life

_TOLD = 500
"""Lives between two lines about how far it is."""


def live(seed: int, *, is_told: bool) -> tuple[int, list[str], list[str]]:
    """Return the seed, what was found, and what happened."""
    logging.disable(logging.CRITICAL)
    life = Life(seed)
    found = life.run()
    return seed, found, life.world.trace if is_told else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many lives")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many at once")
    parser.add_argument("--trace", action="store_true", help="tell what happens in each life")
    args = parser.parse_args()
    begin_s = time.monotonic()
    kinds: dict[str, list[int]] = {}
    seeds = range(args.first, args.first + args.seeds)
    with multiprocessing.Pool(args.processes) as pool:
        one = functools.partial(live, is_told=args.trace)
        for seed, found, trace in pool.imap(one, seeds, chunksize=8):
            if found or trace:
                print("\n".join([f"seed {seed}: {'; '.join(found) or 'fine'}", *trace]), flush=True)
            for kind in {text.partition(":")[0] for text in found}:
                kinds.setdefault(kind, []).append(seed)
            num_lives = seed - args.first + 1
            if num_lives % _TOLD == 0:
                print(f"{num_lives} lives, {time.monotonic() - begin_s:.0f} s", flush=True)
    for kind, failed in sorted(kinds.items()):
        print(f"{kind}: {len(failed)} lives, seeds {', '.join(map(str, failed[:20]))}")
    num_found = sum(map(len, kinds.values()))
    print(f"{args.seeds} lives in {time.monotonic() - begin_s:.0f} s, {num_found} findings")
    return bool(kinds)


if __name__ == "__main__":
    sys.exit(main())
