"""A stop string has a greatest length on the Tinker wire and for OpenAI clients."""

from __future__ import annotations

import pytest
from tests.fakes.tinker_wire import sample_body

from tinsmith_gateway.openai.bodies import SamplingBody
from tinsmith_gateway.tinker.wire import bodies, sample_codec
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_runtime.text.stop_strings import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS

LONGEST, TOO_LONG = "x" * MAX_STOP_CHARACTERS, "x" * (MAX_STOP_CHARACTERS + 1)


@pytest.mark.parametrize(
    "stop", [TOO_LONG, ["a", TOO_LONG], ["a", ""]], ids=["alone", "in-list", "empty"]
)
def test_openai_clients_are_told(stop: str | list[str]) -> None:
    with pytest.raises(InvalidFieldError, match="stop"):
        SamplingBody(model="m", stop=stop).check_offered()
    SamplingBody(model="m", stop=["a", LONGEST]).check_offered()


@pytest.mark.parametrize(
    "stop",
    [TOO_LONG, ["a", TOO_LONG], ["a", ""], ["a"] * (MAX_STOP_STRINGS + 1)],
    ids=["alone", "in-list", "empty", "many"],
)
def test_clients_of_the_tinker_wire_are_told(stop: str | list[str]) -> None:
    with pytest.raises(InvalidFieldError, match=r"sampling_params\.stop"):
        sample_codec.decode_sample(body(stop), "session")
    assert sample_codec.decode_sample(body(LONGEST), "session").params.stop_strings == [LONGEST]


def body(stop: str | list[str]) -> bodies.Sample:
    return bodies.Sample.model_validate(
        sample_body("session", 1, sampling_params={"max_tokens": 4, "stop": stop})
    )
