"""Episodes as they are kept: the same columns again from each layout, and bad lines by name."""

from __future__ import annotations

import copy
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.chat_models import QWEN3, chat_tokenizer
from tests.fakes.pictures import picture
from tests.unit.rollouts.fakes import CharTokenizer

from tinsmith.errors import ConfigurationError
from tinsmith.rollouts import (
    ContextBuilt,
    Continuation,
    PlacedImage,
    Rollout,
    RolloutConfig,
    StepTaken,
    Trajectory,
    TurnSampled,
    trajectory_arrays,
)
from tinsmith.rollouts.records import (
    EpisodeRecord,
    Origin,
    RolloutFileError,
    make_record,
    read_records,
    write_records,
)
from tinsmith.rollouts.records.making import token_texts
from tinsmith.rollouts.records.record import TOKEN_COLUMNS

TOKENIZER = chat_tokenizer(QWEN3)
ORIGIN = Origin(
    environment="guessing",
    environment_config={"high": 9},
    environment_seed=7,
    base_model="tiny",
    sampling={"temperature": 1.0, "seed": 3},
    limits={"max_turns": 2},
    phase="train",
    step=4,
)

tokens = st.lists(st.integers(10, 300), min_size=1, max_size=5)
logprobs = st.floats(-50, 0, width=32)
turns = st.lists(
    st.tuples(tokens, logprobs, st.floats(-10, 10), tokens, st.booleans(), st.booleans()),
    min_size=1,
    max_size=4,
)


def played(first: Sequence[int], script: Sequence[Any]) -> Trajectory:
    """Return an episode of turns: said tokens, their log-probability, reward, what is shown."""
    rollout = Rollout(RolloutConfig(max_turns=100, max_context_tokens=10_000))
    rollout.apply(ContextBuilt(first, stop=("é", 7)))
    for index, (said, logprob, reward, shown, has_image, starts_sample) in enumerate(script):
        rollout.apply(TurnSampled(said, [logprob] * len(said), [index] * len(said), "stop"))
        images = (PlacedImage(0, len(shown), picture(28, 28)),) if has_image else ()
        is_last = index == len(script) - 1
        rollout.apply(
            StepTaken(
                reward,
                is_last,
                {"turn": index},
                None if is_last else Continuation(tuple(shown), images, starts_sample),
                ("now",) if index % 2 else (),
            )
        )
    return rollout.to_trajectory([{"role": "user", "content": "é\n"}], key="0/1/2/0")


def record_of(trajectory: Trajectory, advantage: float | None = 0.5) -> EpisodeRecord:
    return make_record(trajectory, ORIGIN, advantage=advantage, decoder=CharTokenizer())


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@settings(deadline=None, max_examples=30)
@given(first=tokens, script=turns, advantage=st.floats(-5, 5, width=32))
def test_what_is_read_is_what_was_played(
    tmp_path_factory: pytest.TempPathFactory,
    suffix: str,
    first: list[int],
    script: list[Any],
    advantage: float,
) -> None:
    trajectory = played(first, script)
    record = record_of(trajectory, advantage)
    path = tmp_path_factory.mktemp("kept") / f"played{suffix}"
    assert write_records(path, [record, record]) == 2

    again, second = read_records(path)
    assert again == second == record
    samples = trajectory.samples
    assert again.tokens == [token for sample in samples for token in sample.tokens.tolist()]
    assert again.versions == [each for sample in samples for each in sample.versions.tolist()]
    bits = np.asarray(again.logprobs, dtype=np.float32)
    assert bits.tolist() == [each for sample in samples for each in sample.logprobs.tolist()]
    assert [len(sample.tokens) for sample in samples] == np.diff(
        [*again.sample_starts, len(again.tokens)]
    ).tolist()
    assert [turn.reward for turn in again.turns] == [turn.reward for turn in trajectory.turns]
    assert "".join(again.texts) == CharTokenizer().decode(again.tokens)


@given(first=tokens, script=turns, advantage=st.floats(-5, 5, width=32))
def test_only_sampled_tokens_carry_loss(
    first: list[int], script: list[Any], advantage: float
) -> None:
    trajectory = played(first, script)
    record = record_of(trajectory, advantage)
    said = [token for turn in script for token in turn[0]]
    columns = zip(*(getattr(record, name) for name in TOKEN_COLUMNS), strict=True)
    loss = [
        (token, float(np.float32(value)))
        for token, _, mask, logprob, value, version, turn in columns
        if mask or logprob or value or version >= 0 or turn >= 0
    ]
    assert loss == [(token, advantage) for token in said]
    # Those are the tokens that the training sequences are trained on, in their order.
    arrays = trajectory_arrays(trajectory, advantage)
    trained = [t for each in arrays for t in each.target_tokens[each.mask > 0].tolist()]
    assert trained == said
    assert all(not each.advantages[each.mask == 0].any() for each in arrays)


def test_each_turn_may_have_an_advantage_of_its_own() -> None:
    trajectory = played(
        [20, 21], [([30], -1.0, 0.0, [40], False, False), ([31], -1, 1.0, [], 0, 0)]
    )
    record = make_record(trajectory, ORIGIN, advantage=[0.5, -1.0], decoder=CharTokenizer())
    assert record.advantages == [0.0, 0.0, 0.5, 0.0, -1.0]
    assert record.advantage is None


