"""Pages of lists in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tinsmith.v1 import (
    checkpoint_pb2,
    environment_pb2,
    episode_pb2,
    job_pb2,
    keys_pb2,
    run_metrics_pb2,
    sampler_pb2,
    scheduler_pb2,
    trainer_control_pb2,
    trainer_pb2,
    usage_pb2,
    workers_pb2,
)
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_runtime.rpc.pages import take_page

CONTRACT = (
    checkpoint_pb2, environment_pb2, episode_pb2, job_pb2, keys_pb2, run_metrics_pb2,
    sampler_pb2, scheduler_pb2, trainer_control_pb2, trainer_pb2, usage_pb2, workers_pb2,
)  # fmt: skip
LISTS = {
    method.full_name: method
    for module in CONTRACT
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name.startswith("List")
}


@dataclass
class Request:
    page_size: int = 0
    page_token: str = ""


def walk(entries: Sequence[str], size: int) -> list[list[str]]:
    request, pages = Request(size), list[list[str]]()
    while True:
        page, request.page_token = take_page("words", entries, str, request)
        pages.append(page)
        if not request.page_token:
            return pages


@pytest.mark.parametrize("method", LISTS)
def test_every_list_of_the_contract_has_pages(method: str) -> None:
    request, answer = LISTS[method].input_type, LISTS[method].output_type
    assert {"page_size", "page_token"} <= set(request.fields_by_name)
    assert "next_page_token" in answer.fields_by_name


def test_the_contract_has_lists() -> None:
    assert len(LISTS) >= 14


def test_pages_hold_every_entry_once_in_order() -> None:
    assert walk(["d", "a", "é", "c", "b"], 2) == [["a", "b"], ["c", "d"], ["é"]]
    assert walk(["b", "a"], 2) == [["a", "b"]]
    assert walk([], 2) == [[]]


def test_a_page_holds_a_hundred_unless_the_request_says_otherwise() -> None:
    words = [f"{number:04d}" for number in range(1_001)]
    assert [len(page) for page in walk(words, 0)] == [100] * 10 + [1]
    assert [len(page) for page in walk(words, 1_000)] == [1_000, 1]


def test_entries_that_come_and_go_shift_no_other() -> None:
    shown, token = take_page("words", ["b", "d", "f"], str, Request(2))
    assert shown == ["b", "d"]
    # The entry that the token names has gone, one before it has come, and one after it.
    rest, token = take_page("words", ["a", "b", "e", "f"], str, Request(2, token))
    assert (rest, token) == (["e", "f"], "")


@pytest.mark.parametrize("size", [-1, 1_001])
def test_sizes_out_of_range_are_refused(size: int) -> None:
    with pytest.raises(InvalidFieldError, match="page_size"):
        take_page("words", ["a"], str, Request(size))


@pytest.mark.parametrize("damage", ["other", "bytes", "cut", "text"])
def test_tokens_of_other_lists_are_refused(damage: str) -> None:
    _, token = take_page("words", ["a", "b"], str, Request(1))
    other = {"other": token, "bytes": "A" + token[1:], "cut": token[:-2], "text": "§ 7"}[damage]
    name = "names" if damage == "other" else "words"
    with pytest.raises(InvalidFieldError, match="next_page_token of this list"):
        take_page(name, ["a", "b"], str, Request(1, other))
