"""What the processes of a group do; results go to files, and the tests compare them."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.unit.engine.conftest import make_batch, randomise_b

from tinsmith_engine import AdamParams, Datum, Engine, FullConfig, LoraConfig
from tinsmith_engine.base.types import BatchRequest, BatchResult
from tinsmith_engine.distributed.leader_commands import Leader, follow
from tinsmith_engine.distributed.process_group import Ranks, end_process
from tinsmith_engine.distributed.sharded_decoder import ShardedDecoder
from tinsmith_engine.distributed.sharded_engine import ShardedEngine
from tinsmith_engine.distributed.sharded_loading import load_sharded_engine
from tinsmith_runtime.errors import RanksLostError, TinsmithError

MICRO_BATCH_TOKENS = 64
TENANTS = (
    ("small", LoraConfig(rank=8, seed=1), "cross_entropy", (5, 23, 17)),
    ("twin", LoraConfig(rank=8, seed=2), "ppo", (20, 25)),
    ("head", LoraConfig(rank=4, seed=3, train_unembedding=True), "cross_entropy", (9,)),
    ("large", LoraConfig(rank=8, seed=4), "cross_entropy", (60, 61, 62, 33, 8, 50, 44)),
    ("sequence", LoraConfig(rank=16, seed=5), "gspo", (31, 40, 12)),
    ("own", LoraConfig(rank=8, seed=6), "cispo", (33, 12, 40, 25)),
)
ONE_PIECE = ("small", "twin", "head")
ADAM = AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=1.0)


def request(name: str, loss: str, lengths: Sequence[int], **changes: Any) -> BatchRequest:
    batch = make_batch("ppo" if loss == "gspo" else loss, lengths, seed=len(name))
    if loss == "gspo":
        batch = [_with_mask(datum) for datum in batch]
    one = BatchRequest(run=name, batch=batch, loss=loss, loss_config={}, is_backward=True)
    return dataclasses.replace(one, **changes)


def _with_mask(datum: Datum) -> Datum:
    mask = (datum.loss_inputs["advantages"] != 0).astype("float32")
    return Datum(
        datum.tokens_T, datum.targets_T, {**datum.loss_inputs, "sequence_ratio_mask": mask}
    )


def all_requests() -> dict[str, BatchRequest]:
    return {name: request(name, loss, lengths) for name, _, loss, lengths in TENANTS}


def create_runs(engine: Engine) -> None:
    for name, config, _, _ in TENANTS:
        engine.create_run(name, config)
        randomise_b(engine, name)


def collect(
    engine: Engine, requests: Sequence[BatchRequest], prefix: str = ""
) -> dict[str, torch.Tensor]:
    """Log-probabilities, losses and pending gradients after some requests."""
    found = {}
    for one, result in zip(requests, engine.compute(requests), strict=True):
        assert isinstance(result, BatchResult), result
        for index, logprobs in enumerate(result.logprobs):
            found[f"{prefix}{one.run}/logprobs/{index}"] = torch.from_numpy(logprobs)
        names = sorted(result.metrics)
        found[f"{prefix}{one.run}/metrics"] = torch.tensor(
            [result.metrics[name] for name in names], dtype=torch.float64
        )
        if one.is_backward and one.run is not None:
            found[f"{prefix}{one.run}/grad"] = engine.export_state(one.run).tensors["grad"]
    return found


def clear(engine: Engine) -> None:
    for run in engine.runs():
        engine.clear_gradient(run)


def train(engine: Engine) -> dict[str, torch.Tensor]:
    """What a group of runs does in general; the same program on one process is the reference."""
    create_runs(engine)
    requests = list(all_requests().values())
    found = collect(engine, requests, "first/")
    # On top of what is pending, and an operation that only scores.
    found |= collect(engine, requests[::-1], "second/")
    scores = [dataclasses.replace(one, is_backward=False) for one in requests]
    scores.append(dataclasses.replace(scores[0], run=None))
    found |= collect(engine, scores, "scored/")
    steps = engine.optim_steps([(name, ADAM) for name, *_ in TENANTS])
    assert [getattr(step, "version", None) for step in steps] == [1] * len(TENANTS)
    for name, *_ in TENANTS:
        found[f"stepped/{name}"] = engine.export_state(name).tensors["theta"]
    return found


def load(ranks: Ranks, model_dir: Path, **settings: Any) -> ShardedEngine:
    return load_sharded_engine(
        ranks,
        model_dir,
        **{"micro_batch_tokens": MICRO_BATCH_TOKENS, "max_resident_runs": 8} | settings,
    )


@contextmanager
def leading(ranks: Ranks, engine: ShardedEngine) -> Iterator[bool]:
    """Lead as rank 0 for the time of the block, which then holds True; follow as another rank."""
    if not ranks.is_first:
        follow(ranks, {"base": engine})
        yield False
        return
    leader = Leader(ranks)
    engine.lead(leader, "base")
    try:
        yield True
    finally:
        leader.stop()


def write(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> None:
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)


def sharded(ranks: Ranks, folder: Path) -> None:
    """Adapters on a sharded base: everything that a trainer does, and what goes wrong in it."""
    engine = load(ranks, folder / "model", shard_base=True)
    assert isinstance(engine.model, ShardedDecoder)
    facts: dict[str, Any] = {"bytes": engine.model.base.num_bytes, "info": engine.info.fingerprint}
    with leading(ranks, engine) as leads:
        if leads:
            write(folder, "trained.safetensors", train(engine))
            clear(engine)
            _neighbours(engine, folder)
            facts["errors"] = _errors(engine)
    # A follower holds the same arena.
    state = {
        f"{run}/{name}": tensor
        for run in engine.runs()
        for name, tensor in engine.export_state(run).tensors.items()
    }
    write(folder, f"state-{ranks.rank}.safetensors", state)
    _failing_passes(ranks, engine, folder)
    _other_bases(ranks, folder)
    facts["diverged"] = _diverging(ranks, engine)
    (folder / f"facts-{ranks.rank}.json").write_text(json.dumps(facts))


def _neighbours(engine: Engine, folder: Path) -> None:
    requests = all_requests()
    alone: dict[str, torch.Tensor] = {}
    for one in requests.values():
        alone |= collect(engine, [one])
    clear(engine)
    together = collect(engine, list(requests.values()))
    clear(engine)
    reverse = collect(engine, list(requests.values())[::-1])
    clear(engine)
    for name, found in (("alone", alone), ("together", together), ("reverse", reverse)):
        write(folder, f"{name}.safetensors", found)


def _errors(engine: Engine) -> dict[str, str]:
    """Errors of operations: typed, and of their own run alone."""
    requests = all_requests()
    bad = requests["large"]
    bad.batch[3].loss_inputs["weights"][-1] = 3e38
    bad.batch[4].loss_inputs["weights"][-2:] = 3e38
    unknown = dataclasses.replace(requests["small"], run="nobody")
    found = engine.compute([bad, requests["small"], unknown])
    kinds = {
        name: type(one).__name__
        for name, one in zip(("bad", "good", "unknown"), found, strict=True)
    }
    try:
        engine.create_run("small", LoraConfig(rank=8, seed=1))
    except TinsmithError as error:
        kinds["twice"] = type(error).__name__
    clear(engine)
    return kinds


def _failing_passes(ranks: Ranks, engine: ShardedEngine, folder: Path) -> None:
    """Rank 1 alone runs out of memory, or into a bug, in the middle of a pass."""
    decoder: Any = engine.model
    original = decoder._layer
    mode = {"kind": "memory"}

    def failing(layer: Any, index: int, x: torch.Tensor, *rest: Any) -> Any:
        if ranks.rank == 1 and index == 2:
            if mode["kind"] == "memory" and len(x) > 64:
                raise MemoryError("can't allocate memory")
            if mode["kind"] == "fault" and len(x) > 96:
                raise RuntimeError("shapes do not fit")
        return original(layer, index, x, *rest)

    decoder._layer = failing
    kinds: dict[str, list[str]] = {}
    found: dict[str, torch.Tensor] = {}
    requests = all_requests()
    # Pieces of 124 rows and more; and one that fits everywhere.
    big = dataclasses.replace(requests["large"], micro_batch_tokens=130)
    for kind in ("memory", "fault"):
        mode["kind"] = kind
        with leading(ranks, engine) as leads:
            if leads:
                results = engine.compute([requests["small"], big])
                kinds[kind] = [type(one).__name__ for one in results]
                if isinstance(results[1], BatchResult):
                    kinds[kind].append(str(results[1].micro_batch_tokens))
                    found["large"] = engine.export_state("large").tensors["grad"]
                found[f"small-{kind}"] = engine.export_state("small").tensors["grad"]
                clear(engine)
    decoder._layer = original
    if ranks.is_first:
        (folder / "failing.json").write_text(json.dumps(kinds))
        write(folder, "failing.safetensors", found)


def _other_bases(ranks: Ranks, folder: Path) -> None:
    """The base whole on each rank; and a sharded one in bfloat16 with an untied head."""
    engine = load(ranks, folder / "model", shard_base=False)
    with leading(ranks, engine) as leads:
        if leads:
            write(folder, "replicated.safetensors", train(engine))
    engine = load(
        ranks,
        folder / "untied",
        shard_base=True,
        dtype="bfloat16",
        checkpoint_activations_over_tokens=16,
        max_resident_runs=8,
    )
    with leading(ranks, engine) as leads:
        if leads:
            write(folder, "untied.safetensors", train(engine))


def lost(ranks: Ranks, folder: Path) -> None:
    """Rank 1 goes away: how is told by a file that the test writes, after both began."""
    engine = load(ranks, folder / "model", shard_base=True, exact=False)
    if not ranks.is_first:
        try:
            follow(ranks, {"base": engine})
        except RanksLostError as error:
            sys.stderr.write(f"{error}\n")
            # As a service does: whatever the process group still has going on.
            end_process(5)
    leader = Leader(ranks)
    engine.lead(leader, "base")
    create_runs(engine)
    requests = list(all_requests().values())
    (folder / "leader.ready").touch()
    begin_s = time.monotonic()
    try:
        while time.monotonic() - begin_s < 60:
            engine.compute(requests)
    except RanksLostError as error:
        sys.stderr.write(f"{error}\n")
        try:
            engine.compute(requests)
        except RanksLostError:
            end_process(4)


def _diverging(ranks: Ranks, engine: ShardedEngine) -> str:
    """The same call gives another outcome on rank 1; return what is said about it."""
    if ranks.rank == 1:
        engine._runs.get("small").has_gradient = True
    try:
        with leading(ranks, engine) as leads:
            if leads:
                engine.optim_step("small", ADAM)
    except RanksLostError as error:
        return str(error)
    return ""


FULL_STEPS = 3
FULL_ADAM = AdamParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=20.0, eps=1e-8)


def full_requests(step: int) -> list[BatchRequest]:
    """What a full-parameter run computes before a step: equal and unequal lengths, and GSPO."""
    return [
        request("full", "cross_entropy", (12, 31, 31, 31, 8, 20, 20), run="full"),
        request("full" + step * "+", "gspo", (17, 5, 23), run="full"),
    ]


def train_full(engine: Engine) -> dict[str, torch.Tensor]:
    """Three AdamW steps of a full-parameter run; the reference is one process."""
    engine.create_run("full", FullConfig())
    found: dict[str, torch.Tensor] = {}
    for step in range(FULL_STEPS):
        for number, one in enumerate(full_requests(step)):
            found |= collect(engine, [one], f"{step}/{number}/")
        result = engine.optim_step("full", FULL_ADAM)
        found[f"{step}/norm"] = torch.tensor(result.metrics["grad_norm"])
        found[f"{step}/theta"] = engine.export_state("full").tensors["theta"]
    scored = dataclasses.replace(full_requests(0)[0], is_backward=False)
    found |= collect(engine, [scored], "scored/")
    engine.clear_gradient("full")
    return found


def full(ranks: Ranks, folder: Path) -> None:
    """A full-parameter run on FSDP2: training, errors, files."""
    engine = load(ranks, folder / "model", shard_base=True)
    facts: dict[str, Any] = {}
    with leading(ranks, engine) as leads:
        if leads:
            write(folder, "full.safetensors", train_full(engine))
            facts = _full_errors(engine)
            _full_files(engine, folder)
            again = {}
            for number in range(2):
                engine.clear_gradient("full")
                again |= collect(engine, full_requests(0)[:1], f"{number}/")
            write(folder, "again.safetensors", again)
    if "full" in engine._full:
        module = engine._full.get("full").module
        facts["bytes"] = sum(4 * part.numel() for part in module.locals_of(module.parameters))
    (folder / f"full-{ranks.rank}.json").write_text(json.dumps(facts))


def _full_errors(engine: Engine) -> dict[str, Any]:
    good = full_requests(0)[0]
    before = collect(engine, [good])["full/grad"]
    bad = dataclasses.replace(good, batch=make_batch(lengths=(9, 9, 12)))
    bad.batch[0].loss_inputs["weights"][-2:] = 3e38
    kinds = [type(one).__name__ for one in engine.compute([bad])]
    is_kept = torch.equal(engine.export_state("full").tensors["grad"], before)
    for action in (
        lambda: engine.export("full"),
        lambda: engine.create_run("full", FullConfig()),
        lambda: engine.optim_step("full", dataclasses.replace(FULL_ADAM, learning_rate=3e38)),
        lambda: engine.optim_step("full", FULL_ADAM),
    ):
        try:
            action()
            kinds.append("none")
        except TinsmithError as error:
            kinds.append(type(error).__name__)
    return {"kinds": kinds, "is_kept": is_kept}


def _full_files(engine: ShardedEngine, folder: Path) -> None:
    collect(engine, full_requests(1)[:1])
    saved = engine.export_state("full")
    write(folder, "saved.safetensors", saved.tensors)
    engine.save_full_run("full", str(folder / "two"))
    engine.export_full_run("full", str(folder / "exported"))
    engine.create_run("copy", FullConfig())
    engine.load_full_run("copy", str(folder / "two"))
    write(folder, "copy.safetensors", engine.export_state("copy").tensors)
    # Written by one process, and by way of whole tensors.
    engine.load_full_run("copy", str(folder / "one"))
    write(folder, "from-one.safetensors", engine.export_state("copy").tensors)
    engine.drop_run("copy")
    engine.import_state("copy", saved)
    write(folder, "imported.safetensors", engine.export_state("copy").tensors)
    engine.load_adapter_tensors("copy", engine.adapter_tensors("full")[0])
    write(folder, "loaded.safetensors", engine.export_state("copy").tensors)
    engine.drop_run("copy")
