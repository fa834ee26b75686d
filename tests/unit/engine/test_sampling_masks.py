"""A row whose mask is not computed yet waits by itself, and gets the tokens that it gets alone."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.sampled import bits, random_version
from tests.unit.engine.conftest import LORA, VOCAB
from tests.unit.engine.test_sampling import request, run_all
from tests.unit.engine.test_sampling_cache import BLOCK_BYTES, prompts
from tests.unit.engine.test_sampling_fairness import finishing_step

from tinsmith_engine import Engine, Sampler, SampleRequest
from tinsmith_engine.sampling.request.output_constraint import MASK_WAIT_S

EVEN = np.full(-(-VOCAB // 32), 0x55555555, dtype=np.int32)
"""Lets every second token through."""


@dataclass
class EvenTokens:
    """A form whose masks are computed when a test says so."""

    is_computed: bool = True
    num_waits: int = 0
    rows: list[EvenRow] = field(default_factory=list)

    def begin(self, project: str) -> EvenRow:
        self.rows.append(EvenRow(self))
        return self.rows[-1]


@dataclass
class EvenRow:
    form: EvenTokens
    tokens: list[int] = field(default_factory=list)

    def wait(self, timeout_s: float) -> bool:
        self.form.num_waits += timeout_s > 0.0
        return self.form.is_computed

    def words(self) -> NDArray[np.int32] | None:
        assert self.form.is_computed
        return EVEN

    def note(self, token: int) -> None:
        self.tokens.append(token)

    def has_ended(self) -> bool:
        return False


def formed(form: EvenTokens, **changes: Any) -> SampleRequest:
    return request(constraint=form, cache_scope="formed", num_samples=4, seed=5, **changes)


@pytest.mark.parametrize("num_steps_before", [0, 1, 3])
def test_rows_without_a_form_wait_for_no_mask(engine: Engine, num_steps_before: int) -> None:
    plain = request(cache_scope="plain", seed=3, max_tokens=8)
    alone = Sampler(engine)
    num_steps = finishing_step(alone, alone.add(plain))
    (wanted,) = run_all(Sampler(engine), formed(EvenTokens()))
    sampler, form = Sampler(engine), EvenTokens()
    slow = sampler.add(formed(form))
    for _ in range(num_steps_before):
        assert not sampler.step()
    form.is_computed = False
    # One more, in which the prompt is read where there was no step before.
    assert finishing_step(sampler, sampler.add(plain)) <= num_steps + 1
    for _ in range(5):
        assert not sampler.step()
    assert sampler.has_work
    form.is_computed = True
    found = []
    while sampler.has_work:
        found += sampler.step()
    assert {one.request_id for one in found} == {slow}
    found.sort(key=lambda one: one.sample_index)
    assert bits(found) == bits(wanted)
    assert all(token % 2 == 0 for one in found for token in one.tokens)


def test_a_step_with_nothing_else_to_do_waits_for_masks(engine: Engine) -> None:
    sampler, form = Sampler(engine), EvenTokens(is_computed=False)
    sampler.add(formed(form))
    sampler.step()
    form.num_waits = 0
    sampler.step()
    # The thread would go round and round otherwise.
    assert form.num_waits > 0
    sampler.add(request(cache_scope="plain"))
    sampler.step()
    form.num_waits = 0
    sampler.step()
    assert form.num_waits == 0


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_what_gives_way_while_it_waits_for_its_mask_has_the_same_bits(
    engine: Engine, num_tokens: int
) -> None:
    """A row may give way before its first token, or with tokens that it reads again."""
    form = EvenTokens()
    loud = prompts(6, 60, max_tokens=20, cache_scope="loud", constraint=form)
    quiet = prompts(2, 100, max_tokens=60, cache_scope="quiet")
    wanted = [bits(run_all(Sampler(engine), one)[0]) for one in [*loud, *quiet]]
    sampler = Sampler(engine, cache_bytes=6 * BLOCK_BYTES)
    form.rows.clear()
    ids = [sampler.add(one) for one in loud]
    form.is_computed = num_tokens > 0
    while len(form.rows) < len(loud) or len(form.rows[0].tokens) < num_tokens:
        sampler.step()
    form.is_computed = False
    ids += [sampler.add(one) for one in quiet]
    found = {}
    while not set(ids[len(loud) :]) <= set(found):
        found.update((one.request_id, one) for one in sampler.step())
    assert sampler.num_preemptions > 0
    form.is_computed = True
    while sampler.has_work:
        found.update((one.request_id, one) for one in sampler.step())
    assert [bits([found[one]]) for one in ids] == wanted


def test_a_token_names_the_weights_of_the_logits_that_waited(engine: Engine) -> None:
    first = random_version(engine, "run", LORA)
    engine.versions.acquire(first)
    second = random_version(engine, "run", LORA, seed=8)
    pinned = run_all(Sampler(engine), formed(EvenTokens(), weights=first))[0]
    sampler, form = Sampler(engine), EvenTokens()
    request_id = sampler.add(formed(form, weights=first, follows_run=True))
    form.is_computed = False
    sampler.step()
    assert sampler.update(request_id, second)
    form.is_computed = True
    found = []
    while sampler.has_work:
        found += sampler.step()
    for one, of_first in zip(found, pinned, strict=True):
        assert one.versions == [first.version] + [second.version] * 11
        assert one.tokens[0] == of_first.tokens[0]
        assert one.logprobs[0] == of_first.logprobs[0]


def test_a_cancelled_row_leaves_while_it_waits(engine: Engine) -> None:
    sampler, form = Sampler(engine, cache_bytes=4 * BLOCK_BYTES), EvenTokens(is_computed=False)
    request_id = sampler.add(formed(form))
    sampler.step()
    sampler.cancel(request_id)
    assert not sampler.has_work
    assert sampler.num_active == 0


def test_groups_that_begin_in_a_step_wait_for_masks_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's time to wait is used up by the first of them; the clock stands otherwise."""
    now_s = 0.0

    def wait(row: EvenRow, timeout_s: float) -> bool:
        nonlocal now_s
        now_s += timeout_s
        return row.form.is_computed

    monkeypatch.setattr(EvenRow, "wait", wait)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    sampler, form = Sampler(engine), EvenTokens(is_computed=False)
    sampler.add(formed(form))
    while not form.rows:
        sampler.step()
    for _ in range(6):
        sampler.add(formed(form, max_tokens=1))
    before_s = now_s
    num_rows = len(form.rows)
    sampler.step()
    assert len(form.rows) > num_rows + 4
    assert now_s - before_s <= 2 * MASK_WAIT_S
