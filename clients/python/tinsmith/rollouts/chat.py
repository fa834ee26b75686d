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

A turn that calls tools stays in the conversation as the model wrote it, calls included: written
again from their parsed form they might read otherwise. An image is one token of the rendered text,
in whose place stand as many placeholders as the model reads for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.images import ImageRules
from tinsmith.rollouts.errors import ChatTemplateError, TemplateRewritesHistoryError
from tinsmith.rollouts.interfaces import ChatTokenizer, Message
from tinsmith.rollouts.observations import (
    ChatObservation,
    TokenPiece,
    check_images,
    place_among_tokens,
    shape,
)
from tinsmith.types import ImageChunk

_PLACEHOLDER = "TinsmithTurnPlaceholder"
STOP = "stop"


@dataclass(frozen=True, slots=True)
class Continuation(TokenPiece):
    """What follows a turn."""

    starts_sample: bool = False
    """Whether the tokens replace the context, because the template rewrote its history."""


class Conversation:
    """A conversation and its rendering, growing by one turn and one observation at a time.

    Args:
        tokenizer: Renders and encodes.
        split_turns: Start a new sample where the template rewrites its history.
        append_only: Append where the template rewrites its history.
        images: How the model turns images into tokens; None if it reads none.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        split_turns: bool = False,
        append_only: bool = False,
        images: ImageRules | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._split_turns = split_turns
        self._append_only = append_only
        self._image_rules = images
        self._messages: list[dict[str, Any]] = []
        self._images: list[ImageChunk] = []
        self._tools: list[Mapping[str, Any]] | None = None
        self._rendered = ""
        self._num_turns = 0
        self._emitted_ending = ""

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """The conversation as messages; the model's turns as decoded text."""
        return tuple(self._messages)

    def begin(
        self,
        messages: Sequence[Message],
        *,
        images: Sequence[ImageChunk] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> TokenPiece:
        """Return the context of the first turn.

        Args:
            messages: The first observation.
            images: Of its messages, in the order of their places.
            tools: Schemas of the tools that the model is told of.

        Raises:
            ObservationError: If the observation is none.
            ChatTemplateError: If the template cannot render it.
        """
        first = self._shape(messages, images)
        self._messages, self._images = list(first.messages), list(first.images)
        self._tools = list(tools) or None
        self._rendered = self._render(self._messages)
        return self._encode(self._rendered, self._images)

    def add_turn(self, tokens: Sequence[int], stop_reason: str, *, has_stops: bool = False) -> str:
        """Append the model's turn and return its text without the end of turn.

        Args:
            tokens: What was sampled.
            stop_reason: Why it ended, `stop` or `length`.
            has_stops: Whether more than the model's end of turn could end it.
        """
        text_tokens = list(tokens)
        self._emitted_ending = ""
        ending = self.turn_ending()
        index = _find_end(tokens, stop_reason, ending, self._tokenizer, has_stops=has_stops)
        if index is not None:
            text_tokens = text_tokens[:-1]
            self._emitted_ending = self._tokenizer.decode(ending[: index + 1])
        if self._image_rules is not None:
            # A placeholder that the model wrote is no image, and its text must not count as one.
            place = self._tokenizer.image_token_id
            text_tokens = [token for token in text_tokens if token != place]
        text = self._tokenizer.decode(text_tokens) if text_tokens else ""
        self._messages.append({"role": "assistant", "content": text})
        self._num_turns += 1
        return text

    def add_observation(
        self, messages: Sequence[Message], *, images: Sequence[ImageChunk] = ()
    ) -> Continuation:
        """Append what the environment showed and return the tokens that follow the turn.

        Raises:
            ObservationError: If the observation is none.
            TemplateRewritesHistoryError: If the template does, and nothing was chosen for it.
            ChatTemplateError: If the template cannot render the conversation.
        """
        turn = self._messages[-1]["content"]
        before = self._messages[:-1]
        after = self._shape(messages, images)
        suffix = self._text_behind_turn(before, after.messages)
        self._messages.extend(after.messages)
        self._images.extend(after.images)
        rendered = self._render(self._messages)
        position = _first_difference(rendered, self._rendered, turn, suffix)
        self._rendered = rendered
        if position is not None and not self._append_only:
            if not self._split_turns:
                raise TemplateRewritesHistoryError(self._num_turns, position)
            whole = self._encode(rendered, self._images)
            return Continuation(whole.tokens, whole.images, starts_sample=True)
        piece = self._encode(suffix.removeprefix(self._emitted_ending), after.images)
        return Continuation(piece.tokens, piece.images)

    @property
    def may_be_refused(self) -> bool:
        """Whether a sampler may refuse what was shown: it alone decodes pictures."""
        return bool(self._images)

    def turn_ending(self) -> tuple[int, ...]:
        """Return the tokens with which the template ends a turn of the model.

        Raises:
            ChatTemplateError: If the template drops the model's words.
        """
        placeholder = _unused(_PLACEHOLDER, self._messages)
        turn = {"role": "assistant", "content": placeholder}
        text = self._render([*self._messages, turn], add_generation_prompt=False)
        _, found, ending = text.rpartition(placeholder)
        if not found:
            raise ChatTemplateError("the chat template drops the assistant's words")
        return tuple(self._tokenizer.encode(ending, add_special_tokens=False))

    def _shape(self, messages: Sequence[Message], images: Sequence[ImageChunk]) -> ChatObservation:
        if images and (self._image_rules is None or self._tokenizer.image_token_id is None):
            raise ChatTemplateError(
                "the environment shows an image, and the model reads none as far as this rollout "
                "knows; give the model's `images` rules, as Client.list_models() tells them"
            )
        shown = shape(messages, images, self._tokenizer)
        check_images([*self._images, *shown.images])
        return shown

    def _text_behind_turn(
        self, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
    ) -> str:
        placeholder = _unused(_PLACEHOLDER, [*before, *after])
        turn = {"role": "assistant", "content": placeholder}
        text = self._render([*before, turn, *after])
        _, found, behind = text.rpartition(placeholder)
        if not found:
            raise ChatTemplateError("the chat template drops the assistant's words")
        return behind

    def _render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        given = {} if self._tools is None else {"tools": self._tools}
        try:
            return self._tokenizer.render_chat_template(
                messages, add_generation_prompt=add_generation_prompt, **given
            )
        except Exception as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ChatTemplateError(
                f"the chat template cannot render a conversation of the roles {roles}: {error}"
            ) from error

    def _encode(self, text: str, images: Sequence[ImageChunk]) -> TokenPiece:
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        if self._image_rules is None:
            return TokenPiece(tuple(tokens))
        place = self._tokenizer.image_token_id
        return place_among_tokens(tokens, place, images, self._image_rules)


def _find_end(
    tokens: Sequence[int],
    stop_reason: str,
    ending: Sequence[int],
    tokenizer: ChatTokenizer,
    *,
    has_stops: bool,
) -> int | None:
    """Return where in the ending of a turn the last sampled token stands; None if nowhere.

    A turn that was cut off may by chance end in a token that the ending has too, such as a line
    break; only a token of visible text counts there, which is the end-of-turn token. So it is where
    a stop of one's own may be that line break, unless the ending begins with it; and a stop that
    stands in the ending behind visible text is no end of turn.
    """
    if not tokens or tokens[-1] not in ending:
        return None
    index = list(ending).index(tokens[-1])
    if has_stops and tokenizer.decode(ending[:index]).strip():
        return None
    is_certain = stop_reason == STOP and not (has_stops and index)
    if not is_certain and not tokenizer.decode([tokens[-1]]).strip():
        return None
    return index


def _first_difference(rendered: str, so_far: str, turn: str, suffix: str) -> int | None:
    """Return where a rendering leaves `so_far + turn + suffix`; None if it does not."""
    if not rendered.startswith(so_far):
        pairs = enumerate(zip(rendered, so_far, strict=False))
        return next((i for i, (left, right) in pairs if left != right), len(rendered))
    if not rendered.endswith(suffix) or len(rendered) < len(so_far) + len(suffix):
        return len(so_far)
    words = rendered[len(so_far) : len(rendered) - len(suffix)]
    return None if words.strip() == turn.strip() else len(so_far)


def _unused(word: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a word that no message holds."""
    while any(word in str(message["content"]) for message in messages):
        word += "X"
    return word
