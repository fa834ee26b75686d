"""The policies of a recipe that trains several: each with a client that reaches what trains it."""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith.client import Client


@dataclass(frozen=True, slots=True)
class RecipeAgent:
    """One policy of several.

    Attributes:
        name: Names it among the others.
        client: Its runs and samplers are this agent's; in a job they may be its own pods.
        base_model: What is trained.
        adapter: `lora` or `full`.
        rank: Of the LoRA.
    """

    name: str
    client: Client
    base_model: str
    adapter: str
    rank: int
