"""`python -m`, as a confined process: tries whether forms can be compiled in time."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from tinsmith_runtime.confined.worker import Handle, serve
from tinsmith_sampler.forms.compiler import FormCompiler


def begin(first: dict[str, Any]) -> Handle:
    """Return what compiles forms, and keeps none.

    Args:
        first: Holds the arguments of `FormCompiler`.
    """
    compiler = FormCompiler(Path(first["directory"]), first["vocab_size"], first["end_tokens"])

    # Here and not with the first form, whose time it is none of. A model without a tokenizer for
    # forms has each of them refused.
    with contextlib.suppress(ValueError):
        compiler.load()

    def handle(request: dict[str, Any]) -> None:
        compiler.compile(request["kind"], request["source"])

    return handle


if __name__ == "__main__":
    serve(begin)
