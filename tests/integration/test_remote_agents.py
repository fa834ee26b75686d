"""Agents that know nothing but OpenAI's package and a URL make a policy better."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from tests.integration.servers import Deployment

from tinsmith.recipes import rl_episodes
from tinsmith.recipes.experiment.run_log import read_metrics

AGENT = Path(__file__).with_name("openai_agent.py")


def test_a_policy_learns_from_what_an_openai_client_played(
    embedded: Deployment, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"task {n}"}]} for n in range(160)]
    tasks.write_text("\n".join(json.dumps(line) for line in lines))
    config = rl_episodes.Config(
        data=str(tasks),
        queue="openai",
        rank=8,
        # Faster, or with fewer episodes, it may settle on the first answer that beats others.
        learning_rate=2e-2,
        num_warmup_steps=1,
        num_steps=16,
        num_tasks=4,
        group_size=16,
        num_validation=32,
        step_timeout_s=60,
        save_every=0,
        output_dir=tmp_path / "run",
    )
    url = f"http://{embedded.address}"
    agent = subprocess.Popen(
        [sys.executable, str(AGENT), url, embedded.api_key, config.queue],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with embedded.client() as client:
            summary = rl_episodes.main(config, client)
    finally:
        agent.send_signal(signal.SIGKILL)
        _, said = agent.communicate(timeout=10)
    assert said == ""
    assert summary.num_validation == 32
    assert summary.after > summary.before + 0.15
    rewards = [row["reward"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.08
