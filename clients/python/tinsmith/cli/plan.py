"""`tinsmith plan`: what a training will take, before it starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from tinsmith.cli.output import AsJson, describe_seconds, describe_size, show_json
from tinsmith.errors import ConfigurationError
from tinsmith.planning.devices import GPUS, find_device
from tinsmith.planning.estimate import Workload, estimate
from tinsmith.planning.model_shape import ModelShape
from tinsmith.planning.several_devices import Work, refusal


def plan(
    model: Annotated[Path, typer.Option(help="A model's directory, or its config.json.")],
    device: Annotated[str, typer.Option(help=f"cpu (this machine), {', '.join(GPUS)}.")] = "cpu",
    rank: Annotated[int, typer.Option(help="Of the adapter; 0 trains all weights.")] = 32,
    num_sequences: Annotated[int, typer.Option(help="Sequences of a step.")] = 32,
    sequence_tokens: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 512,
    num_steps: Annotated[int, typer.Option(help="Steps in all.")] = 100,
    num_runs: Annotated[int, typer.Option(help="Runs that share the trainer.")] = 1,
    sampled_tokens: Annotated[
        int, typer.Option(help="Tokens of a step that are sampled, for RL.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Estimate memory, time and devices of a training from the model's shape alone.

    Nothing is loaded and no server is asked. What fits only into more devices than the model can be
    spread over is refused.
    """
    shape = ModelShape.read(model)
    work = Workload(
        rank=rank,
        num_sequences=num_sequences,
        sequence_tokens=sequence_tokens,
        num_steps=num_steps,
        num_runs=num_runs,
        sampled_tokens=sampled_tokens,
    )
    found = find_device(device)
    planned = estimate(shape, work, found)
    why = refusal(Work.ADAPTERS if rank else Work.FULL, shape.family, planned.num_devices)
    if why:
        raise ConfigurationError(
            f"the trainer does not fit into one {found.name}, which has "
            f"{describe_size(found.memory_bytes)}, but takes "
            f"{describe_size(planned.trainer_bytes)}: {why}"
        )
    if as_json:
        show_json(
            {
                "device": found,
                "num_parameters": shape.num_parameters,
                **dataclasses.asdict(planned),
                "trainer_bytes": planned.trainer_bytes,
            }
        )
        return
    trains = f"an adapter of rank {rank}" if rank else "all weights"
    print(f"{shape.family}, {shape.num_parameters / 1e6:,.0f} M parameters; trains {trains}")
    for name, size in (
        ("weights", planned.weights_bytes),
        ("runs", planned.run_bytes),
        ("activations", planned.activation_bytes),
        ("logits", planned.logit_bytes),
        *([("process", planned.process_bytes)] if planned.process_bytes else []),
    ):
        print(f"  {name:<12}{describe_size(size):>10}")
    held = f"{planned.num_devices} x {found.name} with {describe_size(found.memory_bytes)}"
    print(f"  {'trainer':<12}{describe_size(planned.trainer_bytes):>10}  on {held}")
    if sampled_tokens:
        sampler = describe_size(planned.weights_bytes + planned.cache_bytes)
        engine = " by engine vllm" if planned.num_sampler_devices > 1 else ""
        held = f"{planned.num_sampler_devices} x {found.name}{engine}"
        print(f"  {'sampler':<12}{sampler:>10}  on {held}")
    print(
        f"about {describe_seconds(planned.step_s)} a step, "
        f"{describe_seconds(planned.training_s)} for {num_steps} steps"
    )
