"""The agents of a job: what each trains, and a client of each.

A job with `roles.agents` tells its driver and the agents' own programs which agents there are. The
address is the same for all; the key says whose trainers and samplers a client reaches. A driver has
the key of each agent, and a program of an agent has that of its own agent alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinsmith.errors import ConfigurationError

if TYPE_CHECKING:
    from tinsmith.client import Client
    from tinsmith.settings import RetryPolicy

_AGENTS = "TINSMITH_JOB_AGENTS"
_OWN_NAME = "TINSMITH_JOB_AGENT"


def agent_key_variable(agent: str) -> str:
    """Return the variable of a driver that holds the key of an agent."""
    return f"TINSMITH_AGENT_{agent.upper().replace('-', '_')}_API_KEY"


@dataclass(frozen=True, slots=True)
class JobAgent:
    """One policy of several in a job.

    Attributes:
        name: Names it within the job.
        base_model: What is trained.
        adapter: `lora` or `full`.
        rank: Of the LoRA.
        address: Where it is trained and sampled from.
        num_trainers: Trainers of its own; 0 if it shares those of the job.
        num_samplers: Samplers of its own, likewise.
        num_workers: Programs that play for it.
        api_key: Reaches its trainers and samplers; empty for a program that has no right to it.
    """

    name: str
    base_model: str
    adapter: str
    rank: int
    address: str
    num_trainers: int
    num_samplers: int
    num_workers: int
    api_key: str = field(repr=False)

    def open_client(
        self,
        *,
        display_name: str = "",
        operation_timeout_s: float = 3600.0,
        retry: RetryPolicy | None = None,
    ) -> Client:
        """Return a client whose runs and samplers are this agent's.

        Raises:
            ConfigurationError: If this process has no key of the agent.
            TinsmithError: If the server cannot be reached or refuses the key.

        Example:
            >>> for agent in tinsmith.driver.read_agents():
            ...     client = agent.open_client()
            ...     runs[agent.name] = client.create_lora_training_run(agent.base_model, agent.rank)
        """
        # Not above: the client itself is imported together with this module.
        from tinsmith.client import Client

        if not self.api_key:
            raise ConfigurationError(
                f"this process has no key of agent {self.name}",
                remedy="train agents in the driver; a program of an agent has the key of its own",
            )
        return Client(
            self.address,
            self.api_key,
            display_name=display_name or self.name,
            operation_timeout_s=operation_timeout_s,
            retry=retry,
        )


def read_agents(environ: Mapping[str, str] = os.environ) -> tuple[JobAgent, ...]:
    """Return the agents of the job that this process belongs to; none if it has none.

    Raises:
        ConfigurationError: If what the process is told is not readable.
    """
    text = environ.get(_AGENTS, "")
    if not text:
        return ()
    own = environ.get(_OWN_NAME, "")
    try:
        return tuple(_agent(entry, own, environ) for entry in json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{_AGENTS} does not describe agents: {error!r}") from error


def _agent(entry: Mapping[str, object], own: str, environ: Mapping[str, str]) -> JobAgent:
    name, adapter, roles = str(entry["name"]), entry["adapter"], entry["roles"]
    if not isinstance(adapter, Mapping) or not isinstance(roles, Mapping):
        raise TypeError(f"adapter and roles of {name} are no objects")

    def count(role: str) -> int:
        return int(roles[role]["replicas"]) if role in roles else 0

    variable = "TINSMITH_API_KEY" if name == own else agent_key_variable(name)
    return JobAgent(
        name=name,
        base_model=str(entry["model"]),
        adapter=str(adapter["type"]),
        rank=int(adapter["rank"]),
        address=str(entry["address"]),
        num_trainers=count("trainer"),
        num_samplers=count("sampler"),
        num_workers=count("worker"),
        api_key=environ.get(variable, ""),
    )
