"""`python -m tinsmith_sampler.vllm.child FD`: the process that holds vLLM.

One thread reads commands from the socket, the main one applies them between two steps of the
engine. The process ends with its socket: a sampler that died leaves nothing behind.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
from typing import Any

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from tinsmith_sampler.vllm.frames import (
    LENGTH_BYTES,
    FrameError,
    command_of,
    length_of,
    stepped_frames,
    to_frame,
)
from tinsmith_sampler.vllm.messages import (
    Abort,
    AddAdapter,
    Command,
    Configure,
    Done,
    Event,
    Generate,
    LikeliestTokens,
    Ready,
    RemoveAdapter,
    Update,
    problem_of,
    refusal_of,
)

logger = logging.getLogger(__name__)


class EngineLoop:
    """Applies commands to an engine and tells what it made."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        settings = self._receive()
        if not isinstance(settings, Configure):
            raise TypeError(f"the first command must configure, got {type(settings).__name__}")
        self._engine = _load(settings)
        length = self._engine.model_config.max_model_len
        self._send(Ready(vllm.__version__, length))
        threading.Thread(target=self._read, daemon=True).start()

    def run(self) -> None:
        """Work until the process ends."""
        while True:
            is_busy = self._engine.has_unfinished_requests()
            self._apply(is_waiting=not is_busy)
            if self._engine.has_unfinished_requests():
                outputs = self._engine.step()
                self._send_updates([_update(output) for output in outputs])

    def _apply(self, *, is_waiting: bool) -> None:
        """Apply all commands that are there; wait for one if there is nothing else to do."""
        while True:
            try:
                command = self._commands.get(block=is_waiting)
            except queue.Empty:
                return
            is_waiting = False
            match command:
                case Generate():
                    self._add(command)
                case Abort(samples):
                    # Under the names that they were added with.
                    self._engine.abort_request([str(sample) for sample in samples])
                case AddAdapter(call, adapter):
                    request = LoRARequest(adapter.name, adapter.id, adapter.directory)
                    self._call(call, self._engine.add_lora, request)
                case RemoveAdapter(call, number):
                    self._call(call, self._engine.remove_lora, number)

    def _add(self, command: Generate) -> None:
        adapter = command.adapter
        params = SamplingParams(
            max_tokens=command.max_tokens,
            min_tokens=command.min_tokens,
            temperature=command.temperature,
            top_k=max(command.top_k, 0),
            top_p=command.top_p,
            seed=command.seed,
            stop_token_ids=command.stop_tokens,
            # Tokens that end a turn are among the stop tokens, if they are to end it.
            ignore_eos=True,
            logprobs=command.num_likeliest,
            prompt_logprobs=command.num_prompt_likeliest,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = TokensPrompt(prompt_token_ids=command.prompt, cache_salt=command.cache_salt)
        try:
            self._engine.add_request(
                str(command.sample),
                prompt,
                params,
                lora_request=adapter and LoRARequest(adapter.name, adapter.id, adapter.directory),
            )
        except Exception as error:
            logger.exception("a completion was refused")
            self._send_updates([refusal_of(command.sample, problem_of(error))])

    def _call(self, call: int, function: Any, *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:
            logger.exception("a command failed")
            self._send(Done(call, problem_of(error)))
        else:
            self._send(Done(call))

    def _read(self) -> None:
        try:
            while True:
                self._commands.put(self._receive())
        except FrameError:
            logger.exception("what the sampler says is not understood")
            os._exit(1)

    def _receive(self) -> Command:
        return command_of(self._bytes(length_of(self._bytes(LENGTH_BYTES))))

    def _bytes(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._connection.recv(min(count - len(parts), 2**20))
            if not part:
                # The engine's own threads and processes must not keep this one alive.
                os._exit(0)
            parts += part
        return bytes(parts)

    def _send(self, event: Event) -> None:
        self._connection.sendall(to_frame(event))

    def _send_updates(self, updates: list[Update]) -> None:
        for frame in stepped_frames(updates):
            self._connection.sendall(frame)


def _load(settings: Configure) -> LLMEngine:
    arguments: dict[str, Any] = {}
    if not vllm.platforms.current_platform.is_cpu():
        arguments["kv_cache_memory_bytes"] = settings.cache_bytes
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=settings.model,
            dtype=settings.dtype,
            max_model_len=settings.max_model_tokens,
            max_num_seqs=settings.max_sequences,
            max_logprobs=settings.max_logprobs,
            # Of the unmodified distribution, as a trainer recomputes them.
            logprobs_mode="raw_logprobs",
            enable_lora=True,
            max_loras=settings.max_adapters,
            max_cpu_loras=settings.max_host_adapters,
            max_lora_rank=settings.max_adapter_rank,
            tensor_parallel_size=settings.tensor_parallel_size,
            distributed_executor_backend="uni" if settings.tensor_parallel_size == 1 else "mp",
            enable_prefix_caching=True,
            # The defaults of a model's authors are not what a request asks for.
            generation_config="vllm",
            skip_tokenizer_init=True,
            enforce_eager=vllm.platforms.current_platform.is_cpu(),
            disable_log_stats=True,
            **arguments,
        )
    )


def _update(output: Any) -> Update:
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    rows = completion.logprobs or []
    scores = output.prompt_logprobs
    return Update(
        sample=int(output.request_id),
        tokens=tokens,
        logprobs=[row[token].logprob for token, row in zip(tokens, rows, strict=True)],
        likeliest=[_ranked(row) for row in rows],
        finish_reason=completion.finish_reason,
        num_cached_tokens=output.num_cached_tokens or 0,
        prompt_logprobs=scores
        and [
            None if row is None else row[token].logprob
            for token, row in zip(output.prompt_token_ids, scores, strict=True)
        ],
        prompt_likeliest=scores and [None if row is None else _ranked(row) for row in scores],
    )


def _ranked(row: Any) -> LikeliestTokens:
    ranked = sorted(row.items(), key=lambda item: item[1].rank)
    return [(token, one.logprob) for token, one in ranked]


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    EngineLoop(socket.socket(fileno=int(sys.argv[1]))).run()
