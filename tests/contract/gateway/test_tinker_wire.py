"""The Tinker wire as it is on the wire: plain HTTP against a gateway with real pods behind it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import zstandard
from tests.fakes.tinker_wire import (
    PROTOBUF,
    TOKENS,
    Model,
    Wire,
    datum,
    dense,
    sample_body,
    sparse,
)
from tests.integration.servers import (
    BASE_MODEL,
    Deployment,
    EmbeddedThread,
    bearer,
    create_key,
    new_request_id,
)

from tinsmith.v1 import scheduler_pb2
from tinsmith_gateway.metrics import PENDING_SAMPLES
from tinsmith_gateway.tinker import retrieval, wire_pb2
from tinsmith_gateway.tinker.account import downloads
from tinsmith_gateway.tinker.wire import tensor_codec

MAX_BODY_BYTES = 2**20
LONG_POLL_S = 0.3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[EmbeddedThread]:
    folder = tmp_path_factory.mktemp("wire")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINSMITH_STATE_DIR", str(folder / "state"))
        made = EmbeddedThread(
            folder / "data",
            tiny_model,
            {
                "gateway": {"max_body_bytes": MAX_BODY_BYTES, "long_poll_s": LONG_POLL_S},
                # No heartbeats are sent.
                "scheduler": {"session_timeout_s": 3600.0},
            },
        )
        try:
            yield made
        finally:
            made.stop()


@pytest.fixture(scope="module")
def deployment(server: EmbeddedThread) -> Deployment:
    return server.start()


@pytest.fixture(scope="module")
def ours(deployment: Deployment) -> Iterator[Wire]:
    yield from _connected(deployment, deployment.api_key)


@pytest.fixture(scope="module")
def theirs(deployment: Deployment) -> Iterator[Wire]:
    yield from _connected(deployment, create_key(deployment, "other"))


@pytest.fixture(scope="module")
def sampler(ours: Wire) -> str:
    return ours.sampler()


@pytest.fixture
def model(ours: Wire) -> Model:
    return ours.model()


def _connected(deployment: Deployment, key: str) -> Iterator[Wire]:
    client = Wire(f"http://{deployment.address}", {"x-api-key": key}, BASE_MODEL)
    try:
        yield client
    finally:
        client.close()


# Numbered calls.


ORDERED: dict[str, Callable[[Model, int], str]] = {
    "batch": lambda model, seq_id: model.submit(model.batch(seq_id=seq_id)),
    "forward": lambda model, seq_id: model.submit(model.batch(seq_id=seq_id, forward_only=True)),
    "step": lambda model, seq_id: model.step(seq_id),
    "save": lambda model, seq_id: model.ask("save_weights", seq_id, path="twice"),
    "overwriting save": lambda model, seq_id: model.ask(
        "save_weights", seq_id, path="twice", overwrite=True
    ),
    "save for a sampler": lambda model, seq_id: model.ask(
        "save_weights_for_sampler", seq_id, path="twice"
    ),
    "save for a client": lambda model, seq_id: model.ask(
        "save_weights_for_sampler", seq_id, sampling_session_seq_id=10_000 + int(model.id[-1])
    ),
    "external save": lambda model, seq_id: model.ask("save_weights_external", seq_id, path="twice"),
    "load": lambda model, seq_id: model.ask(
        "load_weights", seq_id, path=f"tinker://{model.id}/weights/before", optimizer=True
    ),
}


@pytest.mark.parametrize("send", ORDERED.values(), ids=ORDERED)
def test_a_numbered_call_sent_twice_is_one(ours: Wire, send: Callable[[Model, int], str]) -> None:
    def run(num_times: int) -> list[bytes]:
        model = ours.model()
        model.train()
        ours.result(model.ask("save_weights", path="before"))
        results = model.train()
        model.submit(model.batch())
        number = model.number()
        with ThreadPoolExecutor(num_times) as pool:
            sent = list(pool.map(lambda _: send(model, number), range(num_times)))
        assert len(set(sent)) == 1
        first = ours.retrieve(sent[0])
        assert b"error" not in first.content, first.text
        # After its end as well, and as often as it is asked for.
        assert send(model, number) == sent[0]
        assert ours.retrieve(sent[0]).content == first.content
        ours.retrieve(model.step())
        return results + model.train(2)

    assert run(3) == run(1)


def test_a_number_is_used_once(model: Model) -> None:
    first = model.submit(model.batch())
    other = _with_datum(model.batch(seq_id=1), datum(TOKENS[2:]))
    refused = model.send(other)
    assert (refused.status_code, refused.json()["category"]) == (400, "user")
    assert model.output(first).metrics["loss:sum"] > 0
    model.wire.result(model.step())
    model.train()


def test_a_call_sent_again_does_not_look_at_what_has_changed_since(
    ours: Wire, model: Model
) -> None:
    model.train()
    path = ours.result(model.ask("save_weights", path="soon-gone"))["path"]
    number = model.number()
    future = model.ask("load_weights", number, path=path, optimizer=True)
    expected = ours.retrieve(future).content
    gone = ours.http.delete(f"training_runs/{model.id}/checkpoints/weights/soon-gone")
    assert gone.status_code == 200
    assert model.ask("load_weights", number, path=path, optimizer=True) == future
    assert ours.retrieve(future).content == expected
    # A new call does.
    assert (
        "does not exist"
        in ours.result(model.ask("load_weights", path=path, optimizer=True))["error"]
    )
    model.train()


def test_numbers_come_in_any_order(ours: Wire) -> None:
    def run(order: list[int]) -> list[bytes]:
        model = ours.model()
        batches = {number: model.batch() for number in (1, 2, 3)}
        for number, batch in batches.items():
            batch.data[0].CopyFrom(datum(TOKENS[number:]))
        futures = {number: model.submit(batches[number]) for number in order}
        outputs = [ours.retrieve(futures[number]).content for number in (1, 2, 3)]
        return [*outputs, json.dumps(ours.result(model.step())).encode(), *model.train()]

    assert run([3, 2, 1]) == run([2, 3, 1]) == run([1, 2, 3])


def _broken_tensor(model: Model) -> str:
    batch = model.batch()
    batch.data[0].loss_fn_inputs["weights"].dense = b"123"
    return model.submit(batch)


def _huge_claims(model: Model) -> str:
    batch = model.batch()
    for index in range(100):
        tensor = batch.data[0].loss_fn_inputs[f"x{index}"]
        tensor.dtype = wire_pb2.DTYPE_FLOAT32
        tensor.sparse_csr.crow_indices = bytes(16)
        tensor.shape[:] = [1, tensor_codec.MAX_ELEMENTS]
    return model.submit(batch)


def _large_body(model: Model) -> str:
    batch = model.batch()
    batch.data[0].model_input[0].encoded_text.tokens = bytes(2 * MAX_BODY_BYTES)
    return model.submit(batch)


def _bomb(model: Model) -> str:
    batch = model.batch()
    batch.data[0].model_input[0].encoded_text.tokens = bytes(20 * MAX_BODY_BYTES)
    packed = zstandard.compress(batch.SerializeToString())
    assert len(packed) < MAX_BODY_BYTES
    return model.submit(packed, content_encoding="zstd")


def _not_json(model: Model, path: str, fields: str) -> str:
    text = f'{{"model_id":"{model.id}","seq_id":{model.number()},{fields}}}'
    answer = model.wire.http.post(path, content=text)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["request_id"])


REFUSED: dict[str, Callable[[Model], str]] = {
    "tensor": _broken_tensor,
    "huge claims": _huge_claims,
    "large body": _large_body,
    "zstd bomb": _bomb,
    "token": lambda model: model.submit(
        _with_datum(model.batch(), wire_pb2.Datum(model_input=[wire_pb2.Chunk()]))
    ),
    "no data": lambda model: model.submit(_with_datum(model.batch(), None)),
    "unknown loss": lambda model: model.submit(model.batch(loss_fn="nope")),
    "long loss": lambda model: model.submit(model.batch(loss_fn="x" * 100_000)),
    "long input": lambda model: model.submit(
        _with_datum(model.batch(), _with_input(datum(), "x" * 50_000))
    ),
    "loss without recordings": lambda model: model.submit(model.batch(loss_fn="stable_reinforce")),
    "not finite": lambda model: model.submit(
        model.batch(loss_fn="ppo", loss_fn_config={"clip_low_threshold": float("nan")})
    ),
    "name": lambda model: model.ask("save_weights", path="a/b"),
    "long name": lambda model: model.ask("save_weights", path="x" * 100_000),
    "suffixed name": lambda model: model.ask("save_weights", path="x.sampler"),
    "versioned name": lambda model: model.ask("save_weights", path="x.v3"),
    "ttl": lambda model: model.ask("save_weights", path="x", ttl_seconds=-5),
    "kind": lambda model: model.ask("save_weights_for_sampler", path="x", kind="other"),
    "no name": lambda model: model.ask("save_weights_for_sampler"),
    "recipient": lambda model: model.ask(
        "save_weights_external", path="x", age_encryption_recipients=["age1no"]
    ),
    "metadata": lambda model: model.ask("save_weights", user_metadata={"x" * 5000: "y"}),
    "field": lambda model: model.ask("optim_step", adam_params={"learning_rate": "much"}),
    "no parameters": lambda model: model.ask("optim_step"),
    "optimizer": lambda model: model.ask("optim_step", optimizer_params={"type": "dimuon"}),
    "nan": lambda model: _not_json(model, "optim_step", '"adam_params":{"learning_rate":NaN}'),
    "huge integer": lambda model: _not_json(
        model, "save_weights", f'"path":"x","ttl_seconds":1{"0" * 400}'
    ),
    "path": lambda model: model.ask("load_weights", path="tinker://a", optimizer=True),
    "unknown path": lambda model: model.ask(
        "load_weights", path="tinker://a/weights/b", optimizer=False
    ),
    "foreign field": lambda model: model.ask("load_weights", session_id=5, path="x"),
}


def _with_datum(
    request: wire_pb2.ForwardBackwardRequest, made: wire_pb2.Datum | None
) -> wire_pb2.ForwardBackwardRequest:
    del request.data[:]
    if made is not None:
        request.data.append(made)
    return request


def _with_input(made: wire_pb2.Datum, name: str) -> wire_pb2.Datum:
    made.loss_fn_inputs[name].CopyFrom(made.loss_fn_inputs["weights"])
    return made


@pytest.mark.parametrize("send", REFUSED.values(), ids=REFUSED)
def test_a_refused_call_fails_its_future_and_uses_up_its_number(
    model: Model, send: Callable[[Model], str]
) -> None:
    before = model.seq_id
    future = send(model)
    failed = model.wire.result(future)
    assert failed["category"] == "user", failed
    assert 0 < len(failed["error"]) < 5000
    model.seq_id = before
    assert send(model) == future
    assert model.wire.result(future) == failed
    # It may say that a batch is missing, and it ends what was accumulated.
    model.wire.result(model.step())
    model.train()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"\xff" * 50,
        b"\x4b" * 100_000,
        wire_pb2.ForwardBackwardRequest(model_id="x", seq_id=0).SerializeToString(),
        wire_pb2.ForwardBackwardRequest(model_id="x", seq_id=-(2**31)).SerializeToString(),
        wire_pb2.ForwardBackwardRequest(model_id="a/b", seq_id=1).SerializeToString(),
        b"\x0a\x01x\x10\x01\x1a\xff\xff\xff\xff\x0f",
    ],
    ids=["empty", "json", "noise", "groups", "zero", "negative", "name", "torn"],
)
def test_a_body_without_model_and_number_is_refused_at_once(ours: Wire, body: bytes) -> None:
    answer = ours.http.post("forward_backward", content=body, headers={"content-type": PROTOBUF})
    assert answer.status_code == 400
    assert answer.json()["error"]


# Bodies.


def test_a_packed_batch_is_the_same_batch(ours: Wire) -> None:
    results = []
    for is_packed in (False, True):
        model = ours.model()
        body = model.batch().SerializeToString()
        if is_packed:
            future = model.submit(zstandard.compress(body), content_encoding="zstd")
        else:
            future = model.submit(body, content_encoding="identity")
        results.append(model.wire.retrieve(future).content)
    assert results[0] == results[1]


@pytest.mark.parametrize("encoding", ["zstd", "gzip", "x"])
def test_a_body_that_is_not_what_it_says_is_refused(model: Model, encoding: str) -> None:
    answer = model.send(model.batch(), content_encoding=encoding)
    assert answer.status_code == 400
    assert "zstd" in answer.json()["error"]


def test_tensors_mean_the_same_in_every_form(ours: Wire) -> None:
    wide_T2 = np.zeros((7, 2), "<f4")
    wide_T2[:, 0] = 1.0
    targets_T2 = np.zeros((7, 2), "<i8")
    targets_T2[:, 0] = TOKENS[1:]
    halves = (np.ones(7, "<f4").view("<u4") >> 16).astype("<u2")
    forms = {
        "plain": (dense(np.array(TOKENS[1:], "<i8")), dense(np.ones(7, "<f4"))),
        "int32": (dense(np.array(TOKENS[1:], "<i4")), dense(np.ones(7, "<f4"))),
        "bfloat16": (dense(np.array(TOKENS[1:], "<i8")), dense(halves)),
        "wide": (dense(targets_T2), dense(wide_T2)),
        "sparse": (sparse(targets_T2), sparse(wide_T2)),
    }
    outputs = {}
    for name, (targets, weights) in forms.items():
        model = ours.model()
        batch = model.batch()
        batch.data[0].loss_fn_inputs["target_tokens"].CopyFrom(targets)
        batch.data[0].loss_fn_inputs["weights"].CopyFrom(weights)
        outputs[name] = model.wire.retrieve(model.submit(batch)).content
    assert outputs["plain"] == outputs["int32"] == outputs["bfloat16"]
    assert outputs["wide"] == outputs["sparse"]
    plain, wide = (
        wire_pb2.ForwardBackwardOutput.FromString(outputs[name]).loss_fn_outputs[0]
        for name in ("plain", "wide")
    )
    scores_T = np.frombuffer(plain.fields["logprobs"].data, "<f4")
    scores_T2 = np.frombuffer(wide.fields["logprobs"].data, "<f4").reshape(7, 2)
    np.testing.assert_array_equal(scores_T, scores_T2[:, 0])
    assert list(wide.fields["logprobs"].trailing_shape) == [2]


def test_json_of_millions_of_wrong_items_costs_one_error(ours: Wire, sampler: str) -> None:
    text = json.dumps(sample_body(sampler, 1)).replace(
        json.dumps(TOKENS[:4]), "[" + '"x",' * 200_000 + "1]"
    )
    answer = ours.http.post("asample", content=text)
    assert answer.status_code == 400
    assert "tokens.0" in answer.json()["error"]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 5000,
        '{"session_id":"\\ud800"}',
        '{"session_id":1e999}',
        "\x00",
        "é",
    ],
    ids=["deep list", "deep object", "surrogate", "infinite", "zero byte", "letter"],
)
@pytest.mark.parametrize("path", ["create_model", "session_heartbeat", "retrieve_future"])
def test_what_is_no_json_is_refused(ours: Wire, path: str, text: str) -> None:
    answer = ours.http.post(path, content=text.encode())
    assert answer.status_code == 400
    assert answer.json()["error"]


@pytest.mark.parametrize("rank", [-1, 0, 2**31, 2**70, 10**9])
def test_a_rank_that_can_not_be_one_is_refused(ours: Wire, rank: int) -> None:
    answer = ours.post(
        "create_model",
        session_id=ours.session_id,
        model_seq_id=900,
        base_model=BASE_MODEL,
        lora_config={"rank": rank},
    )
    assert answer.status_code == 400
    assert "rank" in answer.json()["error"]


@pytest.mark.parametrize(
    "path",
    [
        "audit?day=9999-12-31",
        "audit?day=0001-01-01",
        "audit?event_type=x",
        "billing/usage/events?starting_on=9999-12-31T00:00:00Z&ending_before=9999-12-31T01:00:00Z",
        "billing/usage/events?starting_on=0001-01-01T00:00:00%2B23:59&ending_before=x",
        "sessions?limit=0",
        "training_runs?offset=-1",
        "sessions/%00",
        "training_runs/a%00b",
        "samplers/..%2f",
    ],
)
def test_queries_out_of_range_are_refused(ours: Wire, path: str) -> None:
    answer = ours.http.get(path)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]


@pytest.mark.parametrize("moment", ["0001-01-01T00:00:00", "9999-12-31T23:59:59-14:00", "x"])
def test_a_search_goes_on_at_a_time(ours: Wire, moment: str) -> None:
    cursor = {"last_created_at": moment, "last_session_id": "x"}
    assert ours.post("sessions/search", cursor=cursor).status_code in (200, 400)


# Futures.


FORGED = [
    "",
    "x",
    "\0",
    "sample.",
    "sample..",
    "op.",
    "op.x",
    "op.x/1/optim_step",
    "op.x/1/other",
    "op.../1/optim_step",
    "op.x/create/create_model",
    "op.x/create/save_weights",
    "op.x/99999999999999999999/optim_step",
    "loss.x.1",
    "é" * 100,
    "x" * 256,
]


@pytest.mark.parametrize("future", FORGED)
def test_a_future_that_was_made_up_is_told_so(ours: Wire, future: str) -> None:
    for path in ("retrieve_future", "cancel_future"):
        answer = ours.post(path, request_id=future)
        allowed = (200, 400) if path == "cancel_future" else (400, 404, 410)
        assert answer.status_code in allowed
        assert answer.status_code == 200 or answer.json()["error"]


def test_a_future_of_another_kind_is_none(model: Model) -> None:
    update = model.submit(model.batch())
    run, number, _ = update.split("/")
    for kind in ("optim_step", "save_weights", "load_weights", "create_model", "save_external"):
        answer = model.wire.retrieve(f"{run}/{number}/{kind}")
        assert answer.status_code == 400, kind
        assert "another kind" in answer.json()["error"]
    answer = model.wire.retrieve(f"{run}/create/forward_backward")
    assert answer.status_code == 400


def test_other_projects_futures_are_unknown(
    ours: Wire, theirs: Wire, model: Model, sampler: str
) -> None:
    futures = [
        *(model.submit(model.batch()), model.step(), model.ask("save_weights", path="secret")),
        model.ask("save_weights_for_sampler", sampling_session_seq_id=20_000),
        model.ask("optim_step"),
        str(ours.sample(sampler, 100)["request_id"]),
        f"op.{model.id.replace(':', '-')}/create/create_model",
    ]
    for future in futures:
        expected = ours.retrieve(future)
        assert expected.status_code == 200
        for _ in range(2):
            answer = theirs.post("retrieve_future", request_id=future)
            assert answer.status_code in (404, 410), (future, answer.text)
            assert theirs.post("cancel_future", request_id=future).status_code == 200
        assert ours.retrieve(future).content == expected.content


def test_a_promise_to_another_project_takes_no_place_of_ours(
    ours: Wire, theirs: Wire, sampler: str
) -> None:
    # They know our ids, as every reader of a published path does, and are faster.
    stolen = theirs.sample(sampler, 200)["request_id"]
    assert "error" in theirs.result(stolen)
    promised = ours.sample(sampler, 200)["request_id"]
    assert promised == stolen
    assert len(ours.samples(promised).sequences) == 1
    listed = theirs.json(
        "retrieve_futures",
        target={"type": "sampling_session", "sampling_session_id": sampler},
        timeout=0,
    )
    assert [one["state"] for one in listed["completions"]] == ["failed"]


def test_a_future_that_waits_says_for_what(server: EmbeddedThread, model: Model) -> None:
    later = model.batch(seq_id=2)
    future = model.submit(later)
    answer = model.wire.post("retrieve_future", request_id=future)
    assert answer.status_code == 408
    body = answer.json()
    assert (body["type"], body["request_id"]) == ("try_again", future)
    assert body["queue_state"] == "paused_capacity"
    assert "1" in body["queue_state_reason"]
    first = model.submit(model.batch(seq_id=1))
    with server.engine_held():
        held = model.wire.post("retrieve_future", request_id=model.step(3))
        assert held.status_code == 408
        assert held.json()["queue_state"] in ("active", "paused_capacity")
    assert model.output(first).metrics["loss:sum"] == model.output(future).metrics["loss:sum"]


def test_results_have_the_form_that_the_sdk_takes(
    ours: Wire, model: Model, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, sample = model.submit(model.batch()), ours.sample(sampler, 300)["request_id"]
    whole = {future: ours.retrieve(future).content for future in (batch, sample)}
    monkeypatch.setattr(retrieval, "_INLINE_BYTES", 16)
    for future, content in whole.items():
        announced = ours.retrieve(future, allow_metadata_only=True)
        assert announced.headers["content-type"] == "application/json"
        assert announced.json() == {
            "status": "complete_metadata",
            "response_payload_size": len(content),
        }
        answer = ours.retrieve(future, allow_metadata_only=False)
        assert (answer.headers["content-type"], answer.content) == (PROTOBUF, content)
    update = ours.retrieve(model.step(), allow_metadata_only=True)
    assert update.headers["content-type"] == "application/json"
    assert "metrics" in update.json()


# Samples.


def test_a_sample_sent_twice_is_drawn_once(ours: Wire, sampler: str) -> None:
    params = {"max_tokens": 6, "stop": []}
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(
                lambda _: ours.sample(sampler, 400, sampling_params=params, num_samples=2), range(8)
            )
        )
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0]["sample_sequence_ids"]) == 2
    contents = {ours.retrieve(answers[0]["request_id"]).content for _ in range(3)}
    assert len(contents) == 1
    again = ours.sample(sampler, 400, sampling_params=params, num_samples=2)
    assert ours.retrieve(again["request_id"]).content in contents


def test_a_cancelled_sample_gives_its_place_back(
    ours: Wire, sampler: str, server: EmbeddedThread
) -> None:
    def num_pending() -> float:
        (family,) = PENDING_SAMPLES.collect()
        return family.samples[0].value

    before = num_pending()
    with server.engine_held():
        futures = [str(ours.sample(sampler, 500 + n)["request_id"]) for n in range(8)]
        assert num_pending() == before + 8
        with ThreadPoolExecutor(16) as pool:
            # Each one twice at once: the second must not disturb the end that the first one brings.
            answers = list(
                pool.map(lambda one: ours.post("cancel_future", request_id=one), futures * 2)
            )
        assert {answer.status_code for answer in answers} == {200}
        for future in futures:
            ended = ours.result(future)
            assert "cancelled" in ended["error"]
        assert num_pending() == before
    # One that has ended stays as it is.
    done = ours.sample(sampler, 520)["request_id"]
    expected = ours.retrieve(done).content
    assert ours.post("cancel_future", request_id=done).status_code == 200
    assert ours.retrieve(done).content == expected


def test_ends_are_listed_once_by_cursor_and_clone(ours: Wire, server: EmbeddedThread) -> None:
    handle = ours.sampler()
    clone = 3 * 10**9

    def ended(cursor: int, timeout: float = 0, clone_id: int = 0) -> tuple[dict[str, str], int]:
        answer = ours.json(
            "retrieve_futures",
            target={
                "type": "sampling_session",
                "sampling_session_id": handle,
                "cloned_sampler_id": clone_id,
            },
            prev_cursor=cursor,
            timeout=timeout,
            retrieved_request_ids=["x", "\0", f"sample.{handle}.0"],
        )
        states = {one["request_id"]: one["state"] for one in answer["completions"]}
        return states, answer["cursor"]

    assert ended(0) == ({}, 0)
    first = str(ours.sample(handle, 0)["request_id"])
    wrong = str(ours.sample(handle, 1, topk_prompt_logprobs=10**6)["request_id"])
    of_clone = str(ours.sample(handle, clone + 1)["request_id"])
    for future in (first, wrong, of_clone):
        ours.retrieve(future)
    states, cursor = ended(0)
    assert states == {first: "finished", wrong: "failed"}
    assert ended(cursor)[0] == {}
    assert ended(0, clone_id=3)[0] == {of_clone: "finished"}
    with ThreadPoolExecutor(1) as pool, server.engine_held():
        waiting = pool.submit(ended, cursor, 30)
        later = str(ours.sample(handle, 2)["request_id"])
    assert waiting.result(30)[0] == {later: "finished"}


@pytest.mark.parametrize("num_samples", [0, -1, 2**16, 2**31 - 1, 2**70])
def test_a_number_of_samples_is_bounded(ours: Wire, sampler: str, num_samples: int) -> None:
    answer = ours.post("asample", **sample_body(sampler, 600, num_samples=num_samples))
    assert answer.status_code == 400
    assert "num_samples" in answer.json()["error"]


def test_a_number_of_a_handle_is_that_of_its_weights(
    ours: Wire, model: Model, deployment: Deployment
) -> None:
    model.train()
    path = ours.result(model.ask("save_weights_for_sampler", path="taken"))["path"]
    wanted = {"session_id": ours.session_id, "sampling_session_seq_id": 700}
    with deployment.scheduler_stub() as scheduler:
        # As opened by a request that is forgotten.
        scheduler.CreateSamplingSession(
            scheduler_pb2.CreateSamplingSessionRequest(
                parent=f"projects/default/sessions/{ours.session_id}",
                request_id=new_request_id(),
                sampling_session_id=f"{ours.session_id}-sample-700",
                base_model=BASE_MODEL,
            ),
            metadata=bearer(deployment.api_key),
        )
    opened = ours.post("create_sampling_session", base_model=BASE_MODEL, **wanted)
    assert opened.status_code == 200
    other = ours.post("create_sampling_session", model_path=path, **wanted)
    assert (other.status_code, other.json()["reason"]) == (400, "RESOURCE_ALREADY_EXISTS")


def test_clients_that_join_get_numbers_of_their_own(ours: Wire, theirs: Wire, sampler: str) -> None:
    numbers = [
        ours.json("join_sampling_session", sampling_session_id=sampler)["client_counter"]
        for _ in range(5)
    ]
    assert len(set(numbers)) == 5
    assert min(numbers) >= 1
    assert theirs.post("join_sampling_session", sampling_session_id=sampler).status_code == 404


# Keys and projects.


def test_a_key_goes_in_either_header(deployment: Deployment) -> None:
    url = f"http://{deployment.address}/api/v1/sessions"
    key = deployment.api_key
    for headers, status in (
        ({"x-api-key": key}, 200),
        ({"x-api-key": key.replace("tsk_", "tml-")}, 200),
        ({"authorization": f"Bearer {key}"}, 200),
        ({"authorization": f"bearer {key}"}, 200),
        ({}, 401),
        ({"x-api-key": "x"}, 401),
        ({"x-api-key": key[:-1]}, 401),
        ({"x-api-key": key.replace(key[-1], "\xe9")}, 401),
        ({"authorization": f"Basic {key}"}, 401),
        ({"x-api-key": "tml-" + "a" * 12 + "_" + "b" * 43}, 401),
    ):
        answer = httpx.get(url, headers={k: v.encode("latin-1") for k, v in headers.items()})
        assert answer.status_code == status, (headers, answer.text)
        if status == 401:
            assert answer.json()["error"]
            assert key not in answer.text


def test_weights_of_other_projects_are_those_they_publish(
    ours: Wire, theirs: Wire, model: Model
) -> None:
    model.train()
    path = str(ours.result(model.ask("save_weights", path="shared"))["path"])
    own = f"training_runs/{model.id}/checkpoints/weights/shared"

    def looks() -> dict[str, int]:
        load = {"path": path, "optimizer": True, "session_id": theirs.session_id}
        theirs._num_models += 1
        theirs._num_samplers += 1
        return {
            "info": theirs.post("weights_info", tinker_path=path).status_code,
            "load": theirs.post(
                "load_weights", model_seq_id=theirs._num_models + 50, **load
            ).status_code,
            "sample": theirs.post(
                "create_sampling_session",
                session_id=theirs.session_id,
                sampling_session_seq_id=theirs._num_samplers + 50,
                model_path=path,
            ).status_code,
            "copy": theirs.post("copy_weights", source_path=path).status_code,
            "list": theirs.http.get(f"training_runs/{model.id}").status_code,
            "publish": theirs.http.post(f"{own}/publish").status_code,
            "delete": theirs.http.delete(own).status_code,
            "ttl": theirs.http.put(f"{own}/ttl", json={"ttl_seconds": 3600}).status_code,
        }

    hidden = dict.fromkeys(looks(), 404)
    assert looks() == hidden
    assert ours.http.post(f"{own}/publish").status_code == 200
    assert looks() == hidden | {"info": 200, "load": 200, "sample": 200, "copy": 200}
    assert ours.http.delete(f"{own}/publish").status_code == 200
    assert looks() == hidden


def test_links_are_good_for_what_they_are_for(
    ours: Wire, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.train()
    ours.result(model.ask("save_weights_external", path="out"))
    where = f"training_runs/{model.id}/checkpoints/external_weights/out/external_weights_urls"
    url = str(ours.http.get(where).json()["urls"]["adapter_config.json"])
    assert json.loads(_fetched(url)[1])["r"] == 4
    trace = str(ours.http.get(f"sessions/{ours.session_id}/trace_export").json()["url"])
    assert _fetched(trace)[0] == 200
    base, ticket = url.rsplit("/", 1)
    forged = [
        f"{base}/{ticket[:-1]}{'0' if ticket[-1] != '0' else '1'}",
        f"{base}/{'A' if ticket[0] != 'A' else 'B'}{ticket[1:]}",
        f"{base}/{ticket.rpartition('.')[0]}",
        f"{base}/.",
        f"{base}/%ff.%ff",
        # Of this deployment, for something else.
        f"{base}/{trace.rsplit('/', 1)[1]}",
        f"{base}/traces/{ticket}",
    ]
    monkeypatch.setattr(downloads, "_LINK_LIFETIME_S", -1.0)
    forged.append(str(ours.http.get(where).json()["urls"]["adapter_config.json"]))
    for link in forged:
        status, content = _fetched(link)
        assert status == 403, link
        assert json.loads(content)["reason"] == "DOWNLOAD_TOKEN_INVALID"


def _fetched(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
