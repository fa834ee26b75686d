"""What a failed call to another pod means."""

from __future__ import annotations

import grpc
import pytest

from tinsmith_runtime.errors import InternalError, TinsmithError, WorkerUnavailableError
from tinsmith_runtime.rpc.scheduler_client import typed_errors


@pytest.mark.parametrize(
    ("may_move", "error"),
    [
        pytest.param(True, WorkerUnavailableError, id="another-pod-has-the-port"),
        pytest.param(False, InternalError, id="another-release"),
    ],
)
async def test_a_call_that_the_other_side_does_not_know(
    may_move: bool, error: type[TinsmithError]
) -> None:
    nothing = grpc.aio.Metadata()
    with pytest.raises(error):
        async with typed_errors("trainer", may_move=may_move):
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNIMPLEMENTED, nothing, nothing)
