"""The spec of a TrainingJob or TrainerPool, as values; every default stands here."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from tinsmith.jobs.methods import UNTRAINED_METHODS
from tinsmith_jobs.quantities import Resources

MANAGED_BY = "tinsmith.dev/controller"
"""`spec.managedBy` of the jobs that this controller decides about."""

TRAINER = "trainer"
SAMPLER = "sampler"
VLLM = "vllm"
"""An engine of samplers, in an image of its own."""
AUTO_DTYPE = "auto"
DTYPES = (AUTO_DTYPE, "float32", "bfloat16")
ENVIRONMENT = "environment"
COORDINATOR = "coordinator"
DRIVER = "driver"
WORKER = "worker"
AGENT_PREFIX = "agent/"
"""Begins the names of the roles that belong to an agent, `agent/red/trainer`."""
FULL = "full"
"""The adapter of runs that train all weights."""


class Method(enum.Enum):
    """The loop of a job: a recipe of the client by its name, or one of two further kinds."""

    SUPERVISED = "supervised"
    RL = "rl"
    RL_EPISODES = "rl_episodes"
    SELF_PLAY = "self_play"
    MATCH = "match"
    DPO = "dpo"
    DISTILLATION = "distillation"
    EVALUATE = "evaluate"
    CUSTOM = "custom"
    SERVE = "serve"

    @property
    def trains(self) -> bool:
        """Whether there is something to train, and so trainers."""
        return self.value not in UNTRAINED_METHODS


class Reaction(enum.Enum):
    """What the end of a pod means."""

    FAIL_JOB = "FailJob"
    RESTART_ROLE = "RestartRole"
    RESTART_JOB = "RestartJob"
    IGNORE = "Ignore"


@dataclass(frozen=True, slots=True)
class FailureRule:
    """One line of the failure policy; an empty condition fits everything."""

    action: Reaction
    roles: frozenset[str] = frozenset()
    exit_codes: frozenset[int] = frozenset()
    pod_conditions: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Volume:
    """A further volume of a role's pods.

    Attributes:
        name: Names it among those of the role.
        kind: `emptyDir`, `configMap`, `secret` or `persistentVolumeClaim`.
        source: Where its files come from, as in a pod.
    """

    name: str
    kind: str
    source: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Mount:
    """Where a container finds a volume, or a part of it."""

    volume: str
    path: str
    sub_path: str = ""
    is_read_only: bool = False


@dataclass(frozen=True, slots=True)
class InitContainer:
    """What runs in a pod to its end before the role does; it has no keys of the job."""

    name: str
    image: str
    image_pull_policy: str = ""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: tuple[Mapping[str, object], ...] = ()
    env_from: tuple[Mapping[str, object], ...] = ()
    mounts: tuple[Mount, ...] = ()


@dataclass(frozen=True, slots=True)
class Toleration:
    """A toleration of a pod, with the meaning that Kubernetes gives it.

    An empty key with `Exists` tolerates every taint; an empty effect is every effect.
    """

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""
    seconds: int | None = None
    """How long a pod stays under a taint `NoExecute`; for ever if None."""

    def in_a_pod(self) -> dict[str, object]:
        """Return it as a pod has it."""
        fields = {"key": self.key, "value": self.value, "effect": self.effect}
        found: dict[str, object] = {name: text for name, text in fields.items() if text}
        if self.seconds is not None:
            found["tolerationSeconds"] = self.seconds
        return {"operator": self.operator, **found}


@dataclass(frozen=True, slots=True)
class Template:
    """What the author of a job wants different about a role's pods."""

    image: str = ""
    image_pull_policy: str = ""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: tuple[Mapping[str, object], ...] = ()
    """As in a pod; names that begin with `TINSMITH_` lose against the controller's own."""
    env_from: tuple[Mapping[str, object], ...] = ()
    """As in a pod: all entries of Secrets and ConfigMaps, which lose against `env`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels of nodes besides those that all pods of the workload need."""
    tolerations: tuple[Toleration, ...] = ()
    """Likewise."""
    volumes: tuple[Volume, ...] = ()
    mounts: tuple[Mount, ...] = ()
    init_containers: tuple[InitContainer, ...] = ()
    pull_secrets: tuple[str, ...] = ()
    """Secrets of registries, besides those of the deployment."""
    service_account: str = ""
    """Of the pods; its token is not mounted."""

    @property
    def variable_sources(self) -> Iterator[Mapping[str, object]]:
        """What variables of all containers are taken from, each as in `valueFrom` or `envFrom`."""
        parts: tuple[Template | InitContainer, ...] = (self, *self.init_containers)
        for part in parts:
            for variable in part.env:
                source = variable.get("valueFrom")
                if isinstance(source, Mapping):
                    yield source
            yield from part.env_from


