"""The compiler of forms, the same in the confined process that tries them and in the sampler.

Its work, the states of its automaton and the work for one mask are bounded by llguidance. These
bounds do not count all of its work, so what a stranger sends is first compiled where it may end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import llguidance
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from tinsmith_sampler.forms.schema_bounds import check_multiples
from tinsmith_sampler.forms.structural_tags import to_lark

_MESSAGE_CHARACTERS = 300
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
        step_lexer_fuel=20_000,
        step_max_items=50_000,
        max_lexer_states=8_000,
        max_grammar_size=200_000,
    )


class FormCompiler:
    """Compiles forms for one base model.

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

    def load(self) -> llguidance.LLTokenizer:
        """Return the tokenizer; reading it takes seconds where the vocabulary is large.

        Raises:
            ValueError: If the model has none that forms can be compiled for.
        """
        if self._tokenizer is None:
            self._tokenizer = self._load()
        return self._tokenizer

    def compile(self, kind: str, source: str) -> llguidance.LLMatcher:
        """Return a form at its beginning.

        Raises:
            ValueError: If it is no such form, or takes too much to follow.
        """
        tokenizer = self.load()
        try:
            grammar = self._grammar_of(kind, source)
        except ValueError as error:
            raise ValueError(f"is no {kind}: {error}"[:_MESSAGE_CHARACTERS]) from error
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())
        if not matcher.is_error():
            # What the first mask costs is known before a sample begins.
            fill_next_token_bitmask(matcher, allocate_token_bitmask(1, self._vocab_size), 0)
        if matcher.is_error():
            problem = matcher.get_error().strip().split("\n")[0]
            raise ValueError(f"cannot be followed: {problem}"[:_MESSAGE_CHARACTERS])
        return matcher

    def _grammar_of(self, kind: str, source: str) -> str:
        if kind == "json_schema":
            check_multiples(source)
            return llguidance.LLMatcher.grammar_from_json_schema(source, overrides=_OPTIONS)
        if kind == "regex":
            return llguidance.LLMatcher.grammar_from_regex(source)
        lark = to_lark(source, special_tokens=self._special_tokens, json_options=dict(_OPTIONS))
        return llguidance.LLMatcher.grammar_from_lark(lark)

    def _load(self) -> llguidance.LLTokenizer:
        if not self._file.is_file() or not self._end_tokens:
            raise ValueError("needs a model that has a fast tokenizer and a token that ends a turn")
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
