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
from pathlib import Path

from tinsmith.client import Client
from tinsmith.environments.local import STEP_TIMEOUT_S
from tinsmith.errors import ConfigurationError
from tinsmith.recipes.environment_source import EnvironmentSource
from tinsmith.recipes.experience import Source, SourceConfig
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.rules import check_settings
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Settings of the recipe."""

    base_model: str = "tiny"
    begin_from: str = ""
    data: str = "arithmetic"
    """`arithmetic`, `small_sums`, `geometry`; a JSONL file, a folder of them, or
    `hf://NAME[:CONFIG][?split=...]`, in the layout of GSM8K or Geometry3K."""
    environment: str = ""
    """What is played instead of `data`: a served name such as `guessing`, a class of your own,
    `FILE.py:CLASS` or `MODULE:CLASS`, or `grpc://HOST:PORT[/NAME]` of a `tinsmith env serve`."""
    environment_config: str = ""
    validation_environment: str = ""
    """Another environment, in any of these forms, that is scored; that of training if empty."""
    validation_config: str = ""
    """Settings of what is scored, as a JSON object; those of training if both are left out."""
    rollouts: str = "client"
    """Where episodes are played: in the `client`, or of a served name on the `server`."""
    reward: str = ""
    """A function of your own, `FILE.py:score`, called with a row of `data` and the answer."""
    judge: str = ""
    """A model that scores the answers instead, from 0 to 1: a base model, or a checkpoint."""
    judge_instruction: str = ""
    """What a good answer is, for the judge."""
    step_timeout_s: float = STEP_TIMEOUT_S
    """What a step of your own environment, or a call of a reward or judge, may take."""
    calculator: bool = False
    """Whether a model that is shown figures may call one."""
    instruction: str = ""
    """What is written below each question."""
    adapter: str = "lora"
    rank: int = 32
    train_unembed: bool = False
    loss: str = "importance_sampling"
    learning_rate: float = 4e-3
    num_warmup_steps: int = 5
    learning_rate_floor: float = 0.1
    grad_clip_norm: float = 1.0
    num_steps: int = 75
    num_imitation_steps: int = 0
    """Steps of a warm start, of `num_steps`."""
    imitation_learning_rate: float = 1e-2
    num_demonstrations: int = 64
    """Answers that a step of the warm start imitates."""
    num_problems: int = 48
    """Problems, or seeds of the environment, of a step."""
    group_size: int = 8
    """Plays of each."""
    format_coef: float = 0.0
    """What an answer loses that has not the wanted form."""
    temperature: float = 1.0
    max_tokens: int = 4
    """Sampled tokens of a turn."""
    max_turns: int = 16
    max_episode_tokens: int = 4096
    history: str = "refuse"
    seed: int = 0
    num_validation: int = 256
    """Held-out tasks that are scored, at most."""
    eval_every: int = 0
    """Steps between scores; 0: before and after only."""
    evaluators: str = ""
    rare_evaluators: str = ""
    rare_eval_every: int = 0
    evaluator_timeout_s: float = 1800.0
    save_every: int = 50
    keep_rollouts: str = ""
    """Whether every rollout is written below `output_dir`: `jsonl`, `parquet`; empty keeps none."""
    log_to: str = ""
    output_dir: Path | None = None
    """`runs/rl-<data>-<n>` if it is left out: a folder of this experiment alone."""
    overwrite: bool = False
    checkpoint: str = "final"
    """Name of the checkpoint at the end."""

    def __post_init__(self) -> None:
        check_settings(self)
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
