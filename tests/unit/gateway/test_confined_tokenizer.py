"""Tokenizers and templates of strangers: in a process of their own, within time and memory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.fakes.scripted_sampler import IMAGE_TOKEN, TURN_END, tokenizer_files
from tests.support.memory import resident_mib
from tests.support.wait import until

from tinsmith.v1 import scheduler_pb2
from tinsmith_gateway.access.authentication import Credential
from tinsmith_gateway.openai.rendering import Conversation, render
from tinsmith_gateway.openai.tokenizers import TokenizerStore
from tinsmith_gateway.tokenizing.confined_tokenizer import MAX_TEMPLATE_BYTES, ConfinedTokenizer
from tinsmith_gateway.tokenizing.model_tokenizer import ChatTokenizer, ModelTokenizer
from tinsmith_gateway.upstream.pod_client import Upstream
from tinsmith_runtime.confined.process import ConfinedProcesses, Confinement
from tinsmith_runtime.errors import (
    FailedPreconditionError,
    InvalidFieldError,
    RateLimitedError,
    TinsmithError,
    WorkerUnavailableError,
)
from tinsmith_runtime.rpc.auth import Caller
from tinsmith_runtime.rpc.permissions import KeyRole
from tinsmith_runtime.text.tokenizer_files import digest_of

BOUNDS = Confinement(timeout_s=60.0, start_timeout_s=60.0, memory_bytes=2**29, max_processes=2)
HASTY = Confinement(timeout_s=3.0, start_timeout_s=60.0, memory_bytes=2**29, max_processes=2)
MESSAGES = [{"role": "user", "content": "añ 🧨 <b>"}]
STAYS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROWS = "{% set x = 'a' * (2**31) %}{{ x | length }}"
SPEAKS = "{{ messages[0].content + 'a' * (2**26) }}"


@pytest.fixture
def processes() -> Iterator[ConfinedProcesses]:
    kept = ConfinedProcesses(BOUNDS)
    yield kept
    kept.close()


@pytest.fixture
def hasty() -> Iterator[ConfinedProcesses]:
    kept = ConfinedProcesses(HASTY)
    yield kept
    kept.close()


def workers() -> list[int]:
    """Return the confined processes of this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = f"PPid:\t{os.getpid()}\n" in (folder / "status").read_text()
            if is_ours and b"tokenizer_worker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def rendered(tokenizer: ChatTokenizer, messages: list[dict[str, Any]] = MESSAGES) -> list[int]:
    return list(render(Conversation(messages=messages, variables={}), tokenizer).tokens)


def test_a_confined_tokenizer_says_what_it_says_elsewhere(processes: ConfinedProcesses) -> None:
    here, there = ModelTokenizer(tokenizer_files()), ConfinedTokenizer(tokenizer_files(), processes)
    assert there.chat_template == here.chat_template
    assert there.image_token == here.image_token
    assert rendered(there) == rendered(here)
    tokens = here.encode(f"añ 🧨 {TURN_END}{IMAGE_TOKEN}", add_special_tokens=False)
    assert there.encode(here.decode(tokens), add_special_tokens=False) == tokens
    assert there.decode(tokens) == here.decode(tokens)
    for kept in ((), (TURN_END,)):
        for skip in (True, False):
            options: dict[str, Any] = {"skip_special": skip, "kept": kept}
            assert there.decoder(**options)(tokens) == here.decoder(**options)(tokens)
    for token in tokens:
        assert there.bytes_of(token) == here.bytes_of(token)
        assert there.text_of(token) == here.text_of(token)


@pytest.mark.parametrize("template", [STAYS, GROWS, SPEAKS], ids=["time", "memory", "answer"])
def test_a_hostile_template_costs_its_own_process(hasty: ConfinedProcesses, template: str) -> None:
    tokenizer = ConfinedTokenizer(tokenizer_files(template), hasty)
    [first] = workers()
    before = resident_mib(os.getpid())
    with pytest.raises(InvalidFieldError, match=r"took more than|MemoryError|bytes"):
        rendered(tokenizer)
    assert resident_mib(os.getpid()) - before < 150
    if template != GROWS:
        # It is not begun anew for each of many requests.
        with pytest.raises(WorkerUnavailableError) as caught:
            rendered(tokenizer)
        assert caught.value.retry_after_s is not None
        assert first not in workers()

    def encoded() -> list[int] | None:
        try:
            return tokenizer.encode("a", add_special_tokens=False)
        except TinsmithError:
            return None

    assert until(encoded) == ModelTokenizer(tokenizer_files()).encode("a", add_special_tokens=False)


def test_a_hostile_expression_costs_its_own_process(hasty: ConfinedProcesses) -> None:
    files = tokenizer_files()
    document = json.loads(files["tokenizer.json"])
    document["normalizer"] = {
        "type": "Replace",
        "pattern": {"Regex": "(x+x+)+y"},
        "content": "",
    }
    files["tokenizer.json"] = json.dumps(document).encode()
    tokenizer = ConfinedTokenizer(files, hasty)
    with pytest.raises(FailedPreconditionError, match="or it crashed"):
        tokenizer.encode("x" * 5000, add_special_tokens=False)


