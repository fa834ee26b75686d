"""`make demo-smoke`: the demo's own code in small, through one server process.

Four supervised steps and four of reinforcement learning on sums, on the tiny model with random
weights. Steps must be taken, files must be there, and the commands that the demo prints at its end
must work as they stand. What was learnt in so few steps says nothing.
"""

from __future__ import annotations

import json
import os
import shlex
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
        command += ["--output", str(output)]
        said = subprocess.run(
            command, check=True, timeout=TIMEOUT_S, stdout=subprocess.PIPE, text=True
        ).stdout
        sys.stdout.write(said)
        return "; ".join([*_missing(output), *_failing(said, Path(folder))]) or None


def _failing(said: str, folder: Path) -> list[str]:
    """Return which of the commands that were printed as next ones do not work."""
    _, is_said, end = said.partition("what was trained is kept")
    if not is_said:
        return ["the demo says not what to do next"]
    server, *others = [line.strip() for line in end.splitlines() if line.startswith("  ")]
    # Its own state, so that no other server of this machine is asked.
    environment = {**os.environ, "TINSMITH_STATE_DIR": str(folder / "state")}
    with subprocess.Popen(
        [*shlex.split(server), "--port", "0", "--until-input-ends"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdin is not None
        if not any("address" in line for line in running.stdout):
            return [f"{server} does not serve"]
        failing = [
            command
            for command in others
            if subprocess.run(shlex.split(command), env=environment, timeout=TIMEOUT_S).returncode
        ]
        running.stdin.close()
        running.wait(TIMEOUT_S)
    return [f"{command} fails" for command in failing]


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
