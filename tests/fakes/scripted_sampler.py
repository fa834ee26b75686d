"""A sampler that says what a test tells it to, and a coordinator that knows the test's episodes.

Both are real servers on loopback that the scheduler lists as workers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import tokenizers

from tinsmith.tensors import decode_tensor, encode_tensor, encode_tokens
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.v1 import (
    episode_pb2,
    episode_pb2_grpc,
    models_pb2,
    sampler_pb2,
    sampler_pb2_grpc,
    scheduler_pb2,
    trajectories_pb2,
    workers_pb2,
)
from tinsmith_runtime.errors import (
    AbortedError,
    KeyInvalidError,
    SequenceTooLongError,
    TinsmithError,
)
from tinsmith_runtime.rpc.pod_identity import PodCredentials, PodRole
from tinsmith_runtime.rpc.scheduler_client import SchedulerClient, WorkerRegistration
from tinsmith_runtime.rpc.server import PodServer, ServerConfig
from tinsmith_runtime.text.tokenizer_files import digest_of

SCRIPTED_MODEL = "scripted"
MAX_CONTEXT = 512
VERSION = 7
TURN_END = "<|im_end|>"
IMAGE_TOKEN = "<|image_pad|>"
_SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", TURN_END, IMAGE_TOKEN]
_LISTING_TIMEOUT_S = 20.0

# Qwen's conventions for tools and images, in short.
QWEN_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nAnswer with <tool_call>{"name": ..., "arguments": ...}</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- elif message.content %}
        {%- for part in message.content %}
            {{- part.text if part.type == 'text' else '<|image_pad|>' }}
        {%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {%- set function = call.function %}
        {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
        {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
        {{- function.arguments if function.arguments is string else function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


class LeaseLostError(AbortedError):
    """The lease of an episode ran out."""

    reason = "LEASE_LOST"


def tokenizer_files(template: str = QWEN_TEMPLATE) -> dict[str, bytes]:
    """Return the files of a byte-level tokenizer without merges."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    letters = {letter: number for number, letter in enumerate([*_SPECIAL_TOKENS, *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIAL_TOKENS)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "image_token": IMAGE_TOKEN,
        "chat_template": template,
    }
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


class _Worker:
    """A server that the scheduler lists."""

    def __init__(self, name: str, role: PodRole, scheduler_address: str, pod_key: str) -> None:
        credentials = PodCredentials.read(pod_key, role)
        self._client = SchedulerClient(scheduler_address, credentials)
        self._name = f"workers/{name}"
        self._registration: WorkerRegistration
        self.server = PodServer(
            ServerConfig(drain_timeout_s=0.01),
            domain=f"{name}.tinsmith",
            authenticator=self._client.authenticator(),
        )

    async def _start(
        self,
        role: workers_pb2.Worker.Role.ValueType,
        models: Sequence[models_pb2.ModelCapabilities] = (),
        files: dict[str, scheduler_pb2.Tokenizer] | None = None,
    ) -> None:
        await self.server.start()
        worker = workers_pb2.Worker(
            name=self._name,
            role=role,
            address=self.server.address,
            models=models,
            incarnation="1",
        )
        self._registration = WorkerRegistration(self._client, worker, files)
        self._registration.start()
        await self._registration.wait_listed(_LISTING_TIMEOUT_S)

    async def stop(self) -> None:
        await self._registration.stop()
        await self.server.stop()
        await self._client.close()


