"""The process group: the ranks, and the few collectives that the engine uses.

Set up from the environment that `torchrun` gives (gloo for the CPU, NCCL beside it for CUDA). One
process alone needs none of it. Every wait has a deadline. Two kinds of trouble are told apart:

* an operation that fails is an exception like any other, and ranks tell each other about it;
* a rank that is gone, hangs, or does something else than the others is a `RankFault`. It is no
  `Exception`, so that nothing which recovers from failed operations takes it for one: the group
  cannot go on, and every process ends.

Messages between ranks carry a running number and a tag. A rank that is in another place of the
program than the others is thus found out instead of being believed.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

DEFAULT_TIMEOUT_S = 300.0
START_TIMEOUT_S = 1800.0
"""How long ranks wait for each other while they start and read weights."""


class RankFault(BaseException):
    """The ranks cannot go on together."""


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return once the result is there.

        Raises:
            RankFault: It will never be.
        """


class Ranks:
    """This process among the processes of an engine.

    Args:
        rank: Number of this process, from 0.
        world_size: How many there are.
        device: Where tensors of this rank are.
        timeout_s: Deadline of every wait for another rank.
        store: Where ranks meet before they talk to each other; None for one rank.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        store: Store | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.timeout_s = timeout_s
        self._store = store
        self._num_messages = 0
        self._num_meetings = 0

    @classmethod
    def start(
        cls,
        device: str = "cpu",
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        store: Path | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> Ranks:
        """Join the process group.

        Args:
            device: `cpu` or `cuda`; a rank takes the device of its local number.
            timeout_s: Deadline of every wait for another rank.
            store: A file to meet at, instead of the address that torchrun gives.
            rank: Number of this process; torchrun's by default.
            world_size: How many there are; torchrun's by default.

        Raises:
            RankFault: The others did not come in time.
        """
        rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        place = torch.device(device)
        if place.type == "cuda" and place.index is None:
            place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if place.type == "cuda":
            torch.cuda.set_device(place)
        if world_size == 1:
            return cls(rank, world_size, place, timeout_s)
        url = f"file://{store}" if store else "env://"
        try:
            found, _, _ = next(
                rendezvous(url, rank, world_size, timeout=timedelta(seconds=START_TIMEOUT_S))
            )
        except RuntimeError as error:
            raise RankFault(f"rank {rank} found no place to meet the others: {error}") from error
        # torchrun keeps its store when it starts processes again, with what the last ones wrote.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        found = PrefixStore(f"attempt-{attempt}", found)
        ranks = cls(rank, world_size, place, timeout_s, found)
        ranks.meet()
        with ranks._deadline("the other ranks to start"):
            dist.init_process_group(
                "gloo" if place.type == "cpu" else "cpu:gloo,cuda:nccl",
                store=PrefixStore("group", found),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        return ranks

    def meet(self) -> None:
        """Return once all ranks are here: a slow start is no failure.

        Raises:
            RankFault: They did not come within `START_TIMEOUT_S`.
        """
        if self._store is None:
            return
        self._num_meetings += 1
        keys = [f"meeting-{self._num_meetings}/{rank}" for rank in range(self.world_size)]
        try:
            self._store.set(keys[self.rank], "here")
            self._store.wait(keys, timedelta(seconds=START_TIMEOUT_S))
        except RuntimeError as error:
            raise RankFault(f"rank {self.rank} waited for the others to start: {error}") from error

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which decides."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self.world_size == 1

    def close(self) -> None:
        """Leave the group; the others must not wait for this rank any more."""
        if not self.is_alone and dist.is_initialized():
            dist.destroy_process_group()

    # Messages.

    def broadcast(self, message: bytes | None, tag: str) -> bytes:
        """Return the message of rank 0, which alone gives one."""
        if self.is_alone:
            return message or b""
        header = self._header(tag, len(message or b""))
        wanted = header[:2].clone()
        awaited = "the other ranks" if self.is_first else "rank 0"
        with self._deadline(f"{awaited} ({tag})"):
            dist.broadcast(header, src=0)
            self._check([header[:2], wanted], tag)
            body = torch.empty(int(header[2]), dtype=torch.uint8)
            if message is not None:
                body.copy_(_to_tensor(message))
            if len(body):
                dist.broadcast(body, src=0)
        return body.numpy().tobytes()

    def all_gather(self, message: bytes, tag: str) -> list[bytes]:
        """Return the messages of all ranks, in their order."""
        if self.is_alone:
            return [message]
        header = self._header(tag, len(message))
        headers = torch.empty(self.world_size, len(header), dtype=torch.int64)
        with self._deadline(f"the other ranks ({tag})"):
            dist.all_gather_single(headers.view(-1), header)
            self._check(list(headers[:, :2]), tag)
            lengths = headers[:, 2].tolist()
            mine = torch.zeros(max(lengths), dtype=torch.uint8)
            mine[: len(message)] = _to_tensor(message)
            found = torch.empty(self.world_size, max(lengths), dtype=torch.uint8)
            if max(lengths):
                dist.all_gather_single(found.view(-1), mine)
        return [row[:length].numpy().tobytes() for row, length in zip(found, lengths, strict=True)]

    # Tensors on the device.

    def share(self, tensor: Tensor, owner: int) -> None:
        """Overwrite a contiguous tensor by that of one rank."""
        with self._deadline(f"rank {owner}"):
            dist.broadcast(tensor, src=owner)

    def exchange(self, parts: Tensor) -> Tensor:
        """Give part r of [world size, n] to rank r; return what each rank gave to this one."""
        received = torch.empty_like(parts)
        with self._deadline("the other ranks"):
            dist.all_to_all_single(received.view(-1), parts.contiguous().view(-1))
        return received

    def gather(self, whole: Tensor, part: Tensor) -> Pending:
        """Begin to put the parts of all ranks, in their order, into a tensor."""
        with self._deadline("the other ranks"):
            # As bytes: the group need not know the dtype.
            work = dist.all_gather_single(
                whole.view(torch.uint8), part.view(torch.uint8), async_op=True
            )
        return _Gather(self, work)

    @contextmanager
    def _deadline(self, awaited: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            # torch.distributed has no class of its own for a peer that is gone or late.
            reason = str(error).strip().split("\n")[0][:300]
            raise RankFault(
                f"rank {self.rank} of {self.world_size} waited for {awaited}, which is gone or "
                f"did not answer within {self.timeout_s:g} s: {reason}"
            ) from error

    def _header(self, tag: str, length: int) -> Tensor:
        self._num_messages += 1
        return torch.tensor([self._num_messages, zlib.crc32(tag.encode()), length])

    def _check(self, places: list[Tensor], tag: str) -> None:
        if any(not torch.equal(place, places[0]) for place in places):
            raise RankFault(
                f"ranks are not in the same place of the program; rank {self.rank} is at message "
                f"{self._num_messages} ({tag})"
            )


class _Gather:
    def __init__(self, ranks: Ranks, work: dist.Work) -> None:
        self._ranks, self._work = ranks, work

    def wait(self) -> None:
        with self._ranks._deadline("the other ranks (weights)"):
            self._work.wait()


def end_process(exit_code: int) -> NoReturn:
    """End the process of a rank without taking the interpreter down.

    A thread of gloo may still hold the tensors of the last collective. Letting go of them takes
    the interpreter's lock. A thread that asks for it while the interpreter ends is torn out of a
    C++ destructor, which aborts a process that had succeeded.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(exit_code)


def _to_tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0)
