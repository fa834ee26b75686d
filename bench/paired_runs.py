"""The two sides of the engine's benchmark, and how they take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch reader expects

from tinsmith_engine import AdamParams, BatchRequest, Datum, Engine, LoraConfig
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


def build_model(
    directory: Path,
    *,
    vocab_size: int = VOCAB,
    scale: int = 1,
    max_context_tokens: int = 1024,
    with_tokenizer: bool = False,
) -> None:
    """Write the model with random weights; `scale` multiplies its width.

    A server lists only models that have a tokenizer; this one's is never used.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=vocab_size,
        hidden_size=HIDDEN * scale,
        intermediate_size=3 * HIDDEN * scale,
        num_hidden_layers=LAYERS,
        num_attention_heads=4 * scale,
        num_key_value_heads=2 * scale,
        head_dim=64,
        max_position_embeddings=max_context_tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    if with_tokenizer:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel

        words = {f"t{index}": index for index in range(vocab_size)}
        Tokenizer(WordLevel(words, unk_token="t0")).save(str(directory / "tokenizer.json"))


class PeftSide:
    """Tenants as adapters of one PEFT model, trained one after another."""

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        num_tenants: int,
        device: str = "cpu",
        *,
        rank: int = RANK,
        fused: bool | None = None,
    ) -> None:
        from peft import LoraConfig as PeftLoraConfig
        from peft import get_peft_model
        from transformers import AutoModelForCausalLM

        base: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
        base.to(device)
        config = PeftLoraConfig(r=rank, lora_alpha=32, target_modules=_LINEARS)
        self.model: Any = get_peft_model(base, config, adapter_name="tenant-0")
        for tenant in range(1, num_tenants):
            self.model.add_adapter(f"tenant-{tenant}", config)
        self.model.train()
        self._device = device
        self._optimizers = []
        for tenant in range(num_tenants):
            self.model.set_adapter(f"tenant-{tenant}")
            trained = [
                parameter
                for name, parameter in self.model.named_parameters()
                if f".tenant-{tenant}." in name
            ]
            self._optimizers.append(torch.optim.AdamW(trained, lr=1e-4, fused=fused))

    def step(self, batches: Sequence[Batch]) -> None:
        """Take one optimizer step for each tenant."""
        for tenant, batch in enumerate(batches):
            self.model.set_adapter(f"tenant-{tenant}")
            longest = max(map(len, batch))
            padded = torch.tensor([row + [0] * (longest - len(row)) for row in batch]).to(
                self._device
            )
            lengths = torch.tensor([len(row) for row in batch], device=self._device)
            is_padded = bool((lengths < longest).any())
            mask = (torch.arange(longest, device=self._device)[None] < lengths[:, None]).long()
            logits = self.model(
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
        device: str = "cpu",
        *,
        exact: bool = True,
        compiled: bool = False,
        num_threads: int | None = 1,
        rank: int = RANK,
    ) -> None:
        self._engine = Engine.load(
            model_dir,
            dtype=dtype,
            device=device,
            max_resident_runs=num_tenants,
            num_threads=num_threads,
            exact=exact,
            compiled=compiled,
        )
        self._runs = [f"tenant-{tenant}" for tenant in range(num_tenants)]
        for seed, run in enumerate(self._runs):
            self._engine.create_run(run, LoraConfig(rank=rank, seed=seed))

    def step(self, batches: Sequence[Batch]) -> None:
        """Take one optimizer step for each tenant."""
        requests = [
            BatchRequest(
                run=run,
                batch=[datum(row) for row in batch],
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


def datum(row: list[int]) -> Datum:
    tokens = np.array(row)
    return Datum(tokens[:-1], tokens[1:], {"weights": np.ones(len(row) - 1, np.float32)})


def compare(
    one: Callable[[], object],
    other: Callable[[], object],
    *,
    repeats: int,
    device: str = "cpu",
    least_s: float = 1.0,
) -> list[float]:
    """Return the ratios of the seconds of `one` to those of `other`, taken in turns."""

    def seconds(call: Callable[[], object], times: int) -> float:
        begin_s = time.perf_counter()
        for _ in range(times):
            call()
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - begin_s

    for call in (one, other):
        seconds(call, 1)
    times = max(1, round(least_s / (seconds(one, 1) + seconds(other, 1))))
    return [seconds(one, times) / seconds(other, times) for _ in range(repeats)]


def ratios(
    ours: Callable[[], object], theirs: Callable[[], object], repeats: int
) -> tuple[list[float], float]:
    """Return the seconds of theirs over those of ours, in turns, and those of our best turn."""
    for call in (ours, theirs):
        call()
    found, best_s = [], float("inf")
    for _ in range(repeats):
        begin_s = time.perf_counter()
        theirs()
        middle_s = time.perf_counter()
        ours()
        ours_s = time.perf_counter() - middle_s
        found.append((middle_s - begin_s) / ours_s)
        best_s = min(best_s, ours_s)
    return found, best_s
