"""Plays episodes by `RolloutRunner`, with a model that says given texts.

play.py '{"adapter": "verifiers", "env": "sums_tasks", "arguments": {}, "seed": 0, "config": {},
"texts": ["1"]}'

It writes a JSON object, a line for each argument: what was read and said, rewards and facts. With
`--together` first, all are played at once.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from tests.fakes.chat_models import QWEN3, TURN_END, chat_tokenizer

import tinsmith
from tinsmith.environments.local import create_local_instance
from tinsmith.rollouts import RolloutConfig, RolloutRunner
from tinsmith.types import ModelInput, SampledSequence, SamplingParams

_CLASSES = {"verifiers": "VerifiersEnvironment", "openenv": "OpenEnvEnvironment"}


class Saying:
    """A sampler that says the texts one after the other."""

    def __init__(self, tokenizer: tinsmith.Tokenizer, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = list(texts)

    async def sample_async(self, prompt: ModelInput, params: SamplingParams) -> SampledSequence:
        text = self._texts.pop(0) + TURN_END
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        return SampledSequence(tokens, [-0.5] * len(tokens), [3] * len(tokens), "stop")


def named(asked: dict[str, Any]) -> Any:
    """Return what the adapter is given: an id, an `Env` of verifiers, or a function of a module."""
    env = asked["env"]
    if asked.get("form") == "loaded":
        vf = importlib.import_module("verifiers.v1")
        loaded = vf.load_environment(vf.resolve_env_config({"taskset": {"id": env}}))
        loaded.taskset = loaded.taskset.skip(3)
        return loaded
    if asked.get("form") == "function":
        module, _, function = env.partition(":")
        return partial(getattr(importlib.import_module(module), function), asked["url"])
    return env


async def play(asked: dict[str, Any]) -> dict[str, Any]:
    module = importlib.import_module(f"tinsmith.environments.adapters.{asked['adapter']}")
    adapter = getattr(module, _CLASSES[asked["adapter"]])
    make = partial(adapter, named(asked), **asked.get("arguments", {}))
    tokenizer = chat_tokenizer(QWEN3)
    limits = RolloutConfig(max_context_tokens=100_000, max_turns=len(asked["texts"]))
    runner = RolloutRunner(tokenizer, Saying(tokenizer, asked["texts"]), limits)
    settings = {"seed": asked.get("seed", 0), "config": asked.get("config")}
    trajectory = await runner.run(lambda: create_local_instance(make, **settings))
    said = [token for s in trajectory.samples for token in s.tokens[s.loss_mask].tolist()]
    return {
        "reason": trajectory.reason.name.lower(),
        "failure": trajectory.failure,
        "rewards": [turn.reward for turn in trajectory.turns],
        "infos": [dict(turn.info) for turn in trajectory.turns],
        "messages": [dict(message) for message in trajectory.messages],
        "said": tokenizer.decode(said),
    }


async def play_together(words: Sequence[str]) -> list[dict[str, Any]]:
    return await asyncio.gather(*(play(json.loads(word)) for word in words))


if sys.argv[1] == "--together":
    for told in asyncio.run(play_together(sys.argv[2:])):
        print(json.dumps(told), flush=True)
else:
    for word in sys.argv[1:]:
        print(json.dumps(asyncio.run(play(json.loads(word)))), flush=True)
