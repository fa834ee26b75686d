"""vLLM behind the protocol of a sampler's engine.

Each version has an id, a name and a salt of the prefix cache that no other version ever has: what
was computed under one cannot be found under another. The process may end at any time: requests
that it held are refused so that they are sent again, versions are kept, and it is started anew.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tinsmith_engine import AdapterConfig, LoraConfig, SampleRequest, WeightVersion
from tinsmith_engine.base.types import ModelInfo
from tinsmith_runtime.errors import (
    CheckpointIncompatibleError,
    InvalidFieldError,
    SequenceTooLongError,
    TinsmithError,
    VersionNotLoadedError,
    WorkerUnavailableError,
    internal_error,
)
from tinsmith_runtime.text.penalties import NEUTRAL, Shaping
from tinsmith_sampler.engines.engine_protocol import (
    EngineCapabilities,
    EngineStatistics,
    HeldWeights,
    Ticket,
)
from tinsmith_sampler.metrics import (
    CACHED_PROMPT_TOKENS,
    ENGINE_RESTARTS,
    PROMPT_TOKENS,
    SAMPLED_TOKENS,
    SEQUENCES,
)
from tinsmith_sampler.requests.usage_log import SharedTime, amounts_of
from tinsmith_sampler.vllm.messages import (
    Adapter,
    AddAdapter,
    Command,
    Configure,
    RemoveAdapter,
    Update,
)
from tinsmith_sampler.vllm.process import Interpreter, VllmProcess
from tinsmith_sampler.vllm.vllm_requests import VllmRequest, numbers
from tinsmith_sampler.vllm.weight_folders import WeightFolders

logger = logging.getLogger(__name__)

NAME = "vllm"
_DONE = frozenset(
    {
        "prompt_tokens",
        "max_tokens",
        "min_tokens",
        "weights",
        "num_samples",
        "temperature",
        "top_k",
        "top_p",
        "seed",
        "stop_tokens",
        "stop_strings",
        "decode_text",
        "prompt_logprobs",
        "topk_prompt_logprobs",
        "prompt_logprobs_last_n",
        "topk_sample_logprobs",
        "cache_scope",
    }
)
"""Fields of a request that this engine follows; any other one is refused unless it is unset."""
_NAMES = {"follows_run": "weight_updates"}
"""Words of the contract for fields that have another one there."""
_SHAPING = tuple(field.name for field in dataclasses.fields(Shaping))
REFUSED = tuple(
    name
    for field in dataclasses.fields(SampleRequest)
    if field.name not in _DONE
    for name in (_SHAPING if field.name == "shaping" else (_NAMES.get(field.name, field.name),))
)
_WATCH_INTERVAL_S = 0.5


@dataclass(slots=True, eq=False)
class _Version:
    handle: WeightVersion
    folder: Path
    num_requests: int = 0
    is_retired: bool = False

    @property
    def adapter(self) -> Adapter:
        serial = self.handle.serial
        return Adapter(serial, f"version-{serial}", str(self.folder))


class VllmEngine:
    """The vLLM of one base model. Everything runs on the event loop that `start` ran on.

    Args:
        info: The model, as far as its files tell.
        settings: What the process loads.
        interpreter: What runs the process.
        stall_timeout_s: Silence with work to do after which the process is ended and started anew.
    """

    def __init__(
        self,
        info: ModelInfo,
        settings: Configure,
        interpreter: Interpreter,
        *,
        stall_timeout_s: float,
    ) -> None:
        self._info = info
        self._settings = settings
        self._interpreter = interpreter
        self._stall_timeout_s = stall_timeout_s
        self.on_failed: Callable[[], None] = lambda: None
        """Is told that the process cannot be started any more."""
        self._folders = WeightFolders()
        self._versions: dict[int, _Version] = {}
        self._newest: dict[str, _Version] = {}
        self._serials = itertools.count(1)
        self._numbers = numbers()
        self._vllm_requests: dict[int, VllmRequest] = {}
        self._by_number: dict[int, VllmRequest] = {}
        self._time = SharedTime()
        self._shared_until_s = time.monotonic()
        self._ready = asyncio.Event()
        self._is_failed = False
        self._is_closing = False
        self._is_restarting = False
        self._num_restarts = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._process = self._new_process()
        self._vllm_version = ""

    async def start(self) -> None:
        """Load the model.

        Raises:
            WorkerUnavailableError: If vLLM does not start.
        """
        ready = await self._process.start()
        self._vllm_version = ready.version
        self._info = dataclasses.replace(
            self._info,
            fingerprint=f"engine={NAME} version={ready.version} {self._info.fingerprint}",
        )
        self._ready.set()
        self._spawn(self._watch())

    async def close(self) -> None:
        """End the process and forget all versions; requests that it holds are refused."""
        self._is_closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._process.stop()
        self._fail_all()
        self._folders.close()

    @property
    def info(self) -> ModelInfo:
        """The model."""
        return self._info

    @property
    def capabilities(self) -> EngineCapabilities:
        """What the engine is, and what it refuses."""
        return EngineCapabilities(
            NAME,
            self._vllm_version,
            self._settings.max_model_tokens,
            self._settings.cache_bytes,
            REFUSED,
        )

    @property
    def pid(self) -> int:
        """Id of the process that holds vLLM."""
        return self._process.pid

    def refuse(self, request: SampleRequest) -> None:
        """Refuse what vLLM cannot do.

        Raises:
            InvalidFieldError: Names the field.
            SequenceTooLongError: If the prompt leaves no room for a token.
        """
        for field in dataclasses.fields(request):
            value = getattr(request, field.name)
            if field.name not in _DONE and not _is_unset(value, field.default):
                name = _NAMES.get(field.name, field.name)
                if isinstance(value, Shaping):
                    name = next(each for each in _SHAPING if _differs(value, each))
                raise InvalidFieldError(
                    name,
                    "cannot be done by engine vllm, which this sampler runs; leave it out, or use "
                    "a sampler with engine embedded",
                )
        limit = self._settings.max_model_tokens
        if len(request.prompt_tokens) + 1 > limit:
            raise SequenceTooLongError(
                f"the prompt has {len(request.prompt_tokens)} tokens, engine vllm takes at most "
                f"{limit - 1}; shorten it",
                limit=limit - 1,
            )

    async def submit(self, ticket: Ticket) -> None:
        """Take a request.

        Raises:
            VersionNotLoadedError: If its weights were replaced before it began.
            WorkerUnavailableError: If vLLM ended, or is given up.
        """
        version = self._version_of(ticket.request.weights)
        vllm_request = self._vllm_request(ticket, version)
        if version is not None:
            version.num_requests += 1
        try:
            await self._wait_ready()
            ticket.request_id = next(self._numbers)
            self._note_work()
            self._vllm_requests[ticket.request_id] = vllm_request
            self._pass_time()
            ticket.mark_s = self._time.enter(ticket.request.num_samples)
            try:
                self._send(vllm_request, first=True)
            except BaseException:
                del self._vllm_requests[ticket.request_id]
                self._charge(vllm_request)
                raise
        except BaseException:
            self._release(version)
            raise
        PROMPT_TOKENS.inc(len(ticket.request.prompt_tokens))

    def cancel(self, ticket: Ticket) -> None:
        """Give a request up."""
        vllm_request = self._vllm_requests.get(ticket.request_id or 0)
        if vllm_request is not None and vllm_request.ticket is ticket:
            try:
                self._process.abort(vllm_request.unfinished)
            except WorkerUnavailableError:
                logger.debug("vLLM ended before a request was cancelled")
            self._forget(vllm_request)

    async def update(self, ticket: Ticket, weights: WeightVersion) -> None:
        """Refuse: requests that follow their run are refused before they begin."""
        raise TypeError(
            f"request {ticket.request_id} follows no run, so that it takes no version {weights}"
        )

    async def load(
        self, name: str, tensors: Mapping[str, Tensor], config: AdapterConfig, version: int
    ) -> WeightVersion:
        """Make a version from tensors of a checkpoint.

        Raises:
            CheckpointIncompatibleError: If vLLM cannot use them.
            WorkerUnavailableError: If vLLM ended, or is given up.
        """
        if not isinstance(config, LoraConfig):
            # Replacing base weights in a running vLLM gave a wrong answer now and then.
            raise CheckpointIncompatibleError(
                "the checkpoint has full weights, which engine vllm does not sample from; use a "
                "sampler with engine embedded"
            )
        self._check_adapter(config)
        serial = next(self._serials)
        folder = await asyncio.to_thread(self._folders.write, str(serial), tensors, config)
        loaded = _Version(WeightVersion(name, version, serial), folder)
        try:
            await self._wait_ready()
            await self._add_adapter(loaded.adapter)
        except BaseException:
            self._folders.remove(folder)
            raise
        self._versions[serial] = loaded
        self._retire(name)
        self._newest[name] = loaded
        return loaded.handle

    async def unload(self, name: str) -> None:
        """End the hold of `load`; a version is forgotten with its last request."""
        self._retire(name)

    def full_tensors(self, handle: WeightVersion) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Return nothing: versions here are adapters."""
        return {}

    def held(self) -> list[HeldWeights]:
        """Return the versions in memory, oldest first."""
        return [HeldWeights(one.handle, one.num_requests) for one in self._versions.values()]

    def statistics(self) -> EngineStatistics:
        """Return how the engine does."""
        stalled_s = self._process.silent_s if self._has_work else 0.0
        return EngineStatistics(len(self._vllm_requests), self._num_restarts, stalled_s)

    # Requests.

    def _vllm_request(self, ticket: Ticket, version: _Version | None) -> VllmRequest:
        request = ticket.request
        room = self._settings.max_model_tokens - len(request.prompt_tokens)
        serial = 0 if version is None else version.handle.serial
        return VllmRequest(
            ticket,
            0 if version is None else version.handle.version,
            min(request.max_tokens, room),
            None if version is None else version.adapter,
            f"{request.cache_scope}/{serial}",
        )

    def _send(self, vllm_request: VllmRequest, *, first: bool) -> None:
        commands = (
            [vllm_request.first(self._numbers)] if first else vllm_request.others(self._numbers)
        )
        for command in commands:
            self._by_number[command.sample] = vllm_request
            self._process.generate(command)

    def _take(self, update: Update) -> None:
        vllm_request = self._by_number.get(update.sample)
        if vllm_request is None:
            return
        if update.problem:
            logger.error("vLLM refused a completion", extra={"problem": update.problem})
            self._process.abort(vllm_request.unfinished)
            self._forget(vllm_request)
            _fail(vllm_request.ticket, internal_error())
            return
        num_ended = len(vllm_request.ticket.finished)
        ended_here = vllm_request.take(update)
        if ended_here is not None:
            self._process.abort([ended_here])
        if vllm_request.ticket.feed is not None:
            vllm_request.ticket.feed.flush()
        for sequence in vllm_request.ticket.finished[num_ended:]:
            SAMPLED_TOKENS.inc(len(sequence.tokens))
            SEQUENCES.labels(sequence.finish_reason).inc()
        if vllm_request.is_finished:
            CACHED_PROMPT_TOKENS.inc(vllm_request.num_cached_tokens)
            self._forget(vllm_request)
            if vllm_request.ticket.future.set_running_or_notify_cancel():
                vllm_request.ticket.future.set_result(vllm_request.ticket.finished)
        else:
            self._send(vllm_request, first=False)

    def _pass_time(self) -> None:
        """Share out the time since a request last came or went: vLLM was busy with what it had."""
        now_s = time.monotonic()
        self._time.spend(now_s - self._shared_until_s)
        self._shared_until_s = now_s

    def _charge(self, vllm_request: VllmRequest) -> None:
        self._pass_time()
        request = vllm_request.ticket.request
        engine_s = self._time.leave(request.num_samples, vllm_request.ticket.mark_s)
        vllm_request.ticket.charge(
            amounts_of(
                request,
                num_sampled_tokens=vllm_request.num_sampled_tokens,
                num_cached_tokens=vllm_request.num_cached_tokens,
                is_read=vllm_request.is_begun,
                engine_s=engine_s,
            )
        )

    def _forget(self, vllm_request: VllmRequest) -> None:
        del self._vllm_requests[vllm_request.ticket.request_id or 0]
        self._charge(vllm_request)
        for number in vllm_request.numbers:
            self._by_number.pop(number, None)
        weights = vllm_request.ticket.request.weights
        self._release(None if weights is None else self._versions.get(weights.serial))

    def _fail_all(self) -> None:
        for vllm_request in list(self._vllm_requests.values()):
            self._forget(vllm_request)
            _fail(
                vllm_request.ticket,
                WorkerUnavailableError("vLLM has ended; send the request again"),
            )

    # Versions.

    def _version_of(self, weights: WeightVersion | None) -> _Version | None:
        if weights is None:
            return None
        version = self._versions.get(weights.serial)
        if version is None:
            raise VersionNotLoadedError(
                f"version {weights.version} of {weights.run} is not loaded; export it again",
                run=weights.run,
                version=weights.version,
            )
        return version

    def _check_adapter(self, config: LoraConfig) -> None:
        limit = self._settings.max_adapter_rank
        if config.rank > limit:
            raise CheckpointIncompatibleError(
                f"the adapter has rank {config.rank}, engine vllm was started for at most {limit}; "
                "raise vllm_max_adapter_rank",
                rank=config.rank,
            )
        if config.train_unembedding:
            raise CheckpointIncompatibleError(
                "the adapter changes the unembedding, which engine vllm cannot do; use a sampler "
                "with engine embedded"
            )

    def _retire(self, name: str) -> None:
        version = self._newest.pop(name, None)
        if version is not None:
            version.is_retired = True
            self._drop_if_free(version)

    def _release(self, version: _Version | None) -> None:
        if version is not None:
            version.num_requests -= 1
            self._drop_if_free(version)

    def _drop_if_free(self, version: _Version) -> None:
        if version.is_retired and version.num_requests == 0:
            self._versions.pop(version.handle.serial, None)
            self._spawn(self._drop(version))

    async def _drop(self, version: _Version) -> None:
        try:
            if self._ready.is_set():
                serial = version.handle.serial
                await self._call(lambda call: RemoveAdapter(call, serial))
        except TinsmithError as error:
            logger.debug("an adapter was not removed", extra={"problem": error.message})
        finally:
            await asyncio.to_thread(self._folders.remove, version.folder)

    async def _add_adapter(self, adapter: Adapter) -> None:
        await self._call(lambda call: AddAdapter(call, adapter))

    async def _add_adapters(self) -> None:
        for version in list(self._versions.values()):
            await self._add_adapter(version.adapter)

    # The process.

    @property
    def _has_work(self) -> bool:
        return bool(self._vllm_requests or self._process.num_calls)

    def _note_work(self) -> None:
        """Count the silence of a process that had nothing to do from now on."""
        if not self._has_work:
            self._process.note_work()

    async def _call(self, command: Callable[[int], Command]) -> None:
        self._note_work()
        await self._process.call(command)

    async def _wait_ready(self) -> None:
        """Wait for a process that runs."""
        if not self._is_failed:
            await self._ready.wait()
        if self._is_failed:
            raise WorkerUnavailableError("vLLM cannot be started; use another sampler")

    def _new_process(self) -> VllmProcess:
        return VllmProcess(
            self._interpreter, self._settings, on_update=self._take, on_end=self._note_end
        )

    def _note_end(self) -> None:
        if self._is_closing:
            return
        logger.error(
            "vLLM has ended; it is started again", extra={"num_requests": len(self._vllm_requests)}
        )
        self._ready.clear()
        self._fail_all()
        if not self._is_restarting:
            self._spawn(self._restart())

    async def _restart(self) -> None:
        self._is_restarting = True
        for wait_s in self._interpreter.restart_waits_s:
            await asyncio.sleep(wait_s)
            await self._process.stop()
            self._process = self._new_process()
            try:
                await self._process.start()
                await self._add_adapters()
            except TinsmithError as error:
                logger.error("vLLM was not started again", extra={"problem": error.message})
                continue
            self._num_restarts += 1
            ENGINE_RESTARTS.inc()
            break
        else:
            self._is_failed = True
            self.on_failed()
        self._is_restarting = False
        self._ready.set()

    async def _watch(self) -> None:
        """End a process that makes no step although it has work: its end starts it anew."""
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            if self.statistics().stalled_s > self._stall_timeout_s:
                logger.error(
                    "vLLM makes no progress", extra={"num_requests": len(self._vllm_requests)}
                )
                self._process.kill()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _differs(shaping: Shaping, name: str) -> bool:
    return bool(getattr(shaping, name) != getattr(NEUTRAL, name))


def _is_unset(value: object, default: object) -> bool:
    if isinstance(value, (int, float, str, Shaping)):
        return value == default
    return value is default or (isinstance(value, Sized) and len(value) == 0)


def _fail(ticket: Ticket, error: TinsmithError) -> None:
    if ticket.feed is not None:
        ticket.feed.fail(error)
    if ticket.future.set_running_or_notify_cancel():
        ticket.future.set_exception(error)
