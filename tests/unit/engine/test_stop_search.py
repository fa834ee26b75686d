"""Stop strings: found at the token that completes them, at a cost that does not grow."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.unit.engine.test_sampling import request, run_all

from tinsmith_engine import Engine, Sampler
from tinsmith_engine.sampling.request.stop_search import StopSearch
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_runtime.text.stop_strings import MAX_STOP_CHARACTERS


def bytes_of(tokens: Sequence[int]) -> str:
    """The text of a byte-level tokenizer whose tokens are bytes."""
    return bytes(tokens).decode("utf-8", errors="replace")


def test_a_long_completion_is_not_decoded_again_for_each_token(engine: Engine) -> None:
    num_decoded: list[int] = []

    def decode_text(tokens: Sequence[int]) -> str:
        num_decoded.append(len(tokens))
        return "".join(f"<{token}>" for token in tokens)

    found = run_all(
        Sampler(engine),
        request(max_tokens=90, stop_strings=("x" * MAX_STOP_CHARACTERS,), decode_text=decode_text),
    )[0][0]
    assert found.finish_reason == "length"
    assert max(num_decoded) <= 8
    assert sum(num_decoded) <= 10 * len(found.tokens)


def test_a_stop_string_is_found_at_the_token_that_completes_it() -> None:
    text = "ä long text, its ënd and 日本, then the rest"
    for stop in ("ënd", "ä", "日本", ", then", "t"):
        search = StopSearch(("never", stop), bytes_of)
        tokens = list(text.encode())
        first = next(at for at, token in enumerate(tokens) if search.push(token))
        assert stop in bytes_of(tokens[: first + 1])
        assert stop not in bytes_of(tokens[:first])


@pytest.mark.parametrize("stop", ["x" * (MAX_STOP_CHARACTERS + 1), ""])
def test_a_stop_string_of_another_length_is_refused(engine: Engine, stop: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        Sampler(engine).add(request(stop_strings=["a", stop], decode_text=bytes_of))
    assert "stop_strings" in str(caught.value)
