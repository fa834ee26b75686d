"""What a caller asks a sampler for, and what it gets.

Log-probabilities are those of the unmodified model distribution: temperature 1, no top-k, no top-p,
no penalty. They are what a trainer recomputes, so that a ratio of the two measures a change of
weights and nothing else. Everything here can be built and checked without torch.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

from tinsmith_engine.base.types import FloatArray, ImageInput, IntArray, ModelInfo, WeightVersion
from tinsmith_engine.packing.images import place_images
from tinsmith_runtime.errors import (
    EmptyBatchError,
    InvalidFieldError,
    NotFiniteInputError,
    SequenceTooLongError,
    ShapeMismatchError,
    TokenOutOfVocabularyError,
)
from tinsmith_runtime.text.penalties import NEUTRAL, Shaping
from tinsmith_runtime.text.stop_strings import check_stop_strings

if TYPE_CHECKING:
    from tinsmith_engine.sampling.request.output_constraint import OutputConstraint

DecodeText = Callable[[Sequence[int]], str]

MAX_OUTPUT_FORMAT_BYTES = 2**16
"""Source of a form that answers keep."""
UNLIMITED_TOKENS = 2**31 - 1
"""A completion ends where the context, or the cache, is full."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A form that answers keep."""

    kind: Literal["json_schema", "regex", "structural_tag"]
    source: str

    @property
    def num_bytes(self) -> int:
        """Length of its source."""
        return len(self.source.encode())


@dataclass(slots=True)
class Timeline:
    """When a request got on, in seconds since the epoch; None until then."""

    begin_s: float | None = None
    """The first part of its prompt began to be read, or the prompt was known."""
    read_s: float | None = None
    """The prompt was read, and the first token drawn from."""

    def note_begin(self) -> None:
        """Note that the request waits no longer."""
        if self.begin_s is None:
            self.begin_s = time.time()

    def note_read(self) -> None:
        """Note that the prompt was read."""
        self.note_begin()
        if self.read_s is None:
            self.read_s = time.time()


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """Completions of one prompt under one immutable version of weights.

    The same request gives the same tokens whatever else is being sampled: each sample draws from a
    stream made of `seed` and its index alone. Only a request that follows its run may be given
    other weights between two tokens (`Sampler.update`).
    """

    prompt_tokens: Sequence[int]
    max_tokens: int
    """Longest completion; 0 only scores the prompt."""
    weights: WeightVersion | None = None
    """None means the base model."""
    num_samples: int = 1
    temperature: float = 1.0
    """0 means the likeliest token."""
    top_k: int = -1
    """Sample among the k likeliest tokens; 0 or less means all."""
    top_p: float = 1.0
    """Sample among the fewest likeliest tokens whose probability reaches p; 1 means all."""
    min_p: float = 0.0
    """Sample among tokens at least this fraction as probable as the likeliest; 0 means all."""
    shaping: Shaping = NEUTRAL
    """Penalties and biases, before all of these."""
    output_format: OutputFormat | None = None
    """What the text of completions has to keep, as long as they are not cut."""
    constraint: OutputConstraint | None = None
    """The same, compiled by the engine's owner."""
    seed: int = 0
    stop_tokens: Sequence[int] = ()
    """Tokens that end a completion, of which they are the last."""
    min_tokens: int = 0
    """Before a completion has as many tokens nothing ends it but its limit."""
    stop_strings: Sequence[str] = ()
    """Texts that end a completion with the token that completes them; need `decode_text`."""
    decode_text: DecodeText | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    """How many likeliest tokens to report at each position of the prompt."""
    prompt_logprobs_last_n: int | None = None
    """Score (and list likeliest tokens of) only this many tokens at the end of the prompt."""
    target_prompt_tokens: IntArray | None = None
    """Tokens to score at each position of the prompt after the first, int64 [T - 1, K]; -1 for
    none."""
    num_prompt_alternatives: int = 0
    """How many tokens to draw at each position of the prompt after the first, with replacement, at
    `temperature` alone."""
    topk_sample_logprobs: int = 0
    """How many likeliest tokens to report at each sampled token."""
    follows_run: bool = False
    """Whether newer weights of the run may take effect between tokens."""
    cache_scope: str = ""
    """Requests share what is known of a prompt only within a scope, such as a project."""
    images: Sequence[ImageInput] = ()
    """Of the prompt, in the order of their places; `prompt_tokens` holds their placeholders once
    they are placed."""
    timeline: Timeline | None = None
    """Is told when the request got on, if that is wanted."""


