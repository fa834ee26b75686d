"""Forms of answers as token masks: JSON schemas, regular expressions, tags; by llguidance.

A form is compiled once, aside of the engine, and kept; each sample follows a copy. What a caller
sends may be hostile. So its length is bounded, and a confined process tries it first: one that
takes too long, or too much memory, is refused there. Projects take turns at it. Forms are kept
within a number and a size. Masks are computed beside the engine, while the model reads the token
(`mask_queue.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import llguidance
import numpy as np
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from tinsmith_engine.sampling.request.output_constraint import RowConstraint
from tinsmith_engine.sampling.request.sample_request import OutputFormat
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_sampler.forms.compiler import FormCompiler
from tinsmith_sampler.forms.mask_queue import MaskQueue
from tinsmith_sampler.forms.trials import MAX_TRIED, FormTrials

MAX_KEPT_GRAMMARS = 256
"""Compiled forms of a base model; beyond it the oldest goes of the project that has most."""
MAX_KEPT_GRAMMAR_BYTES = 2**22
"""Their sources together."""
_FIELD = "params.output_format"
_MASKS = MaskQueue()
_COMPILER = ThreadPoolExecutor(MAX_TRIED, thread_name_prefix="grammar-compiler")


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

    def begin(self, project: str) -> RowConstraint:
        """Return what follows a new sample of a project."""
        return _Row(self._matcher.deep_copy(), self._vocab_size, self._end_tokens, project)


class _Row:
    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocab_size: int,
        end_tokens: frozenset[int],
        project: str,
    ) -> None:
        self._matcher = matcher
        self._end_tokens = end_tokens
        self._project = project
        self._words = allocate_token_bitmask(1, vocab_size)
        self._has_ended = False
        self._newest: int | None = None
        self._work: Future[bool] = _MASKS.submit(project, self)

    def wait(self, timeout_s: float) -> bool:
        return self._work.done() or bool(wait((self._work,), timeout_s).done)

    def words(self) -> NDArray[np.int32] | None:
        return self._words[0] if self._work.result() else None

    def note(self, token: int) -> None:
        if token in self._end_tokens:
            self._has_ended = True
        else:
            self._newest = token
            self._work = _MASKS.submit(self._project, self)

    def has_ended(self) -> bool:
        return self._has_ended

    def compute(self) -> bool:
        """Follow the newest token, and fill the mask behind it."""
        if self._newest is not None and not self._matcher.consume_token(self._newest):
            return False
        fill_next_token_bitmask(self._matcher, self._words, 0)
        # Without any token the vocabulary cannot spell what has to come.
        return not self._matcher.is_error() and bool(self._words.any())


@dataclass(frozen=True, slots=True)
class _Kept:
    grammar: Grammar
    project: str
    """The one that asked for it first."""


class Grammars:
    """Compiled forms for one base model.

    Args:
        trials: Of the pod.
        directory: Of the model, with its tokenizer.
        vocab_size: Of the model.
        end_tokens: What ends a turn of it.
    """

    def __init__(
        self, trials: FormTrials, directory: Path, vocab_size: int, end_tokens: Sequence[int]
    ) -> None:
        self._trials = trials
        self._of_model = trials.of_model(directory, vocab_size, end_tokens)
        self._compiler = FormCompiler(directory, vocab_size, end_tokens)
        self._vocab_size = vocab_size
        self._end_tokens = frozenset(end_tokens)
        self._kept: OrderedDict[OutputFormat, _Kept] = OrderedDict()

    async def get(self, form: OutputFormat, *, project: str = "") -> Grammar:
        """Return a form, compiled if it is not known.

        Args:
            form: What answers have to keep.
            project: Whose it is; the forms of one project are compiled one after another.

        Raises:
            InvalidFieldError: If it is no such form, or takes too much to compile or to follow.
            WorkerUnavailableError: If it could not be tried.
        """
        kept = self._kept.get(form)
        if kept is None:
            return await self._add(form, project)
        self._kept.move_to_end(form)
        return kept.grammar

    async def _add(self, form: OutputFormat, project: str) -> Grammar:
        async with self._trials.hold(project):
            if form in self._kept:
                return self._kept[form].grammar
            work = asyncio.create_task(self._compile(form))
            try:
                matcher = await asyncio.shield(work)
            except asyncio.CancelledError:
                # A caller that leaves gives its place away when what it began has ended.
                await asyncio.gather(work, return_exceptions=True)
                raise
        grammar = Grammar(matcher, self._vocab_size, self._end_tokens)
        self._kept[form] = _Kept(grammar, project)
        self._forget_some()
        return grammar

    def _forget_some(self) -> None:
        """Forget forms while there are too many: the oldest of the project that has most.

        So a project keeps its forms as long as it has less than an equal part.
        """
        while True:
            numbers: Counter[str] = Counter()
            sizes: Counter[str] = Counter()
            for form, kept in self._kept.items():
                numbers[kept.project] += 1
                sizes[kept.project] += form.num_bytes
            if sizes.total() > MAX_KEPT_GRAMMAR_BYTES:
                largest = max(sizes, key=sizes.__getitem__)
            elif numbers.total() > MAX_KEPT_GRAMMARS:
                largest = max(numbers, key=numbers.__getitem__)
            else:
                return
            del self._kept[next(f for f, kept in self._kept.items() if kept.project == largest)]

    async def _compile(self, form: OutputFormat) -> llguidance.LLMatcher:
        loop = asyncio.get_running_loop()
        try:
            await self._of_model.check(form.kind, form.source)
            return await loop.run_in_executor(
                _COMPILER, self._compiler.compile, form.kind, form.source
            )
        except ValueError as error:
            raise InvalidFieldError(_FIELD, str(error)) from error
