"""Plays one step of a run again, with its inputs, and compares its results with the recorded.

A fork of the run, at the moment before the step, executes the operations of the step anew under
their own numbers. Then each answer is compared with the recorded one, to the bit. The fork is
deleted at the end; the run itself is only read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from google.longrunning import operations_pb2

from tinsmith.errors import TinsmithError
from tinsmith.rpc import operations
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.error_codec import decode_status
from tinsmith.rpc.transport import Endpoint
from tinsmith.tensors import decode_tensor
from tinsmith.training.past_steps import ReplayedOperation, StepReplay
from tinsmith.training.run_creation import delete_run, fork_run, wait_done
from tinsmith.v1 import scheduler_pb2, trainer_pb2

_Answer = (
    trainer_pb2.ForwardResponse
    | trainer_pb2.ForwardBackwardResponse
    | trainer_pb2.OptimStepResponse
)
_ANSWERS: Mapping[str, type[_Answer]] = {
    operations.FORWARD.kind: trainer_pb2.ForwardResponse,
    operations.FORWARD_BACKWARD.kind: trainer_pb2.ForwardBackwardResponse,
    operations.OPTIM_STEP.kind: trainer_pb2.OptimStepResponse,
}
_NOT_KEPT = "the recorded result is not kept any more"


async def replay_step(core: ClientCore, name: str, step: int) -> StepReplay:
    """Play a step of a run again; see `TrainingRunListCalls.replay`."""
    source = await core.get_run(core.run_name(name))
    fork = await fork_run(
        core, source.name, step, reruns_step=True, display_name=f"replay of {source.name}@{step}"
    )
    try:
        compared = await _compare(core, source, fork)
    finally:
        await delete_run(core, fork.name)
    return StepReplay(run=source.name, step=step, operations=tuple(compared))


async def _compare(
    core: ClientCore, source: scheduler_pb2.TrainingRun, fork: scheduler_pb2.TrainingRun
) -> list[ReplayedOperation]:
    recorded_at, replayed_at = core.trainer_endpoint(source), core.trainer_endpoint(fork)
    status = await core.transport.call(
        replayed_at,
        lambda c: c.trainer.GetRunStatus,
        trainer_pb2.GetRunStatusRequest(run=fork.name),
    )
    compared = []
    for number in range(fork.rerun_sequence_number, status.next_sequence_number):
        replayed = await _outcome(core, replayed_at, fork.name, number)
        recorded = await _outcome(core, recorded_at, source.name, number)
        # What had failed is not executed anew, nor is a save.
        had_failed = recorded is not None and recorded.error is not None
        if replayed is not None and replayed.kind in _ANSWERS and not had_failed:
            compared.append(_compared(number, recorded, replayed))
    return compared


class _Outcome:
    """What an operation ended with."""

    def __init__(self, operation: operations_pb2.Operation) -> None:
        metadata = trainer_pb2.OperationMetadata()
        operation.metadata.Unpack(metadata)
        self.kind = metadata.kind
        self.error = decode_status(operation.error) if operation.HasField("error") else None
        self.encoded = operation.response.value
        self.answer: _Answer | None = None
        if self.kind in _ANSWERS and self.error is None:
            self.answer = _ANSWERS[self.kind].FromString(self.encoded)


async def _outcome(core: ClientCore, endpoint: Endpoint, run: str, number: int) -> _Outcome | None:
    """Return what an operation ended with; None if that is not kept."""
    name = f"{run}/operations/{number}"
    try:
        return _Outcome(await wait_done(core, endpoint, operations_pb2.Operation(name=name)))
    except TinsmithError as error:
        if error.reason != operations.EXPIRED_REASON:
            raise
        return None


def _compared(number: int, recorded: _Outcome | None, replayed: _Outcome) -> ReplayedOperation:
    num_datums, num_tokens = _size(replayed.answer)
    if recorded is None:
        differences = [_NOT_KEPT]
    elif replayed.error is not None:
        differences = [f"recorded a result, now it failed: {replayed.error.message}"]
    elif recorded.encoded == replayed.encoded:
        differences = []
    elif recorded.answer is not None and replayed.answer is not None:
        differences = _differences(recorded.answer, replayed.answer)
    else:
        differences = [f"kind: recorded {recorded.kind}, now {replayed.kind}"]
    return ReplayedOperation(
        sequence_number=number,
        kind=replayed.kind,
        num_datums=num_datums,
        num_tokens=num_tokens,
        recorded=_metrics(recorded),
        replayed=_metrics(replayed),
        differences=tuple(differences),
    )


def _metrics(outcome: _Outcome | None) -> dict[str, float]:
    if outcome is None or outcome.answer is None:
        return {}
    return dict(sorted(outcome.answer.metrics.items()))


def _size(answer: _Answer | None) -> tuple[int, int]:
    """Return the datums and tokens of a batch; none for a step."""
    if answer is None or isinstance(answer, trainer_pb2.OptimStepResponse):
        return 0, 0
    shapes = [tuple(output.logprobs.shape) for output in answer.outputs]
    return len(shapes), sum(shape[0] for shape in shapes if shape)


def _differences(recorded: _Answer, replayed: _Answer) -> list[str]:
    """Return where two answers of one kind differ, in words; there is at least one place."""
    found = []
    if isinstance(recorded, trainer_pb2.OptimStepResponse) and isinstance(
        replayed, trainer_pb2.OptimStepResponse
    ):
        if recorded.version != replayed.version:
            found.append(f"version: recorded {recorded.version}, now {replayed.version}")
    elif not isinstance(recorded, trainer_pb2.OptimStepResponse) and not isinstance(
        replayed, trainer_pb2.OptimStepResponse
    ):
        found += _logprob_differences(recorded, replayed)
    for name in sorted({*recorded.metrics, *replayed.metrics}):
        before, now = recorded.metrics.get(name), replayed.metrics.get(name)
        if not _is_equal(before, now):
            found.append(f"{name}: recorded {before!r}, now {now!r}")
    return found or ["the encoded answers differ, in no value that this client knows"]


def _is_equal(before: float | None, now: float | None) -> bool:
    if before is None or now is None:
        return before is now
    return before == now or (math.isnan(before) and math.isnan(now))


def _logprob_differences(
    recorded: trainer_pb2.ForwardResponse | trainer_pb2.ForwardBackwardResponse,
    replayed: trainer_pb2.ForwardResponse | trainer_pb2.ForwardBackwardResponse,
) -> list[str]:
    if len(recorded.outputs) != len(replayed.outputs):
        return [f"datums: recorded {len(recorded.outputs)}, now {len(replayed.outputs)}"]
    found = []
    for index, (before, now) in enumerate(zip(recorded.outputs, replayed.outputs, strict=True)):
        before_T, now_T = decode_tensor(before.logprobs), decode_tensor(now.logprobs)
        if before_T.shape != now_T.shape:
            shapes = f"recorded {before_T.shape}, now {now_T.shape}"
            found.append(f"shape of the logprobs of datum {index}: {shapes}")
            continue
        differing = np.argwhere(before_T.view(np.uint32) != now_T.view(np.uint32))
        if differing.size:
            place = tuple(int(axis) for axis in differing[0])
            found.append(
                f"logprobs of datum {index}: {len(differing)} differ, the first at token "
                f"{place[0]}: recorded {before_T[place]!r}, now {now_T[place]!r}"
            )
    return found
