"""Turns as tokens: what to append after a sampled turn so that the model reads its own template.

A rollout never tokenises again what was sampled. The text that follows a turn is its end, the
observation, and the start of the next turn. It is found by rendering the conversation with a
placeholder in place of the turn's words. That text alone is encoded and
appended. If the model emitted its end of turn, those tokens are dropped from the front of it; if it
was cut off, they stay, so the context is right in both cases.

That is sound only if the template leaves its history alone. So the real conversation is rendered
too, and must be the text so far, the turn's words, and the suffix. White space around the words may
differ (some templates trim), since the tokens of the turn are kept as sampled in any case. Anything
else is `TemplateRewritesHistoryError`, unless the caller chose what to do about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinsmith.rollouts.errors import ChatTemplateError, TemplateRewritesHistoryError
from tinsmith.rollouts.interfaces import ChatTokenizer, Message

_PLACEHOLDER = "TinsmithTurnPlaceholder"
STOP = "stop"


@dataclass(frozen=True, slots=True)
class Continuation:
    """What follows a turn."""

    tokens: tuple[int, ...]
    """To append to the context; the whole new context if it starts a new sample."""
    starts_sample: bool = False
    """Whether the tokens replace the context, because the template rewrote its history."""


class Conversation:
    """A conversation and its rendering, growing by one turn and one observation at a time.

    Args:
        tokenizer: Renders and encodes.
        split_turns: Start a new sample where the template rewrites its history.
        append_only: Append where the template rewrites its history.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, *, split_turns: bool = False, append_only: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._split_turns = split_turns
        self._append_only = append_only
        self._messages: list[dict[str, str]] = []
        self._rendered = ""
        self._num_turns = 0
        self._emitted_ending = ""

    @property
    def messages(self) -> tuple[Mapping[str, str], ...]:
        """The conversation as messages; the model's turns as decoded text."""
        return tuple(self._messages)

    def begin(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the context of the first turn.

        Raises:
            ChatTemplateError: If the template cannot render the messages.
        """
        self._messages = [_copy(message) for message in messages]
        self._rendered = self._render(self._messages)
        return self._encode(self._rendered)

    def add_turn(self, tokens: Sequence[int], stop_reason: str) -> str:
        """Append the model's turn and return its text without the end of turn."""
        text_tokens = list(tokens)
        self._emitted_ending = ""
        ending = self._turn_ending()
        index = _find_end(tokens, stop_reason, ending, self._tokenizer)
        if index is not None:
            text_tokens = text_tokens[:-1]
            self._emitted_ending = self._tokenizer.decode(ending[: index + 1])
        text = self._tokenizer.decode(text_tokens) if text_tokens else ""
        self._messages.append({"role": "assistant", "content": text})
        self._num_turns += 1
        return text

    def add_observation(self, messages: Sequence[Message]) -> Continuation:
        """Append what the environment showed and return the tokens that follow the turn.

        Raises:
            TemplateRewritesHistoryError: If the template does, and nothing was chosen for it.
            ChatTemplateError: If the template cannot render the conversation.
        """
        turn = self._messages[-1]["content"]
        before = self._messages[:-1]
        after = [_copy(message) for message in messages]
        suffix = self._text_behind_turn(before, after)
        self._messages.extend(after)
        rendered = self._render(self._messages)
        position = _first_difference(rendered, self._rendered, turn, suffix)
        self._rendered = rendered
        if position is not None and not self._append_only:
            if not self._split_turns:
                raise TemplateRewritesHistoryError(self._num_turns, position)
            return Continuation(self._encode(rendered), starts_sample=True)
        return Continuation(self._encode(suffix.removeprefix(self._emitted_ending)))

    def _turn_ending(self) -> tuple[int, ...]:
        """Return the tokens with which the template ends an assistant's turn."""
        placeholder = _unused(_PLACEHOLDER, self._messages)
        turn = {"role": "assistant", "content": placeholder}
        text = self._render([*self._messages, turn], add_generation_prompt=False)
        _, found, ending = text.rpartition(placeholder)
        if not found:
            raise ChatTemplateError("the chat template drops the assistant's words")
        return self._encode(ending)

    def _text_behind_turn(
        self, before: Sequence[dict[str, str]], after: Sequence[dict[str, str]]
    ) -> str:
        placeholder = _unused(_PLACEHOLDER, [*before, *after])
        turn = {"role": "assistant", "content": placeholder}
        text = self._render([*before, turn, *after])
        _, found, behind = text.rpartition(placeholder)
        if not found:
            raise ChatTemplateError("the chat template drops the assistant's words")
        return behind

    def _render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        try:
            return self._tokenizer.render_chat_template(
                messages, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ChatTemplateError(
                f"the chat template cannot render a conversation of the roles {roles}: {error}"
            ) from error

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def _find_end(
    tokens: Sequence[int], stop_reason: str, ending: Sequence[int], tokenizer: ChatTokenizer
) -> int | None:
    """Return where in the ending of a turn the last sampled token stands; None if nowhere.

    A turn that was cut off may by chance end in a token that the ending has too, such as a line
    break; only a token of visible text counts there, which is the end-of-turn token.
    """
    if not tokens or tokens[-1] not in ending:
        return None
    if stop_reason != STOP and not tokenizer.decode([tokens[-1]]).strip():
        return None
    return list(ending).index(tokens[-1])


def _first_difference(rendered: str, so_far: str, turn: str, suffix: str) -> int | None:
    """Return where a rendering leaves `so_far + turn + suffix`; None if it does not."""
    if not rendered.startswith(so_far):
        pairs = enumerate(zip(rendered, so_far, strict=False))
        return next((i for i, (left, right) in pairs if left != right), len(rendered))
    if not rendered.endswith(suffix) or len(rendered) < len(so_far) + len(suffix):
        return len(so_far)
    words = rendered[len(so_far) : len(rendered) - len(suffix)]
    return None if words.strip() == turn.strip() else len(so_far)


def _unused(word: str, messages: Sequence[Mapping[str, str]]) -> str:
    """Return a word that no message holds."""
    while any(word in message["content"] for message in messages):
        word += "X"
    return word


def _copy(message: Message) -> dict[str, str]:
    return {"role": message["role"], "content": message["content"]}
