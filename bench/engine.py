"""The packed engine against PEFT, one tenant after another, side by side in one process.

`python -m bench.engine` builds a tiny Qwen3 (hidden 256, 4 layers, vocabulary 4096), gives each
tenant an adapter of rank 16 on all linear layers, and lets both sides take the same training steps:
forward, backward, AdamW. PEFT switches adapters with `set_adapter`; the engine computes all tenants
in one pass. Sides take turns, and a figure is the median of the ratios of neighbouring turns, since
other work on the machine slows both. Everything runs on one thread.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch reader expects

from bench import report
from tinsmith_engine import AdamParams, Datum, Engine, LoraConfig
from tinsmith_engine.memory import keep_freed_memory
from tinsmith_engine.values import BatchRequest
from tinsmith_runtime.errors import TinsmithError

VOCAB, HIDDEN, LAYERS, RANK = 4096, 256, 4, 16
_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_ADAM = AdamParams(learning_rate=1e-4)

Batch = list[list[int]]
"""Token ids of each sequence, one more than is trained on."""


@dataclass(frozen=True, slots=True)
class Case:
    """Tenants and what each trains on."""

    name: str
    num_tenants: int
    lengths: tuple[int, ...] | None
    """Tokens of each sequence of a tenant; None draws 4 sequences of 16 to 128 for each."""
    targets: dict[str, float]
    """By dtype: what the ratio should reach."""

    def batches(self) -> list[Batch]:
        """Return a batch for each tenant."""
        random = np.random.default_rng(7)
        found = []
        for _ in range(self.num_tenants):
            lengths = self.lengths or tuple(random.integers(16, 129, 4))
            found.append([random.integers(0, VOCAB, length + 1).tolist() for length in lengths])
        return found


CASES = (
    Case("16 tenants x (1x32)", 16, (32,), {"float32": 5.0, "bfloat16": 5.0}),
    Case("32 tenants x (1x16)", 32, (16,), {"float32": 6.0, "bfloat16": 6.0}),
    Case("16 tenants x (4x64)", 16, (64,) * 4, {"float32": 1.7, "bfloat16": 2.5}),
    Case("16 tenants x 4 ragged (16-128)", 16, None, {"bfloat16": 2.5}),
    Case("1 tenant x (1x32)", 1, (32,), {"float32": 1.0, "bfloat16": 1.0}),
    Case("1 tenant x (8x128)", 1, (128,) * 8, {"float32": 1.0, "bfloat16": 1.0}),
)


def build_model(directory: Path) -> None:
    """Write the model, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)


