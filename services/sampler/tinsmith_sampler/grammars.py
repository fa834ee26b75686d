"""Forms of answers as token masks: JSON schemas, regular expressions, tags; by llguidance.

A form is compiled once, aside of the engine, and kept; each sample follows a copy. What a caller
sends may be hostile. So its length is bounded, and the compiler's work, the states of its automaton
and the work for one mask. Forms are kept within a number and a size. Masks are computed on a thread
of their own while the model reads the token.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import llguidance
import numpy as np
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from tinsmith_engine.sampling.output_constraint import RowConstraint
from tinsmith_engine.sampling.sample_request import OutputFormat
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_sampler.schema_bounds import check_multiples
from tinsmith_sampler.structural_tags import to_lark

MAX_KEPT_GRAMMARS = 256
"""Compiled forms of a base model; those used longest ago go first."""
MAX_KEPT_GRAMMAR_BYTES = 2**22
"""Their sources together."""
_FIELD = "params.output_format"
_MESSAGE_CHARACTERS = 300
# A mask waits for nothing but itself: more threads would take the model's own.
_MASKS = ThreadPoolExecutor(1, thread_name_prefix="token-masks")
_COMPILER = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")
_OPTIONS: llguidance._lib.JsonCompileOptions = {
    # One space may follow a separator. Any more could go on for ever.
    "whitespace_flexible": False,
    "whitespace_pattern": " ?",
    "coerce_one_of": False,
    "lenient": False,
}


def _limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=8_000,
        max_grammar_size=200_000,
    )


class Grammar:
    """A compiled form.

    Args:
        matcher: At its beginning; never moved.
        vocab_size: Of the model.
        end_tokens: What ends an answer.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, vocab_size: int, end_tokens: frozenset[int]
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_tokens = end_tokens

    def begin(self) -> RowConstraint:
        """Return what follows a new sample."""
        return _Row(self._matcher.deep_copy(), self._vocab_size, self._end_tokens)


class _Row:
    def __init__(
        self, matcher: llguidance.LLMatcher, vocab_size: int, end_tokens: frozenset[int]
    ) -> None:
        self._matcher = matcher
        self._end_tokens = end_tokens
        self._words = allocate_token_bitmask(1, vocab_size)
        self._has_ended = False
        self._work: Future[bool] = _MASKS.submit(self._fill)

    def words(self) -> NDArray[np.int32] | None:
        return self._words[0] if self._work.result() else None

    def note(self, token: int) -> None:
        if token in self._end_tokens:
            self._has_ended = True
        else:
            self._work = _MASKS.submit(self._follow, token)

    def has_ended(self) -> bool:
        return self._has_ended

    def _follow(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token)) and self._fill()

    def _fill(self) -> bool:
        fill_next_token_bitmask(self._matcher, self._words, 0)
        # Without any token the vocabulary cannot spell what has to come.
        return not self._matcher.is_error() and bool(self._words.any())


class Grammars:
    """Compiled forms for one base model.

    Args:
        directory: Of the model, with its tokenizer.
        vocab_size: Of the model.
        end_tokens: What ends a turn of it.
    """

    def __init__(self, directory: Path, vocab_size: int, end_tokens: Sequence[int]) -> None:
        self._file = directory / "tokenizer.json"
        self._vocab_size = vocab_size
        self._end_tokens = list(end_tokens)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._special_tokens: dict[str, int] = {}
        self._kept: OrderedDict[OutputFormat, Grammar] = OrderedDict()
        self._num_bytes = 0

    async def get(self, form: OutputFormat) -> Grammar:
        """Return a form, compiled if it is not known.

        Raises:
            InvalidFieldError: If it is no such form, or takes too much to follow.
        """
        kept = self._kept.get(form)
        if kept is None:
            loop = asyncio.get_running_loop()
            kept = await loop.run_in_executor(_COMPILER, self._compile, form)
            if self._kept.setdefault(form, kept) is kept:
                self._num_bytes += form.num_bytes
            while self._kept and (
                len(self._kept) > MAX_KEPT_GRAMMARS or self._num_bytes > MAX_KEPT_GRAMMAR_BYTES
            ):
                dropped, _ = self._kept.popitem(last=False)
                self._num_bytes -= dropped.num_bytes
        else:
            self._kept.move_to_end(form)
        return kept

    def _compile(self, form: OutputFormat) -> Grammar:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        try:
            source = self._grammar_of(form)
        except ValueError as error:
            raise InvalidFieldError(
                _FIELD, f"is no {form.kind}: {error}"[:_MESSAGE_CHARACTERS]
            ) from error
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=_limits())
        if not matcher.is_error():
            # What the first mask costs is known before a sample begins.
            fill_next_token_bitmask(matcher, allocate_token_bitmask(1, self._vocab_size), 0)
        if matcher.is_error():
            problem = matcher.get_error().strip().split("\n")[0]
            raise InvalidFieldError(_FIELD, f"cannot be followed: {problem}"[:_MESSAGE_CHARACTERS])
        return Grammar(matcher, self._vocab_size, frozenset(self._end_tokens))

    def _grammar_of(self, form: OutputFormat) -> str:
        if form.kind == "json_schema":
            check_multiples(form.source)
            return llguidance.LLMatcher.grammar_from_json_schema(form.source, overrides=_OPTIONS)
        if form.kind == "regex":
            return llguidance.LLMatcher.grammar_from_regex(form.source)
        lark = to_lark(
            form.source, special_tokens=self._special_tokens, json_options=dict(_OPTIONS)
        )
        return llguidance.LLMatcher.grammar_from_lark(lark)

    def _load(self) -> llguidance.LLTokenizer:
        if not self._file.is_file() or not self._end_tokens:
            raise InvalidFieldError(
                _FIELD, "needs a model that has a fast tokenizer and a token that ends a turn"
            )
        tokenizer = json.loads(self._file.read_text())
        # A prompt is cut or padded nowhere here.
        tokenizer["truncation"] = tokenizer["padding"] = None
        loaded = llguidance.LLTokenizer(
            json.dumps(tokenizer), n_vocab=self._vocab_size, eos_token=self._end_tokens
        )
        # It takes more for special than the file does, such as Qwen's `<tool_call>`.
        self._special_tokens = {
            token["content"]: token["id"]
            for token in tokenizer.get("added_tokens", ())
            if loaded.is_special_token(token["id"])
        }
        return loaded
