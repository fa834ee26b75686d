"""What one sample says: text, calls of tools, log-probabilities; whole or piece by piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tinsmith.text.tool_notations import Piece, ToolCall, ToolCallParser
from tinsmith_gateway.openai.codec import Sampled, Top
from tinsmith_gateway.tokenizing.model_tokenizer import ChatTokenizer
from tinsmith_runtime.text.detokenizer import IncrementalDetokenizer, StopFilter

# JSON has no infinity; OpenAI shows this for what is out of the question.
_LOWEST_LOGPROB = -9999.0


class Answer:
    """Turns the tokens of one sample into what a client reads.

    Args:
        tokenizer: Of the model.
        stops: Stop strings; the text ends before the first.
        min_tokens: Before the sample has as many tokens, no stop string ends its text.
        skip_special: Whether special tokens are left out of the text.
        kept_tokens: Special tokens that are not.
        parser: Finds calls of tools; None if there are no tools.
        read_cut: Finds them in an answer that had to be calls and ended at its limit, None if it
            did not have to.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        stops: Sequence[str],
        min_tokens: int = 0,
        skip_special: bool = True,
        kept_tokens: Sequence[str] = (),
        parser: ToolCallParser | None = None,
        read_cut: Callable[[str], list[ToolCall]] | None = None,
    ) -> None:
        decode = tokenizer.decoder(skip_special=skip_special, kept=kept_tokens)
        self._detokenizer = IncrementalDetokenizer(decode)
        self._filter = StopFilter(stops)
        self._min_tokens = min_tokens
        self._parser = parser
        self._read_cut = read_cut
        self._has_calls = False
        self._is_cut = False
        self.sampled = Sampled()
        """Everything so far, exactly."""

    def push(self, piece: Sampled) -> list[Piece]:
        """Return what may leave now; everything once the piece is the last."""
        num_free = max(self._min_tokens - len(self.sampled.tokens), 0)
        self.sampled.extend(piece)
        text = self._detokenizer.push(piece.tokens[:num_free]) if num_free else ""
        text += self._filter.push(self._detokenizer.push(piece.tokens[num_free:]))
        if piece.stop_reason:
            text += self._filter.push(self._detokenizer.finish()) + self._filter.finish()
        if self._parser is None:
            return [text] if text else []
        pieces = self._parser.push(text) if text else []
        if piece.stop_reason:
            pieces += self._finish(self._parser)
        self._has_calls = self._has_calls or any(not isinstance(one, str) for one in pieces)
        return pieces

    def _finish(self, parser: ToolCallParser) -> list[Piece]:
        """Return what is left; what is cut of a call that had to be is its arguments so far."""
        left = parser.finish()
        self._is_cut = self._read_cut is not None and self.sampled.stop_reason == "length"
        if self._read_cut is None or not self._is_cut:
            return left
        text = "".join(one for one in left if isinstance(one, str))
        cut = self._read_cut(text)
        return [*(one for one in left if not isinstance(one, str)), *cut] if cut else left

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None if none did."""
        return self._filter.stopped_by

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's word for why the sample ended; None while it goes on."""
        if not self.sampled.stop_reason:
            return None
        if self._has_calls and not self._is_cut:
            return "tool_calls"
        return "stop" if self._filter.is_stopped else self.sampled.stop_reason


def chat_logprobs(piece: Sampled, tokenizer: ChatTokenizer, *, num_top: int) -> dict[str, Any]:
    """Return the log-probabilities of a chat completion: one entry for every sampled token."""
    tops = piece.top or [[] for _ in piece.tokens]
    content = []
    for token, logprob, top in zip(piece.tokens, piece.logprobs, tops, strict=True):
        alternatives = [_chat_entry(other, value, tokenizer) for other, value in top[:num_top]]
        content.append({**_chat_entry(token, logprob, tokenizer), "top_logprobs": alternatives})
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    tops: Sequence[Top],
    tokenizer: ChatTokenizer,
    *,
    offsets: list[int],
    num_top: int,
) -> dict[str, Any]:
    """Return the log-probabilities of a completion.

    Args:
        tokens: Token ids.
        logprobs: Of the tokens; NaN for the first of a prompt, which nothing precedes.
        tops: The most probable tokens at each; empty for none.
        tokenizer: Of the model.
        offsets: Where each token begins in the text of the choice.
        num_top: How many of the most probable are told.
    """
    return {
        "tokens": [tokenizer.text_of(token) for token in tokens],
        "token_logprobs": [_finite(value) for value in logprobs],
        "top_logprobs": (
            [_top_mapping(top[:num_top], tokenizer) for top in tops] if num_top else None
        ),
        "text_offset": offsets,
    }


def _chat_entry(token: int, logprob: float, tokenizer: ChatTokenizer) -> dict[str, Any]:
    content = tokenizer.bytes_of(token)
    return {
        "token": tokenizer.text_of(token),
        "logprob": _finite(logprob),
        "bytes": None if content is None else list(content),
    }


def _top_mapping(top: Top, tokenizer: ChatTokenizer) -> dict[str, float | None] | None:
    return {tokenizer.text_of(token): _finite(value) for token, value in top} or None


def _finite(logprob: float) -> float | None:
    if math.isnan(logprob):
        return None
    return max(logprob, _LOWEST_LOGPROB)
