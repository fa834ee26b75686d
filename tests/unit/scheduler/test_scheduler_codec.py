"""Requests and answers of the scheduler: ranges, defaults, and what an answer tells."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.longrunning import operations_pb2

from tinsmith.rpc.durations import encode_duration
from tinsmith.v1 import keys_pb2, models_pb2, scheduler_pb2
from tinsmith_runtime.adapters import (
    AdapterConfig,
    FullConfig,
    LoraConfig,
    adapter_from_json,
    adapter_to_json,
)
from tinsmith_runtime.errors import AbortedError, ConfigError, InvalidFieldError
from tinsmith_runtime.rpc.adapter_codec import encode_adapter
from tinsmith_runtime.rpc.auth import ApiKey
from tinsmith_runtime.rpc.permissions import KeyRole
from tinsmith_runtime.rpc.requests import decode_page_token, encode_page_token
from tinsmith_scheduler.config import SchedulerConfig
from tinsmith_scheduler.rpc import codec
from tinsmith_scheduler.store.records import (
    Key,
    KeyState,
    ListedRun,
    NewRun,
    Run,
    RunStanding,
    RunState,
)


def lora(**fields: Any) -> models_pb2.AdapterConfig:
    return models_pb2.AdapterConfig(lora=models_pb2.LoraConfig(**fields))


@pytest.mark.parametrize(
    "message", [models_pb2.AdapterConfig(), lora()], ids=["no-adapter", "empty-lora"]
)
def test_adapter_defaults_are_filled_in(message: models_pb2.AdapterConfig) -> None:
    assert encode_adapter(codec.decode_adapter(message)) == lora(
        rank=32,
        alpha=32,
        seed=0,
        train_attention=True,
        train_mlp=True,
        train_unembedding=False,
    )


@pytest.mark.parametrize("adapter", [LoraConfig(seed=2**64 - 1, alpha=0.5), FullConfig()])
def test_adapter_survives_storage_and_wire(adapter: AdapterConfig) -> None:
    assert adapter_from_json(adapter_to_json(adapter)) == adapter
    assert codec.decode_adapter(encode_adapter(adapter)) == adapter


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 0},
        {"rank": -1},
        {"rank": 129},
        {"alpha": 0},
        {"alpha": -1},
        {"alpha": math.nan},
        {"alpha": math.inf},
        {"train_attention": False, "train_mlp": False},
    ],
    ids=str,
)
def test_adapter_out_of_range_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError):
        codec.decode_adapter(lora(**fields))


def test_page_token_belongs_to_its_list() -> None:
    token = encode_page_token("a", 7)
    assert decode_page_token("a", token) == 7
    assert decode_page_token("a", "") is None
    forged = encode_page_token("a", 10**30)
    for wrong in (encode_page_token("b", 7), token[:-1], token + "A", "x", "\u00e9", forged):
        with pytest.raises(InvalidFieldError):
            decode_page_token("a", wrong)


@pytest.mark.parametrize(
    "settings",
    [
        {"session_timeout_s": 0},
        {"session_timeout_s": 5, "heartbeat_interval_s": 5},
        {"worker_timeout_s": 1},
        {"max_runs_per_project": 0},
        {"bootstrap_key": "secret-words"},
        {"bootstrap_project": "a/b"},
        {"listen_address": "nowhere"},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        SchedulerConfig(data_dir=tmp_path, **settings)
    assert "secret-words" not in str(error.value)


@pytest.mark.parametrize("fields", [{"rank": 1}, {"rank": 128}, {"alpha": 1e-30}], ids=str)
def test_an_adapter_at_the_end_of_its_range_is_taken(fields: dict[str, Any]) -> None:
    adapter = codec.decode_adapter(lora(**fields))
    assert {name: pytest.approx(getattr(adapter, name)) for name in fields} == fields
    for only in ("train_attention", "train_mlp", "train_unembedding"):
        names = ("train_attention", "train_mlp", "train_unembedding")
        adapter = codec.decode_adapter(lora(**{name: name == only for name in names}))
        assert [name for name in names if getattr(adapter, name)] == [only]


def test_a_template_of_a_run_has_a_largest_size_and_number_of_ends() -> None:
    largest = models_pb2.AdapterConfig(
        chat_template="a" * codec.MAX_TEMPLATE_CHARACTERS,
        stop_token_ids=range(codec.MAX_TEMPLATE_ENDS),
    )
    adapter = codec.decode_adapter(largest)
    assert adapter.chat_template == largest.chat_template
    assert adapter.stop_token_ids == tuple(range(codec.MAX_TEMPLATE_ENDS))
    for field, fields in (
        ("chat_template", {"chat_template": "a" * (codec.MAX_TEMPLATE_CHARACTERS + 1)}),
        ("stop_token_ids", {"chat_template": "a", "stop_token_ids": range(9)}),
        ("stop_token_ids", {"chat_template": "a", "stop_token_ids": [3, -1]}),
        ("stop_token_ids", {"stop_token_ids": [3]}),
        ("chat_template", {"chat_template": "{% if %}"}),
    ):
        with pytest.raises(InvalidFieldError) as refusal:
            codec.decode_adapter(models_pb2.AdapterConfig(**fields))
        assert refusal.value.metadata["field"] == f"adapter.{field}"


SESSION = "projects/p/sessions/s"
SOURCE = "projects/p/trainingRuns/r"
CHECKPOINT = f"{SOURCE}/checkpoints/c"


def new_run(**fields: Any) -> NewRun:
    request = scheduler_pb2.CreateTrainingRunRequest(parent=SESSION, **fields)
    return codec.decode_new_run(request, max_history_s=math.inf)


def test_a_run_begins_at_one_place() -> None:
    plain = new_run(base_model="m", display_name="d", labels={"a": "b"}, training_run_id="mine")
    assert (plain.base_model, plain.source, plain.fork) == ("m", None, None)
    assert (plain.display_name, plain.labels, plain.chosen_id) == ("d", {"a": "b"}, "mine")
    assert plain.given_adapter_fields is None
    given = new_run(base_model="m", adapter=lora(rank=8, alpha=4))
    assert given.given_adapter_fields == {"rank", "alpha"}
    loaded = new_run(source_checkpoint=CHECKPOINT, include_optimizer=True)
    assert (str(loaded.source), loaded.base_model, loaded.include_optimizer) == (
        CHECKPOINT,
        "",
        True,
    )
    fork = new_run(source_run=SOURCE, source_step=0).fork
    assert fork is not None
    assert (str(fork.run), fork.step, fork.reruns_step) == (SOURCE, 0, False)
    again = new_run(source_run=SOURCE, source_step=3, reruns_step=True).fork
    assert again is not None
    assert (again.step, again.reruns_step) == (3, True)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "base_model"),
        ({"base_model": "a" * 257}, "base_model"),
        ({"base_model": "m", "include_optimizer": True}, "include_optimizer"),
        ({"base_model": "m", "source_step": 1}, "source_step"),
        ({"base_model": "m", "reruns_step": True}, "reruns_step"),
        ({"source_run": SOURCE}, "source_step"),
        ({"source_run": SOURCE, "source_step": -1}, "source_step"),
        ({"source_run": SOURCE, "source_step": 1, "base_model": "m"}, "base_model"),
        (
            {"source_run": SOURCE, "source_step": 1, "source_checkpoint": CHECKPOINT},
            "source_checkpoint",
        ),
        ({"source_run": SOURCE, "source_step": 1, "adapter": lora(rank=1)}, "adapter"),
        ({"source_checkpoint": "nonsense"}, "source_checkpoint"),
    ],
    ids=str,
)
def test_a_run_that_would_begin_nowhere_or_twice_is_refused(
    fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidFieldError) as refusal:
        new_run(**fields)
    assert refusal.value.metadata["field"] == field


def test_the_name_of_a_model_has_a_largest_size() -> None:
    assert new_run(base_model="a" * 256).base_model == "a" * 256


def test_a_training_ends_with_its_last_operation() -> None:
    def last(**fields: Any) -> int:
        return codec.decode_last_operation(scheduler_pb2.FinishTrainingRunRequest(**fields))

    assert (last(sequence_number=0), last(sequence_number=7)) == (0, 7)
    for wrong in ({}, {"sequence_number": -1}):
        with pytest.raises(InvalidFieldError):
            last(**wrong)


@pytest.mark.parametrize(
    ("asked", "wait_s"), [(None, 20.0), (0.0, 0.0), (-1.0, 0.0), (1.5, 1.5), (60.0, 20.0)]
)
def test_a_wait_lasts_twenty_seconds_at_most_and_by_default(
    asked: float | None, wait_s: float
) -> None:
    request = operations_pb2.WaitOperationRequest()
    if asked is not None:
        request.timeout.CopyFrom(encode_duration(asked))
    assert codec.decode_wait_s(request) == wait_s


def test_a_key_lives_for_ever_or_up_to_ten_years() -> None:
    longest_s = 10 * 365.25 * 24 * 3600.0

    def ttl_s(asked: float) -> float | None:
        return codec.decode_key_ttl_s(keys_pb2.CreateKeyRequest(ttl=encode_duration(asked)))

    assert codec.decode_key_ttl_s(keys_pb2.CreateKeyRequest()) is None
    assert (ttl_s(0.5), ttl_s(longest_s)) == (0.5, longest_s)
    for wrong in (0.0, -1.0, longest_s + 1):
        with pytest.raises(InvalidFieldError):
            ttl_s(wrong)


def test_a_key_is_told_without_a_secret_unless_it_is_new() -> None:
    key = Key(
        key_id="k",
        project="p",
        secret_sha256=b"",
        role=KeyRole.MEMBER,
        state=KeyState.REVOKED,
        display_name="d",
        create_time_s=5.0,
        pool="q",
        expire_time_s=9.0,
    )
    told = codec.encode_key(key, name="n")
    assert (told.name, told.state, told.role) == ("n", keys_pb2.Key.STATE_REVOKED, "member")
    assert (told.display_name, told.pool, told.create_time.seconds) == ("d", "q", 5)
    assert (told.expire_time.seconds, told.secret, told.tinker_secret) == (9, "", "")
    assert not codec.encode_key(replace(key, expire_time_s=None), name="n").HasField("expire_time")
    new = ApiKey.generate()
    assert codec.encode_key(key, name="n", api_key=new).secret == str(new)


RUN = Run(
    name=SOURCE,
    project="p",
    state=RunState.ACTIVE,
    session=SESSION,
    base_model="m",
    adapter=LoraConfig(),
    display_name="d",
    labels={"a": "b"},
    create_time_s=5.0,
    worker="w",
    epoch=3,
    source_checkpoint="c",
    source_run="o",
    source_step=2,
    rerun_from=7,
    history_retention_s=90_000.0,
    finish_time_s=0.0,
)


def test_a_run_is_told_with_where_it_comes_from_and_where_it_is() -> None:
    told = codec.encode_run(RUN, trainer_address="t:1", checkpoint_address="c:1", waiting_for="x")
    assert (told.name, told.session, told.base_model, told.display_name) == (
        SOURCE,
        SESSION,
        "m",
        "d",
    )
    assert told.state == scheduler_pb2.TrainingRun.STATE_ACTIVE
    assert (told.labels, told.worker, told.epoch) == ({"a": "b"}, "w", 3)
    assert (told.trainer_address, told.checkpoint_address, told.waiting_for) == ("t:1", "c:1", "x")
    assert (told.source_checkpoint, told.source_run, told.source_step) == ("c", "o", 2)
    assert (told.rerun_sequence_number, told.history_retention.seconds) == (7, 90_000)
    assert (told.create_time.seconds, told.adapter.lora.rank) == (5, 32)
    # A time of 0 is one.
    assert told.HasField("finish_time")
    open_run = replace(RUN, finish_time_s=None)
    told = codec.encode_run(open_run, trainer_address="", checkpoint_address="")
    assert not told.HasField("finish_time")


def listed(told: scheduler_pb2.TrainingRun, **fields: Any) -> scheduler_pb2.TrainingRun:
    values = {"standing": None, "session_ended": False, "is_reopened": False, **fields}
    return codec.encode_listed_run(ListedRun(run=RUN, **values), run=told)


def test_a_listed_run_says_what_its_trainer_says_of_it() -> None:
    standing = RunStanding(SOURCE, num_pending=2, waiting_for="room", has_diverged=True)
    run = listed(scheduler_pb2.TrainingRun(), standing=standing, session_ended=True)
    assert (run.num_pending_operations, run.replay_diverged, run.waiting_for) == (2, True, "room")
    assert run.session_ended
    # What its move waits for comes first.
    moving = scheduler_pb2.TrainingRun(waiting_for="a trainer")
    assert listed(moving, standing=standing).waiting_for == "a trainer"
    unknown = listed(scheduler_pb2.TrainingRun())
    assert (unknown.num_pending_operations, unknown.session_ended) == (0, False)


@pytest.mark.parametrize(
    ("state", "is_done", "result"),
    [
        (RunState.CREATING, False, None),
        (RunState.ACTIVE, True, "response"),
        (RunState.MOVING, True, "response"),
        (RunState.FAILED, True, "error"),
        (RunState.DELETED, True, "error"),
    ],
)
def test_a_creation_ends_as_its_run_did(state: RunState, is_done: bool, result: str | None) -> None:
    failed = codec.encode_error(AbortedError("no trainer"))
    operation = codec.encode_creation(
        replace(RUN, state=state, encoded_error=failed),
        trainer_address="t:1",
        checkpoint_address="c:1",
        waiting_for="a trainer",
        closed=AbortedError("deleted"),
    )
    assert (operation.done, operation.WhichOneof("result")) == (is_done, result)
    assert operation.name == f"{SOURCE}/operations/create"
    metadata = scheduler_pb2.CreateTrainingRunMetadata()
    assert operation.metadata.Unpack(metadata)
    assert metadata.waiting_for == ("" if is_done else "a trainer")
    if result == "error":
        words = "no trainer" if state is RunState.FAILED else "deleted"
        assert words in operation.error.message