class ScriptedSampler(_Worker, sampler_pb2_grpc.SamplerServiceServicer):
    """Says `replies`, sample by sample, in tokens of one byte and an end of turn.

    Attributes:
        replies: What the samples say; the last for all further ones.
        requests: What was asked for.
        fail_after: Number of streamed messages after which `failure` is raised, once.
        hold_after: Number of streamed messages after which a stream waits for its end.
    """

    def __init__(self, scheduler_address: str, pod_key: str) -> None:
        super().__init__("scripted-sampler", PodRole.SAMPLER, scheduler_address, pod_key)
        files = tokenizer_files()
        self._files = scheduler_pb2.Tokenizer(digest=digest_of(files), files=files)
        self.tokenizer = Tokenizer(files)
        self.reset()
        self.server.add(sampler_pb2_grpc.add_SamplerServiceServicer_to_server, self)

    def reset(self) -> None:
        """Forget what a test set."""
        self.replies: list[str | list[int]] = ["hello"]
        self.requests: list[sampler_pb2.SampleRequest] = []
        self.streams: list[sampler_pb2.StreamSampleRequest] = []
        self.failure: TinsmithError | None = None
        self.fail_after = 0
        self.hold_after: int | None = None
        self.held = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def start(self) -> None:
        model = models_pb2.ModelCapabilities(
            base_model=SCRIPTED_MODEL,
            vocabulary_size=self.tokenizer.vocab_size,
            max_context_tokens=MAX_CONTEXT,
            tokenizer_digest=self._files.digest,
            reads_images=True,
        )
        await self._start(workers_pb2.Worker.ROLE_SAMPLER, [model], {SCRIPTED_MODEL: self._files})

    async def Sample(self, request: Any, context: Any) -> sampler_pb2.SampleResponse:
        self._look_at(request)
        self._fail()
        await self._hold(self.hold_after == 0)
        answer = self._about(request)
        for index in range(request.num_samples):
            answer.sequences.append(self._piece(request, *self._tokens(request, index)))
        return answer

    async def StreamSample(
        self, request: Any, context: Any
    ) -> AsyncIterator[sampler_pb2.StreamSampleResponse]:
        self.streams.append(request)
        inner = request.request
        self._look_at(inner)
        received = list(request.received_tokens) or [0] * inner.num_samples
        samples = [self._tokens(inner, index) for index in range(inner.num_samples)]
        num_sent = 0
        for at in range(max(len(tokens) for tokens, _ in samples)):
            for index, (tokens, reason) in enumerate(samples):
                if not received[index] <= at < len(tokens):
                    continue
                if num_sent == self.fail_after:
                    self._fail()
                await self._hold(num_sent == self.hold_after)
                message = sampler_pb2.StreamSampleResponse(sample_index=index, token_index=at)
                is_last = at + 1 == len(tokens)
                piece = self._piece(inner, tokens[at : at + 1], reason if is_last else 0)
                message.piece.CopyFrom(piece)
                if not num_sent:
                    message.prompt.CopyFrom(self._about(inner))
                yield message
                num_sent += 1

    def _look_at(self, request: sampler_pb2.SampleRequest) -> None:
        self.requests.append(request)
        num_tokens = sum(decode_tensor(chunk.tokens).size for chunk in request.prompt.chunks)
        if num_tokens >= MAX_CONTEXT:
            raise SequenceTooLongError(f"the prompt has {num_tokens} tokens", limit=MAX_CONTEXT)

    def _fail(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    async def _hold(self, is_held: bool) -> None:
        if not is_held:
            return
        self.held.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def _tokens(self, request: sampler_pb2.SampleRequest, index: int) -> tuple[list[int], Any]:
        reply = self.replies[min(index, len(self.replies) - 1)]
        tokens = reply if isinstance(reply, list) else self.tokenizer.encode(reply + TURN_END)
        reason = trajectories_pb2.SampledSequence.STOP_REASON_STOP
        for end in range(1, len(tokens) + 1):
            text = self.tokenizer.decode(tokens[:end])
            if any(stop in text for stop in request.params.stop_strings):
                return tokens[:end], reason
        limit = request.params.max_tokens or len(tokens)
        if limit < len(tokens):
            return tokens[:limit], trajectories_pb2.SampledSequence.STOP_REASON_LENGTH
        return tokens, reason

    def _about(self, request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleResponse:
        answer = sampler_pb2.SampleResponse(seed=request.params.seed, num_cached_prompt_tokens=2)
        if request.prompt_logprobs:
            num_tokens = sum(decode_tensor(chunk.tokens).size for chunk in request.prompt.chunks)
            logprobs = np.asarray([np.nan, *[-0.5] * (num_tokens - 1)], dtype=np.float32)
            answer.prompt_logprobs.CopyFrom(encode_tensor(logprobs))
        return answer

    def _piece(
        self, request: sampler_pb2.SampleRequest, tokens: list[int], reason: Any
    ) -> trajectories_pb2.SampledSequence:
        logprobs = np.asarray([logprob_of(token) for token in tokens], dtype=np.float32)
        piece = trajectories_pb2.SampledSequence(
            tokens=encode_tokens(tokens),
            logprobs=encode_tensor(logprobs),
            versions=encode_tensor(np.full(len(tokens), VERSION, dtype=np.int64)),
            stop_reason=reason,
        )
        if request.topk_sample_logprobs:
            ids = np.asarray([[token, 0] for token in tokens], dtype=np.int32).reshape(-1, 2)
            values = np.asarray([[logprob_of(token), -9] for token in tokens], dtype=np.float32)
            piece.topk_logprobs.token_ids.CopyFrom(encode_tensor(ids))
            piece.topk_logprobs.logprobs.CopyFrom(encode_tensor(values.reshape(-1, 2)))
        return piece


class FakeCoordinator(_Worker, episode_pb2_grpc.EpisodeServiceServicer):
    """Knows the keys of episodes, keeps the calls that are recorded."""

    def __init__(self, scheduler_address: str, pod_key: str) -> None:
        # Of several coordinators the gateway takes the first by name: this one, not the real one.
        super().__init__("0-fake-coordinator", PodRole.COORDINATOR, scheduler_address, pod_key)
        self.lease_s = 60.0
        self.episodes: dict[str, episode_pb2.Episode] = {}
        self.ended: dict[str, TinsmithError] = {}
        self.records: list[episode_pb2.RecordModelCallRequest] = []
        self.num_renewals = 0
        self.renewed = asyncio.Event()
        self.server.add(episode_pb2_grpc.add_EpisodeServiceServicer_to_server, self)

    async def start(self) -> None:
        await self._start(workers_pb2.Worker.ROLE_COORDINATOR)

    async def VerifyEpisodeKey(self, request: Any, context: Any) -> episode_pb2.Episode:
        self._check(request.api_key)
        self.num_renewals += 1
        if self.num_renewals > 2:
            self.renewed.set()
        episode = self.episodes[request.api_key]
        episode.lease_expire_time.FromNanoseconds(int((time.time() + self.lease_s) * 1e9))
        return episode

    async def RecordModelCall(
        self, request: Any, context: Any
    ) -> episode_pb2.RecordModelCallResponse:
        self._check(request.api_key)
        self.records.append(request)
        return episode_pb2.RecordModelCallResponse(call_index=len(self.records) - 1)

    def _check(self, key: str) -> None:
        if key in self.ended:
            raise self.ended[key]
        if key not in self.episodes:
            raise KeyInvalidError("there is no such episode")


def logprob_of(token: int) -> float:
    """Return what the scripted sampler says of a token."""
    return -token / 128
