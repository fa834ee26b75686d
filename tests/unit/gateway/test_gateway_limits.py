"""What a project may have in flight: nothing leaks or goes below zero, no project is locked out."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tinsmith_runtime.errors import ConfigError, RateLimitedError
from tinsmith_runtime.rpc.in_flight import AdmittedRequest, Limits, LimitSettings

SMALL = LimitSettings(
    max_requests_per_project=2,
    max_waits_per_project=3,
    max_bytes_per_project=100,
    max_tokens_per_project=50,
)


def test_requests_beyond_the_limit_are_refused() -> None:
    limits = Limits(SMALL)
    with limits.admit("a"), limits.admit("a"):
        with pytest.raises(RateLimitedError) as caught:
            limits.admit("a")
        assert caught.value.metadata == {"what": "requests", "limit": "2"}
        assert caught.value.retry_after_s is not None
    with limits.admit("a"):
        pass


def test_a_project_at_its_limit_takes_nothing_from_others() -> None:
    limits = Limits(SMALL)
    with limits.admit("a", 100), limits.admit("a"), limits.admit("b", 100), limits.admit("b"):
        for project in ("a", "b"):
            with pytest.raises(RateLimitedError):
                limits.admit(project)


def test_waits_are_counted_apart() -> None:
    limits = Limits(SMALL)
    with limits.admit("a"), limits.admit("a"):
        waits = [limits.admit("a", is_wait=True) for _ in range(3)]
        with pytest.raises(RateLimitedError, match="waits"):
            limits.admit("a", is_wait=True)
        for wait in waits:
            limits.release(wait)


def test_bytes_are_counted_as_they_arrive() -> None:
    limits = Limits(SMALL)
    with limits.admit("a", 60), limits.admit("a") as second:
        second.add_bytes(40)
        with pytest.raises(RateLimitedError, match="bytes"):
            second.add_bytes(1)
        assert limits.in_flight_of("a").num_bytes == 100
    assert limits.num_projects == 0


def test_tokens_are_counted_once_they_are_known() -> None:
    limits = Limits(SMALL)
    with limits.admit("a") as first, limits.admit("a") as second:
        first.add_tokens(40)
        second.add_tokens(10)
        with pytest.raises(RateLimitedError, match="tokens"):
            second.add_tokens(1)
    with limits.admit("a") as again:
        again.add_tokens(50)


def test_a_single_request_gets_in_whatever_its_size() -> None:
    limits = Limits(SMALL)
    with limits.admit("a", 1000) as alone:
        alone.add_bytes(1000)
        alone.add_tokens(1000)
        alone.add_tokens(1000)
        with pytest.raises(RateLimitedError, match="bytes"):
            limits.admit("a", 1)


def test_zero_sets_no_limit() -> None:
    limits = Limits(
        LimitSettings(
            max_requests_per_project=0,
            max_waits_per_project=0,
            max_bytes_per_project=0,
            max_tokens_per_project=0,
        )
    )
    with contextlib.ExitStack() as admitted:
        for _ in range(1000):
            admitted.enter_context(limits.admit("a", 10**12)).add_tokens(10**12)
            admitted.enter_context(limits.admit("a", is_wait=True))


def test_negative_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_bytes_per_project"):
        LimitSettings(max_bytes_per_project=-1)


def test_a_failure_releases() -> None:
    limits = Limits(SMALL)
    with pytest.raises(KeyError), limits.admit("a", 10):
        raise KeyError
    assert limits.num_projects == 0


def test_the_delay_follows_the_rate_of_ends() -> None:
    now_s = 0.0
    limits = Limits(LimitSettings(max_requests_per_project=2), clock=lambda: now_s)
    with limits.admit("a"):
        for _ in range(5):
            with limits.admit("a"):
                now_s += 3.0
        with limits.admit("a"), pytest.raises(RateLimitedError) as caught:
            limits.admit("a")
        assert caught.value.retry_after_s == 3.0
        # Nothing has ended for long: the next end is likely far.
        now_s += 40.0
        with limits.admit("a"), pytest.raises(RateLimitedError) as caught:
            limits.admit("a")
        assert caught.value.retry_after_s == 10.4


@pytest.mark.parametrize("num_greedy", [1, 2, 3, 10])
def test_greedy_projects_have_equal_parts_and_leave_room_for_the_next(num_greedy: int) -> None:
    total = 1200
    limits = Limits(LimitSettings(max_requests=total, max_requests_per_project=total))
    counts = dict.fromkeys(range(num_greedy), 0)
    for _ in range(total):
        for project in counts:
            with contextlib.suppress(RateLimitedError):
                limits.admit(str(project))
                counts[project] += 1
    part = 3 * total / (3 * num_greedy + 1)
    assert all(abs(count - part) <= 0.1 * part for count in counts.values())
    for _ in range(int(0.1 * part)):
        limits.admit("new")


def test_one_that_was_refused_comes_first_until_it_was_told_to_come_again() -> None:
    now_s = 0.0
    limits = Limits(LimitSettings(max_requests=9), clock=lambda: now_s)
    for _ in range(3):
        with limits.admit("x"):
            now_s += 20.0
    held = [limits.admit("a") for _ in range(6)]
    for _ in range(3):
        limits.admit("b")
    with pytest.raises(RateLimitedError, match="the server has too many") as caught:
        limits.admit("c")
    assert caught.value.retry_after_s == 20.0
    for admission in (held.pop(), held.pop()):
        limits.release(admission)
    now_s += 20.0
    with pytest.raises(RateLimitedError, match="this project has too many"):
        limits.admit("a")
    # One that does not come is waited for no longer.
    now_s += 200.0
    held.append(limits.admit("a"))


def test_one_that_has_all_it_may_have_holds_no_other_back() -> None:
    limits = Limits(LimitSettings(max_waits=100, max_waits_per_project=10))
    for _ in range(10):
        limits.admit("small", is_wait=True)
    with pytest.raises(RateLimitedError):
        limits.admit("small", is_wait=True)
    own = Limits(LimitSettings(max_waits=100, max_waits_per_project=60))
    greedy = [own.admit("a", is_wait=True) for _ in range(60)]
    for _ in range(3):
        with pytest.raises(RateLimitedError, match="60 allowed"):
            own.admit("a", is_wait=True)
    assert len(greedy) == 60
    # It asks on, and takes nothing from one that is far from its part.
    assert own.admit("b", is_wait=True)


class AnyOrder(RuleBasedStateMachine):
    """Requests of two projects begin, grow and end in any order, also twice."""

    @initialize()
    def begin(self) -> None:
        self.limits = Limits(SMALL)
        self.open: list[tuple[AdmittedRequest, bool, list[int]]] = []

    @rule(project=st.sampled_from("ab"), size=st.integers(0, 150), is_wait=st.booleans())
    def admit(self, project: str, size: int, is_wait: bool) -> None:
        try:
            admission = self.limits.admit(project, size, is_wait=is_wait)
        except RateLimitedError:
            # A project with nothing in flight is admitted.
            num_of_project = sum(kept.project == project for kept, _, _ in self.open)
            if not num_of_project:
                raise
        else:
            self.open.append((admission, is_wait, [size, 0]))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), num_bytes=st.integers(0, 80), num_tokens=st.integers(0, 40))
    def grow(self, data: st.DataObject, num_bytes: int, num_tokens: int) -> None:
        admission, _, sizes = data.draw(st.sampled_from(self.open))
        for index, (add, amount) in enumerate(
            [(admission.add_bytes, num_bytes), (admission.add_tokens, num_tokens)]
        ):
            try:
                add(amount)
            except RateLimitedError:
                continue
            sizes[index] += amount

    @precondition(lambda self: self.open)
    @rule(data=st.data(), times=st.integers(1, 2))
    def end(self, data: st.DataObject, times: int) -> None:
        index = data.draw(st.integers(0, len(self.open) - 1))
        admission, _, _ = self.open.pop(index)
        for _ in range(times):
            self.limits.release(admission)

    @invariant()
    def counts_are_what_is_open(self) -> None:
        for project in "ab":
            usage = self.limits.in_flight_of(project)
            of_project = [entry for entry in self.open if entry[0].project == project]
            assert usage.num_waits == sum(is_wait for _, is_wait, _ in of_project)
            assert usage.num_requests == sum(not is_wait for _, is_wait, _ in of_project)
            assert usage.num_bytes == sum(sizes[0] for _, _, sizes in of_project)
            assert usage.num_tokens == sum(sizes[1] for _, _, sizes in of_project)
            assert usage.num_requests <= SMALL.max_requests_per_project
            assert usage.num_waits <= SMALL.max_waits_per_project
        assert self.limits.num_projects == len({entry[0].project for entry in self.open})

    def teardown(self) -> None:
        for admission, _, _ in self.open:
            self.limits.release(admission)
        assert self.limits.num_projects == 0


TestAnyOrder = AnyOrder.TestCase
