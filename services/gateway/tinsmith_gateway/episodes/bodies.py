"""JSON bodies of the episode endpoints; both spellings of a name are taken."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from tinsmith_gateway.json_lists import List

Text = Annotated[str, Field(max_length=1024)]
Seconds = Annotated[float, Field(gt=0, le=24 * 3600.0)]
EpisodeType = Literal["train", "eval"]


class Body(BaseModel):
    """Base of all bodies; unknown fields are let be."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)


class NewEpisode(Body):
    """One episode to register."""

    task_id: Text = ""
    task: Any = None
    episode_type: EpisodeType = "train"
    max_attempts: int = Field(default=0, ge=0, le=1000)


class RegisterEpisodes(Body):
    """Registers episodes, all or none."""

    sampling_session: Text
    model: Text = ""
    queue: Text = ""
    request_id: Text = ""
    episodes: List[NewEpisode] = Field(min_length=1, max_length=1000)


class ThrottlePolicy(Body):
    """How many episodes a client may hold, as AgentJet's swarms say it."""

    ratio: float = Field(default=1.0, gt=0, le=1)
    expected_batch_size: int = Field(default=0, ge=0, le=2**20)
    expected_num_repeat: int = Field(default=1, ge=1, le=2**20)


class ClaimEpisode(Body):
    """Asks for an episode to play."""

    client_uuid: Text = Field(min_length=1)
    episode_type: EpisodeType = "train"
    discard_timeout_s: Seconds = Field(
        default=240.0,
        validation_alias=AliasChoices("discard_episode_timeout", "allow_discard_timeout"),
    )
    queue: Text = ""
    request_id: Text = ""
    timeout_s: float = Field(default=0.0, ge=0, le=20)
    throttle_policy: ThrottlePolicy | None = None


class HeldEpisode(Body):
    """Names an episode that the sender holds."""

    episode_uuid: Text = Field(min_length=1)
    client_uuid: Text = ""


class WorkflowOutput(Body):
    """What an episode was worth."""

    reward: float | List[float] | None = None
    is_success: bool | None = None
    metadata: dict[str, Any] = {}
    log_metrics: dict[str, float] = {}


class EndEpisode(HeldEpisode):
    """Ends an episode."""

    workflow_output: WorkflowOutput
    task_id: Text = ""


class AbortEpisode(HeldEpisode):
    """Gives an episode up."""

    reason: Text = ""
    workflow_output: WorkflowOutput | None = None


class IsClaimed(Body):
    """Asks whether an agent holds an episode."""

    episode_uuid: Text = Field(min_length=1)
    unregister_if_not_claimed: bool = False


class Queue(Body):
    """Names a queue."""

    queue: Text = ""
