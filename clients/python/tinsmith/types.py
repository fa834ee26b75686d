"""The values that users build and receive: plain dataclasses over numpy, no protobuf."""

from __future__ import annotations

import datetime
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tinsmith.errors import InvalidArgumentError
from tinsmith.images import ImageChunk as ImageChunk
from tinsmith.images import ImageRules

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EncodedTextChunk:
    """A stretch of token ids in a prompt."""

    tokens: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(int(token) for token in self.tokens))

    @property
    def length(self) -> int:
        """Number of token ids."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A prompt: chunks in reading order."""

    chunks: Sequence[EncodedTextChunk | ImageChunk] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunks", tuple(self.chunks))

    @classmethod
    def empty(cls) -> Self:
        """Return the input without chunks."""
        return cls()

    @classmethod
    def from_ints(cls, tokens: Sequence[int] | NDArray[np.integer]) -> Self:
        """Return the input of plain token ids.

        Raises:
            InvalidArgumentError: If it is text.
        """
        if isinstance(tokens, str):
            raise InvalidArgumentError(
                "the prompt is text, and a model reads tokens",
                remedy="encode it with get_tokenizer() of the run or sampler",
            )
        return cls((EncodedTextChunk(tuple(int(token) for token in tokens)),))

    def append(self, chunk: EncodedTextChunk | ImageChunk) -> Self:
        """Return a longer input; this one stays as it is."""
        return type(self)((*self.chunks, chunk))

    def append_tokens(self, tokens: Sequence[int]) -> Self:
        """Return a longer input; this one stays as it is."""
        return self.append(EncodedTextChunk(tuple(tokens)))

    def append_int(self, token: int) -> Self:
        """Return an input longer by one token; this one stays as it is."""
        return self.append(EncodedTextChunk((token,)))

    def to_ints(self) -> list[int]:
        """Return the token ids.

        Raises:
            ValueError: If the input holds an image.
        """
        tokens: list[int] = []
        for chunk in self.chunks:
            if not isinstance(chunk, EncodedTextChunk):
                raise ValueError("the input holds an image, which has no token ids")
            tokens.extend(chunk.tokens)
        return tokens

    @property
    def length(self) -> int:
        """Number of tokens; of images those that they are expected to take."""
        return sum(chunk.length for chunk in self.chunks)


class TensorData(np.ndarray[Any, np.dtype[Any]]):
    """A numpy array that Tinker's programs can also build and read by their own calls.

    Example:
        >>> TensorData(data=[0.0, 1.0], dtype="float32", shape=[2]).tolist()
        [0.0, 1.0]
    """

    def __new__(
        cls, data: ArrayLike, dtype: str | None = None, shape: Sequence[int] | None = None
    ) -> Self:
        """Return the tensor of some values.

        Args:
            data: The values, flat or in shape.
            dtype: `int64` or `float32`; by the values if None.
            shape: Its shape; that of `data` if None.
        """
        array = np.asarray(data)
        dtype = dtype or ("int64" if np.issubdtype(array.dtype, np.integer) else "float32")
        return array.astype(dtype, copy=False).reshape(shape or array.shape).view(cls)

    @classmethod
    def from_numpy(cls, array: NDArray[Any]) -> Self:
        """Return the tensor of a numpy array."""
        return cls(array)

    @classmethod
    def from_torch(cls, tensor: Any) -> Self:
        """Return the tensor of a torch tensor."""
        return cls(tensor.detach().cpu().numpy())

    def to_numpy(self) -> NDArray[Any]:
        """Return the values as a plain numpy array."""
        return self.view(np.ndarray)

    def to_torch(self) -> Any:
        """Return the values as a torch tensor; needs torch."""
        return importlib.import_module("torch").from_numpy(self.to_numpy().copy())


