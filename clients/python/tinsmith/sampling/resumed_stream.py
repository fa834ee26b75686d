"""A stream of sampled tokens that goes on where it broke off, for clients and for the gateway.

A seed repeats its tokens, so a stream that broke off is begun again with the number of tokens of
each sample that arrived. What arrived is left out by the sampler. Whether a failure passes, and how
long to wait, is for the caller to say.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from tinsmith.errors import InternalError
from tinsmith.tensors import decode_tensor
from tinsmith.v1 import sampler_pb2, trajectories_pb2

Messages = AsyncGenerator[sampler_pb2.StreamSampleResponse, None]


class ResumedStream:
    """How much of each sample of a request has arrived.

    Args:
        num_samples: Samples of the request.
        unavailable: Makes the error of a stream that ended before its samples.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        unavailable: Callable[[str], Exception],
    ) -> None:
        self.received = [0] * num_samples
        """How many tokens of each sample have arrived."""
        self._is_open = [True] * num_samples
        self._unavailable = unavailable

    @property
    def is_complete(self) -> bool:
        """Whether all samples have ended."""
        return not any(self._is_open)

    async def messages(
        self,
        begin: Callable[[Sequence[int]], Messages],
        pause: Callable[[Exception], Awaitable[None]],
    ) -> Messages:
        """Yield what is new, until all samples have ended.

        Args:
            begin: Opens a stream that leaves out so many tokens of each sample.
            pause: Waits after a failure, or raises it if the stream is not to be begun again.
        """
        while True:
            try:
                async with aclosing(begin(self.received)) as messages:
                    async for message in messages:
                        if self._is_open[message.sample_index]:
                            self._note(message)
                            yield message
                if not self.is_complete:
                    raise self._unavailable("the sampler ended a stream before its samples")
            except Exception as error:
                if not self.is_complete:
                    await pause(error)
            if self.is_complete:
                return

    def _note(self, message: sampler_pb2.StreamSampleResponse) -> None:
        index = message.sample_index
        num_tokens = len(decode_tensor(message.piece.tokens))
        num_missing = message.token_index - self.received[index]
        # Newer weights may end a sample before the tokens that arrived of it.
        if num_missing > 0 or (num_missing < 0 and num_tokens):
            raise InternalError("the sampler left out or repeated a piece of a stream")
        self.received[index] += num_tokens
        reason = message.piece.stop_reason
        self._is_open[index] = reason == trajectories_pb2.SampledSequence.STOP_REASON_UNSPECIFIED