@pytest.mark.parametrize("files", [{"tokenizer.json": b"{}"}, {"tokenizer.json": b"\xff"}])
def test_files_that_are_no_tokenizer_are_refused(
    processes: ConfinedProcesses, files: dict[str, bytes]
) -> None:
    with pytest.raises(FailedPreconditionError):
        ConfinedTokenizer(files, processes)
    assert workers() == []


def test_a_template_has_a_size(processes: ConfinedProcesses) -> None:
    with pytest.raises(FailedPreconditionError, match=str(MAX_TEMPLATE_BYTES)):
        ConfinedTokenizer(tokenizer_files("a" * (MAX_TEMPLATE_BYTES + 1)), processes)


def test_a_process_that_was_killed_begins_anew(processes: ConfinedProcesses) -> None:
    tokenizer = ConfinedTokenizer(tokenizer_files(), processes)
    tokens = rendered(tokenizer)
    [first] = workers()
    os.kill(first, signal.SIGKILL)
    until(lambda: "State:\tZ" in Path(f"/proc/{first}/status").read_text())
    assert rendered(tokenizer) == tokens


def test_a_process_knows_no_variables_of_this_one(
    processes: ConfinedProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINSMITH_POD_KEY", "a-secret")
    tokenizer = ConfinedTokenizer(tokenizer_files(), processes)
    [worker] = workers()
    assert b"a-secret" not in Path(f"/proc/{worker}/environ").read_bytes()
    tokenizer.close()
    assert workers() == []


def test_the_process_used_longest_ago_gives_way(processes: ConfinedProcesses) -> None:
    first, second = (ConfinedTokenizer(tokenizer_files(), processes) for _ in range(2))
    before = set(workers())
    rendered(first)
    third = ConfinedTokenizer(tokenizer_files(), processes)
    assert len(workers()) == 2
    assert len(before.intersection(workers())) == 1
    for tokenizer in (first, second, third):
        assert rendered(tokenizer)
    assert len(workers()) == 2


def test_when_all_are_at_work_another_is_told_to_come_again(processes: ConfinedProcesses) -> None:
    busy = [ConfinedTokenizer(tokenizer_files(STAYS), processes) for _ in range(2)]
    threads = [threading.Thread(target=_ended, args=(tokenizer,)) for tokenizer in busy]
    for thread in threads:
        thread.start()
    with pytest.raises(RateLimitedError) as caught:
        until(lambda: _begun(processes))
    assert caught.value.metadata["what"] == "confined processes"
    processes.close()
    for thread in threads:
        thread.join()


def _ended(tokenizer: ConfinedTokenizer) -> None:
    with pytest.raises(InvalidFieldError):
        rendered(tokenizer)


def _begun(processes: ConfinedProcesses) -> bool:
    """Begin a process, which takes the place of an idle one; False as long as there are such."""
    ConfinedTokenizer(tokenizer_files(), processes).close()
    return False


async def test_a_slow_tokenizer_delays_its_own_callers_alone(hasty: ConfinedProcesses) -> None:
    slow = ConfinedTokenizer(tokenizer_files(STAYS), hasty)
    quick = ConfinedTokenizer(tokenizer_files(), hasty)
    working = asyncio.create_task(slow.aside(_ended, slow))
    for _ in range(20):
        await quick.aside(rendered, quick)
    assert not working.done() or working.exception() is None
    await working


# The store.


class Scheduler:
    """Serves a tokenizer of some size for each model."""

    async def call(
        self, service: str, method: str, request: Any, response: Any, credential: Credential
    ) -> scheduler_pb2.Tokenizer:
        files = {**tokenizer_files(), "notes.json": request.base_model.encode() * 100_000}
        digest = digest_of(files)
        return scheduler_pb2.Tokenizer(
            digest=digest, files={} if request.known_digest == digest else files
        )


async def test_the_bytes_that_are_kept_are_bounded(processes: ConfinedProcesses) -> None:
    now_s = 0.0
    store = TokenizerStore(
        cast(Upstream, Scheduler()), processes, max_bytes=350_000, clock=lambda: now_s
    )
    users = Credential(Caller("p", KeyRole.MEMBER, "k"), (), "k")
    strangers = Credential(Caller("p", KeyRole.MEMBER, "k", "a.job"), (), "k")
    first = await store.get("a", users)
    for model in "bcd":
        await store.get(model, users)
        assert store.num_bytes <= 350_000
    # It went, and is fetched whole again although its digest is known.
    assert await store.get("a", users) is not first
    now_s = 100.0
    again = await store.get("a", users)
    assert again is await store.get("a", users)
    confined = await store.get("a", strangers)
    assert isinstance(confined, ConfinedTokenizer)
    assert len(workers()) == 1
    for model in "bcd":
        await store.get(model, users)
    assert workers() == []