class Datum:
    """One training sequence: an input of T tokens and the tensors, each [T], that a loss needs.

    Values may be lists, numpy arrays or torch tensors. `target_tokens` become int64, all others
    float32. `cross_entropy` also takes `target_tokens` and `weights` of shape [T, K]: K targets by
    position.
    """

    __slots__ = ("loss_fn_inputs", "model_input")

    def __init__(self, model_input: ModelInput, loss_fn_inputs: Mapping[str, ArrayLike]) -> None:
        """Build a datum.

        Args:
            model_input: What the model reads.
            loss_fn_inputs: Tensors by name: `target_tokens`, and what the loss takes of `weights`,
                `logprobs`, `advantages`, `sequence_ratio_mask`, `clip_low_threshold` and
                `clip_high_threshold`.
        """
        self.model_input = model_input
        self.loss_fn_inputs: dict[str, TensorData] = {
            name: TensorData(value, "int64" if name.endswith("tokens") else "float32")
            for name, value in loss_fn_inputs.items()
        }

    def __repr__(self) -> str:
        shapes = {name: value.shape for name, value in self.loss_fn_inputs.items()}
        return f"Datum(length={self.model_input.length}, loss_fn_inputs={shapes})"


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Hyper-parameters of one AdamW step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Euclidean norm that the gradient is scaled down to; 0 is off."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn."""

    max_tokens: int | None = None
    """None: what the context still holds."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = -1
    """0 or -1 keeps all."""
    top_p: float = 1.0
    seed: int | None = None
    """None: the client draws one, so that a call that is sent again gives the same tokens."""
    stop: str | Sequence[str | int] | None = None
    """Strings, token ids, or both. None: the model's end of turn. `[]`: nothing but the length."""
    min_p: float = 0.0
    """Keeps tokens at least this fraction as probable as the most probable one."""
    frequency_penalty: float = 0.0
    """Lowers a logit by this for each time that the completion holds the token, -2 to 2."""
    presence_penalty: float = 0.0
    """Lowers the logits of tokens that the completion holds, -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that prompt or completion hold, and multiplies others."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """What is added to the logits of tokens by their ids, -100 to 100."""
    json_schema: Mapping[str, Any] | str | None = None
    """What the text has to keep, as long as it is not cut; tokens that break it are never drawn."""
    regex: str | None = None
    """The same by a regular expression of the whole text; not beside `json_schema`."""
    keeps_turn_end: bool | None = None
    """Whether the model's end of turn ends it too. None: unless `stop` is `[]` or has token ids."""


@dataclass(frozen=True, slots=True)
class DatumOutput:
    """Result for one datum."""

    logprobs: FloatArray
    """Natural-log probability of each target token, float32 [T] or [T, K], as `target_tokens`.

    `forward_backward` does not compute tokens without a loss, and has 0 for them.
    """


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """Result of `forward` and `forward_backward`."""

    outputs: list[DatumOutput]
    """By datum, in the order of the batch."""
    metrics: dict[str, float]
    """Named `<name>:<reduction>`; always `loss:sum`."""

    def __repr__(self) -> str:
        # The log-probabilities of a batch would fill the cell of a notebook.
        figures = ", ".join(f"{name}={value:.6g}" for name, value in self.metrics.items())
        return f"ForwardBackwardOutput({figures}; {len(self.outputs)} outputs)"

    @property
    def loss(self) -> float:
        """The loss, summed over tokens and datums."""
        return self.metrics["loss:sum"]

    @property
    def loss_fn_outputs(self) -> list[dict[str, TensorData]]:
        """The outputs by datum and name, as Tinker's programs read them."""
        return [{"logprobs": TensorData(output.logprobs)} for output in self.outputs]


@dataclass(frozen=True, slots=True)
class OptimStepResponse:
    """Result of `optim_step`."""

    version: int
    """Number of optimizer steps applied to the run."""
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class LoadWeightsResponse:
    """Result of `load_state`."""

    version: int


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file of a checkpoint or export."""

    file: str
    size_bytes: int
    sha256: str
    """In hex."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A named, immutable state of a run."""

    name: str
    kind: str
    """`training` or `sampler`."""
    base_model: str
    version: int
    sequence_number: int
    size_bytes: int
    manifest_uri: str
    create_time: datetime.datetime | None = None
    labels: dict[str, str] = field(default_factory=dict)
    is_published: bool = False
    """Whether other projects may read it by its name."""
    expire_time: datetime.datetime | None = None
    """When it is deleted; None keeps it."""
    files: list[CheckpointFile] = field(default_factory=list)
    source_checkpoint: str = ""
    """The checkpoint that it is a copy of; empty if it is none."""

    @property
    def path(self) -> str:
        """Its resource name, by the name that Tinker's programs read."""
        return self.name


