"""The other side: transformers + PEFT as a user would write it, in a process of its own.

`python -m bench.peft_baseline build DIR` writes the model. With `serve MODEL ADAPTER THREADS` it
obeys one JSON object by line on stdin and answers with one on stdout; clocks run here, so
the pipe is not measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch reader expects

from bench import workload


class BareLoop:
    """A model with its adapter and optimizer, and the loop around them.

    Args:
        model_dir: The base model.
        adapter_dir: The adapter to start from, as PEFT reads it.
    """

    def __init__(self, model_dir: Path, adapter_dir: Path) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._model: Any = PeftModel.from_pretrained(base, adapter_dir, is_trainable=True)
        self._model.train()
        self._optimizer = torch.optim.AdamW(
            [parameter for parameter in self._model.parameters() if parameter.requires_grad],
            lr=workload.LEARNING_RATE,
            betas=workload.BETAS,
            eps=workload.EPS,
            weight_decay=0.0,
            fused=True,
        )
        self._batches: dict[tuple[int, int], list[torch.Tensor]] = {}

    def train(self, *, num_sequences: int, num_tokens: int, num_steps: int) -> dict[str, Any]:
        """Take steps; return the loss and the seconds of each."""
        shape = (num_sequences, num_tokens)
        if shape not in self._batches:
            self._batches[shape] = [torch.from_numpy(b) for b in workload.make_batches(*shape)]
        batches = self._batches[shape]
        losses, seconds = [], []
        for step in range(num_steps):
            begin_s = time.perf_counter()
            losses.append(self._step(batches[step % len(batches)]))
            seconds.append(time.perf_counter() - begin_s)
        return {"losses": losses, "seconds": seconds}

    def generate(self, *, is_merged: bool) -> dict[str, Any]:
        """Sample completions of all prompts as one batch; return the seconds."""
        prompts = torch.from_numpy(workload.make_prompts())
        self._model.eval()
        if is_merged:
            self._model.merge_adapter()
        begin_s = time.perf_counter()
        with torch.no_grad():
            tokens = self._model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=workload.SAMPLED_TOKENS,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
            )
        duration_s = time.perf_counter() - begin_s
        if is_merged:
            self._model.unmerge_adapter()
        self._model.train()
        if tokens.shape[1] != prompts.shape[1] + workload.SAMPLED_TOKENS:
            raise RuntimeError(f"generate returned {list(tokens.shape)} tokens")
        return {"seconds": [duration_s]}

    def score(self, *, adapter_dir: str, sequences: list[list[int]]) -> dict[str, Any]:
        """Load an adapter; return the log-probability of each token but the first, by sequence."""
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(self._model, load_peft_weights(adapter_dir, device="cpu"))
        tokens = torch.tensor(sequences)
        with torch.no_grad():
            logits = self._model(input_ids=tokens[:, :-1], use_cache=False).logits
        logprobs = torch.log_softmax(logits, -1).gather(2, tokens[:, 1:, None])[..., 0]
        return {"logprobs": logprobs.tolist()}

    def _step(self, batch: torch.Tensor) -> float:
        logits = self._model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss)


def main(arguments: list[str]) -> None:
    """Build a model, or serve until stdin ends."""
    warnings.simplefilter("ignore")
    if arguments[0] == "build":
        workload.build_model(Path(arguments[1]))
        return
    # Libraries print to stdout; answers go to a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(int(arguments[3]))
    loop = BareLoop(Path(arguments[1]), Path(arguments[2]))
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "train": loop.train,
        "generate": loop.generate,
        "score": loop.score,
    }
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        answer = commands[request.pop("command")](**request)
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