@dataclass(frozen=True, slots=True)
class Role:
    """The pods of one role.

    Attributes:
        name: `trainer`, or `agent/red/trainer` for those of an agent.
        kind: What runs in them: `trainer`, `sampler`, `environment`, `coordinator`, `driver` or
            `worker`.
        replicas: How many.
        gpus: GPUs of each.
        requests: Further requests of each, as in a pod; empty takes the defaults.
        limits: Likewise.
        template: What is different about them.
        engine: What samples, `embedded` or `vllm`; empty for what does not sample.
    """

    name: str
    kind: str
    replicas: int
    gpus: int = 0
    requests: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    template: Template = Template()
    engine: str = ""

    @property
    def is_placed(self) -> bool:
        """Whether the controller chooses the nodes of its pods."""
        return self.gpus > 0 or self.kind in (TRAINER, SAMPLER)

    @property
    def agent(self) -> str:
        """The agent that it belongs to; empty for roles of the whole job."""
        _, _, rest = self.name.partition(AGENT_PREFIX)
        return rest.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Model:
    """A base model and where it is.

    Attributes:
        dtype: Of its weights in trainers and samplers: `float32`, `bfloat16`, or `auto`, which is
            bfloat16 on GPUs that compute in it.
    """

    name: str
    source: str
    hub_token_secret: str = ""
    cache_claim: str = ""
    dtype: str = AUTO_DTYPE


@dataclass(frozen=True, slots=True)
class Adapter:
    """What is trained of a model: a LoRA of a rank, or all weights."""

    type: str = "lora"
    rank: int = 32


@dataclass(frozen=True, slots=True)
class Agent:
    """One policy of several in a job.

    Attributes:
        name: Names it within the job.
        model: Its base model; None for that of the job.
        adapter: What is trained of it.
        has_own_pods: Whether it has trainers or samplers of its own. One without shares those of
            the job.
    """

    name: str
    model: Model | None = None
    adapter: Adapter = Adapter()
    has_own_pods: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """Which nodes will do, and how close together they have to be."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    gpu_products: tuple[str, ...] = ()
    """Products that will do; any if empty. About pods with a GPU."""
    min_gpu_memory_gib: int = 0
    least_gpu_bytes: int = 0
    """Of the model on each GPU; nodes whose GPUs are known to have less will not do."""
    required_level: str = ""
    """Label of nodes; all pods of the workload, placed ones included, on one value of it."""
    preferred_level: str = ""
    """Label of nodes; as few values as possible."""
    avoided: frozenset[str] = frozenset()
    """Nodes by name that are left alone, whatever they have."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Where and when pods may run."""

    queue: str = "default"
    priority_class: str = ""
    is_preemptible: bool = True
    grace_s: int = 120
    """Time to save in, for every reason to stop."""
    rules: Rules = Rules()

    def rules_for(self, role: Role) -> Rules:
        """Return which nodes will do for a role: those that all pods need, and its template.

        Where both ask for a label, the value of the template counts.
        """
        template = role.template
        if not (template.node_selector or template.tolerations):
            return self.rules
        return replace(
            self.rules,
            node_selector={**self.rules.node_selector, **template.node_selector},
            tolerations=(*self.rules.tolerations, *template.tolerations),
        )


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """What is saved."""

    every_steps: int = 50
    keep_last: int = 3
    final_name: str = "final"
    resume_from: str = ""
    uri: str = ""
    secret: str = ""