@dataclass(frozen=True, slots=True)
class CheckpointExport:
    """A checkpoint in the layout of other tools, on the server."""

    name: str
    format: str
    """`peft` or `merged`."""
    files: list[CheckpointFile]
    size_bytes: int
    manifest_uri: str
    create_time: datetime.datetime | None
    expire_time: datetime.datetime | None
    """When it is removed."""


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One completion, exactly as it was sampled."""

    tokens: list[int]
    """Stop token included."""
    logprobs: list[float]
    """Natural-log, under the unmodified distribution of the model."""
    versions: list[int]
    """Version of the weights that produced each token; 0 for a base model."""
    stop_reason: str
    """`stop` or `length`."""
    topk_logprobs: list[list[tuple[int, float]]] | None = None
    """For each token the k most probable ones in its place; None unless asked for."""

    def __repr__(self) -> str:
        num_shown = 8
        more = f", ... {len(self.tokens)} in all" if len(self.tokens) > num_shown else ""
        shown = ", ".join(map(str, self.tokens[:num_shown]))
        return f"SampledSequence([{shown}{more}], stop_reason={self.stop_reason!r})"


@dataclass(frozen=True, slots=True)
class SampleChunk:
    """The next tokens of one completion of a stream."""

    sample_index: int
    """Which completion it continues."""
    token_index: int
    """At which token of the completion it begins."""
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: str
    """`stop` or `length` in the last chunk of a completion; empty before."""
    topk_logprobs: list[list[tuple[int, float]]] | None = None


@dataclass(frozen=True, slots=True)
class PromptAltTokens:
    """Tokens that might have stood in a prompt; row i is about position i + 1."""

    tokens: NDArray[np.int64]
    """int64 [T - 1, k]."""
    logprobs: FloatArray
    """Natural-log, under the unmodified distribution of the model, float32 [T - 1, k]."""


@dataclass(frozen=True, slots=True)
class SampleResponse:
    """Result of `sample`."""

    sequences: list[SampledSequence]
    seed: int
    prompt_logprobs: list[float | None] | None = None
    """[T], None at position 0 and where nothing was scored; None unless asked for."""
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    """For each prompt position the k most probable tokens, None where nothing was scored."""
    target_prompt_logprobs: FloatArray | None = None
    """Of `target_prompt_tokens`, float32 in their shape, 0 where there was none."""
    prompt_alt_tokens: PromptAltTokens | None = None
    prompt_cache_hit_tokens: int = 0
    """Prompt tokens that the server did not compute again."""
    version: int = 0
    """Of the newest weights that were used; 0 for a base model."""
    sampler: str = ""
    """The sampler that answered, `workers/{worker}`; of a stream, the last one."""
    sampler_choice: str = ""
    """Why the call went there: `only_one`, `least_loaded`, `sticky` (it sampled what the prompt
    continues), `full` (another one did, and is busy) or `failover` (another one failed)."""


@dataclass(frozen=True, slots=True, eq=False)
class MetricCurve:
    """One metric of a run over steps, in buckets of steps where there are many.

    Attributes:
        name: Of the metric.
        steps: First step of each bucket, int64 [P].
        means: Mean of its finite values, float64 [P]; NaN without any.
        minima: The least of them [P].
        maxima: The greatest of them [P].
        times: Time of its newest point, seconds since the epoch [P].
    """

    name: str
    steps: NDArray[np.int64]
    means: NDArray[np.float64]
    minima: NDArray[np.float64]
    maxima: NDArray[np.float64]
    times: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LastMetric:
    """The newest point of one metric of a run.

    Attributes:
        run: Resource name of the run.
        name: Of the metric.
        step: Its last step.
        value: At that step.
        update_time: When it was recorded.
    """

    run: str
    name: str
    step: int
    value: float
    update_time: datetime.datetime


@dataclass(frozen=True, slots=True)
class TrainingRunInfo:
    """What the scheduler knows of a run."""

    name: str
    state: str
    base_model: str
    adapter: str
    """`lora` or `full`."""
    rank: int
    """0 for a full-parameter run."""
    display_name: str
    labels: dict[str, str]
    session: str
    create_time: datetime.datetime | None
    worker: str
    """The trainer that holds it or will; empty before one was chosen."""
    waiting_for: str
    """What it waits for, in words: to be created or moved or, in a list, its next operation."""
    activity: str = ""
    """What goes on in an active run, in a list; else empty. `training`: an operation runs, or there
    is none and the client that trains it is there. `waiting`: its next operation waits. `finished`:
    its training is done, as `TrainingRun.finish` said. `idle`: its client has gone without that."""
    num_pending_operations: int = 0
    """Operations that wait or run, in a list."""
    replay_diverged: bool = False
    """Whether a replay after a failure gave other bits than the first execution, in a list."""
    source_run: str = ""
    """The run that it was forked from; empty if it is no fork."""
    source_step: int = 0
    """The step that it was forked at."""
    history_retention_seconds: float = 0.0
    """How long its past is kept after each operation, to be forked and replayed; 0 of a server that
    does not say."""
    chat_template: str = ""
    """Its own, which its samples, checkpoints and exports have too; that of the model if empty."""
    exactness: str = ""
    """What is promised of bits, in the command line's list: `exact`, `fast` or `fallback`."""
    finish_time: datetime.datetime | None = None
    """When its training was done; None while it goes on."""

    @property
    def model_data(self) -> ModelData:
        """The base model, as Tinker describes it."""
        return ModelData(self.base_model, self.base_model)

    @property
    def model_id(self) -> str:
        """The name, as Tinker calls it."""
        return self.name

    @property
    def is_lora(self) -> bool:
        """Whether the run trains an adapter."""
        return self.adapter == "lora"

    @property
    def lora_rank(self) -> int | None:
        """Rank of the adapter; None for a full-parameter run."""
        return self.rank or None


