"""What was sampled with `record_stability_info`, and the batches that refer to it.

`stable_reinforce` weighs each token by how far the policy has moved since the token was drawn, so a
batch must say truthfully what was drawn. Its datums name runs of recorded sequences. Here each run
is held against the recording: the tokens, and their log-probabilities. A datum that passes gets the
mask of its sampled tokens. A recording lives one day and serves the models of its own session.

Prompts with images are recorded without their tokens, since the number of placeholders of an image
is the model's to say. For them the targets alone are held against the recording.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinsmith.tensors import decode_tensor, encode_tensor
from tinsmith.v1 import sampler_pb2, trajectories_pb2
from tinsmith_gateway.project_threads import ProjectThreads
from tinsmith_gateway.tinker import wire_pb2
from tinsmith_gateway.tinker.promises.future_store import RECORDING, FutureRecord, FutureStore
from tinsmith_gateway.tinker.wire import ids
from tinsmith_runtime.errors import InvalidFieldError

STABLE_REINFORCE = "stable_reinforce"
_SEQUENCE = re.compile(r"(sample\.(.+)-sample-\d+\.\d+)\.(\d{1,5})")
_TOLERANCE = 1e-5
"""Of a log-probability that went through a client's own numbers."""
_MAX_SEQUENCES = 4096
"""Sequences that one batch may name."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A sequence as it was drawn.

    Attributes:
        prompt_T: Tokens that the model read; None if there were images among them.
        tokens_T: Tokens that it drew.
        logprobs_T: Their natural-log probabilities.
    """

    prompt_T: NDArray[np.int64] | None
    tokens_T: NDArray[np.int64]
    logprobs_T: NDArray[np.float32]


class Recordings:
    """Keeps what was sampled, and checks batches against it."""

    def __init__(self, store: FutureStore, threads: ProjectThreads) -> None:
        self._store = store
        self._threads = threads

    async def keep(
        self,
        project: str,
        sampling_session: str,
        future: str,
        prompt: trajectories_pb2.ModelInput,
        response: sampler_pb2.SampleResponse,
    ) -> None:
        """Record the sequences of a sample, before its future is answered.

        A repeat changes nothing.

        Args:
            project: Id of the project.
            sampling_session: Name of what was sampled from.
            future: Id of the sample, which the ids of its sequences begin with.
            prompt: What the model read.
            response: What it drew.
        """
        kept = sampler_pb2.SampleResponse()
        for sequence in response.sequences:
            kept.sequences.add(tokens=sequence.tokens, logprobs=sequence.logprobs)
        has_images = any(chunk.HasField("image") for chunk in prompt.chunks)
        await self._store.add_ended(
            project,
            _recording_of(future),
            RECORDING,
            owner=sampling_session,
            request=b"" if has_images else prompt.SerializeToString(),
            result=kept.SerializeToString(),
        )

    async def check(
        self,
        project: str,
        request: wire_pb2.ForwardBackwardRequest,
        data: Sequence[trajectories_pb2.Datum],
    ) -> None:
        """Hold a batch against the recordings that it names, and mark its sampled tokens.

        Args:
            project: Id of the project.
            request: The batch as it came.
            data: The same datums in native words; each gets the input `sampled_mask`.

        Raises:
            InvalidFieldError: If a datum names no recording, or not what was recorded.
        """
        names = {
            run.sequence_id
            for datum in request.data
            for span in (*datum.model_input_spans, *datum.loss_fn_input_spans)
            for run in _run_of(span)
        }
        if len(names) > _MAX_SEQUENCES:
            raise InvalidFieldError("data", f"names more than {_MAX_SEQUENCES} sequences")
        session = ids.session_of_model(request.model_id)
        recorded: dict[str, _Recorded] = {}
        rows: dict[str, FutureRecord | None] = {}
        for name in sorted(names):
            match = _SEQUENCE.fullmatch(name)
            if match is None or match[2] != session:
                continue
            future = match[1]
            if future not in rows:
                rows[future] = await self._store.get(project, _recording_of(future))
            found = _read(rows[future], int(match[3]))
            if found is not None:
                recorded[name] = found
        await self._threads.run(project, _check_all, request.data, data, recorded)


def _read(record: FutureRecord | None, index: int) -> _Recorded | None:
    """Return a sequence of a recording; None if there is none."""
    if record is None or record.kind != RECORDING:
        return None
    response = sampler_pb2.SampleResponse.FromString(record.result or b"")
    if index >= len(response.sequences):
        return None
    sequence = response.sequences[index]
    prompt = trajectories_pb2.ModelInput.FromString(record.request)
    chunks = [decode_tensor(chunk.tokens).astype(np.int64) for chunk in prompt.chunks]
    return _Recorded(
        np.concatenate(chunks) if chunks else None,
        decode_tensor(sequence.tokens).astype(np.int64),
        decode_tensor(sequence.logprobs).astype(np.float32),
    )


def _recording_of(future: str) -> str:
    return f"recording.{future}"


def _run_of(span: wire_pb2.ProvenanceSpan) -> Iterator[wire_pb2.TokenRun]:
    kind = span.WhichOneof("span")
    if kind is not None:
        yield getattr(span, kind)


