"""Data sets by their address: parts, columns and revision, loaded by the real `datasets`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from tinsmith.errors import ConfigurationError
from tinsmith.recipes import rl
from tinsmith.recipes.experiment.experiment import slug
from tinsmith.recipes.tasks.hub_data import HubAddress, data_name, is_of_hub, parse_address
from tinsmith.recipes.tasks.preferences import load_preferences
from tinsmith.recipes.tasks.prompts import load_prompts
from tinsmith.recipes.tasks.public_data import load_pictures, read_rows
from tinsmith.recipes.tasks.rl_problems import load_problems

# As the repository of openai/gsm8k has it on the hub.
GSM8K_CARD = """---
language:
- en
license:
- mit
pretty_name: Grade School Math 8K
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
  - split: test
    path: socratic/test-*
---
# Dataset Card for GSM8K
"""


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the caches of a test to itself, and the network out of it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list([dict(row) for row in rows]).to_parquet(str(path))


def sums(first: int, number: int, how: str = "It is.") -> list[dict[str, str]]:
    return [
        {"question": f"{n}+1?", "answer": f"{how}\n#### {n + 1}"}
        for n in range(first, first + number)
    ]


@pytest.fixture
def gsm8k(tmp_path: Path) -> str:
    """Return the folder of a data set with the files of openai/gsm8k."""
    folder = tmp_path / "gsm8k"
    for config, how in (("main", "It is."), ("socratic", "What is it?")):
        write(folder / config / "train-00000-of-00001.parquet", sums(0, 10, how))
        write(folder / config / "test-00000-of-00001.parquet", sums(20, 3, how))
    (folder / "README.md").write_text(GSM8K_CARD)
    return f"hf://{folder}"


def questions(rows: Sequence[Any]) -> list[str]:
    return [str(row["question"]) for row in rows]


def test_the_files_of_gsm8k_are_loaded_by_configuration(gsm8k: str) -> None:
    problems = load_problems(f"{gsm8k}:main")
    assert [record.final_answer for record in problems.train] == [str(n + 1) for n in range(10)]
    assert [record.final_answer for record in problems.validation] == ["21", "22", "23"]
    assert problems.demonstrate(problems.train[0], 0).startswith("It is.")
    socratic = load_problems(f"{gsm8k}:socratic")
    assert socratic.demonstrate(socratic.train[0], 0).startswith("What is it?")
    assert load_pictures(f"{gsm8k}:main") is None


def test_an_address_names_the_parts(gsm8k: str) -> None:
    found = read_rows(f"{gsm8k}:main?split=train[:4]")
    assert questions(found["train"]) == [f"{n}+1?" for n in range(4)]
    assert questions(found["validation"]) == ["20+1?", "21+1?", "22+1?"]
    found = read_rows(f"{gsm8k}:main?split=train[:80%]&validation=train[80%:]")
    assert len(found["train"]) == 8
    assert questions(found["validation"]) == ["8+1?", "9+1?"]
    found = read_rows(f"{gsm8k}:main?validation=test[:1]")
    assert (len(found["train"]), questions(found["validation"])) == (10, ["20+1?"])


@pytest.mark.parametrize("split", ["test", "test[:3]", "train[:0]+test"])
def test_what_is_trained_on_is_not_held_out(gsm8k: str, split: str) -> None:
    found = read_rows(f"{gsm8k}:main?split={split}")
    # No other part is for validation, so every fifth row is held out.
    assert questions(found["train"]) == ["21+1?", "22+1?"]
    assert questions(found["validation"]) == ["20+1?"]


def test_an_address_names_the_columns(tmp_path: Path) -> None:
    # MATH-500 has a part `test` alone; its `solution` holds more than its `answer`.
    rows = [
        {"problem": f"{n}+1?", "solution": f"So.\n#### {n + 1}", "answer": "no", "level": n}
        for n in range(6)
    ]
    write(tmp_path / "math" / "test.parquet", rows)
    data = f"hf://{tmp_path}/math?split=test&question=problem&answer=solution"
    problems = load_problems(data)
    assert [record.final_answer for record in problems.train] == ["2", "3", "4", "5"]
    # What is not named is there for rewards of one's own.
    assert set(read_rows(data)["train"][0]) == {"question", "answer", "level"}
    swapped = read_rows(f"hf://{tmp_path}/math?split=test&question=answer&answer=problem")
    assert swapped["train"][0]["question"] == "no"
    assert swapped["train"][0]["answer"] == "1+1?"
    [first, *_] = load_prompts(f"hf://{tmp_path}/math?split=test&prompt=problem").train
    assert first == [{"role": "user", "content": "1+1?"}]


def test_pairs_are_read_by_their_columns(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "good": "yes", "bad": "no"} for n in range(3)]
    write(tmp_path / "pairs" / "train.parquet", rows)
    data = f"hf://{tmp_path}/pairs?prompt=question&chosen=good&rejected=bad"
    pair = load_preferences(data).train[0]
    assert [message["content"] for message in pair.chosen.messages] == ["1?", "yes"]
    assert pair.rejected.messages[-1]["content"] == "no"


def test_pictures_of_parquet_files_are_shown(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (8, 6), "red").save(stream, format="PNG")
    # hiyouga/geometry3k holds encoded pictures beside the text, and says so in its features.
    picture = {"bytes": stream.getvalue(), "path": None}
    rows = [{"pictures": [picture], "problem": "<image>Find x.", "answer": "12"}] * 3
    features = datasets.Features(
        {
            "pictures": [datasets.Image()],
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    for part in ("train", "validation", "test"):
        path = tmp_path / "geometry3k" / "data" / f"{part}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(rows, features=features).to_parquet(str(path))
    found = load_pictures(f"hf://{tmp_path}/geometry3k?images=pictures")
    assert found is not None
    shown = found["validation"][0]
    assert (shown.question, shown.record.final_answer) == ("Find x.", "12")
    assert Image.open(io.BytesIO(shown.images[0].data)).size == (8, 6)


def test_the_revision_is_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def load_dataset(name: str, config: str | None, **how: Any) -> Any:
        asked.append({"name": name, "config": config, **how})
        return datasets.DatasetDict(train=datasets.Dataset.from_list(sums(0, 5)))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    read_rows("hf://openai/gsm8k:main?revision=refs%2Fconvert%2Fparquet&split=train")
    read_rows("hf://openai/gsm8k")
    # Each is loaded once, whatever is taken of it.
    assert asked == [
        {"name": "openai/gsm8k", "config": "main", "revision": "refs/convert/parquet"},
        {"name": "openai/gsm8k", "config": None, "revision": None},
    ]


def test_an_address_is_read_as_it_is_written() -> None:
    address = parse_address("hf://a/b:c?split=train%5B:10%25%5D&validation=x+y&answer=the%20answer")
    assert address == HubAddress("a/b", "c", "train[:10%]", "x+y", "", {"answer": "the answer"})
    assert parse_address("hf://squad") == HubAddress("squad", "", "", "", "", {})


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("hf://", "hf:// names no data set; write hf://OWNER/NAME"),
        ("hf://a/b/c", "names no data set"),
        ("hf://a b", "names no data set"),
        ("hf://-a/b", "names no data set"),
        ("hf://?split=train", "names no data set"),
        ("hf://a/b?slit=train", "'slit' is no key of an address; the keys are split, validation"),
        ("hf://a/b?", None),
        ("hf://a/b?split=train&", "'' is no key of an address"),
        ("hf://a/b?split", "split has no value; write split=VALUE once"),
        ("hf://a/b?split=", "split has no value"),
        ("hf://a/b?split=x&split=y", "split is there twice"),
        ("hf://a/b?question=x&answer=x", "reads a column under two names"),
        ("hf:///data/set?revision=main", "a folder has no revisions; leave revision out"),
    ],
)
def test_what_is_no_address_is_refused(address: str, message: str | None) -> None:
    if message is None:
        assert parse_address(address).split == ""
        return
    with pytest.raises(ConfigurationError) as caught:
        parse_address(address)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("{gsm8k}:main?split=dev", "has no part dev"),
        ("{gsm8k}:other", "cannot be loaded: ValueError: BuilderConfig 'other' not found"),
        ("{gsm8k}:main?answer=solution", "the part train has no column solution; its columns are"),
        ("{gsm8k}:main?split=test[:1]", "has too few rows: 0 to train on, 1 held out"),
        ("{gsm8k}/missing", "there is no folder"),
        ("{tests_only}", "has no part train; it has test; name the part to train on: ?split=NAME"),
    ],
)
def test_what_a_data_set_lacks_is_named(
    gsm8k: str, tmp_path: Path, address: str, message: str
) -> None:
    write(tmp_path / "tests_only" / "test.parquet", sums(0, 3))
    data = address.format(gsm8k=gsm8k, tests_only=f"hf://{tmp_path}/tests_only")
    with pytest.raises(ConfigurationError) as caught:
        read_rows(data)
    assert message in str(caught.value)


def test_a_title_has_the_name_alone() -> None:
    assert data_name("hf://openai/gsm8k:main?split=train&revision=a/b") == "gsm8k:main"
    assert data_name("hf://openai/gsm8k") == "gsm8k"
    assert data_name("runs/what?.jsonl") == "what?.jsonl"
    config = rl.Config(data="hf://openai/gsm8k:main?split=train&revision=a/b")
    assert slug(config) == "gsm8k-main"


@pytest.mark.parametrize(
    "query",
    [
        "validation=train[:20%]",
        "validation=train",
        "split=train&validation=train[80%:]",
        "split=train[:80%]&validation=train[50%:]",
        "split=all&validation=test",
        "split=test%2Btrain[:1]&validation=train[:2]",
    ],
)
def test_stretches_that_meet_are_refused(gsm8k: str, query: str) -> None:
    with pytest.raises(ConfigurationError, match="trains on what it holds out"):
        read_rows(f"{gsm8k}:main?{query}")


def test_where_all_is_trained_on_no_part_is_held_out(gsm8k: str) -> None:
    found = read_rows(f"{gsm8k}:main?split=all")
    # Every fifth row is, as where a set has no part for validation.
    assert len(found["train"]) + len(found["validation"]) == 13
    assert not set(questions(found["train"])) & set(questions(found["validation"]))


def test_a_name_that_is_a_folder_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="is a folder here too"):
        read_rows("hf://openai/gsm8k:main")


@pytest.mark.parametrize(
    ("data", "is_there"),
    [
        pytest.param("hf://openai/gsm8k:main", True, id="a-set"),
        pytest.param("hf:///data/sums", False, id="a-folder"),
        pytest.param("hf://./sums", False, id="a-folder-from-here"),
        pytest.param("hf://a/b?part=c", False, id="a-wrong-key"),
        pytest.param("arithmetic", False, id="comes-with-a-recipe"),
        pytest.param("s3://bucket/a", False, id="a-store"),
    ],
)
def test_which_data_is_of_the_hub(data: str, is_there: bool) -> None:
    assert is_of_hub(data) is is_there