@dataclass(frozen=True, slots=True)
class ModelData:
    """The base model of a run."""

    model_name: str
    tokenizer_id: str


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key without its secret."""

    name: str
    state: str
    """`active` or `revoked`."""
    role: str
    """What it may do: `viewer`, `agent`, `member` or `admin`."""
    display_name: str
    create_time: datetime.datetime | None
    expire_time: datetime.datetime | None
    """When it is refused from; None for never."""


@dataclass(frozen=True, slots=True)
class NewApiKey:
    """An API key that was created a moment ago; its secret is never told again."""

    name: str
    role: str
    """What it may do: `viewer`, `agent`, `member` or `admin`."""
    expire_time: datetime.datetime | None
    """When it is refused from; None for never."""
    display_name: str
    secret: str = field(repr=False)
    """The key, `tsk_<id>_<secret>`."""
    tinker_secret: str = field(repr=False)
    """The same key as `tml-<id>_<secret>`, for clients of Tinker."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A base model and what can be done with it."""

    base_model: str
    trainable: bool
    sampleable: bool
    vocabulary_size: int
    max_context_tokens: int
    num_parameters: int
    exactness: str
    """`exact`, `fallback` or `fast`."""
    stop_token_ids: list[int]
    numerics_fingerprint: str
    reads_images: bool = False
    """Whether prompts may hold images."""
    dtype: str = "float32"
    """Of its weights, `float32` or `bfloat16`; adapters are float32 always."""
    images: ImageRules | None = None
    """How it turns images into tokens; None if it reads none."""
    layers_without_adapters: tuple[str, ...] = ()
    """Kinds of matrices that no adapter reaches, such as `model.layers.*.mlp.gate`."""


@dataclass(frozen=True, slots=True)
class OperationMetadata:
    """How an operation stands."""

    kind: str
    state: str
    """`held`, `queued`, `running`, `succeeded` or `failed`."""
    waiting_for: str
    """What it waits for, in words; empty once it runs."""
    num_attempts: int
    revision: int
    queue_position: int = 0
    """Operations of its run that are executed before it; 0 if it is next, runs or ended."""
    num_tokens_ahead: int = 0
    """About how many tokens, of all runs, are computed before it."""
