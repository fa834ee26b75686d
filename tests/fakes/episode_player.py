"""Agents and the endpoint that they talk to: sampling under the key of an episode, recorded."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

import tinsmith
from tinsmith.tensors import decode_tensor, encode_tokens
from tinsmith.v1 import (
    episode_pb2,
    episode_pb2_grpc,
    sampler_pb2,
    sampler_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from tinsmith_runtime.rpc.pod_identity import PodCredentials, PodRole

_TIMEOUT_S = 60.0


class EpisodeEndpoint:
    """Does for one model call of an episode what the OpenAI endpoint does.

    Args:
        address: Of the scheduler.
        pod_key: The root secret of the pods.
    """

    def __init__(self, address: str, pod_key: str) -> None:
        self._metadata = PodCredentials.read(pod_key, PodRole.GATEWAY).metadata
        self._channels: dict[str, grpc.Channel] = {}
        self._scheduler: Any = scheduler_pb2_grpc.SchedulerServiceStub(self._channel(address))
        request = scheduler_pb2.GetCapabilitiesRequest(parent="projects/default")
        found = self._call(self._scheduler.GetCapabilities, request)
        self._coordinator: Any = episode_pb2_grpc.EpisodeServiceStub(
            self._channel(found.coordinator_address)
        )

    def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            channel.close()

    def complete(self, api_key: str, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Sample once, record it, and return the tokens."""
        episode = self._call(
            self._coordinator.VerifyEpisodeKey, episode_pb2.VerifyEpisodeKeyRequest(api_key=api_key)
        )
        session = self._call(
            self._scheduler.GetSamplingSession,
            scheduler_pb2.GetSamplingSessionRequest(name=episode.sampling_session),
        )
        channel = self._channel(session.sampler_addresses[0])
        sampler: Any = sampler_pb2_grpc.SamplerServiceStub(channel)
        request = sampler_pb2.SampleRequest(sampling_session=session.name, num_samples=1)
        request.prompt.chunks.add(tokens=encode_tokens(prompt))
        request.params.max_tokens = max_tokens
        answer = self._call(sampler.Sample, request)
        record = episode_pb2.RecordModelCallRequest(
            name=episode.name,
            request_id=str(uuid.uuid4()),
            api_key=api_key,
            prompt=request.prompt,
            sequences=answer.sequences,
            params=request.params,
        )
        self._call(self._coordinator.RecordModelCall, record)
        return [int(token) for token in decode_tensor(answer.sequences[0].tokens)]

    def _channel(self, address: str) -> grpc.Channel:
        if address not in self._channels:
            self._channels[address] = grpc.insecure_channel(address)
        return self._channels[address]

    def _call(self, method: Any, request: Any) -> Any:
        return method(request, metadata=self._metadata, timeout=_TIMEOUT_S)


@contextlib.contextmanager
def agents(
    client: tinsmith.Client,
    play: Callable[[tinsmith.HeldEpisode], None],
    *,
    queue: str,
    types: Sequence[str],
) -> Iterator[list[BaseException]]:
    """Let agents, one for each type given, play until the block ends; yield what they raised."""
    is_over = threading.Event()
    failures: list[BaseException] = []

    def work(episode_type: str) -> None:
        agent = client.episodes.agent(queue=queue)
        while not is_over.is_set():
            try:
                with agent.episode(60, episode_type, timeout_s=0.1) as episode:
                    play(episode)
            except tinsmith.OperationTimeoutError:
                continue
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(each,)) for each in types]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