@dataclass(frozen=True, slots=True)
class Data:
    """What a recipe trains on; all empty if it brings its own.

    Attributes:
        name: What ships with the recipe.
        object: `s3://bucket/path`, read with the keys and settings of the job's own store.
        config_map: Name of a ConfigMap.
        config_map_key: Its entry.
        claim: Name of a volume claim.
        claim_path: A file on it.
    """

    name: str = ""
    object: str = ""
    config_map: str = ""
    config_map_key: str = ""
    claim: str = ""
    claim_path: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """A TrainingJob."""

    method: Method
    max_steps: int | None = None
    parameters: Mapping[str, object] = field(default_factory=dict)
    model: Model | None = None
    pool: str = ""
    """Name of the TrainerPool that it trains in; empty if it has pods of its own."""
    adapter: Adapter = Adapter()
    serve_checkpoint: str = ""
    roles: tuple[Role, ...] = ()
    agents: tuple[Agent, ...] = ()
    data: Data = Data()
    scheduling: Scheduling = Scheduling()
    checkpoint: Checkpointing = Checkpointing()
    suspend: bool = False
    cancel: bool = False
    managed_by: str = MANAGED_BY
    startup_deadline_s: int = 1800
    active_deadline_s: int | None = None
    stall_timeout_s: int = 1800
    ttl_s: int | None = None
    backoff_limit: int = 3
    rules: tuple[FailureRule, ...] = ()

    def role(self, name: str) -> Role | None:
        """Return a role by its name."""
        return next((role for role in self.roles if role.name == name), None)

    def agent(self, name: str) -> Agent | None:
        """Return an agent by its name."""
        return next((agent for agent in self.agents if agent.name == name), None)

    def model_of(self, role: Role) -> Model | None:
        """Return the base model that the pods of a role load; None where a pool has it."""
        agent = self.agent(role.agent)
        return self.model if agent is None else agent.model or self.model

    def adapter_of(self, role: Role) -> Adapter:
        """Return what the trainers of a role train."""
        agent = self.agent(role.agent)
        return self.adapter if agent is None else agent.adapter

    def is_group(self, role: Role) -> bool:
        """Whether the pods of a role are ranks of one process group."""
        is_full = self.adapter_of(role).type == FULL
        return role.kind == TRAINER and is_full and role.replicas > 1

    @property
    def is_serving(self) -> bool:
        """Whether it samples until it is told to stop, instead of training."""
        return self.method is Method.SERVE


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """A TrainerPool."""

    model: Model
    roles: tuple[Role, ...]
    scheduling: Scheduling = Scheduling()

    def role(self, name: str) -> Role | None:
        """Return a role by its name."""
        return next((role for role in self.roles if role.name == name), None)

    def model_of(self, role: Role) -> Model:
        """Return the base model that the pods of a role load: all of a pool load one."""
        del role
        return self.model

    def adapter_of(self, role: Role) -> Adapter:
        """Return what its trainers train: adapters, for all runs that land on them."""
        del role
        return Adapter()

    def is_group(self, role: Role) -> bool:
        """Whether the pods of a role are ranks of one process group: never in a pool."""
        del role
        return False


def requested(role: Role, defaults: Mapping[str, Mapping[str, str]]) -> Resources:
    """Return what one pod of a role asks of a node.

    Args:
        role: The role.
        defaults: Requests by kind of role, for what it leaves out.
    """
    amounts: dict[str, object] = {**defaults.get(role.kind, {}), **role.limits, **role.requests}
    asked = Resources.parse({name: amounts.get(name, 0) for name in ("cpu", "memory")}, pods=1)
    return Resources(asked.cpu_milli, asked.memory_bytes, role.gpus, 1)
