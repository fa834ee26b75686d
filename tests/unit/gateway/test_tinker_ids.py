"""Identifiers of the Tinker wire, and the resource names behind them."""

from __future__ import annotations

import pytest

from tinsmith.v1 import checkpoint_pb2
from tinsmith_gateway.tinker.promises.futures import CREATE_MODEL, SNAPSHOT_CLIENT, OperationFuture
from tinsmith_gateway.tinker.wire import ids
from tinsmith_runtime.errors import InvalidFieldError

RUN = "projects/p/trainingRuns/ses-1a-train-0"
MODEL = "ses-1a:train:0"
Kind = checkpoint_pb2.Checkpoint


def checkpoint(checkpoint_id: str, kind: int = Kind.KIND_TRAINING) -> checkpoint_pb2.Checkpoint:
    return checkpoint_pb2.Checkpoint(name=f"{RUN}/checkpoints/{checkpoint_id}", kind=kind)


def test_the_id_that_the_sdk_computes_is_the_one_of_the_run() -> None:
    assert ids.new_model_id("ses-1a", 0) == MODEL
    assert ids.run_name("p", MODEL) == RUN
    assert ids.model_id_of(RUN) == MODEL


def test_a_run_that_was_made_elsewhere_is_its_own_model() -> None:
    assert ids.model_id_of("projects/p/trainingRuns/run-77") == "run-77"
    assert ids.run_name("p", "run-77") == "projects/p/trainingRuns/run-77"


@pytest.mark.parametrize(
    "model_id", ["", "../x", "a/b", "a:b", "ses:train:x", "x" * 80, ":train:1"]
)
def test_what_can_be_no_model_is_refused(model_id: str) -> None:
    with pytest.raises(InvalidFieldError):
        ids.run_name("p", model_id)


@pytest.mark.parametrize(
    ("checkpoint_id", "kind", "path"),
    [
        ("final", Kind.KIND_TRAINING, f"tinker://{MODEL}/weights/final"),
        ("final.v12", Kind.KIND_TRAINING, f"tinker://{MODEL}/weights/final"),
        ("final.sampler", Kind.KIND_SAMPLER, f"tinker://{MODEL}/sampler_weights/final"),
        ("plain", Kind.KIND_SAMPLER, f"tinker://{MODEL}/sampler_weights/plain"),
        ("out.external", Kind.KIND_SAMPLER, f"tinker://{MODEL}/external_weights/out"),
    ],
)
def test_a_checkpoint_has_one_path(checkpoint_id: str, kind: int, path: str) -> None:
    assert str(ids.path_of(checkpoint(checkpoint_id, kind))) == path


@pytest.mark.parametrize("kind", ids.KINDS)
def test_a_saved_name_is_found_again(kind: str) -> None:
    is_training = kind == ids.TRAINING
    saved = checkpoint(
        ids.native_checkpoint_id(kind, "a.b-1"),
        Kind.KIND_TRAINING if is_training else Kind.KIND_SAMPLER,
    )
    path = ids.TinkerPath(MODEL, kind, "a.b-1")
    assert ids.newest_match(path, [checkpoint("other"), saved]) == saved


def test_the_newest_of_an_overwritten_name_is_meant() -> None:
    path = ids.TinkerPath(MODEL, ids.TRAINING, "last")
    saves = [checkpoint(name) for name in ("last.v9", "last", "last.v10", "last.v10.sampler")]
    newest = ids.newest_match(path, saves)
    assert newest is not None
    assert newest.name.endswith("last.v10")
    assert len(ids.all_matches(path, saves)) == 3


@pytest.mark.parametrize(
    "name", ["", "a/b", "a.sampler", "a.external", "a.v3", "-a", "x" * 41, "ü", "a\n"]
)
def test_names_that_could_be_taken_for_another_are_refused(name: str) -> None:
    with pytest.raises(InvalidFieldError):
        ids.native_checkpoint_id(ids.TRAINING, name)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "tinker://",
        "tinker://m/weights",
        "tinker://m/nothing/x",
        "s3://m/weights/x",
        "tinker://a/weights/b/c",
    ],
)
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(InvalidFieldError):
        ids.TinkerPath.parse(path)


@pytest.mark.parametrize(
    "future",
    [
        OperationFuture("ses-1a-train-0", "7", SNAPSHOT_CLIENT, 0),
        OperationFuture("ses-1a-train-0", "7", SNAPSHOT_CLIENT, 3),
        OperationFuture("run.x", "create", CREATE_MODEL),
    ],
)
def test_a_future_of_an_operation_is_its_own_record(future: OperationFuture) -> None:
    assert OperationFuture.parse(str(future)) == future
    assert future.name("p") == (
        f"projects/p/trainingRuns/{future.run_id}/operations/{future.operation}"
    )


@pytest.mark.parametrize(
    "value",
    ["op.", "op.run/7", "op.run/x/save_weights", "op.a/b/7/save_weights", "op.run/7/nothing"],
)
def test_a_future_that_was_not_given_out_is_refused(value: str) -> None:
    with pytest.raises(InvalidFieldError):
        OperationFuture.parse(value)


def test_a_repeated_call_has_the_same_request_id_and_others_have_others() -> None:
    assert ids.request_id(RUN, 1) == ids.request_id(RUN, 1)
    assert len({ids.request_id(RUN, number) for number in range(100)}) == 100
