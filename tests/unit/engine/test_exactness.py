"""The promise of the packed engine: a run gets the bits that it would get alone.

Everything here is compared byte for byte. What runs alone has an engine of its own, one call for
each operation; what is mixed shares passes, stacks and head chunks with all others that are there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.support.engine_turns import computed_in_turns
from tests.unit.engine.conftest import VOCAB, make_batch, save_tiny

from tinsmith_engine import (
    LOSS_SPECS,
    AdamParams,
    AdapterConfig,
    BatchResult,
    Datum,
    Engine,
    FullConfig,
    LoraConfig,
    OptimStepResult,
    RunState,
)
from tinsmith_engine.base.types import BatchRequest
from tinsmith_engine.products.split_products import KSplit
from tinsmith_engine.training.exactness import NUM_PROBE_RUNS, check_exactness
from tinsmith_runtime.errors import ExactnessUnavailableError, TinsmithError

Random = np.random.Generator

MICRO_BATCH_TOKENS = 96
NUM_CHUNKS = 4
MIXES_FACTOR = int(os.environ.get("TINSMITH_TEST_MIXES", "1"))
MIXES_PER_CHUNK = {1: 12 * MIXES_FACTOR, 2: 2 * MIXES_FACTOR, 3: MIXES_FACTOR}
"""By threads, for each of two dtypes: 120 mixes in all, and ten times that in `make exactness`."""
ABSENT = "absent"
"""A run that lies among the others and asks for nothing."""


class Rig(NamedTuple):
    """Engines that must agree: one to be alone in, and others to mix in."""

    alone: Engine
    mixing: tuple[Engine, ...]


@pytest.fixture(scope="module")
def long_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("long")
    return save_tiny(directory, "qwen3", max_position_embeddings=512, tie_word_embeddings=False)


def load(model_dir: Path, **options: Any) -> Engine:
    return Engine.load(model_dir, micro_batch_tokens=MICRO_BATCH_TOKENS, **options)


class Threads(NamedTuple):
    """A rig, and the threads of the process that it was loaded with."""

    rig: Rig
    num_threads: int


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((dtype, threads), id=f"{dtype}-{threads}-threads")
        for dtype in ("float32", "bfloat16")
        for threads in (1, 2, 3)
    ],
)
def loaded(request: pytest.FixtureRequest, long_dir: Path) -> Threads:
    dtype, num_threads = request.param
    options = {"dtype": dtype, "num_threads": num_threads}
    try:
        mixing = (
            load(long_dir, **options),
            # Small passes, and gradient checkpointing in some of them or in all.
            load(long_dir, **options, max_pass_tokens=160, checkpoint_activations_over_tokens=96),
            load(long_dir, **options, checkpoint_activations_over_tokens=0),
        )
        for engine in mixing:
            engine.create_run(ABSENT, LoraConfig(rank=8, seed=0))
            state = filled_state(engine.export_state(ABSENT), np.random.default_rng(0))
            engine.import_state(ABSENT, with_gradient(state))
        # A run that is alone has one thread: the number of them changes no bit.
        return Threads(Rig(load(long_dir, dtype=dtype, num_threads=1), mixing), num_threads)
    finally:
        torch.set_num_threads(1)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(1)


# Random work.


def random_config(random: Random) -> AdapterConfig:
    if random.random() < 0.04:
        return FullConfig()
    # Ranks that many runs share, so that runs stack, and odd ones.
    rank = int(random.choice([1, 3, 5, 8, 8, 8, 16, 16, 32, random.integers(1, 33)]))
    trains_attention, trains_mlp, trains_head = random.random(3) < (0.85, 0.85, 0.25)
    return LoraConfig(
        rank=rank,
        seed=int(random.integers(1 << 30)),
        alpha=float(random.choice([32.0, 16.0])),
        train_attention=bool(trains_attention or not (trains_mlp or trains_head)),
        train_mlp=bool(trains_mlp),
        train_unembedding=bool(trains_head),
    )


def random_length(random: Random) -> int:
    longest = random.choice([16, 48, 100, 150, 280], p=[0.35, 0.35, 0.17, 0.1, 0.03])
    return int(random.integers(1, longest + 1))


def random_datum(random: Random, loss: str) -> Datum:
    length = random_length(random)
    tokens = random.integers(0, VOCAB, length + 1)

    def numbers(scale: float, shape: tuple[int, ...] = (length,)) -> Any:
        values = random.normal(size=shape) * scale
        is_zero = random.random(length) < random.choice(
            [0.0, 0.3, 0.9, 1.0], p=[0.4, 0.3, 0.2, 0.1]
        )
        values[is_zero] = 0.0
        return values.astype(np.float32)

    if loss == "cross_entropy":
        num_targets = int(random.choice([0, 0, 1, 2, 5]))
        if not num_targets:
            return Datum(tokens[:-1], tokens[1:], {"weights": numbers(1.0)})
        shape = (length, num_targets)
        targets = random.integers(0, VOCAB, shape)
        return Datum(tokens[:-1], targets, {"weights": numbers(1.0, shape)})
    inputs = {"logprobs": numbers(0.5) - np.float32(4.6), "advantages": numbers(1.0)}
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = (random.random(length) < 0.7).astype(np.float32)
    if loss == "stable_reinforce":
        inputs["sampled_mask"] = (random.random(length) < 0.7).astype(np.float32)
    if LOSS_SPECS[loss].optional_inputs and random.random() < 0.3:
        inputs["clip_low_threshold"] = random.uniform(0.5, 1.0, length).astype(np.float32)
        inputs["clip_high_threshold"] = random.uniform(1.0, 1.5, length).astype(np.float32)
    return Datum(tokens[:-1], tokens[1:], inputs)


def random_request(random: Random, run: str | None, *, is_backward: bool) -> BatchRequest:
    loss = str(random.choice(list(LOSS_SPECS)))
    spec = LOSS_SPECS[loss]
    config = {}
    if "beta" in spec.config:
        config["beta"] = float(random.uniform(0.0, 0.2))
    elif "kl_coeff" in spec.config:
        config = {"kl_coeff": float(random.uniform(0.0, 0.2)), "max_ratio": 1.5}
    elif spec.config and random.random() < 0.5:
        config = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4}
    num_datums = int(random.choice([1, 1, 2, 3, 4]))
    return BatchRequest(
        run=run,
        batch=[random_datum(random, loss) for _ in range(num_datums)],
        loss=loss,
        loss_config=config,
        is_backward=is_backward,
    )


class Tenant(NamedTuple):
    """A run with the weights that it begins with, what it asks for, and how it steps."""

    run: str
    state: RunState
    requests: list[BatchRequest]
    adam: AdamParams


def random_tenant(random: Random, engine: Engine, run: str) -> Tenant:
    engine.create_run(run, random_config(random))
    state = filled_state(engine.export_state(run), random)
    engine.drop_run(run)
    if random.random() < 0.2:
        state = with_gradient(state)
    num_requests = int(random.choice([1, 1, 2]))
    requests = [
        random_request(random, run, is_backward=bool(random.random() < 0.75))
        for _ in range(num_requests)
    ]
    adam = AdamParams(
        learning_rate=float(10.0 ** random.uniform(-5, -1)),
        beta1=float(random.choice([0.9, 0.0, 0.99])),
        beta2=float(random.choice([0.95, 0.5, 0.999])),
        eps=float(random.choice([1e-12, 1e-8])),
        weight_decay=float(random.choice([0.0, 0.1])),
        grad_clip_norm=float(random.choice([0.0, 0.5])),
    )
    return Tenant(run, state, requests, adam)


def filled_state(state: RunState, random: Random) -> RunState:
    """Return a state in which no adapter matrix is zero, so that every gradient flows."""
    generator = torch.Generator().manual_seed(int(random.integers(1 << 30)))
    if isinstance(state.config, LoraConfig):
        theta = state.tensors["theta"]
        theta += 0.05 * torch.randn(theta.shape, generator=generator)
    return state


def with_gradient(state: RunState) -> RunState:
    """Return a state with a pending gradient, to be added to."""
    pending = state.tensors | {"grad": state.tensors["theta"].flip(0)}
    return dataclasses.replace(state, tensors=pending, has_gradient=True)


def shuffled(random: Random, tenants: Sequence[Tenant]) -> list[BatchRequest]:
    """Return all requests in a random order that keeps the order within each run."""
    queues = {tenant.run: iter(tenant.requests) for tenant in tenants}
    turns = [tenant.run for tenant in tenants for _ in tenant.requests]
    random.shuffle(turns)
    return [next(queues[run]) for run in turns]


# Bits.


def result_bits(outcome: BatchResult | TinsmithError) -> tuple[Any, ...]:
    if isinstance(outcome, TinsmithError):
        raise outcome
    return (
        [(logprobs.shape, logprobs.tobytes()) for logprobs in outcome.logprobs],
        sorted((name, value.hex()) for name, value in outcome.metrics.items()),
    )


def state_bits(engine: Engine, run: str) -> dict[str, Any]:
    state = engine.export_state(run)
    bits: dict[str, Any] = {name: row.numpy().tobytes() for name, row in state.tensors.items()}
    return bits | {"version": state.version, "adam_steps": state.adam_steps}


class Bits(NamedTuple):
    """All that a run got."""

    results: list[tuple[Any, ...]]
    gradient: dict[str, Any]
    step: dict[str, float] | str
    stepped: dict[str, Any]


def step_bits(outcome: OptimStepResult | TinsmithError) -> dict[str, float] | str:
    return outcome.metrics if isinstance(outcome, OptimStepResult) else outcome.reason


def bits_alone(engine: Engine, tenant: Tenant) -> Bits:
    engine.import_state(tenant.run, tenant.state)
    try:
        results = [result_bits(engine.compute([request])[0]) for request in tenant.requests]
        gradient = state_bits(engine, tenant.run)
        step = step_bits(engine.optim_steps([(tenant.run, tenant.adam)])[0])
        return Bits(results, gradient, step, state_bits(engine, tenant.run))
    finally:
        engine.drop_run(tenant.run)


def bits_mixed(random: Random, engine: Engine, tenants: Sequence[Tenant]) -> dict[str, Bits]:
    for index in random.permutation(len(tenants)):
        engine.import_state(tenants[index].run, tenants[index].state)
    try:
        requests = shuffled(random, tenants)
        # The base model itself may be scored in the same pass.
        guests = [random_request(random, None, is_backward=False)] * int(random.random() < 0.3)
        outcomes = computed_in_turns(random, engine, [*guests, *requests])[len(guests) :]
        results: dict[str, list[tuple[Any, ...]]] = {tenant.run: [] for tenant in tenants}
        for request, outcome in zip(requests, outcomes, strict=True):
            results[str(request.run)].append(result_bits(outcome))
        gradients = {tenant.run: state_bits(engine, tenant.run) for tenant in tenants}
        steps = engine.optim_steps([(tenant.run, tenant.adam) for tenant in tenants])
        return {
            tenant.run: Bits(
                results[tenant.run],
                gradients[tenant.run],
                step_bits(step),
                state_bits(engine, tenant.run),
            )
            for tenant, step in zip(tenants, steps, strict=True)
        }
    finally:
        for tenant in tenants:
            engine.drop_run(tenant.run)


# Two threads that share a busy core with others spin at each barrier: ten times the usual seconds.
@pytest.mark.timeout(400)
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_a_run_gets_the_bits_that_it_gets_alone(loaded: Threads, chunk: int) -> None:
    rig = loaded.rig
    before = [state_bits(engine, ABSENT) for engine in rig.mixing]
    num_mixes = MIXES_PER_CHUNK[loaded.num_threads]
    for number in range(chunk * num_mixes, (chunk + 1) * num_mixes):
        random = np.random.default_rng(number)
        num_tenants = int(random.choice([2, 3, 3, 4, 6]))
        tenants = [random_tenant(random, rig.alone, f"run-{i}") for i in range(num_tenants)]
        with threads(loaded.num_threads):
            mixed = bits_mixed(random, rig.mixing[number % len(rig.mixing)], tenants)
        for tenant in tenants:
            wanted = bits_alone(rig.alone, tenant)
            for part in Bits._fields:
                assert getattr(mixed[tenant.run], part) == getattr(wanted, part), (
                    f"mix {number}, {tenant.run} {tenant.state.config}: {part}"
                )
    assert [state_bits(engine, ABSENT) for engine in rig.mixing] == before


# A life among others.

LIFE_STEPS = 50
LIFE_ADAM = AdamParams(learning_rate=5e-3, weight_decay=0.1, grad_clip_norm=1.0)
RUN, OTHER_CONFIG = "run", LoraConfig(rank=8, seed=77)


def life_requests(step: int) -> list[BatchRequest]:
    """Return two gradients to accumulate, of different losses."""
    batches = {"ppo": (11, 40, 23), "cross_entropy": (5, 70, 33, 18)}
    return [
        BatchRequest(
            run=RUN,
            batch=make_batch(loss, lengths, seed=step),
            loss=loss,
            loss_config={},
            is_backward=True,
        )
        for loss, lengths in batches.items()
    ]


def calm_life(engine: Engine) -> list[Any]:
    """Train a run that has the engine to itself."""
    engine.create_run(RUN, LoraConfig(rank=8, seed=3))
    found: list[Any] = []
    for step in range(LIFE_STEPS):
        for request in life_requests(step):
            found.append(result_bits(engine.compute([request])[0]))
        found.append(engine.optim_step(RUN, LIFE_ADAM).metrics)
    return [*found, state_bits(engine, RUN)]


def moved(source: Engine, target: Engine, run: str, squatter: str) -> None:
    """Park a run, let another one have its row, and bring the run back."""
    state = source.export_state(run)
    source.drop_run(run)
    target.create_run(squatter, OTHER_CONFIG)
    target.import_state(run, state)


def busy_life(load_engine: Callable[[], Engine]) -> list[Any]:
    """Train the same run among tenants that come and go, moved from row to row and restarted."""
    random = np.random.default_rng(5)
    engine = load_engine()
    engine.create_run(ABSENT, LoraConfig(rank=8, seed=8))
    engine.create_run(RUN, LoraConfig(rank=8, seed=3))
    engine.import_state(ABSENT, with_gradient(engine.export_state(ABSENT)))
    absent = state_bits(engine, ABSENT)
    found: list[Any] = []
    for step in range(LIFE_STEPS):
        for run in engine.runs():
            if run not in (RUN, ABSENT) and random.random() < 0.4:
                engine.drop_run(run)
        if step % 9 == 4:
            moved(engine, engine, RUN, f"squatter-{step}")
        if len(engine.runs()) < 5:
            engine.create_run(f"guest-{step}", random_config(random))
        tenants = [run for run in engine.runs() if run not in (RUN, ABSENT)]
        ours, theirs = (
            life_requests(step),
            [random_request(random, run, is_backward=random.random() < 0.8) for run in tenants],
        )
        requests = [*theirs[:2], ours[0], *theirs[2:], ours[1]]
        outcomes = engine.compute(requests)
        found += [result_bits(outcomes[requests.index(request)]) for request in ours]
        if step == LIFE_STEPS // 2:
            # A restart with a gradient pending.
            fresh = load_engine()
            moved(engine, fresh, RUN, "first-in-the-new-engine")
            fresh.import_state(ABSENT, engine.export_state(ABSENT))
            engine, tenants = fresh, []
        elif step % 11 == 7:
            moved(engine, engine, RUN, f"squatter-of-a-gradient-{step}")
        steps = engine.optim_steps([(run, LIFE_ADAM) for run in (*tenants, RUN)])
        ours_stepped = steps[-1]
        assert isinstance(ours_stepped, OptimStepResult)
        found.append(ours_stepped.metrics)
    assert state_bits(engine, ABSENT) == absent
    return [*found, state_bits(engine, RUN)]


def test_long_segments_in_bfloat16_have_the_bits_of_each_alone(long_dir: Path) -> None:
    # Segments of over 256 rows, which are not stacked in this dtype.
    engine = Engine.load(long_dir, dtype="bfloat16", max_resident_runs=3)
    requests = []
    for index in range(3):
        engine.create_run(f"run-{index}", LoraConfig(rank=8, seed=index))
        requests.append(
            BatchRequest(
                run=f"run-{index}",
                batch=make_batch(lengths=(150, 200), seed=index),
                loss="cross_entropy",
                loss_config={},
                is_backward=True,
            )
        )
    alone = []
    for request in requests:
        engine.compute([request])
        alone.append(state_bits(engine, str(request.run)))
        engine.clear_gradient(str(request.run))
    engine.compute(requests)
    assert [state_bits(engine, str(request.run)) for request in requests] == alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_life_among_others_has_the_bits_of_a_calm_one(long_dir: Path, dtype: str) -> None:
    calm = calm_life(load(long_dir, dtype=dtype))
    busy = busy_life(
        lambda: load(
            long_dir, dtype=dtype, max_pass_tokens=256, checkpoint_activations_over_tokens=200
        )
    )
    differing = [index for index, (a, b) in enumerate(zip(calm, busy, strict=True)) if a != b]
    assert differing == []


def test_a_row_forgets_who_had_it(long_dir: Path) -> None:
    # In bfloat16 a pass reads a copy of the weights; the copy of a run that is gone once served
    # the next run in its row.
    engine = load(long_dir, dtype="bfloat16")
    found = []
    for seed in (1, 2, 1):
        engine.create_run(RUN, LoraConfig(rank=8, seed=3))
        state = filled_state(engine.export_state(RUN), np.random.default_rng(seed))
        engine.import_state(RUN, state)
        found.append(result_bits(engine.compute(life_requests(0)[:1])[0]))
        engine.drop_run(RUN)
    assert found[0] == found[2] != found[1]


# The probe.

Patch = Callable[[pytest.MonkeyPatch], None]


def position_dependent_mm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a product round later rows of a call differently."""
    real = torch.mm

    def mm(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        found: torch.Tensor = real(x, weight, **options)
        found[len(x) // 2 :] *= 1 + 1e-5
        return found

    monkeypatch.setattr(torch, "mm", mm)


def size_dependent_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a frozen product depend on the rows of the pass; the check of products is blind."""
    real = KSplit.product
    monkeypatch.setattr(
        "tinsmith_engine.loading.base_model.check_split", lambda split, factors: True
    )

    def product(
        self: KSplit, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return real(self, x, weight, bias) * (1 + 1e-6 * len(x))

    monkeypatch.setattr(KSplit, "product", product)


def stack_dependent_bmm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a batched product depend on how many share it."""
    real = torch.bmm

    def bmm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return real(left, right) * (1 + 1e-6 * len(left))

    monkeypatch.setattr(torch, "bmm", bmm)


def thread_dependent_bmm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a batched product depend on the number of threads."""
    real = torch.bmm

    def bmm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return real(left, right) * (1 + 1e-6 * torch.get_num_threads())

    monkeypatch.setattr(torch, "bmm", bmm)


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        pytest.param(position_dependent_mm, "beside other rows", id="row-position"),
        pytest.param(size_dependent_products, "than alone", id="rows-of-a-pass"),
        pytest.param(stack_dependent_bmm, "than alone", id="runs-of-a-stack"),
        pytest.param(thread_dependent_bmm, "with 2 threads than alone", id="threads"),
    ],
)
def test_kernels_that_let_tenants_meet(
    qwen3_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    patch: Patch,
    says: str,
) -> None:
    sound = load(qwen3_dir)
    assert sound.info.exactness == "exact"
    assert "threads=" not in sound.info.fingerprint
    patch(monkeypatch)
    with pytest.raises(ExactnessUnavailableError, match=says) as refusal:
        load(qwen3_dir, exact=True)
    assert "--exact auto" in str(refusal.value)
    caplog.clear()
    fast = load(qwen3_dir)
    assert [says in record.getMessage() for record in caplog.records] == [True]
    assert fast.info.exactness == "fast"
    assert "exactness=fast" in fast.info.fingerprint
    assert "threads=" in fast.info.fingerprint
    fast.create_run(RUN, LoraConfig(rank=8, seed=3))
    for outcome in fast.compute(life_requests(0)):
        assert isinstance(outcome, BatchResult)


def test_an_engine_that_is_told_to_be_fast_checks_nothing(
    qwen3_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(qwen3_dir, exact=False).info.exactness == "fast"
    assert caplog.records == []


def test_the_probe_leaves_no_run_behind(qwen3_dir: Path) -> None:
    engine = load(qwen3_dir, max_resident_runs=NUM_PROBE_RUNS)
    check_exactness(engine)
    assert engine.runs() == []
