"""`python -m tests.chaos --size ci|long [--only NAME] [--seed N]`: what may go wrong does.

Each scenario disturbs trainings and compares them with calm ones: nothing that was acknowledged may
be lost or applied twice, and every result, weight and moment must have the same bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.chaos import (
    disk_full,
    failpoints,
    fsync,
    kill_trainer,
    kills,
    network,
    object_store,
    promotion,
    report,
    zombies,
)
from tests.chaos.report import Findings, Row
from tests.chaos.scenario import Setting
from tinsmith_local.tiny_model import build_tiny_model

SCENARIOS: dict[str, Callable[[Setting], Findings]] = {
    "embedded": kill_trainer.run,
    "kills": kills.run,
    "failpoints": failpoints.run,
    "zombies": zombies.run,
    "promotion": promotion.run,
    "network": network.run,
    "object_store": object_store.run,
    "disk_full": disk_full.run,
    "fsync": fsync.run,
}
_NUM_KILLS = {"ci": 8, "long": 100}


def main() -> int:
    """Run the scenarios; return 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("ci", "long"), default="ci")
    parser.add_argument("--only", choices=tuple(SCENARIOS), action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, help="of scenarios that kill at random moments")
    arguments = parser.parse_args()
    # The end of this process ends its pods and databases as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = Path(tempfile.mkdtemp(prefix="tinsmith-chaos-"))
    model_dir = build_tiny_model(folder / "model")
    found: dict[str, Findings] = {}
    for name in arguments.only or SCENARIOS:
        setting = Setting(
            folder=folder / name,
            model_dir=model_dir,
            is_long=arguments.size == "long",
            num_kills=arguments.kills or _NUM_KILLS[arguments.size],
            seed=arguments.seed,
        )
        print(f"{name}:", flush=True)
        found[name] = _run(name, setting)
        print(report.table(found[name]), flush=True)
        if found[name].is_good:
            shutil.rmtree(setting.folder)
        else:
            print(f"  kept for inspection: {setting.folder}", flush=True)
    report.write(found, size=arguments.size, seed=arguments.seed)
    missed = [name for name, findings in found.items() if not findings.is_good]
    total_s = sum(findings.duration_s for findings in found.values())
    print(f"{len(found)} scenarios in {total_s:.0f} s; missed: {', '.join(missed) or 'none'}")
    if missed:
        return 1
    shutil.rmtree(folder)
    return 0


def _run(name: str, setting: Setting) -> Findings:
    setting.folder.mkdir(parents=True)
    try:
        findings = SCENARIOS[name](setting)
    except Exception:
        # The others are still worth their time.
        traceback.print_exc()
        findings = Findings([Row(name="the scenario came to its end", value=0, target=1)])
    return dataclasses.replace(findings, duration_s=time.monotonic() - setting.begin_s)


if __name__ == "__main__":
    sys.exit(main())
