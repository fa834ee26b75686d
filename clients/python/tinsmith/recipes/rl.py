"""Reinforcement learning with groups: play, reward, centre, one step; on policy.

Each task is played `group_size` times; a play's advantage is its reward minus the mean of its
group. This is GRPO without the division by the standard deviation, which would weight easy and hard
groups up. Groups in which all plays earn the same teach nothing and are left out. Tokens,
log-probabilities and the version that sampled them come from the server as they were; the
difference between them and the trainer's own log-probabilities is measured at every step.

A model that knows nothing earns nothing, whatever it tries. `num_imitation_steps` begins with
supervised steps on what the data's pupil writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tinsmith.client import Client
from tinsmith.errors import ConfigurationError
from tinsmith.recipes.environment_source import EnvironmentSource
from tinsmith.recipes.experience import Source, SourceConfig
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.settings import PlayConfig, RewardedConfig
from tinsmith.recipes.kept_rollouts import RolloutKeeper
from tinsmith.recipes.named_source import NamedSource, plan_environments
from tinsmith.recipes.problem_source import ProblemSource
from tinsmith.recipes.reinforcement import About, Summary, learn
from tinsmith.recipes.rewarded_source import RewardedData, check_judge
from tinsmith.recipes.tasks.geometry_tasks import load_geometry
from tinsmith.recipes.tasks.hub_data import data_name
from tinsmith.recipes.tasks.rl_problems import load_problems
from tinsmith.sampling.sampler_forms import Sampler

__all__ = ["Config", "Summary", "main"]


@dataclass(frozen=True, kw_only=True)
class Config(RewardedConfig, PlayConfig):
    """Settings of the recipe."""

    data: str = "arithmetic"
    """`arithmetic`, `small_sums`, `geometry`; a JSONL file, a folder of them, or
    `hf://NAME[:CONFIG][?split=...]`, in the layout of GSM8K or Geometry3K."""
    validation_environment: str = ""
    """Another environment, in any of these forms, that is scored; that of training if empty."""
    validation_config: str = ""
    """Settings of what is scored, as a JSON object; those of training if both are left out."""
    calculator: bool = False
    """Whether a model that is shown figures may call one."""
    instruction: str = ""
    """What is written below each question."""
    train_unembed: bool = False
    learning_rate: float = 4e-3
    num_steps: int = 75
    num_demonstrations: int = 64
    """Answers that a step of the warm start imitates."""
    num_problems: int = 48
    """Problems, or seeds of the environment, of a step."""
    group_size: int = 8
    """Plays of each."""
    format_coef: float = 0.0
    """What an answer loses that has not the wanted form."""
    max_tokens: int = 4
    """Sampled tokens of a turn."""
    num_validation: int = 256
    """Held-out tasks that are scored, at most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_judge(self)


def main(config: Config, client: Client, observer: Observer | None = None) -> Summary:
    """Train, and score validation tasks before and after.

    Of an experiment that ended, nothing is repeated: what came out is returned.

    Raises:
        ConfigurationError: If the data cannot be read, the environment is not there, or
            `output_dir` holds another experiment.
        KeyboardInterrupt: After Ctrl-C, once the state is saved; the same call resumes.
    """
    # All that can be wrong with the data is found before anything is made on the server.
    make_source = _prepare(config, client)
    about = About("rl", config.environment or data_name(config.data))
    [summary] = learn(
        about,
        config,
        client,
        lambda progress, experiment: make_source(
            sampler := progress.run.sampler(),
            RolloutKeeper(experiment.folder, config.keep_rollouts, sampler),
        ),
        observer,
    )
    return summary


def _prepare(config: Config, client: Client) -> Callable[[Sampler, RolloutKeeper], Source]:
    """Read what is played, and return what makes a source of it.

    Raises:
        ConfigurationError: If it cannot be read, or the environment is not there.
    """
    settings = SourceConfig(
        num_tasks=config.num_problems,
        group_size=config.group_size,
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        num_validation=config.num_validation,
        seed=config.seed,
        format_coef=config.format_coef,
        num_demonstrations=config.num_demonstrations,
        max_turns=config.max_turns,
        max_episode_tokens=config.max_episode_tokens,
        history=config.history,
    )
    # A model that is not served is refused before a run is made.
    client.get_tokenizer(config.base_model)
    served = {model.base_model: model for model in client.list_models()}
    model = served[config.base_model]
    has_reward = bool(config.reward or config.judge)
    if (has_reward or config.environment) and config.num_imitation_steps:
        raise ConfigurationError(
            "a reward, a judge or an environment has no pupil to imitate",
            remedy="set num_imitation_steps=0",
        )
    for name in ("validation_environment", "validation_config"):
        if getattr(config, name) and not config.environment:
            raise ConfigurationError(
                f"{name} belongs to environment=, which is not given", remedy=f"leave {name} out"
            )
    if has_reward:
        rewarded = RewardedData(config, client)
        return lambda sampler, keeper: rewarded.source(
            settings, sampler, sampler.get_tokenizer(), model, keeper
        )
    if config.environment:
        plan = plan_environments(
            config,
            client,
            max_context_tokens=model.max_context_tokens,
            validation_environment=config.validation_environment,
            validation_config=config.validation_config,
        )
        return lambda sampler, keeper: NamedSource(settings, sampler, client, plan, keeper)
    geometry = load_geometry(
        config.data,
        calculator=config.calculator,
        format_coef=config.format_coef,
        instruction=config.instruction,
    )
    if geometry is None:
        problems = load_problems(config.data, instruction=config.instruction)
        return lambda sampler, keeper: ProblemSource(
            settings, sampler, sampler.get_tokenizer(), problems, config.data, keeper
        )
    if model.images is None:
        raise ConfigurationError(
            f"{config.base_model} reads no images, and {config.data} shows them",
            remedy="give base_model= one that does, such as tiny-vl of `tinsmith up --model`",
        )
    return lambda sampler, keeper: EnvironmentSource(
        settings,
        sampler,
        sampler.get_tokenizer(),
        geometry,
        max_context_tokens=model.max_context_tokens,
        images=model.images,
        name=config.data,
        keeper=keeper,
    )
