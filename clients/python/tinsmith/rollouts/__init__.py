"""Rollouts: episodes driven by a model, as exact tokens with mask, log-probabilities and versions.

The same code plays in training, validation and inference. `RolloutRunner` plays one episode,
`run_groups` many; `trajectory_datums` makes training sequences of them, and
`tinsmith.rollouts.adapters` connects them to the service.
"""

from tinsmith.rollouts.advantages import center_rewards
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
from tinsmith.rollouts.groups import (
    GroupConfig,
    GroupReport,
    GroupResult,
    RolloutGroup,
    run_groups,
)
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
from tinsmith.rollouts.runner import RolloutRunner
from tinsmith.rollouts.trajectory import (
    MASKED_VERSION,
    TerminationReason,
    TokenSample,
    Trajectory,
    Turn,
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
    "Event",
    "GroupConfig",
    "GroupReport",
    "GroupResult",
    "InvalidTransitionError",
    "NoRolloutsError",
    "ParseFailed",
    "Rollout",
    "RolloutConfig",
    "RolloutError",
    "RolloutGroup",
    "RolloutRunner",
    "RolloutState",
    "SamplerFailedError",
    "StepTaken",
    "TemplateRewritesHistoryError",
    "TerminationReason",
    "TokenSample",
    "Trajectory",
    "Turn",
    "TurnSampled",
    "build_arrays",
    "center_rewards",
    "run_groups",
    "trajectory_arrays",
    "trajectory_datums",
]
