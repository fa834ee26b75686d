"""JSON bodies of the Tinker wire; unknown fields are let be, as older and newer SDKs send them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from tinsmith_gateway.json_lists import List

Seconds = Annotated[int, Field(ge=1, le=10 * 366 * 24 * 3600)]
Number = Annotated[int, Field(ge=0, lt=2**31)]
Index = Annotated[int, Field(ge=0, lt=10**9)]
"""Number of a model or a sampling session; its digits are part of an id."""
SequenceNumber = Annotated[int, Field(ge=1, lt=2**53)]
Label = Annotated[str, Field(max_length=1024)]
Identifier = Annotated[str, Field(max_length=256)]
Path = Annotated[str, Field(max_length=512)]


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), allow_inf_nan=False)


class CreateSession(Body):
    """Opens a session."""

    tags: List[Label] = Field(default=[], max_length=64)
    user_metadata: dict[str, Any] | None = None
    sdk_version: Label = ""
    project_id: Identifier | None = None
    display_name: Label | None = None


class SessionHeartbeat(Body):
    """Keeps a session alive."""

    session_id: Identifier


class FinishReason(Body):
    """How a session went."""

    type: Literal["success", "errored", "interrupted"]


class FinishSession(Body):
    """Ends a session."""

    reason: FinishReason
    detail: str | None = None


class SessionProject(Body):
    """Moves a session to a project."""

    project_id: Identifier


class LoraConfig(Body):
    """What of a model is adapted."""

    rank: int = Field(default=32, ge=1, lt=2**31)
    seed: int | None = Field(default=None, ge=0, lt=2**64)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Body):
    """Which optimizer a model has."""

    type: str = "adamw"


class CreateModel(Body):
    """Creates a model."""

    session_id: Identifier
    model_seq_id: Index
    base_model: Identifier
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: dict[str, Any] | None = None


class ModelReference(Body):
    """Names a model."""

    model_id: Identifier


class OrderedReference(Body):
    """What a call of a model needs at the least: without these it cannot be given a place."""

    model_id: Identifier
    seq_id: SequenceNumber


class AdamParams(Body):
    """Hyper-parameters of one AdamW step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Body):
    """Asks for an optimizer step."""

    model_id: Identifier
    seq_id: SequenceNumber
    adam_params: AdamParams | None = None
    optimizer_params: OptimizerConfig | None = None


class SaveWeights(Body):
    """Saves weights and optimizer."""

    model_id: Identifier
    seq_id: SequenceNumber
    path: Path | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class SaveWeightsForSampler(Body):
    """Saves weights under a name, or for a sampling client of their own."""

    model_id: Identifier
    seq_id: SequenceNumber
    path: Path | None = None
    sampling_session_seq_id: Index | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Seconds | None = None
    user_metadata: dict[str, Any] | None = None


class SaveWeightsExternal(Body):
    """Saves weights in the layout of other tools."""

    model_id: Identifier
    seq_id: SequenceNumber
    path: Path
    ttl_seconds: Seconds | None = None
    age_encryption_recipients: List[Label] | None = Field(default=None, max_length=16)


class LoadWeightsTarget(Body):
    """What weights are to be loaded into."""

    model_id: Any = None
    seq_id: Any = None


class LoadWeights(Body):
    """Loads weights into a model, or makes a model of them."""

    path: Path
    optimizer: bool
    model_id: Identifier | None = None
    seq_id: SequenceNumber | None = None
    session_id: Identifier | None = None
    model_seq_id: Index | None = None
    base_model: Identifier | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None


class CreateSamplingSession(Body):
    """Opens a handle to sample with."""

    session_id: Identifier
    sampling_session_seq_id: Index
    base_model: Identifier | None = None
    model_path: Path | None = None


class JoinSamplingSession(Body):
    """Joins a sampling session as one more client."""

    sampling_session_id: Identifier


class TensorData(Body):
    """A tensor as JSON: dense, or rows of listed cells."""

    data: List[int] | List[float]
    dtype: Literal["int64", "float32"]
    shape: List[Number] | None = Field(default=None, max_length=2)
    sparse_crow_indices: List[Number] | None = None
    sparse_col_indices: List[Number] | None = None


class TextChunk(Body):
    """Tokens of a prompt."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: List[Annotated[int, Field(ge=-(2**31), lt=2**31)]]


class ImageChunk(Body):
    """An image of a prompt; `data` is base64."""

    type: Literal["image"]
    data: str
    format: str
    expected_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None


class OtherChunk(Body):
    """A piece of a prompt that is known and not taken."""

    type: Literal["image_asset_pointer", "dmel"]


def _kind_of_chunk(value: Any) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    if kind == "image":
        return "image"
    return "other" if kind in ("image_asset_pointer", "dmel") else "text"


Chunk = Annotated[
    Annotated[ImageChunk, Tag("image")]
    | Annotated[OtherChunk, Tag("other")]
    | Annotated[TextChunk, Tag("text")],
    Discriminator(_kind_of_chunk),
]


class ModelInput(Body):
    """A prompt."""

    chunks: List[Chunk]


class SamplingParams(Body):
    """How tokens are drawn."""

    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    seed: int | None = None
    stop: str | List[str] | List[int] | None = None
    temperature: float = 1.0
    top_k: int = Field(default=-1, ge=-1, lt=2**31)
    top_p: float = 1.0


class Sample(Body):
    """Asks for completions."""

    sampling_session_id: Identifier
    seq_id: Annotated[int, Field(ge=0, lt=2**62)]
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: int = Field(default=1, ge=1, lt=2**16)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Number = 0
    topk_sample_logprobs: Number = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: Number = 0
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1, lt=2**31)
    record_stability_info: bool | None = None


class RetrieveFuture(Body):
    """Asks what became of a future."""

    request_id: Identifier
    allow_metadata_only: bool = False


class FuturesTarget(Body):
    """Whose futures are asked for."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Identifier
    cloned_sampler_id: Annotated[int, Field(ge=0, lt=2**53)] = 0


class RetrieveFutures(Body):
    """Asks which futures of a sampling session ended."""

    target: FuturesTarget
    prev_cursor: int = Field(default=0, ge=0, lt=2**62)
    timeout: float | None = None
    retrieved_request_ids: List[Identifier] = []


class CancelFuture(Body):
    """Gives a future up."""

    request_id: Identifier


class PathReference(Body):
    """Names a checkpoint."""

    tinker_path: Path


class CheckpointTtl(Body):
    """Sets or ends the expiry of a checkpoint."""

    ttl_seconds: Seconds | None


class CopyWeights(Body):
    """Asks for a copy of a checkpoint."""

    source_path: Path
    destination_project_id: Identifier | None = None
    session_id: Identifier | None = None
    model_seq_id: Index | None = None
    ttl_seconds: Seconds | None = None
    weights_access_token: str | None = None


class StatusQuery(Body):
    """Which sessions are searched for."""

    type: str
    reasons: List[str] | None = None


class SearchOwner(Body):
    """Whose sessions are searched for."""

    type: str = "own"


class SearchCursor(Body):
    """Where a search goes on."""

    last_created_at: str
    last_session_id: Identifier


class SearchSessions(Body):
    """Searches sessions."""

    session_id: Identifier | None = None
    project_ids: List[Identifier] | None = None
    user_metadata: dict[str, Any] = {}
    display_name: Label | None = None
    owner: SearchOwner = SearchOwner()
    statuses: List[StatusQuery] | None = None
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SearchCursor | None = None
