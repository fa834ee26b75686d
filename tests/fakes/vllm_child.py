"""`python -m tests.fakes.vllm_child FD`: speaks as the process with vLLM does, without vLLM.

Each token of a completion is the id of its adapter, or 0 of the base model. A prompt that begins
with `DIE` ends the process, one with `GARBLE` has it say what is no message. Adapters that it was
not given are refused.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from tinsmith_sampler.vllm.frames import LENGTH_BYTES, command_of, length_of, to_frame
from tinsmith_sampler.vllm.messages import (
    AddAdapter,
    Command,
    Configure,
    Done,
    Event,
    Generate,
    Ready,
    RemoveAdapter,
    Stepped,
    Update,
)

DIE = 9
GARBLE = 8
FOLDER = "TEST_VLLM_CHILD"
"""Names a folder: a file `broken` there ends the process at once, `garbled` has it begin so."""


def main(connection: socket.socket) -> None:
    """Answer commands until the socket ends."""
    stream = connection.makefile("rb")

    def receive() -> Command:
        start = stream.read(LENGTH_BYTES)
        if not start:
            sys.exit(0)
        return command_of(stream.read(length_of(start)))

    def send(event: Event) -> None:
        connection.sendall(to_frame(event))

    configure = receive()
    assert isinstance(configure, Configure)
    if (Path(os.environ[FOLDER]) / "broken").exists():
        sys.exit(1)
    if (Path(os.environ[FOLDER]) / "garbled").exists():
        connection.sendall(b"\xff" * LENGTH_BYTES)
    send(Ready("0", configure.max_model_tokens))
    adapters: set[int] = set()
    while True:
        match receive():
            case Generate() as command:
                if command.prompt[0] == DIE:
                    sys.exit(1)
                if command.prompt[0] == GARBLE:
                    # A frame of the other direction.
                    connection.sendall(to_frame(command))
                    continue
                number = 0 if command.adapter is None else command.adapter.id
                problem = "" if number in {0, *adapters} else f"no adapter {number}"
                count = 0 if problem else command.max_tokens
                send(
                    Stepped(
                        [
                            Update(
                                sample=command.sample,
                                tokens=[number] * count,
                                logprobs=[-1.0] * count,
                                likeliest=[[]] * count,
                                finish_reason="length",
                                num_cached_tokens=0,
                                problem=problem,
                            )
                        ]
                    )
                )
            case AddAdapter(call, adapter):
                adapters.add(adapter.id)
                send(Done(call))
            case RemoveAdapter(call, number):
                adapters.discard(number)
                send(Done(call))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
