"""The arithmetic task: disjoint splits, the answer parser, the reward, GSM8K's layout."""

from pathlib import Path

import pytest

from tinsmith.recipes.tasks.arithmetic import (
    FORGETS_CARRY_FRACTION,
    MathFormatError,
    MathRecord,
    accuracy,
    build_messages,
    build_prompt,
    extract_final_answer,
    make_addition,
    make_demonstration,
    make_split,
    parse_completion,
    read_jsonl,
    reward,
    write_jsonl,
)


def test_splits_share_no_problem_nor_its_mirror_image() -> None:
    split = make_split()
    parts = [_pairs(part) for part in (split.warm_start, split.train, split.validation)]
    assert sum(len(part) for part in parts) == len(frozenset[tuple[int, ...]]().union(*parts))
    records = (*split.warm_start, *split.train, *split.validation)
    assert len(records) == len(set(records)) == 100 * 100


def test_split_sizes_and_determinism() -> None:
    split = make_split(num_warm_start=500, num_validation=300)
    assert len(split.validation) in (300, 301)
    assert len(split.warm_start) in (500, 501)
    assert split == make_split(num_warm_start=500, num_validation=300)


def test_warm_start_size_moves_no_validation_problem() -> None:
    assert make_split(num_warm_start=10).validation == make_split().validation


def test_split_without_training_problems_is_refused() -> None:
    with pytest.raises(ValueError, match="leave no training problems"):
        make_split(num_warm_start=10_000)


def test_answers_are_sums() -> None:
    for record in make_split().train:
        left, right = record.question.removesuffix("=").split("+")
        assert record.final_answer == str(int(left) + int(right))


def test_messages_hold_question_and_bare_answer() -> None:
    record = make_addition(12, 34)
    assert record.answer == "12+34=46\n#### 46"
    assert build_prompt(record) == [{"role": "user", "content": "12+34="}]
    assert build_messages(record)[1] == {"role": "assistant", "content": "46"}


def test_pupil_forgets_some_units_carries_and_errs_nowhere_else() -> None:
    records = make_split().warm_start
    errors = {r: int(r.final_answer) - int(_demonstrate(r)) for r in records}
    carries = [r for r in records if _units_carry(r)]
    assert all(error == 0 for record, error in errors.items() if not _units_carry(record))
    assert {errors[record] for record in carries} == {0, 10}
    share = sum(errors[record] == 10 for record in carries) / len(carries)
    assert share == pytest.approx(FORGETS_CARRY_FRACTION, abs=0.03)


def test_pupil_decides_anew_but_reproducibly_at_each_occurrence() -> None:
    record = make_addition(18, 27)
    answers = [make_demonstration(record, n).final_answer for n in range(40)]
    assert set(answers) == {"35", "45"}
    assert answers == [make_demonstration(record, n).final_answer for n in range(40)]
    assert make_demonstration(record, 1).question == record.question


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        pytest.param("46", "46", id="bare"),
        pytest.param(" 046\n", "46", id="spaces-and-zeros"),
        pytest.param("-0", "0", id="negative-zero"),
        pytest.param("so 12 + 34\n#### 46", "46", id="gsm8k"),
        pytest.param("#### 1 no, #### 2", "2", id="last-mark-counts"),
        pytest.param("#### $1,234.50", "1234.5", id="money"),
        pytest.param("#### forty", None, id="mark-without-number"),
        pytest.param("45 46 47", None, id="several-guesses"),
        pytest.param("the answer is 46", None, id="number-in-prose"),
        pytest.param("", None, id="empty"),
    ],
)
def test_parse_completion(completion: str, expected: str | None) -> None:
    assert parse_completion(completion) == expected


def test_reward_and_accuracy() -> None:
    record = make_addition(12, 34)
    assert (reward(record, "46"), reward(record, "47"), reward(record, "")) == (1.0, 0.0, 0.0)
    assert accuracy([record, record], ["46", "64"]) == 0.5
    with pytest.raises(ValueError, match="at least one"):
        accuracy([], [])


def test_jsonl_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    records = make_split().validation[:5]
    write_jsonl(path, records)
    assert read_jsonl(path) == records


def test_jsonl_reads_gsm8k_lines(tmp_path: Path) -> None:
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(
        '{"question": "How much?", "answer": "7*9=<<7*9=63>>63\\n#### 1,063", "id": 3}\n\n',
        encoding="utf-8",
    )
    (record,) = read_jsonl(path)
    assert record.question == "How much?"
    assert record.final_answer == "1063"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param("{", "not JSON", id="not-json"),
        pytest.param("[1]", "expected an object", id="not-an-object"),
        pytest.param('{"question": "q"}', "must be strings; .* reward=FILE", id="key-missing"),
        pytest.param('{"question": "q", "answer": "7"}', "no number behind", id="no-mark"),
    ],
)
def test_jsonl_error_names_the_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"question": "q", "answer": "#### 1"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(MathFormatError, match=rf"bad\.jsonl:2: .*{message}"):
        read_jsonl(path)


def test_final_answer_needs_a_mark() -> None:
    with pytest.raises(MathFormatError):
        extract_final_answer("46")


def _pairs(records: tuple[MathRecord, ...]) -> frozenset[tuple[int, ...]]:
    return frozenset(
        tuple(sorted(int(x) for x in record.question.removesuffix("=").split("+")))
        for record in records
    )


def _demonstrate(record: MathRecord) -> str:
    return make_demonstration(record, 1).final_answer


def _units_carry(record: MathRecord) -> bool:
    left, right = record.question.removesuffix("=").split("+")
    return int(left) % 10 + int(right) % 10 >= 10
