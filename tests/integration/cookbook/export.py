"""Fetches a checkpoint, encrypted on its way, and turns it into an adapter for other tools."""

from pathlib import Path

import chz
from tinker_cookbook import checkpoint_utils, weights


def main(model_name: str, log_path: str, output_dir: str) -> None:
    """Export the last checkpoint of a training."""
    checkpoint = checkpoint_utils.get_last_checkpoint(log_path)
    assert checkpoint is not None
    folder = Path(output_dir)
    adapter = weights.download(
        tinker_path=checkpoint.state_path, output_dir=str(folder / "downloaded")
    )
    weights.build_lora_adapter(
        base_model=model_name, adapter_path=adapter, output_path=str(folder / "peft")
    )


if __name__ == "__main__":
    chz.entrypoint(main)
