"""Tokenizers of base models, as the scheduler delivers them.

Files are kept by digest, so that models of one family share them. Whether a model still has the
files that it had is asked again after a while: a base model may be replaced by another of its name.

What the workers of a job's own pool serve was chosen by the job's author: it is confined to a
process of its own, which the callers of that pool alone use. So is the chat template that a run was
created with. Of too many bytes of files, those
used longest ago go.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tinsmith.text.tokenizer import files_with_template
from tinsmith.v1 import scheduler_pb2
from tinsmith_gateway.access.authentication import Credential
from tinsmith_gateway.tokenizing.confined_tokenizer import ConfinedTokenizer
from tinsmith_gateway.tokenizing.model_tokenizer import ChatTokenizer, ModelTokenizer
from tinsmith_gateway.upstream.pod_client import Upstream
from tinsmith_gateway.upstream.routing import SCHEDULER_SERVICE
from tinsmith_runtime.confined.process import ConfinedProcesses
from tinsmith_runtime.errors import FailedPreconditionError
from tinsmith_runtime.text.tokenizer_files import digest_of

_FRESH_S = 60.0
MAX_TOKENIZER_KEYS = 10_000
"""Base models, by project and pool, whose tokenizer is known."""
_Key = tuple[str, str, str, str]
"""Project, pool, base model and the hash of a run's own chat template, if it has one.

Another pool may serve another model of the same name.
"""
_Place = tuple[str, str, str, str]
"""Project and pool, or nothing for operators' models, digest and hash."""


@dataclass(frozen=True, slots=True)
class _Kept:
    tokenizer: ChatTokenizer
    num_bytes: int


class TokenizerStore:
    """Tokenizers by base model.

    Args:
        upstream: Calls the scheduler.
        confined: Processes for those of jobs' own models.
        max_bytes: Of the files of all that are kept; the one in use is kept in any case.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        upstream: Upstream,
        confined: ConfinedProcesses,
        *,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._upstream = upstream
        self._confined = confined
        self._max_bytes = max_bytes
        self._clock = clock
        self._digests: OrderedDict[_Key, tuple[str, float]] = OrderedDict()
        self._kept: OrderedDict[_Place, _Kept] = OrderedDict()
        self._num_bytes = 0
        self._locks: dict[_Key, asyncio.Lock] = {}

    @property
    def num_bytes(self) -> int:
        """Size of the files that are kept."""
        return self._num_bytes

    async def get(
        self, base_model: str, credential: Credential, chat_template: str = ""
    ) -> ChatTokenizer:
        """Return the tokenizer of a base model.

        Args:
            base_model: Its name.
            credential: Of the caller.
            chat_template: Of the run that is sampled from, confined as a stranger's program is; the
                model's own if it is empty.

        Raises:
            ModelNotFoundError: If no pod serves it.
            FailedPreconditionError: If it has none, or one that takes too much time or memory.
        """
        key = (
            credential.caller.project,
            credential.caller.pool,
            base_model,
            _hash_of(chat_template),
        )
        found = self._fresh(key)
        if found is not None:
            return found
        async with self._locks.setdefault(key, asyncio.Lock()):
            found = self._fresh(key)
            if found is None:
                return await self._fetch(key, credential, chat_template)
            return found

    def _fresh(self, key: _Key) -> ChatTokenizer | None:
        digest, expires_s = self._digests.get(key, ("", 0.0))
        return self._use(_place_of(key, digest)) if expires_s > self._clock() else None

    def _use(self, place: _Place) -> ChatTokenizer | None:
        kept = self._kept.get(place)
        if kept is None:
            return None
        self._kept.move_to_end(place)
        return kept.tokenizer

    async def _fetch(self, key: _Key, credential: Credential, chat_template: str) -> ChatTokenizer:
        project, pool, base_model, _ = key
        known = self._digests.get(key, ("", 0.0))[0]
        if self._use(_place_of(key, known)) is None:
            known = ""
        found = await self._upstream.call(
            SCHEDULER_SERVICE,
            "GetTokenizer",
            scheduler_pb2.GetTokenizerRequest(
                base_model=base_model, known_digest=known, project=project, pool=pool
            ),
            scheduler_pb2.Tokenizer,
            credential,
        )
        place = _place_of(key, found.digest)
        tokenizer = self._use(place)
        if tokenizer is None:
            if "tokenizer.json" not in found.files:
                raise FailedPreconditionError(
                    f"the base model {base_model} has no tokenizer; use the native API",
                    base_model=base_model,
                )
            files = dict(found.files)
            if await asyncio.to_thread(digest_of, files) != found.digest:
                # Others share what has this digest, so that it must be what it says.
                raise FailedPreconditionError(
                    f"the tokenizer of {base_model} is not the one that its worker registered",
                    base_model=base_model,
                )
            if chat_template:
                changed = await asyncio.to_thread(files_with_template, files, chat_template)
                tokenizer = await self._make(changed, is_confined=True)
            else:
                tokenizer = await self._make(files, is_confined=bool(pool))
            await self._keep(place, tokenizer, sum(map(len, files.values())))
        self._digests[key] = (found.digest, self._clock() + _FRESH_S)
        while len(self._digests) > MAX_TOKENIZER_KEYS:
            oldest, _ = self._digests.popitem(last=False)
            self._locks.pop(oldest, None)
        used = {_place_of(key, digest) for key, (digest, _) in self._digests.items()}
        for unused in set(self._kept) - used:
            await self._drop(unused)
        return tokenizer

    async def _make(self, files: Mapping[str, bytes], *, is_confined: bool) -> ChatTokenizer:
        if is_confined:
            return await asyncio.to_thread(ConfinedTokenizer, files, self._confined)
        return await asyncio.to_thread(ModelTokenizer, files)

    async def _keep(self, place: _Place, tokenizer: ChatTokenizer, num_bytes: int) -> None:
        # Two base models of one family may have been fetched beside each other.
        await self._drop(place)
        self._kept[place] = _Kept(tokenizer, num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            await self._drop(next(iter(self._kept)))

    async def _drop(self, place: _Place) -> None:
        kept = self._kept.pop(place, None)
        if kept is None:
            return
        self._num_bytes -= kept.num_bytes
        if isinstance(kept.tokenizer, ConfinedTokenizer):
            await asyncio.to_thread(kept.tokenizer.close)


def _place_of(key: _Key, digest: str) -> _Place:
    project, pool, _, template_hash = key
    if pool or template_hash:
        return project, pool, digest, template_hash
    return "", "", digest, ""


def _hash_of(chat_template: str) -> str:
    return hashlib.sha256(chat_template.encode()).hexdigest() if chat_template else ""