@dataclass(frozen=True, slots=True)
class PromptAlternatives:
    """Tokens that might have stood in a prompt; row i is about position i + 1."""

    tokens: IntArray
    """int64 [T - 1, k]."""
    logprobs: FloatArray
    """Unmodified distribution, float32 [T - 1, k]."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Scores of a prompt; entry i is about token i given those before it, the first has none."""

    logprobs: list[float | None]
    """Empty unless `prompt_logprobs` was asked for; None where nothing was scored."""
    topk: list[list[tuple[int, float]] | None]
    """Token ids and log-probabilities, likeliest first; empty unless asked for."""
    targets: FloatArray | None = None
    """Of `target_prompt_tokens`, float32 [T - 1, K], 0 where none was asked for."""
    alternatives: PromptAlternatives | None = None


class SampledToken(NamedTuple):
    """One token as it was drawn."""

    token: int
    logprob: float
    version: int
    """Of the weights that produced it."""
    topk: list[tuple[int, float]]
    """The likeliest tokens in its place; empty unless asked for."""


class TokenListener(Protocol):
    """Is told of a request while it is sampled, on the sampler's thread."""

    def begin(self, prompt: PromptLogprobs | None, num_cached_tokens: int, version: int) -> None:
        """Note that the prompt was read, before any token."""

    def token(self, sample_index: int, token: SampledToken) -> None:
        """Note the next token of a sample."""

    def end(self, sample_index: int, reason: str) -> None:
        """Note why a sample ended, after its last token."""


@dataclass(slots=True)
class SampledSequence:
    """One completion, finished or so far."""

    request_id: int
    sample_index: int
    tokens: list[int]
    logprobs: FloatArray
    """Natural log, unmodified distribution, float32, one for each token."""
    versions: list[int]
    """Weight version that produced each token."""
    finish_reason: str | None
    """`stop`, `length` (also: the context is full), `error` (the model gave no finite
    distribution), or None while it grows."""
    prompt: PromptLogprobs | None = None
    topk: list[list[tuple[int, float]]] | None = None
    """For each token the likeliest ones in its place; None unless asked for."""
    num_cached_prompt_tokens: int = 0
    """Prompt tokens that were not computed, because an earlier request had them."""


def place_prompt(request: SampleRequest, info: ModelInfo, field: str) -> SampleRequest:
    """Return a request with its images opened and their placeholders among the prompt's tokens.

    Raises:
        InvalidFieldError: The model reads no images, or an image cannot be read.
        SequenceTooLongError: The images exceed the context of the model.
    """
    if not request.images or request.images[0].pixels is not None:
        return request
    tokens_T = np.asarray(request.prompt_tokens, dtype=np.int64)
    tokens_T, images = place_images(tokens_T, request.images, info, field)
    return dataclasses.replace(request, prompt_tokens=tokens_T.tolist(), images=images)


def check_ranges(request: SampleRequest, *, params: str = "") -> None:
    """Raise the error that names the first field out of range, whatever the model.

    Args:
        request: The request.
        params: What stands before the names of fields that say how tokens are drawn.

    Raises:
        NotFiniteInputError: A number of how tokens are drawn is NaN or infinite.
        InvalidFieldError: A field is out of range.
    """
    for name, value in (
        ("temperature", request.temperature),
        ("top_p", request.top_p),
        ("min_p", request.min_p),
    ):
        if not math.isfinite(value):
            raise NotFiniteInputError(f"{params}{name}", f"must be finite, got {value}")
    last_n = request.prompt_logprobs_last_n
    for name, is_wrong, rule in (
        (f"{params}temperature", request.temperature < 0.0, "must be at least 0"),
        (f"{params}top_p", not 0.0 < request.top_p <= 1.0, "must be above 0 and at most 1"),
        (f"{params}min_p", not 0.0 <= request.min_p <= 1.0, "must be 0 to 1"),
        (f"{params}max_tokens", request.max_tokens < 0, "must not be negative"),
        (
            f"{params}min_tokens",
            not 0 <= request.min_tokens <= request.max_tokens,
            "must be 0 to max_tokens",
        ),
        (
            f"{params}min_tokens",
            request.min_tokens > 0 and request.output_format is not None,
            "excludes a form of the answer, which ends where it is whole",
        ),
        ("num_samples", request.num_samples < 1, "must be at least 1"),
        *(
            (name, getattr(request, name) < 0, "must not be negative")
            for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "num_prompt_alternatives")
        ),
        (
            "prompt_logprobs_last_n",
            last_n is not None and not request.prompt_logprobs,
            "needs prompt_logprobs",
        ),
    ):
        if is_wrong:
            raise InvalidFieldError(name, rule)
    request.shaping.check(params)
    form = request.output_format
    if form is not None and not 0 < form.num_bytes <= MAX_OUTPUT_FORMAT_BYTES:
        raise InvalidFieldError(
            f"{params}output_format.{form.kind}", f"must have 1 to {MAX_OUTPUT_FORMAT_BYTES} bytes"
        )
    check_stop_strings(request.stop_strings, f"{params}stop_strings")