class PeftSide:
    """Tenants as adapters of one PEFT model, trained one after another."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, num_tenants: int) -> None:
        from peft import LoraConfig as PeftLoraConfig
        from peft import get_peft_model
        from transformers import AutoModelForCausalLM

        base: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
        config = PeftLoraConfig(r=RANK, lora_alpha=32, target_modules=_LINEARS)
        self._model: Any = get_peft_model(base, config, adapter_name="tenant-0")
        for tenant in range(1, num_tenants):
            self._model.add_adapter(f"tenant-{tenant}", config)
        self._model.train()
        self._optimizers = []
        for tenant in range(num_tenants):
            self._model.set_adapter(f"tenant-{tenant}")
            trained = [
                parameter
                for name, parameter in self._model.named_parameters()
                if f".tenant-{tenant}." in name
            ]
            self._optimizers.append(torch.optim.AdamW(trained, lr=1e-4))

    def step(self, batches: Sequence[Batch]) -> None:
        """Take one optimizer step for each tenant."""
        for tenant, batch in enumerate(batches):
            self._model.set_adapter(f"tenant-{tenant}")
            longest = max(map(len, batch))
            padded = torch.tensor([row + [0] * (longest - len(row)) for row in batch])
            lengths = torch.tensor([len(row) for row in batch])
            is_padded = bool((lengths < longest).any())
            mask = (torch.arange(longest)[None] < lengths[:, None]).long()
            logits = self._model(
                input_ids=padded[:, :-1],
                attention_mask=mask[:, :-1] if is_padded else None,
                use_cache=False,
            ).logits
            targets = padded[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizers[tenant].step()
            self._optimizers[tenant].zero_grad(set_to_none=True)


class EngineSide:
    """Tenants as runs of one engine, trained in one pass."""

    def __init__(
        self,
        model_dir: Path,
        dtype: str,
        num_tenants: int,
        *,
        exact: bool = True,
        compiled: bool = False,
    ) -> None:
        self._engine = Engine.load(
            model_dir,
            dtype=dtype,
            max_rows=num_tenants,
            num_threads=1,
            exact=exact,
            compiled=compiled,
        )
        self._runs = [f"tenant-{tenant}" for tenant in range(num_tenants)]
        for seed, run in enumerate(self._runs):
            self._engine.create_run(run, LoraConfig(rank=RANK, seed=seed))

    def step(self, batches: Sequence[Batch]) -> None:
        """Take one optimizer step for each tenant."""
        requests = [
            BatchRequest(
                run=run,
                batch=[_datum(row) for row in batch],
                loss="cross_entropy",
                loss_config={},
                is_backward=True,
            )
            for run, batch in zip(self._runs, batches, strict=False)
        ]
        stepped = [(str(request.run), _ADAM) for request in requests]
        for result in (*self._engine.compute(requests), *self._engine.optim_steps(stepped)):
            if isinstance(result, TinsmithError):
                raise result


def _datum(row: list[int]) -> Datum:
    tokens = np.array(row)
    return Datum(tokens[:-1], tokens[1:], {"weights": np.ones(len(row) - 1, np.float32)})


def compare(
    one: Callable[[], object], other: Callable[[], object], *, repeats: int, least_s: float
) -> list[float]:
    """Return the ratios of the seconds of `one` to those of `other`, taken in turns."""
    one(), other()
    begin_s = time.perf_counter()
    one(), other()
    times = max(1, round(least_s / (time.perf_counter() - begin_s)))
    ratios = []
    for _ in range(repeats):
        seconds = []
        for call in (one, other):
            begin_s = time.perf_counter()
            for _ in range(times):
                call()
            seconds.append(time.perf_counter() - begin_s)
        ratios.append(seconds[0] / seconds[1])
    return ratios


def run_cases(
    model_dir: Path, dtypes: Sequence[str], repeats: int, only: str, *, compiled: bool
) -> list[report.Row]:
    """Return the rows of all cases."""
    rows = []
    for dtype in dtypes:
        for case in CASES:
            if only not in case.name:
                continue
            batches = case.batches()
            peft = PeftSide(model_dir, getattr(torch, dtype), case.num_tenants)
            engine = EngineSide(model_dir, dtype, case.num_tenants, compiled=compiled)
            ratios = compare(
                lambda: peft.step(batches),  # noqa: B023 - called before the next round
                lambda: engine.step(batches),  # noqa: B023
                repeats=repeats,
                least_s=1.0,
            )
            target = case.targets.get(dtype)
            rows.append(
                report.Row.of(
                    f"{case.name}, {dtype}: engine / sequential PEFT",
                    ratios,
                    "ratio",
                    "higher",
                    target=target,
                )
            )
            print(rows[-1].name, f"{rows[-1].value:.2f}", rows[-1].spread, flush=True)
    return rows


def main() -> None:
    """Run the comparison and write `bench/results/engine.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--compiled", action="store_true", help="compile the elementwise kernels")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    keep_freed_memory()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder))
        rows = run_cases(
            Path(folder),
            arguments.dtypes,
            arguments.repeats,
            arguments.only,
            compiled=arguments.compiled,
        )
    machine = report.machine() | {"torch": torch.__version__, "threads": 1}
    report.show("The engine against sequential PEFT", rows, machine)
    report.write("engine", rows, machine)


if __name__ == "__main__":
    main()
