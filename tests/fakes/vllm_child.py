"""`python -m tests.fakes.vllm_child FD`: speaks as the process with vLLM does, without vLLM.

Each token of a completion is the id of its adapter, or 0 of the base model. A prompt that begins
with `DIE` ends the process. Adapters that it was not given are refused.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from tinsmith_sampler.vllm.messages import (
    LENGTH_BYTES,
    AddAdapter,
    Done,
    Event,
    Generate,
    Ready,
    RemoveAdapter,
    Stepped,
    Update,
    from_content,
    length_of,
    to_frame,
)

DIE = 9
FOLDER = "TEST_VLLM_CHILD"
"""Names a folder: a file `broken` there keeps the process from starting."""


def main(connection: socket.socket) -> None:
    """Answer commands until the socket ends."""
    stream = connection.makefile("rb")

    def receive() -> Any:
        start = stream.read(LENGTH_BYTES)
        if not start:
            sys.exit(0)
        return from_content(stream.read(length_of(start)))

    def send(event: Event) -> None:
        connection.sendall(to_frame(event))

    configure = receive()
    if (Path(os.environ[FOLDER]) / "broken").exists():
        sys.exit(1)
    send(Ready("0", configure.max_model_tokens))
    adapters: set[int] = set()
    while True:
        match receive():
            case Generate() as command:
                if command.prompt[0] == DIE:
                    sys.exit(1)
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
