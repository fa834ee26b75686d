"""What an experiment begins with: a base model, or a checkpoint that another one left."""

from __future__ import annotations

from tinsmith.client import Client
from tinsmith.errors import ConfigurationError
from tinsmith.recipes.experiment.settings import TrainingConfig
from tinsmith.recipes.tasks.hub_data import data_name
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.training.run_forms import TrainingRun


def tokenizer_of(client: Client, base_model: str, begin_from: str = "") -> Tokenizer:
    """Return the tokenizer without a run: a checkpoint may have a chat template of its own."""
    if begin_from:
        return client.create_sampler(checkpoint=begin_from).get_tokenizer()
    return client.get_tokenizer(base_model)


def create_run(config: TrainingConfig, client: Client, begin_from: str = "") -> TrainingRun:
    """Create the run of an experiment, from a training checkpoint if one is named.

    Raises:
        ConfigurationError: If the checkpoint is of another base model, or of other weights, than
            the settings say.
    """
    # Not every recipe has environments.
    display_name = getattr(config, "environment", "") or data_name(config.data)
    if begin_from:
        return _begin_from(config, client, begin_from, display_name)
    # Not every recipe has the setting.
    chat_template = str(getattr(config, "chat_template", ""))
    if config.adapter == "full":
        return client.create_full_training_run(
            config.base_model, display_name=display_name, chat_template=chat_template
        )
    return client.create_lora_training_run(
        config.base_model,
        config.rank,
        seed=config.seed,
        # Not every recipe has the setting.
        train_unembed=getattr(config, "train_unembed", False),
        display_name=display_name,
        chat_template=chat_template,
    )


def _begin_from(
    config: TrainingConfig, client: Client, checkpoint: str, display_name: str
) -> TrainingRun:
    base_model = client.checkpoints.get(checkpoint).base_model
    if base_model != config.base_model:
        raise ConfigurationError(
            f"{checkpoint} is of {base_model}, and base_model is {config.base_model}",
            remedy=f"give base_model={base_model}",
        )
    # What a job goes on from is its own work. What a setting names was trained for something else,
    # and its optimizer knows another loss.
    is_other = checkpoint == config.begin_from
    if is_other and str(getattr(config, "chat_template", "")):
        raise ConfigurationError(
            f"a run that begins from {checkpoint} has its chat template",
            remedy="leave chat_template or begin_from out",
        )
    run = client.create_training_run_from_checkpoint(
        checkpoint, include_optimizer=not is_other, display_name=display_name
    )
    adapter = "lora" if run.info.is_lora else "full"
    if adapter != config.adapter:
        # The rate that is advised for the one ruins the other.
        client.runs.delete(run.name)
        raise ConfigurationError(
            f"{checkpoint} holds {'an adapter' if run.info.is_lora else 'all weights'}, and "
            f"adapter is {config.adapter}",
            remedy=f"give adapter={adapter}",
        )
    return run
