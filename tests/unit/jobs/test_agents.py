"""Jobs with agents: what each trains, and what each process of the job is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.driver.agents import JobAgent, agent_key_variable, read_agents
from tinsmith.errors import ConfigurationError
from tinsmith.names import pools_in_reach
from tinsmith_jobs.method import describe_agents
from tinsmith_jobs.naming import pool_id
from tinsmith_jobs.spec import Adapter, JobSpec
from tinsmith_jobs.spec_codec import decode_job

MODEL = {"name": "small", "source": "hf://org/small"}
LARGE = {"name": "large", "source": "hf://org/large"}
_NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,14}[a-z0-9])?", fullmatch=True)


def match(*agents: dict[str, Any], **roles: Any) -> JobSpec:
    """Return a job of method `match`."""
    spec = {
        "method": {"type": "match"},
        "model": MODEL,
        "adapter": {"rank": 8},
        "roles": {**roles, "agents": list(agents)},
    }
    return decode_job("duel", spec)


def test_each_agent_has_a_model_and_an_adapter_of_its_own() -> None:
    own = {"trainer": {"replicas": 2}, "sampler": {}}
    job = match(
        {"name": "black", "model": LARGE, "adapter": {"type": "full"}, **own},
        {"name": "white", "adapter": {"rank": 16}, **own},
        {"name": "grey", **own},
    )
    models = {role.agent: job.model_of(role) for role in job.roles if role.agent}
    assert {name: model.name for name, model in models.items() if model is not None} == {
        "black": "large",
        "white": "small",
        "grey": "small",
    }
    assert [agent.adapter for agent in job.agents] == [
        Adapter("full", 8),
        Adapter("lora", 16),
        Adapter("lora", 8),
    ]
    ranks = [role.name for role in job.roles if job.is_group(role)]
    assert ranks == ["agent/black/trainer"], "two pods that train all weights are one group"


def test_agents_without_pods_share_those_of_the_job() -> None:
    job = match({"name": "black"}, {"name": "white"}, trainer={}, sampler={})
    assert not any(agent.has_own_pods for agent in job.agents)
    assert {role.agent for role in job.roles} == {""}


def test_a_driver_reads_what_a_job_says_of_its_agents() -> None:
    job = match(
        {"name": "black", "model": LARGE, "trainer": {}, "sampler": {"replicas": 3}},
        {"name": "red-2", "trainer": {}, "sampler": {}, "worker": {"template": {"image": "i"}}},
    )
    environ = {
        "TINSMITH_JOB_AGENTS": describe_agents(job, model="small", address="gateway:7077"),
        "TINSMITH_AGENT_BLACK_API_KEY": "key-b",
        "TINSMITH_AGENT_RED_2_API_KEY": "key-r",
    }
    assert read_agents(environ) == (
        JobAgent("black", "large", "lora", 8, "gateway:7077", 1, 3, 0, "key-b"),
        JobAgent("red-2", "small", "lora", 8, "gateway:7077", 1, 1, 1, "key-r"),
    )
    assert "key-b" not in repr(read_agents(environ))


def test_a_program_of_an_agent_has_the_key_of_that_agent_alone() -> None:
    job = match({"name": "black"}, {"name": "white"}, trainer={}, sampler={})
    environ = {
        "TINSMITH_JOB_AGENTS": describe_agents(job, model="small", address="gateway:7077"),
        "TINSMITH_JOB_AGENT": "white",
        "TINSMITH_API_KEY": "key-w",
    }
    black, white = read_agents(environ)
    assert (black.api_key, white.api_key) == ("", "key-w")
    with pytest.raises(ConfigurationError, match="no key of agent black"):
        black.open_client()


def test_a_job_without_agents_tells_of_none() -> None:
    job = decode_job(
        "j", {"method": {"type": "supervised"}, "model": MODEL, "roles": {"trainer": {}}}
    )
    assert read_agents({"TINSMITH_JOB_AGENTS": describe_agents(job, model="m", address="a")}) == ()


@pytest.mark.parametrize("text", ["{", "[1]", '[{"name": "a"}]', json.dumps({"name": "a"})])
def test_what_describes_no_agents_is_refused_by_the_name_of_the_variable(text: str) -> None:
    with pytest.raises(ConfigurationError, match="TINSMITH_JOB_AGENTS"):
        read_agents({"TINSMITH_JOB_AGENTS": text})


@given(_NAMES, _NAMES, st.text(min_size=1))
def test_an_agent_reaches_the_pool_of_its_job_and_no_other_agents(
    job: str, agent: str, uid: str
) -> None:
    own, whole = pool_id(job, uid, agent), pool_id(job, uid)
    assert pools_in_reach(own) == (own, whole, "")
    assert pools_in_reach(whole) == (whole, "")
    assert pools_in_reach("") == ("",)


@given(st.sets(_NAMES, min_size=2, max_size=8))
def test_agents_have_different_variables_and_pools(agents: set[str]) -> None:
    assert len({agent_key_variable(agent) for agent in agents}) == len(agents)
    assert len({pool_id("job", "uid", agent) for agent in agents}) == len(agents)