def test_the_page_reads_the_same_names() -> None:
    record = record_of(played([20], [([30], -1.0, 0.25, [], False, False)]))
    page = Path(__file__).parents[3] / "clients/web/src/trajectory.ts"
    found = re.search(r"const COLUMNS = new Set\((\[.*?\])\)", page.read_text())
    assert found is not None
    assert set(json.loads(found[1])) <= set(record.to_row())


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    record = record_of(played([20], [([30], -1.0, 0.25, [], False, False)]))
    row = copy.deepcopy(record.to_row())
    row["logprobs"][1] = None
    assert math.isnan(EpisodeRecord.from_row(row).logprobs[1])
    assert EpisodeRecord.from_row(row).to_row() == row


def broken(**changes: Any) -> dict[str, Any]:
    record = record_of(played([20, 21], [([30], -1.0, 0.25, [40], False, False)]))
    row = record.to_row()
    for name, value in changes.items():
        if value is ...:
            del row[name]
        else:
            row[name] = value
    return row


@pytest.mark.parametrize(
    ("row", "field", "problem"),
    [
        pytest.param([1], "", "is no JSON object", id="no-object"),
        pytest.param(broken(schema=2), "schema", "must be 1", id="newer"),
        pytest.param(broken(tokens=...), "tokens", "is missing", id="missing"),
        pytest.param(broken(tokens="x"), "tokens", "list of whole numbers", id="type"),
        pytest.param(broken(tokens=[1, True, 3]), "tokens", "list of whole numbers", id="bool"),
        pytest.param(broken(mask=[0, 1]), "mask", "has 2 entries for 3 tokens", id="length"),
        pytest.param(broken(mask=[0, 0, 2]), "mask", "list of 0 and 1", id="mask"),
        pytest.param(broken(mask=[0, 1, 1]), "versions[1]", "is sampled", id="contradiction"),
        pytest.param(broken(turn_indices=[-1, -1, 5]), "turn_indices[2]", "of 1 turns", id="turn"),
        pytest.param(broken(reason="bored"), "reason", "must be one of done", id="reason"),
        pytest.param(broken(reward=3.0), "reward", "turns add to 0.25", id="reward"),
        pytest.param(broken(rewards=[1.0]), "rewards", "not those of the turns", id="rewards"),
        pytest.param(broken(sample_starts=[0, 9]), "sample_starts", "ascend", id="starts"),
        pytest.param(
            broken(turns=[{"num_tokens": 1, "stop_reason": "stop", "reward": None, "info": {}}]),
            "turns[0].reward",
            "a number",
            id="reward-of-a-turn",
        ),
        pytest.param(
            broken(turns=[{**broken()["turns"][0], "stop": [None]}]),
            "turns[0].stop",
            "a list of texts and token ids",
            id="stop-of-a-turn",
        ),
        pytest.param(
            broken(
                images=[
                    {
                        "position": 2,
                        "num_tokens": 4,
                        "format": "png",
                        "sha256": "",
                        "width": 1,
                        "height": 1,
                    }
                ]
            ),
            "images[0].position",
            "outside",
            id="image",
        ),
    ],
)
def test_a_line_that_is_no_record_is_named(
    tmp_path: Path, row: Any, field: str, problem: str
) -> None:
    path = tmp_path / "played.jsonl"
    path.write_text(json.dumps(broken()) + "\n" + json.dumps(row) + "\n", encoding="utf-8")
    lines = read_records(path)
    next(lines)
    with pytest.raises(RolloutFileError, match=r"played\.jsonl:2: ") as caught:
        next(lines)
    assert (caught.value.line, caught.value.field) == (2, field)
    assert problem in str(caught.value)


def test_turns_of_an_earlier_release_say_nothing_of_stops(tmp_path: Path) -> None:
    row = broken()
    row["turns"] = [{name: turn[name] for name in turn if name != "stop"} for turn in row["turns"]]
    path = tmp_path / "played.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")
    [record] = read_records(path)
    assert [turn.stop for turn in record.turns] == [() for _ in row["turns"]]


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_text(json.dumps(broken())[:50], encoding="utf-8")
    with pytest.raises(RolloutFileError, match=r"cut\.jsonl:1: is no line of JSON"):
        list(read_records(path))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        pytest.param("played.txt", "no name of a file of rollouts", id="suffix"),
        pytest.param("nothing.jsonl", "there is no file", id="missing"),
        pytest.param("folder", "holds no rollouts", id="empty-folder"),
        pytest.param("broken.parquet", "is no Parquet file", id="no-parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "played.txt").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.parquet").write_text("x")
    with pytest.raises(ConfigurationError, match=problem):
        list(read_records(tmp_path / name))


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    record = record_of(played([20], [([30], -1.0, 0.25, [], False, False)]))
    for name in ("b.jsonl", "a.parquet", "notes.txt"):
        if name.endswith("txt"):
            (tmp_path / name).write_text("x")
        else:
            write_records(tmp_path / name, [record] * (1 + name.startswith("a")))
    assert len(list(read_records(tmp_path))) == 3


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    record = record_of(played([20], [([30], -1.0, 0.25, [], False, False)]))
    path = tmp_path / "played.jsonl"
    write_records(path, [record])

    def failing() -> Any:
        yield record
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        write_records(path, failing())
    assert list(read_records(path)) == [record]
    assert [each.name for each in tmp_path.iterdir()] == ["played.jsonl"]


@settings(deadline=None)
@given(text=st.text(max_size=20))
def test_texts_of_tokens_join_to_the_text(text: str) -> None:
    encoded = TOKENIZER.encode(text, add_special_tokens=False)
    assert "".join(token_texts(encoded, TOKENIZER)) == TOKENIZER.decode(encoded)


def test_without_pyarrow_parquet_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'tinsmith\[parquet\]'"):
        write_records(tmp_path / "played.parquet", [])
    assert write_records(tmp_path / "played.jsonl", []) == 0
