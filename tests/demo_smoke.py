"""`make demo-smoke`: the demo's own code in small, through one server process.

Four supervised steps and four of reinforcement learning on sums, on the tiny model with random
weights. What is checked is that steps were taken and files are there; what was learnt in so few
steps says nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tinsmith.recipes.experiment.run_log import METRICS, read_metrics

NUM_STEPS = 4
TIMEOUT_S = 300


def main() -> str | None:
    """Run the demo and look at what it left; return what is wrong."""
    with tempfile.TemporaryDirectory(prefix="tinsmith-demo-") as folder:
        output = Path(folder) / "demo"
        data = Path(folder) / "sums.jsonl"
        data.write_text(
            "".join(
                json.dumps({"question": f"What is {n} + {n % 7}?", "answer": f"#### {n + n % 7}"})
                + "\n"
                for n in range(10, 42)
            )
        )
        command = [sys.executable, "-m", "tinsmith_local.demo", "--data", str(data)]
        command += ["--steps", str(NUM_STEPS), "--batch", "4", "--max-tokens", "4", "--seeds", "0"]
        subprocess.run([*command, "--output", str(output)], check=True, timeout=TIMEOUT_S)
        return "; ".join(_missing(output)) or None


def _missing(output: Path) -> list[str]:
    """Return what the demo should have left and did not."""
    problems = []
    for run in ("supervised", "rl-0"):
        metrics = output / run / METRICS
        steps = [row for row in read_metrics(metrics) if "step" in row] if metrics.is_file() else []
        if len(steps) < NUM_STEPS:
            problems.append(f"{run} took {len(steps)} of {NUM_STEPS} steps")
    for picture in ("supervised.png", "rl.png"):
        path = output / picture
        if not path.is_file() or not path.read_bytes().startswith(b"\x89PNG"):
            problems.append(f"there is no picture {picture}")
    if not any((output / "work" / "server").rglob("*.safetensors")):
        problems.append("no checkpoint was written")
    return problems


if __name__ == "__main__":
    sys.exit(main())
