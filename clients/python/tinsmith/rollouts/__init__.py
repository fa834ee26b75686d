"""Rollouts: episodes driven by a model, as exact tokens with mask, log-probabilities and versions.

The same code plays in training, validation and inference. `RolloutRunner` plays one episode,
`run_groups` many; `trajectory_datums` makes training sequences of them, and
`tinsmith.rollouts.adapters` connects them to the service.
"""

from tinsmith.rollouts.advantages import RoleBaselines, center_rewards
from tinsmith.rollouts.batch import EpisodeStream, RolloutBatch
from tinsmith.rollouts.batch_codec import EnvironmentTask, PlayedEpisode
from tinsmith.rollouts.chat import Continuation, Conversation
from tinsmith.rollouts.datums import (
    DatumArrays,
    build_arrays,
    trajectory_arrays,
    trajectory_datums,
)
from tinsmith.rollouts.errors import (
    ActionParseError,
    ChatTemplateError,
    InvalidTransitionError,
    NoRolloutsError,
    RolloutError,
    SamplerFailedError,
    TemplateRewritesHistoryError,
)
from tinsmith.rollouts.group_plan import GroupConfig, GroupPlan, Play
from tinsmith.rollouts.groups import (
    GroupReport,
    GroupResult,
    PlayFailure,
    RolloutGroup,
    UnusedPlay,
    failure_of,
    note_failure,
    note_plan,
    run_groups,
)
from tinsmith.rollouts.judge import Judge
from tinsmith.rollouts.machine import (
    Cancelled,
    ContextBuilt,
    EnvironmentFailed,
    Event,
    ParseFailed,
    Rollout,
    RolloutConfig,
    RolloutState,
    StepTaken,
    TurnSampled,
)
from tinsmith.rollouts.observations import TokenPiece
from tinsmith.rollouts.pass_at_k import pass_at_k
from tinsmith.rollouts.policy_player import PolicyPlayer
from tinsmith.rollouts.runner import RolloutRunner
from tinsmith.rollouts.trajectory import (
    MASKED_VERSION,
    PlacedImage,
    TerminationReason,
    TokenSample,
    Trajectory,
    Turn,
    to_model_input,
)

__all__ = [
    "MASKED_VERSION",
    "ActionParseError",
    "Cancelled",
    "ChatTemplateError",
    "ContextBuilt",
    "Continuation",
    "Conversation",
    "DatumArrays",
    "EnvironmentFailed",
    "EnvironmentTask",
    "EpisodeStream",
    "Event",
    "GroupConfig",
    "GroupPlan",
    "GroupReport",
    "GroupResult",
    "InvalidTransitionError",
    "Judge",
    "NoRolloutsError",
    "ParseFailed",
    "PlacedImage",
    "Play",
    "PlayFailure",
    "PlayedEpisode",
    "PolicyPlayer",
    "RoleBaselines",
    "Rollout",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutError",
    "RolloutGroup",
    "RolloutRunner",
    "RolloutState",
    "SamplerFailedError",
    "StepTaken",
    "TemplateRewritesHistoryError",
    "TerminationReason",
    "TokenPiece",
    "TokenSample",
    "Trajectory",
    "Turn",
    "TurnSampled",
    "UnusedPlay",
    "build_arrays",
    "center_rewards",
    "failure_of",
    "note_failure",
    "note_plan",
    "pass_at_k",
    "run_groups",
    "to_model_input",
    "trajectory_arrays",
    "trajectory_datums",
]
