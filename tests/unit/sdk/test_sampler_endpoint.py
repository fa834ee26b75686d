"""A call is counted at the sampler where it is, also after the first one failed."""

from __future__ import annotations

import pytest

from tinsmith.errors import UnavailableError
from tinsmith.rpc.sampler_choice import HEADER, choice_name, choice_of
from tinsmith.sampling.sampler_endpoint import SamplerEndpoint
from tinsmith.tensors import encode_tokens
from tinsmith.v1 import scheduler_pb2, trajectories_pb2

ADDRESSES = ["a:1", "b:1", "c:1"]


def prompt(number: int) -> trajectories_pb2.ModelInput:
    message = trajectories_pb2.ModelInput()
    message.chunks.add(tokens=encode_tokens([number] * 8))
    return message


def session(*busy: tuple[str, int]) -> scheduler_pb2.SamplingSession:
    loads = [
        scheduler_pb2.SamplerLoad(address=address, num_requests=count) for address, count in busy
    ]
    return scheduler_pb2.SamplingSession(sampler_addresses=ADDRESSES, sampler_loads=loads)


async def test_a_call_that_went_elsewhere_is_counted_there() -> None:
    async def locate() -> scheduler_pb2.SamplingSession:
        return session()

    samplers = SamplerEndpoint(session(), "s:1", locate)
    with samplers.of(prompt(1)) as first:
        failed = first.address
        assert first.metadata == ((HEADER, "least_loaded"),)
        await first.relocate()
        assert first.address != failed
        assert first.metadata == ((HEADER, "failover"),)
        # One of the two that are left has the call, so the next one goes to the other.
        with samplers.of(prompt(2)) as second:
            assert {failed, first.address, second.address} == set(ADDRESSES)


async def test_loads_come_with_the_session_and_when_it_is_asked_for_again() -> None:
    async def locate() -> scheduler_pb2.SamplingSession:
        return session(("a:1", 0), ("b:1", 9), ("c:1", 9))

    samplers = SamplerEndpoint(session(("a:1", 9), ("b:1", 9)), "s:1", locate)
    with samplers.of(prompt(1)) as endpoint:
        assert endpoint.address == "c:1"
        await endpoint.relocate()
        assert endpoint.address == "a:1"


async def test_a_session_without_samplers_is_called_at_the_server() -> None:
    async def locate() -> scheduler_pb2.SamplingSession:
        raise UnavailableError("the scheduler is away")

    samplers = SamplerEndpoint(scheduler_pb2.SamplingSession(), "s:1", locate)
    with samplers.of(prompt(1)) as endpoint:
        assert endpoint.address == "s:1"
        await endpoint.relocate()
        assert (endpoint.address, endpoint.metadata) == ("s:1", ((HEADER, "only_one"),))


@pytest.mark.parametrize("word", ["", "sticky ", "STICKY", "unspecified"])
def test_a_word_that_is_not_known_says_nothing(word: str) -> None:
    assert choice_name(choice_of([(HEADER, word)])) == ""
    assert choice_name(choice_of([(HEADER, "sticky")])) == "sticky"
    assert choice_name(choice_of(None)) == ""
