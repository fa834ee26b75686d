"""Programs of the authors of jobs, as their drivers and workers run them."""

from __future__ import annotations

LOOP = """
import sys
import tinsmith
from tinsmith import driver

job = driver.current()
with tinsmith.Client() as client:
    job.wait_ready(client, "{model}")
    run = client.create_lora_training_run(base_model="{model}", rank=4)
    tokens = run.get_tokenizer().encode("the quick brown fox")
    datum = tinsmith.Datum(
        model_input=tinsmith.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={{"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}},
    )
    for step in range(3):
        gradient = run.forward_backward([datum], "cross_entropy")
        run.optim_step(tinsmith.AdamParams(learning_rate=1e-2)).result()
        loss = gradient.result().loss
        job.report(step=step + 1, max_steps=3, metrics={{"loss": loss}}, run=run.name)
    job.report(checkpoint=run.save_state("mine").result())
"""
"""A loop of its own: three steps, and a checkpoint. `model` is what it trains."""

PLAYER = """
import openai
import tinsmith

with tinsmith.Client() as client:
    agent = client.episodes.agent(queue="rl")
    while True:
        with agent.episode() as episode:
            model = openai.OpenAI(
                base_url=episode.openai.base_url, api_key=episode.openai.api_key
            )
            with model:
                answer = model.chat.completions.create(
                    model=episode.openai.model, messages=episode.task["messages"], max_tokens=4
                )
            text = answer.choices[0].message.content or ""
            even = sum(ord(character) % 2 == 0 for character in text)
            episode.end(tinsmith.WorkflowOutput(reward=even / max(1, len(text))))
"""
"""An agent that claims episodes for as long as its job lives."""
