"""verifiers: rollouts of an environment of one turn, with rewards."""

import asyncio
import json
import os
import sys

import verifiers as vf
from datasets import Dataset


def length_reward(completion, **kwargs) -> float:
    """Return a reward for any answer."""
    return float(len(completion) > 0)


dataset = Dataset.from_list([{"question": "Say cat.", "answer": "cat"}] * 2)
environment = vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[length_reward]))
client = vf.ClientConfig(api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
results = asyncio.run(
    environment.evaluate(
        client=client,
        model=sys.argv[1],
        sampling_args={"max_tokens": 16, "temperature": 1.0},
        num_examples=2,
        rollouts_per_example=2,
    )
)
print(json.dumps({"rewards": [one["reward"] for one in results["outputs"]]}))