def validate_sample_request(
    request: SampleRequest, info: ModelInfo, *, prompt_field: str = "prompt_tokens"
) -> None:
    """Raise the error that names the first fault of a request for a model.

    Args:
        request: The request, its images placed.
        info: The model.
        prompt_field: Where the prompt stood, for errors.

    Raises:
        EmptyBatchError: The prompt has no token.
        TokenOutOfVocabularyError: A token of the prompt or to be scored is not in the vocabulary.
        ShapeMismatchError: `target_prompt_tokens` do not have a row for each prompt position after
            the first.
        SequenceTooLongError: The prompt exceeds the context of the model.
        NotFiniteInputError: See `check_ranges`.
        InvalidFieldError: Another field is out of range.
    """
    prompt = request.prompt_tokens
    if len(prompt) == 0:
        raise EmptyBatchError(prompt_field, "holds no token")
    for position, token in enumerate(prompt):
        if not 0 <= token < info.vocab_size:
            raise TokenOutOfVocabularyError(
                prompt_field,
                f"holds token {token} at position {position}, the vocabulary has {info.vocab_size}",
                token=token,
                vocab_size=info.vocab_size,
            )
    if len(prompt) > info.max_context_tokens:
        raise SequenceTooLongError(
            f"the prompt holds {len(prompt)} tokens, over the model's limit of "
            f"{info.max_context_tokens}; send a shorter prompt",
            num_tokens=len(prompt),
            max_context_tokens=info.max_context_tokens,
        )
    check_ranges(request)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if getattr(request, name) > info.vocab_size:
            raise InvalidFieldError(name, f"must be 0 to {info.vocab_size}")
    for token in request.shaping.logit_bias:
        if not 0 <= token < info.vocab_size:
            raise TokenOutOfVocabularyError(
                "params.logit_bias",
                f"biases token {token}, the vocabulary has {info.vocab_size}",
                token=token,
                vocab_size=info.vocab_size,
            )
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not 1 <= last_n < len(prompt):
        raise InvalidFieldError(
            "prompt_logprobs_last_n",
            f"must be 1 to {len(prompt) - 1} for a prompt of {len(prompt)} tokens, got {last_n}",
        )
    if request.target_prompt_tokens is not None:
        check_target_tokens(request.target_prompt_tokens, len(prompt), info.vocab_size)
    if request.stop_strings and request.decode_text is None:
        raise InvalidFieldError(
            "stop_strings", "need a decoder of text, which this model was loaded without"
        )


def check_target_tokens(targets: IntArray, num_prompt_tokens: int, vocab_size: int) -> None:
    """Raise the error that names what is wrong with `target_prompt_tokens`.

    Raises:
        ShapeMismatchError: They are not [T - 1, K] for a prompt of T tokens.
        TokenOutOfVocabularyError: One is neither in the vocabulary nor -1.
    """
    field = "target_prompt_tokens"
    if targets.ndim != 2 or len(targets) != num_prompt_tokens - 1:
        raise ShapeMismatchError(
            field,
            f"must have shape [{num_prompt_tokens - 1}, K] for a prompt of {num_prompt_tokens} "
            f"tokens, got {list(targets.shape)}",
        )
    wrong = np.argwhere((targets < -1) | (targets >= vocab_size))
    if len(wrong):
        row, column = wrong[0].tolist()
        token = int(targets[row, column])
        raise TokenOutOfVocabularyError(
            field,
            f"holds token {token} at [{row}, {column}], the vocabulary has {vocab_size}; -1 stands "
            "for none",
            token=token,
            vocab_size=vocab_size,
        )
