"""A tokenizer whose files a stranger wrote, in a process of its own.

Templates are programs, and the files of a tokenizer hold regular expressions: both may take any
time and memory. Each tokenizer has one process and one thread that waits for it, so that it delays
its own callers alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tinsmith_runtime.confined.process import (
    ConfinedProcess,
    ConfinedProcesses,
    NotBegunError,
    RefusedByWorkError,
    WorkEndedError,
)
from tinsmith_runtime.errors import FailedPreconditionError, RateLimitedError

ResultT = TypeVar("ResultT")

MAX_TEMPLATE_BYTES = 2**20
"""Largest chat template of a job's own model."""
MAX_CONFINED_WORK = 256
"""Pieces of work that wait for one confined tokenizer."""
_WORKER = "tinsmith_gateway.tokenizing.tokenizer_worker"


class ConfinedTokenizer:
    """A `ChatTokenizer` in a process of its own. Its methods block but for `aside` and `quickly`.

    Args:
        files: As `GetTokenizer` delivers them.
        processes: Bounds the number of processes.

    Raises:
        FailedPreconditionError: If the files are no tokenizer, or take too much time or memory.
        RateLimitedError: If too many processes are at work.
    """

    def __init__(self, files: Mapping[str, bytes], processes: ConfinedProcesses) -> None:
        try:
            texts = {name: content.decode() for name, content in files.items()}
        except UnicodeDecodeError as error:
            raise FailedPreconditionError(
                "the tokenizer of this model is no text; use the native API"
            ) from error
        self._process = ConfinedProcess(_WORKER, {"files": texts}, processes, work="tokenizer")
        self._executor = ThreadPoolExecutor(1, "confined-tokenizer")
        self._num_waiting = 0
        try:
            about = self._call("about")
            templates = [about["chat_template"], about["tool_template"]]
            image_token = about["image_token"]
            if any(len(template or "") > MAX_TEMPLATE_BYTES for template in templates):
                raise FailedPreconditionError(
                    f"the chat template of this model is larger than {MAX_TEMPLATE_BYTES} bytes"
                )
        except BaseException:
            self.close()
            raise
        self.chat_template, self.tool_template = (
            None if template is None else str(template) for template in templates
        )
        self.image_token: int | None = None if image_token is None else int(image_token)

    def close(self) -> None:
        """End the process; a request that still comes begins a new one."""
        self._process.close()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """See `ChatTokenizer`."""
        found = self._call("encode", text=text, add_special_tokens=add_special_tokens)
        return [int(token) for token in found]

    def decode(self, tokens: Sequence[int]) -> str:
        """See `ChatTokenizer`."""
        return self.decoder(skip_special=False)(tokens)

    def render_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        **variables: Any,
    ) -> str:
        """See `ChatTokenizer`."""
        return str(
            self._call(
                "render",
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                variables=variables,
            )
        )

    def decoder(self, *, skip_special: bool, kept: Collection[str] = ()) -> Callable[..., str]:
        """See `ChatTokenizer`."""

        def decode(tokens: Sequence[int]) -> str:
            return str(
                self._call(
                    "decode",
                    tokens=[int(token) for token in tokens],
                    skip_special=skip_special,
                    kept=sorted(kept),
                )
            )

        return decode

    def bytes_of(self, token: int) -> bytes | None:
        """See `ChatTokenizer`."""
        content = self._call("bytes_of", token=int(token))
        return None if content is None else bytes.fromhex(content)

    def text_of(self, token: int) -> str:
        """See `ChatTokenizer`."""
        return str(self._call("text_of", token=int(token)))

    async def aside(self, work: Callable[..., ResultT], *args: Any) -> ResultT:
        """See `ChatTokenizer`: in the one thread that waits for this tokenizer.

        Raises:
            RateLimitedError: If too much waits for it already.
        """
        if self._num_waiting >= MAX_CONFINED_WORK:
            raise RateLimitedError(
                "too many requests wait for the tokenizer of this model; send it again later",
                what="work of a tokenizer",
                limit=MAX_CONFINED_WORK,
            )
        self._num_waiting += 1
        done = self._executor.submit(work, *args)
        try:
            return await asyncio.wrap_future(done)
        finally:
            self._num_waiting -= 1

    async def quickly(self, work: Callable[..., ResultT], *args: Any) -> ResultT:
        """See `ChatTokenizer`: nothing of a stranger's is quick."""
        return await self.aside(work, *args)

    def _call(self, method: str, **fields: Any) -> Any:
        try:
            return self._process.call({"method": method, **fields})
        except RefusedByWorkError as error:
            raise FailedPreconditionError(str(error)) from error
        except NotBegunError as error:
            # It begins by reading the files of the model.
            raise FailedPreconditionError(
                f"the tokenizer of this model cannot be read: {error}; mend its files"
            ) from error
        except WorkEndedError as error:
            raise FailedPreconditionError(
                f"the tokenizer of this model {error}; mend its template or its files"
            ) from error
