"""An agent as its author would write it far away: the `openai` package, and nothing of ours.

Usage: openai_agent.py URL KEY QUEUE. It claims episodes, answers each task with one chat call under
the key of the episode, and says what the answer was worth: the share of characters whose code is
even.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import urllib.error
import urllib.request
from typing import Any

from openai import OpenAI

NUM_THREADS = 16


def post(url: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url,
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: dict[str, Any] = json.loads(answer.read())
    return content


def reward_of(text: str) -> float:
    return sum(ord(character) % 2 == 0 for character in text) / len(text) if text else 0.0


def play(url: str, key: str, queue: str, client: str, models: OpenAI) -> None:
    types = itertools.cycle(("train", "eval"))
    episode_type = next(types)
    while True:
        claim = {
            "client_uuid": client,
            "episode_type": episode_type,
            "allow_discard_timeout": 60,
            "queue": queue,
            "timeout_s": 1.0,
        }
        claimed = post(f"{url}/claim_episode", key, claim)
        if not claimed["success"]:
            episode_type = next(types)
            continue
        # A client of its own would load the certificates of the machine anew, for each episode.
        model = models.with_options(
            base_url=claimed["openai_base_url"], api_key=claimed["openai_api_key"]
        )
        answer = model.chat.completions.create(
            model=claimed["model"], messages=claimed["task"]["messages"], max_tokens=8
        )
        text = answer.choices[0].message.content or ""
        ended = {
            "client_uuid": client,
            "episode_uuid": claimed["episode_uuid"],
            "workflow_output": {"reward": reward_of(text), "metadata": {"text": text}},
        }
        try:
            post(f"{url}/end_episode", key, ended)
        except urllib.error.HTTPError as error:
            # The step was over before: the next attempt's problem now.
            sys.stderr.write(error.read().decode())


def main() -> None:
    url, key, queue = sys.argv[1:]
    models = OpenAI(base_url=url, api_key=key)
    threads = [
        threading.Thread(
            target=play,
            args=(url, key, queue, f"agent-{number}", models),
        )
        for number in range(NUM_THREADS)
    ]
    for thread in threads:
        thread.start()


if __name__ == "__main__":
    main()