def _check_all(
    wire: Sequence[wire_pb2.Datum],
    data: Sequence[trajectories_pb2.Datum],
    recorded: dict[str, _Recorded],
) -> None:
    for index, (sent, datum) in enumerate(zip(wire, data, strict=True)):
        mask_T = _check_targets(sent, datum, recorded, f"data[{index}]")
        _check_input(sent, datum, recorded, f"data[{index}].model_input_spans")
        datum.loss_inputs["sampled_mask"].CopyFrom(encode_tensor(mask_T))


def _check_targets(
    sent: wire_pb2.Datum,
    datum: trajectories_pb2.Datum,
    recorded: dict[str, _Recorded],
    path: str,
) -> NDArray[np.float32]:
    """Return which targets were sampled, float32 [T], 0 or 1."""
    field = f"{path}.loss_fn_input_spans"
    found = {}
    for name in ("target_tokens", "logprobs", "advantages"):
        if name not in datum.loss_inputs:
            raise InvalidFieldError(f"{path}.loss_fn_inputs.{name}", "is required")
        found[name] = decode_tensor(datum.loss_inputs[name])
        if found[name].ndim != 1 or len(found[name]) != len(found["target_tokens"]):
            raise InvalidFieldError(
                f"{path}.loss_fn_inputs.{name}", "must have one value for each target"
            )
    mask_T = np.zeros(len(found["target_tokens"]), dtype=np.float32)
    for begin, span in _tiles(sent.loss_fn_input_spans, len(mask_T), field):
        if span.WhichOneof("span") == "prompt_tokens":
            continue
        run = span.sampled_tokens
        sequence = _sequence(recorded, run, field)
        drawn = _slice(sequence.tokens_T, run, field)
        part = slice(begin, begin + run.length)
        if not np.array_equal(found["target_tokens"][part], drawn):
            raise InvalidFieldError(field, f"holds targets that {run.sequence_id} did not draw")
        logprobs = _slice(sequence.logprobs_T, run, field)
        if not np.allclose(found["logprobs"][part], logprobs, rtol=0, atol=_TOLERANCE):
            raise InvalidFieldError(
                f"{path}.loss_fn_inputs.logprobs",
                f"differ from those that {run.sequence_id} was drawn with",
            )
        mask_T[part] = 1.0
    if np.any((mask_T == 0) & (found["advantages"] != 0)):
        raise InvalidFieldError(
            f"{path}.loss_fn_inputs.advantages", "must be 0 on tokens that were not sampled"
        )
    return mask_T


def _check_input(
    sent: wire_pb2.Datum,
    datum: trajectories_pb2.Datum,
    recorded: dict[str, _Recorded],
    field: str,
) -> None:
    chunks = datum.model_input.chunks
    if any(chunk.HasField("image") for chunk in chunks):
        return
    tokens_T = np.concatenate([decode_tensor(chunk.tokens).astype(np.int64) for chunk in chunks])
    for begin, span in _tiles(sent.model_input_spans, len(tokens_T), field):
        is_prompt = span.WhichOneof("span") == "prompt_tokens"
        run = span.prompt_tokens if is_prompt else span.sampled_tokens
        sequence = _sequence(recorded, run, field)
        whole_T = sequence.prompt_T if is_prompt else sequence.tokens_T
        if whole_T is None:
            continue
        part = tokens_T[begin : begin + run.length]
        if not np.array_equal(part, _slice(whole_T, run, field)):
            what = "the prompt of " if is_prompt else ""
            raise InvalidFieldError(field, f"holds tokens that {what}{run.sequence_id} has not")


def _tiles(
    spans: Sequence[wire_pb2.ProvenanceSpan], length: int, field: str
) -> Iterator[tuple[int, wire_pb2.ProvenanceSpan]]:
    """Yield each run with its position, once they are known to tile the field."""
    runs = [run for span in spans for run in _run_of(span)]
    if not runs or len(runs) != len(spans):
        raise InvalidFieldError(
            field, "must name the sampled sequences behind the datum; see Datum.with_provenance"
        )
    if any(run.length < 0 or run.offset < 0 for run in runs) or length != sum(
        run.length for run in runs
    ):
        raise InvalidFieldError(field, f"must cover {length} positions, each once")
    begin = 0
    for span, run in zip(spans, runs, strict=True):
        yield begin, span
        begin += run.length


def _sequence(recorded: dict[str, _Recorded], run: wire_pb2.TokenRun, field: str) -> _Recorded:
    found = recorded.get(run.sequence_id)
    if found is None:
        raise InvalidFieldError(
            field,
            f"names {run.sequence_id[:128]!r}, of which nothing is recorded in this session; "
            "sample with record_stability_info=True, at most a day before",
        )
    return found


def _slice(whole_T: NDArray[np.generic], run: wire_pb2.TokenRun, field: str) -> NDArray[np.generic]:
    if run.offset + run.length > len(whole_T):
        raise InvalidFieldError(
            field, f"names more tokens than {run.sequence_id} has, which are {len(whole_T)}"
        )
    return whole_T[run.offset : run.offset + run.length]
