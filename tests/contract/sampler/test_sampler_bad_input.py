"""Bad input: each row is refused with its meaning, and no other caller notices.

What is wrong with a request alone is a row of `tests/unit/engine/test_sampling_extras.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tests.fakes.sampler_harness import (
    SamplerRig,
    code_of,
    make_request,
    refusal,
    running_sampler,
    tokens_of,
)
from tests.fakes.scheduler import bearer

from tinsmith.tensors import encode_tensor, encode_tokens
from tinsmith.v1 import sampler_pb2, tensors_pb2
from tinsmith_engine.files.weight_files import ADAPTER_FILE
from tinsmith_engine.host import EngineHost
from tinsmith_runtime.rpc.auth import ApiKey

NAN, INFINITY = float("nan"), float("inf")
NOT_FOUND, INVALID = "NOT_FOUND", "INVALID_ARGUMENT"
EXHAUSTED, UNAUTHENTICATED = "RESOURCE_EXHAUSTED", "UNAUTHENTICATED"
METHOD = "/tinsmith.v1.SamplerService/Sample"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Row:
    """A bad request, and what its sender is to be told.

    Attributes:
        send: Sends it.
        says: What the message must contain: the resource or field, and what to do.
        field: The field that is named as wrong; empty for none.
        metadata: Values of `ErrorInfo.metadata`; `...` means any that is not empty.
    """

    send: Callable[[SamplerRig], Awaitable[Any]]
    code: str
    reason: str
    says: tuple[str, ...] = ()
    field: str = ""
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


def sample(*args: Any, **options: Any) -> Callable[[SamplerRig], Awaitable[Any]]:
    return lambda rig: rig.sample(rig.session(), *args, **options)


def extra(
    *, prompt_logprobs: bool = False, **extras: Any
) -> Callable[[SamplerRig], Awaitable[Any]]:
    return sample(prompt_logprobs=prompt_logprobs, extras=extras)


def targets(values: Any) -> Any:
    return encode_tensor(np.asarray(values, dtype=np.int64))


async def all_of(call: Any) -> Any:
    return [message async for message in call]


def stream(change: Callable[[Any], Any]) -> Callable[[SamplerRig], Awaitable[Any]]:
    def send(rig: SamplerRig) -> Any:
        session = rig.session()
        request = sampler_pb2.StreamSampleRequest(
            sampling_session=session, request=make_request(session)
        )
        change(request)
        return all_of(rig.call("StreamSample", request))

    return send


async def stream_of_a_version_to_come(rig: SamplerRig) -> Any:
    run = await rig.export("young", seed=1, version=3)
    return await all_of(rig.stream(rig.session(run=run), min_version=4))


def sample_from(session: str) -> Callable[[SamplerRig], Awaitable[Any]]:
    return lambda rig: rig.sample(session)


def of_source(**source: str) -> Callable[[SamplerRig], Awaitable[Any]]:
    return lambda rig: rig.sample(rig.session(**source))


def with_prompt(fill: Callable[[Any], Any]) -> Callable[[SamplerRig], Awaitable[Any]]:
    def send(rig: SamplerRig) -> Any:
        request = make_request(rig.session())
        request.prompt.Clear()
        fill(request.prompt)
        return rig.call("Sample", request)

    return send


def score(tokens: list[int], **fields: Any) -> Callable[[SamplerRig], Awaitable[Any]]:
    def send(rig: SamplerRig) -> Any:
        request = sampler_pb2.ComputeLogprobsRequest(sampling_session=rig.session(), **fields)
        request.input.chunks.add(tokens=encode_tokens(tokens))
        return rig.call("ComputeLogprobs", request)

    return send


def raw(body: bytes) -> Callable[[SamplerRig], Awaitable[Any]]:
    def send(rig: SamplerRig) -> Any:
        return rig.channel.unary_unary(METHOD)(body, metadata=bearer(rig.key), timeout=60)

    return send


def foreign_session(rig: SamplerRig) -> Any:
    return rig.sample(rig.session(project="q"))


def known_but_foreign_key(rig: SamplerRig) -> Any:
    return rig.sample(rig.session(), key=rig.scheduler.new_key("q"))


def revoked_key(rig: SamplerRig) -> Any:
    key = rig.scheduler.new_key("p")
    rig.scheduler.revoked.add(ApiKey.parse(key).key_id)
    return rig.sample(rig.session(), key=key)


def unknown_key(rig: SamplerRig) -> Any:
    return rig.sample(rig.session(), key=str(ApiKey.generate()))


def no_key(rig: SamplerRig) -> Any:
    return rig.stub.Sample(make_request(rig.session()), timeout=5)


def list_weights(parent: str) -> Callable[[SamplerRig], Awaitable[Any]]:
    request = sampler_pb2.ListLoadedWeightsRequest(parent=parent)
    return lambda rig: rig.call("ListLoadedWeights", request)


def damaged(damage: Callable[[Path], None]) -> Callable[[SamplerRig], Awaitable[Any]]:
    async def send(rig: SamplerRig) -> Any:
        name = await rig.checkpoint("damaged")
        damage(rig.folder(name))
        return await rig.sample(rig.session(checkpoint=name))

    return send


def damaged_before_hashing(
    damage: Callable[[dict[str, Any]], Any],
) -> Callable[[SamplerRig], Awaitable[Any]]:
    """A manifest that the trainer vouches for, although it says nothing that can be used."""

    async def send(rig: SamplerRig) -> Any:
        name = await rig.checkpoint("odd")
        path = rig.folder(name) / "manifest.json"
        content = json.loads(path.read_text())
        damage(content["attributes"])
        path.write_text(json.dumps(content))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        rig.trainer.checkpoints[name].manifest_sha256 = digest
        return await rig.sample(rig.session(checkpoint=name))

    return send


def flip_a_bit(folder: Path) -> None:
    path = folder / ADAPTER_FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def edit_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 9'))


async def checkpoint_elsewhere(rig: SamplerRig) -> Any:
    name = await rig.checkpoint("elsewhere")
    rig.trainer.checkpoints[name].manifest_uri = "file:///etc/manifest.json"
    return await rig.sample(rig.session(checkpoint=name))


async def checkpoint_of_another_model(rig: SamplerRig) -> Any:
    name = await rig.checkpoint("other-model")
    session = rig.session(checkpoint=name)
    rig.scheduler.sampling_sessions[session].base_model = "gpt-9"
    return await rig.sample(session)


async def version_to_come(rig: SamplerRig) -> Any:
    run = await rig.export("young", seed=1, version=3)
    return await rig.sample(rig.session(run=run), min_version=4)


def corrupt(file: str, *says: str) -> dict[str, Any]:
    return {
        "code": "DATA_LOSS",
        "reason": "CHECKPOINT_CORRUPT",
        "says": (file, *says, "use another checkpoint"),
        "metadata": {"file": file, "folder": ...},
    }


ROWS = {
    # Sessions.
    "unknown-session": Row(
        sample_from("projects/p/samplingSessions/none"), NOT_FOUND, "SAMPLING_SESSION_NOT_FOUND"
    ),
    "foreign-session": Row(
        foreign_session, NOT_FOUND, "SAMPLING_SESSION_NOT_FOUND", ("create a new one",)
    ),
    "foreign-key": Row(
        known_but_foreign_key, NOT_FOUND, "SAMPLING_SESSION_NOT_FOUND", ("create a new one",)
    ),
    "session-name-malformed": Row(
        sample_from("../../etc"), INVALID, "INVALID_FIELD",
        ("sampling_session must be projects/{project}/samplingSessions/",), "sampling_session",
    ),
    "model-not-served": Row(
        checkpoint_of_another_model, NOT_FOUND, "MODEL_NOT_FOUND", ("gpt-9", "served are: tiny"),
        metadata={"base_model": "gpt-9"},
    ),
    "unknown-checkpoint": Row(
        of_source(checkpoint="projects/p/trainingRuns/r/checkpoints/none"), NOT_FOUND,
        "CHECKPOINT_NOT_FOUND", ("checkpoints/none",),
    ),
    "unknown-run": Row(
        of_source(run="projects/p/trainingRuns/none"), NOT_FOUND, "RUN_NOT_FOUND",
        ("trainingRuns/none",),
    ),
    "version-to-come": Row(
        version_to_come, "UNAVAILABLE", "VERSION_NOT_LOADED",
        ("at version 3", "asks for 4", "send it again"), metadata={"run": ..., "version": "3"},
    ),
    # Prompts.
    "prompt-absent": Row(
        with_prompt(lambda prompt: None), INVALID, "EMPTY_BATCH", ("prompt", "no token"), "prompt"
    ),
    "prompt-image": Row(
        with_prompt(lambda prompt: prompt.chunks.add().image.SetInParent()), INVALID,
        "INVALID_FIELD", ("no images",), "prompt.chunks[0]",
    ),
    "prompt-floats": Row(
        with_prompt(
            lambda prompt: prompt.chunks.add(tokens=encode_tensor(np.ones(3, np.float32)))
        ),
        INVALID, "SHAPE_MISMATCH", ("int64 or int32",), "prompt.chunks[0].tokens",
    ),
    "prompt-two-dimensional": Row(
        with_prompt(
            lambda prompt: prompt.chunks.add(tokens=encode_tensor(np.ones((2, 2), np.int32)))
        ),
        INVALID, "SHAPE_MISMATCH", ("shape [T]", "[2, 2]"), "prompt.chunks[0].tokens",
    ),
    "token-too-high": Row(
        sample([5, 100_000, 6]), INVALID, "TOKEN_OUT_OF_VOCABULARY",
        ("100000", "position 1", "vocabulary"), "prompt", {"token": "100000"},
    ),
    "prompt-too-long": Row(
        sample([5] * 4096), EXHAUSTED, "SEQUENCE_TOO_LONG",
        ("4096 tokens", "no room", "shorten it"), metadata={"limit": "4096"},
    ),
    "scored-too-long": Row(
        score([5] * 4097), EXHAUSTED, "SEQUENCE_TOO_LONG", ("4097 tokens", "short")
    ),
    "scored-min-version": Row(
        score([5], min_version=-1), INVALID, "INVALID_FIELD", ("at least 0",), "min_version"
    ),
    # Parameters.
    "temperature-nan": Row(
        sample(temperature=NAN), INVALID, "NOT_FINITE", ("nan",), "params.temperature"
    ),
    "top-k-negative": Row(
        sample(top_k=-2), INVALID, "INVALID_FIELD", ("at least -1",), "params.top_k"
    ),
    "max-tokens-zero": Row(
        sample(max_tokens=0), INVALID, "INVALID_FIELD", ("at least 1",), "params.max_tokens"
    ),
    "stop-strings-too-many": Row(
        sample(stop_strings=["a"] * 65), INVALID, "INVALID_FIELD", ("at most 64",),
        "params.stop_strings",
    ),
    "samples-too-many": Row(
        sample(num_samples=9), EXHAUSTED, "LIMIT_EXCEEDED", ("9", "1 to 8", "several requests"),
        metadata={"limit": "8"},
    ),
    "topk-too-many": Row(
        sample(topk_prompt_logprobs=65), INVALID, "INVALID_FIELD", ("0 to 64",),
        "topk_prompt_logprobs",
    ),
    "min-version-negative": Row(
        sample(min_version=-1), INVALID, "INVALID_FIELD", ("negative",), "min_version"
    ),
    "alternatives-too-many": Row(
        extra(num_prompt_alternatives=65), INVALID, "INVALID_FIELD", ("0 to 64",),
        "num_prompt_alternatives",
    ),
    "targets-one-dimensional": Row(
        extra(target_prompt_tokens=targets([1, 2, 3])), INVALID, "SHAPE_MISMATCH",
        ("[T - 1, K]", "[3]"), "target_prompt_tokens",
    ),
    "targets-too-many": Row(
        extra(target_prompt_tokens=targets([[1] * 129] * 3)), INVALID, "SHAPE_MISMATCH",
        ("1 to 128",), "target_prompt_tokens",
    ),
    "targets-none": Row(
        extra(target_prompt_tokens=targets(np.zeros((3, 0)))), INVALID, "SHAPE_MISMATCH",
        ("1 to 128",), "target_prompt_tokens",
    ),
    "targets-floats": Row(
        extra(target_prompt_tokens=encode_tensor(np.ones((3, 1), np.float32))), INVALID,
        "SHAPE_MISMATCH", ("int64 or int32",), "target_prompt_tokens",
    ),
    "targets-malformed": Row(
        extra(target_prompt_tokens=tensors_pb2.Tensor(shape=[3, 1], data=b"x")), INVALID,
        "SHAPE_MISMATCH", ("not a tensor",), "target_prompt_tokens",
    ),
    "weight-updates-unknown": Row(
        extra(weight_updates=9), INVALID, "INVALID_FIELD", ("got 9",), "weight_updates"
    ),
    # Streams.
    "stream-of-a-foreign-session": Row(
        lambda rig: all_of(rig.stream(rig.session(project="q"))), NOT_FOUND,
        "SAMPLING_SESSION_NOT_FOUND", ("create a new one",),
    ),
    "stream-of-two-sessions": Row(
        stream(lambda request: setattr(request.request, "sampling_session", "x")), INVALID,
        "INVALID_FIELD", ("empty or equal",), "request.sampling_session",
    ),
    "received-negative": Row(
        stream(lambda request: request.received_tokens.append(-1)), INVALID, "INVALID_FIELD",
        ("negative",), "received_tokens",
    ),
    "received-of-other-samples": Row(
        stream(lambda request: request.received_tokens.extend([1, 2])), INVALID, "INVALID_FIELD",
        ("each of 1 samples, got 2",), "received_tokens",
    ),
    "stream-version-to-come": Row(
        stream_of_a_version_to_come, "UNAVAILABLE", "VERSION_NOT_LOADED", ("asks for 4",)
    ),
    # Bytes and keys.
    "malformed": Row(raw(b"\xff\xff\xff\xff"), INVALID, "MALFORMED_REQUEST"),
    "key-missing": Row(no_key, UNAUTHENTICATED, "KEY_MISSING", ("authorization: Bearer",)),
    "key-revoked": Row(revoked_key, UNAUTHENTICATED, "KEY_REVOKED", ("revoked",)),
    # Lists.
    "list-foreign": Row(
        list_weights("projects/q"), NOT_FOUND, "RESOURCE_NOT_FOUND", ("projects/q",)
    ),
    # Checkpoints.
    "weights-changed": Row(damaged(flip_a_bit), **corrupt(ADAPTER_FILE, "SHA-256")),
    "manifest-edited": Row(damaged(edit_manifest), **corrupt("manifest.json", "was changed")),
    "manifest-elsewhere": Row(
        checkpoint_elsewhere, "FAILED_PRECONDITION", "STORE_MISMATCH",
        ("not in the store", "same storage_uri"),
        metadata={"manifest_uri": ..., "storage_uri": ...},
    ),
    "manifest-without-adapter": Row(
        damaged_before_hashing(lambda attributes: attributes.pop("adapter")), "DATA_LOSS",
        "CHECKPOINT_CORRUPT", ("adapter", "use another checkpoint"),
    ),
    "manifest-adapter-unreadable": Row(
        damaged_before_hashing(lambda attributes: attributes.update(adapter="{")), "DATA_LOSS",
        "CHECKPOINT_CORRUPT", ("adapter", "use another checkpoint"),
    ),
    "manifest-adapter-unknown": Row(
        damaged_before_hashing(
            lambda attributes: attributes.update(adapter='{"kind": "lora", "depth": 3}')
        ),
        "DATA_LOSS", "CHECKPOINT_CORRUPT", ("adapter", "use another checkpoint"),
    ),
    "checkpoint-of-another-model": Row(
        damaged_before_hashing(lambda attributes: attributes.update(base_model="gpt-9")),
        "FAILED_PRECONDITION", "CHECKPOINT_INCOMPATIBLE", ("gpt-9", "not of tiny"),
        metadata={"source": ...},
    ),
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    tmp_path_factory: pytest.TempPathFactory, engine_host: EngineHost
) -> AsyncIterator[SamplerRig]:
    folder = tmp_path_factory.mktemp("sampler")
    async with running_sampler(folder, engine_host, max_samples=8) as rig:
        bystander = rig.session(checkpoint=await rig.checkpoint("bystander", seed=9))
        before = tokens_of(await rig.sample(bystander))
        yield rig
        assert tokens_of(await rig.sample(bystander)) == before


@pytest.mark.parametrize("name", ROWS)
async def test_bad_input(rig: SamplerRig, name: str) -> None:
    row = ROWS[name]
    error = await refusal(row.send(rig))

    assert (code_of(error), error.reason) == (row.code, row.reason), error
    for part in row.says:
        assert part in error.message
    for key, wanted in row.metadata.items():
        assert error.metadata[key] if wanted is ... else error.metadata[key] == wanted
    assert [each.field for each in error.field_violations] == ([row.field] * bool(row.field))
    assert await rig.num_active() == 0


async def test_random_bytes_are_never_an_untyped_error(rig: SamplerRig) -> None:
    random = np.random.default_rng(0)
    for method in sampler_pb2.DESCRIPTOR.services_by_name["SamplerService"].methods:
        if method.name == "GetCapabilities":  # Any bytes of unknown fields are a good request.
            continue
        path = f"/tinsmith.v1.SamplerService/{method.name}"
        channel: Any = rig.channel
        for _ in range(20):
            body = random.bytes(int(random.integers(1, 40)))
            options = {"metadata": bearer(rig.key), "timeout": 5}
            if method.name == "StreamSample":
                error = await refusal(all_of(channel.unary_stream(path)(body, **options)))
            else:
                error = await refusal(channel.unary_unary(path)(body, **options))
            assert error.reason != "INTERNAL", (method.name, body)
