"""What a sampler and its vLLM process say to each other; `frames` has its form on the socket.

Both ends are one program in two environments: the standard library is all that they share, and
neither end listens on a port.
"""

from __future__ import annotations

from dataclasses import dataclass

_MAX_PROBLEM_CHARACTERS = 4096

LikeliestTokens = list[tuple[int, float]]
"""Token ids and log-probabilities, likeliest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Configure:
    """First command: what to load, and its limits."""

    model: str
    dtype: str
    max_model_tokens: int
    max_sequences: int
    max_logprobs: int
    cache_bytes: int
    max_adapters: int
    """Versions whose tokens are made together."""
    max_host_adapters: int
    max_adapter_rank: int
    tensor_parallel_size: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA version: neither id nor name is used again for other weights."""

    id: int
    name: str
    directory: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Generate:
    """Asks for one completion."""

    sample: int
    """Names the completion; never used twice."""
    prompt: list[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_tokens: list[int]
    num_likeliest: int
    num_prompt_likeliest: int | None
    """None scores no token of the prompt."""
    adapter: Adapter | None
    cache_salt: str
    """Prompts are shared only under one salt; it names project and version."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Gives completions up; unknown ones are no error."""

    samples: list[int]


@dataclass(frozen=True, slots=True)
class AddAdapter:
    """Reads an adapter; answered by `Done`."""

    call: int
    adapter: Adapter


@dataclass(frozen=True, slots=True)
class RemoveAdapter:
    """Forgets an adapter; answered by `Done`."""

    call: int
    id: int


Command = Configure | Generate | Abort | AddAdapter | RemoveAdapter


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded."""

    version: str
    max_model_tokens: int


@dataclass(frozen=True, slots=True)
class Done:
    """A call has ended; `problem` is empty if it succeeded."""

    call: int
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What a step brought for one completion."""

    sample: int
    tokens: list[int]
    logprobs: list[float]
    likeliest: list[LikeliestTokens]
    finish_reason: str | None
    num_cached_tokens: int
    prompt_logprobs: list[float | None] | None = None
    prompt_likeliest: list[LikeliestTokens | None] | None = None
    problem: str = ""
    """Why the completion was refused."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """The engine has made a step, also one without a token: a sign of life."""

    updates: list[Update]


Event = Ready | Done | Stepped


def problem_of(error: Exception) -> str:
    """Return what an error of vLLM says, cut where it repeats what it was given."""
    return (str(error) or type(error).__name__)[:_MAX_PROBLEM_CHARACTERS]


def refusal_of(sample: int, problem: str) -> Update:
    """Return the update of a completion that is refused."""
    return Update(
        sample=sample,
        tokens=[],
        logprobs=[],
        likeliest=[],
        finish_reason=None,
        num_cached_tokens=0,
        problem=problem,
    )
