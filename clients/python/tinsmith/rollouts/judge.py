"""A model that judges what another one answered.

It reads the conversation, the answer and, where there is one, a reference in one message. A grammar
lets it write a whole number from 0 to 10 and nothing else, so whatever model it is, it says a
score. It is drawn greedily: the same answer gets the same score. Judging one answer by itself is
"single answer grading" of Zheng et al. 2023 (https://arxiv.org/abs/2306.05685), which lists what
such judges get wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.rollouts.chat import Conversation
from tinsmith.rollouts.errors import SamplerFailedError
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.types import ModelInput, SamplingParams

HIGHEST = 10
INSTRUCTION = "Judge how well the answer does what was asked for."

_PARAMS = SamplingParams(temperature=0.0, seed=0, max_tokens=8, regex=f"{HIGHEST}|[0-9]")
_NUMBER = re.compile(rf"({HIGHEST}|[0-9])(?![0-9])")
"""What the text begins with; behind it stands an end of turn of whatever kind."""
_QUESTION = f"Your judgement, a whole number from 0 (worst) to {HIGHEST} (best):"


class Judge:
    """Scores answers with a model.

    Args:
        sampler: Of the model.
        instruction: What a good answer is.
        timeout_s: What one judgement may take.

    Example:
        >>> judge = Judge(client.create_sampler(base_model="tiny"), instruction="Be brief.")
        >>> judge.score([{"role": "user", "content": "1 + 1?"}], "2")
    """

    def __init__(
        self, sampler: Sampler, *, instruction: str = INSTRUCTION, timeout_s: float = 60.0
    ) -> None:
        self._sampler = sampler
        self._tokenizer = sampler.get_tokenizer()
        self._instruction = instruction
        self._timeout_s = timeout_s

    def score(
        self, messages: Sequence[Mapping[str, Any]], answer: str, *, reference: str = ""
    ) -> float:
        """Return the judgement of an answer, from 0 to 1.

        Args:
            messages: What was said before it, with `role` and `content` each.
            answer: What is judged.
            reference: An answer that is right; empty if none is known.

        Raises:
            TypeError: If the content of a message is no text.
            TinsmithError: If the model cannot be asked; what is judged may be longer than it reads.
            ChatTemplateError: If its chat template cannot render the message.
            SamplerFailedError: If an engine wrote something else all the same.
        """
        asked = Conversation(self._tokenizer).begin(
            [{"role": "user", "content": self._ask(messages, answer, reference)}]
        )
        response = self._sampler.sample(
            ModelInput.from_ints(list(asked.tokens)), sampling_params=_PARAMS
        )
        [said] = response.result(self._timeout_s).sequences
        text = self._tokenizer.decode(said.tokens)
        number = _NUMBER.match(text)
        if number is None:
            raise SamplerFailedError(f"the judge wrote {text!r}, which is no judgement")
        return int(number[0]) / HIGHEST

    def _ask(self, messages: Sequence[Mapping[str, Any]], answer: str, reference: str) -> str:
        for message in messages:
            if not isinstance(message["content"], str):
                raise TypeError(
                    f"a judge reads texts, and a message has {message['content']!r:.80}"
                )
        said = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
        parts = [self._instruction, f"<conversation>\n{self._as_text(said)}\n</conversation>"]
        if reference:
            parts.append(f"<reference>\n{self._as_text(reference)}\n</reference>")
        parts += [f"<answer>\n{self._as_text(answer)}\n</answer>", _QUESTION]
        return "\n\n".join(parts)

    def _as_text(self, text: str) -> str:
        """Return a text without special tokens, by which an answer could speak for others."""
        while True:
            tokens = self._tokenizer.encode(text, add_special_tokens=False)
            plain = self._tokenizer.decode(tokens, skip_special_tokens=True)
            if plain == self._tokenizer.decode(tokens):
                return text
            # What is left may be a special token again.
            text = plain
