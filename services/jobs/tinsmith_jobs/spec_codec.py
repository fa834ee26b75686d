"""The `spec` of a resource: reads its JSON into dataclasses, and checks all rules.

The API server checks the schema, but old servers drop its CEL rules, and an older definition may be
installed. So every rule is checked here too, and one machine has no API server. The result is a
spec, or one sentence for its author.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tinsmith_jobs.quantities import QuantityError, parse_quantity
from tinsmith_jobs.spec import (
    AUTO_DTYPE,
    COORDINATOR,
    DRIVER,
    DTYPES,
    ENVIRONMENT,
    MANAGED_BY,
    SAMPLER,
    TRAINER,
    VLLM,
    WORKER,
    Checkpointing,
    Data,
    FailureRule,
    JobSpec,
    Method,
    Model,
    PoolSpec,
    Reaction,
    Role,
    Rules,
    Scheduling,
    Template,
    Toleration,
)

MAX_NAME_LENGTH = 40
"""Of a job or pool: its name begins the names of pods, which Kubernetes limits."""

_SOURCE = re.compile(
    r"^(hf://[^/@,=]+/[^/@,=]+|pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[^,=]+|file:///[^,=]+)$",
    re.ASCII,
)
_OBJECT_NAME = re.compile(r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_CHECKPOINT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_MAX_REPLICAS = 1024
_MAX_GPUS = 64
_MAX_PODS = 4096
"""The status lists all of them."""
_MAX_AMOUNT = 2**50
"""Of a resource, for one pod; a PiB of memory."""
_JOB = JobSpec(method=Method.CUSTOM)
_SCHEDULING = Scheduling()
_CHECKPOINTING = Checkpointing()
"""Defaults stand in the dataclasses alone."""
_SAMPLING_METHODS = frozenset({Method.RL, Method.RL_EPISODES, Method.SERVE})
_ENGINES = ("embedded", VLLM)
"""The first is the default."""
_PLAIN_ROLES = (TRAINER, SAMPLER, ENVIRONMENT, COORDINATOR, DRIVER)
_AGENT_ROLES = (TRAINER, SAMPLER, WORKER)


class SpecError(ValueError):
    """A spec that cannot be run; the text is one sentence for its author.

    Args:
        message: The sentence.
        field: Path of the field that is wrong; the first word of the sentence by default.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field or message.partition(" ")[0].rstrip(":")


class _Reader:
    """Reads one JSON object and knows where it is in the whole."""

    def __init__(self, value: object, path: str) -> None:
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise SpecError(f"{path} must be an object")
        self._value: Mapping[str, Any] = value
        self.path = path

    def has(self, name: str) -> bool:
        return self._value.get(name) is not None

    def at(self, name: str) -> _Reader:
        return _Reader(self._value.get(name), f"{self.path}.{name}")

    def text(self, name: str, default: str = "", *, longest: int = 4096) -> str:
        value = self._value.get(name, default)
        if not isinstance(value, str) or len(value) > longest:
            raise SpecError(f"{self.path}.{name} must be a text of at most {longest} characters")
        return value

    def required(self, name: str) -> str:
        value = self.text(name)
        if not value:
            raise SpecError(f"{self.path}.{name} is required")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._value.get(name, default)
        if not isinstance(value, bool):
            raise SpecError(f"{self.path}.{name} must be true or false")
        return value

    def optional_number(self, name: str, *, least: int, most: int = 2**31) -> int | None:
        value = self._value.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise SpecError(f"{self.path}.{name} must be a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: int, *, least: int, most: int = 2**31) -> int:
        value = self.optional_number(name, least=least, most=most)
        return default if value is None else value

    def choice(self, name: str, options: Sequence[str], default: str = "") -> str:
        value = self._value.get(name, default)
        if value not in options:
            raise SpecError(f"{self.path}.{name} must be one of {', '.join(options)}")
        return str(value)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self._value.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise SpecError(f"{self.path}.{name} must be an object")
        return {str(key): entry for key, entry in value.items()}

    def texts_by_name(self, name: str) -> dict[str, str]:
        found = self.mapping(name)
        for key, entry in found.items():
            if not isinstance(entry, str):
                raise SpecError(f"{self.path}.{name}.{key} must be a text")
        return found

    def items(self, name: str) -> list[Any]:
        value = self._value.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise SpecError(f"{self.path}.{name} must be a list")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        found = self.items(name)
        if not all(isinstance(entry, str) for entry in found):
            raise SpecError(f"{self.path}.{name} must be a list of texts")
        return tuple(found)

    def objects(self, name: str) -> list[_Reader]:
        return [
            _Reader(entry if entry is not None else "", f"{self.path}.{name}[{position}]")
            for position, entry in enumerate(self.items(name))
        ]


_STORE_PARAMETERS = frozenset({"endpoint", "public_endpoint", "region", "path_style"})
"""Never where credentials come from or are exchanged: those of the pod are the operators'."""


def decode_job(name: str, spec: object, *, is_local: bool = False) -> JobSpec:
    """Return the spec of a TrainingJob.

    Args:
        name: Of the job.
        spec: Its JSON.
        is_local: Whether one machine runs the job, in trainers and samplers that serve already.
            Then the job needs neither a source of its model nor a trainer of its own.

    Raises:
        SpecError: If it cannot be run.
    """
    _check_name(name)
    reader = _Reader(spec, "spec")
    method = reader.at("method")
    kind = Method(method.choice("type", [entry.value for entry in Method]))
    adapter = reader.at("adapter")
    job = JobSpec(
        method=kind,
        max_steps=method.optional_number("maxSteps", least=1),
        parameters=method.mapping("parameters"),
        model=_model(reader.at("model"), is_local) if reader.has("model") else None,
        pool=reader.at("poolRef").required("name") if reader.has("poolRef") else "",
        adapter_type=adapter.choice("type", ("lora", "full"), _JOB.adapter_type),
        rank=adapter.number("rank", _JOB.rank, least=1, most=128),
        serve_checkpoint=reader.at("serve").text("checkpoint"),
        roles=_roles(reader.at("roles"), kind),
        data=_data(reader.at("data")),
        scheduling=_scheduling(reader.at("scheduling")),
        checkpoint=_checkpoint(reader.at("checkpoint")),
        suspend=reader.flag("suspend"),
        cancel=reader.flag("cancel"),
        managed_by=reader.text("managedBy", MANAGED_BY),
        startup_deadline_s=reader.number(
            "startupDeadlineSeconds", _JOB.startup_deadline_s, least=1
        ),
        active_deadline_s=reader.optional_number("activeDeadlineSeconds", least=1),
        stall_timeout_s=reader.number("stallTimeoutSeconds", _JOB.stall_timeout_s, least=10),
        ttl_s=reader.optional_number("ttlSecondsAfterFinished", least=0),
        backoff_limit=reader.number("backoffLimit", _JOB.backoff_limit, least=0, most=1000),
        rules=tuple(_rule(entry) for entry in reader.at("failurePolicy").objects("rules")),
    )
    _check_job(job, is_local=is_local)
    return job


def decode_pool(name: str, spec: object) -> PoolSpec:
    """Return the spec of a TrainerPool.

    Raises:
        SpecError: If it cannot be run.
    """
    _check_name(name)
    reader = _Reader(spec, "spec")
    roles = tuple(
        _role(reader.at(kind), kind, kind, default_gpus=1)
        for kind in (TRAINER, SAMPLER)
        if reader.has(kind)
    )
    if not roles:
        raise SpecError("spec needs trainer, sampler or both")
    return PoolSpec(
        model=_model(reader.at("model")),
        roles=roles,
        scheduling=_scheduling(reader.at("scheduling")),
    )


def is_left_alone(spec: object) -> bool:
    """Whether another controller manages a job; the rest of its spec may be wrong."""
    managed_by = spec.get("managedBy", MANAGED_BY) if isinstance(spec, Mapping) else MANAGED_BY
    return bool(managed_by != MANAGED_BY)


def _check_name(name: str) -> None:
    if not _OBJECT_NAME.match(name):
        raise SpecError("metadata.name may have small letters, digits and - alone")
    if len(name) > MAX_NAME_LENGTH:
        raise SpecError(
            f"metadata.name has {len(name)} characters, at most {MAX_NAME_LENGTH} are possible "
            "because it begins the names of pods"
        )


def _check_job(job: JobSpec, *, is_local: bool) -> None:
    if job.model is None and not job.pool:
        raise SpecError("one of spec.model and spec.poolRef is needed", "spec.model")
    if job.pool and any(role.kind in (TRAINER, SAMPLER) for role in job.roles):
        raise SpecError(
            "a job that uses a pool has no trainer or sampler of its own; drop spec.poolRef or the "
            "roles",
            "spec.poolRef",
        )
    if not job.pool and job.method in _SAMPLING_METHODS and not _num_pods(job, SAMPLER):
        raise SpecError(
            f"method {job.method.value} samples, so it needs spec.roles.sampler",
            "spec.roles.sampler",
        )
    needs_trainer = not (job.pool or job.is_serving or is_local)
    if needs_trainer and not _num_pods(job, TRAINER):
        raise SpecError(
            f"method {job.method.value} trains, so it needs spec.roles.trainer",
            "spec.roles.trainer",
        )
    foreign = [role.name for role in job.roles if role.kind not in (SAMPLER, DRIVER)]
    if job.is_serving and foreign:
        # Its samplers are among those that others use, so that its project finds them.
        raise SpecError(
            f"method serve has samplers alone; drop {', '.join(foreign)} from spec.roles",
            "spec.roles",
        )
    if job.is_serving and job.pool:
        raise SpecError("method serve needs samplers of its own; drop spec.poolRef", "spec.poolRef")
    if job.checkpoint.uri and not job.checkpoint.secret:
        raise SpecError("spec.checkpoint.uri needs spec.checkpoint.secretRef")
    query = parse_qsl(urlsplit(job.checkpoint.uri).query, keep_blank_values=True)
    unknown = sorted({name for name, _ in query} - _STORE_PARAMETERS)
    if unknown:
        raise SpecError(
            f"spec.checkpoint.uri may say {', '.join(sorted(_STORE_PARAMETERS))} of its store, not "
            f"{unknown[0]}",
            "spec.checkpoint.uri",
        )
    num_pods = sum(role.replicas for role in job.roles)
    if num_pods > _MAX_PODS:
        raise SpecError(
            f"the roles have {num_pods} pods together, at most {_MAX_PODS} are possible",
            "spec.roles",
        )
    driver = job.role(DRIVER)
    if job.method is Method.CUSTOM and not (
        driver and (driver.template.image or driver.template.command)
    ):
        raise SpecError(
            "method custom needs spec.roles.driver.template.image or command",
            "spec.roles.driver.template",
        )


def _num_pods(job: JobSpec, kind: str) -> int:
    return sum(role.replicas for role in job.roles if role.kind == kind)


def _model(reader: _Reader, is_local: bool = False) -> Model:
    name = reader.required("name")
    source = reader.text("source") if is_local else reader.required("source")
    if not _MODEL_NAME.fullmatch(name):
        raise SpecError(f"{reader.path}.name may have letters, digits and . _ / - alone")
    if source and not _SOURCE.fullmatch(source):
        raise SpecError(
            f"{reader.path}.source must be hf://organisation/name, pvc://claim/path or "
            "file:///path, without commas and equals signs"
        )
    _check_path(f"{reader.path}.source", source)
    token = reader.at("hubTokenSecretRef")
    dtype = reader.choice("dtype", DTYPES, AUTO_DTYPE)
    if is_local and dtype != AUTO_DTYPE:
        raise SpecError(
            f"{reader.path}.dtype: the model is served already; start the server with --dtype "
            f"{dtype}, and drop the field"
        )
    return Model(name, source, token.text("name"), reader.text("cacheClaimName"), dtype)


def _check_path(field: str, path: str) -> None:
    if ".." in path.split("/"):
        raise SpecError(f"{field} must not go up by ..")


def _roles(reader: _Reader, method: Method) -> tuple[Role, ...]:
    found = [
        _role(reader.at(kind), kind, kind, default_gpus=1 if kind in (TRAINER, SAMPLER) else 0)
        for kind in _PLAIN_ROLES
        if reader.has(kind) and not (kind == DRIVER and method is Method.SERVE)
    ]
    if method is not Method.SERVE and not any(role.kind == DRIVER for role in found):
        found.append(Role(DRIVER, DRIVER, 1))
    for role in found:
        if role.kind == DRIVER and role.replicas != 1:
            raise SpecError("spec.roles.driver.replicas must be 1")
    names = set()
    for agent in reader.objects("agents"):
        name = agent.required("name")
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,14}[a-z0-9])?", name):
            raise SpecError(f"{agent.path}.name may have 16 small letters, digits and - alone")
        if name in names:
            raise SpecError(f"spec.roles.agents has two of the name {name}")
        names.add(name)
        for kind in _AGENT_ROLES:
            if agent.has(kind):
                default_gpus = 0 if kind == WORKER else 1
                found.append(
                    _role(agent.at(kind), f"agent/{name}/{kind}", kind, default_gpus=default_gpus)
                )
    for role in found:
        if role.kind == WORKER and not (role.template.image or role.template.command):
            raise SpecError(f"the {role.name} needs template.image or command")
    return tuple(found)


def _role(reader: _Reader, name: str, kind: str, *, default_gpus: int) -> Role:
    resources = reader.at("resources")
    return Role(
        name=name,
        kind=kind,
        replicas=reader.number("replicas", 1, least=0, most=_MAX_REPLICAS),
        gpus=reader.number("gpus", default_gpus, least=0, most=_MAX_GPUS),
        requests=_amounts(resources, "requests"),
        limits=_amounts(resources, "limits"),
        template=_template(reader.at("template")),
        engine=_engine(reader, kind),
    )


def _engine(reader: _Reader, kind: str) -> str:
    if kind == SAMPLER:
        return reader.choice("engine", _ENGINES, _ENGINES[0])
    if reader.has("engine"):
        raise SpecError(f"{reader.path}.engine is a field of samplers; drop it")
    return ""


def _amounts(reader: _Reader, name: str) -> dict[str, str]:
    found = {}
    for resource, amount in reader.mapping(name).items():
        try:
            if not 0 <= parse_quantity(amount) <= _MAX_AMOUNT:
                raise QuantityError(f"{amount} is negative, or more than any machine has")
        except QuantityError as error:
            raise SpecError(f"{reader.path}.{name}.{resource}: {error}") from error
        if resource.endswith("/gpu"):
            raise SpecError(f"{reader.path}.{name} names GPUs; use the field gpus")
        found[resource] = str(amount)
    return found


def _template(reader: _Reader) -> Template:
    env = []
    for entry in reader.objects("env"):
        variable: dict[str, object] = {"name": entry.required("name")}
        if entry.has("value"):
            variable["value"] = entry.text("value", longest=32768)
        source = entry.at("valueFrom")
        for kind in ("secretKeyRef", "configMapKeyRef"):
            if source.has(kind):
                reference = source.at(kind)
                variable["valueFrom"] = {
                    kind: {"name": reference.required("name"), "key": reference.required("key")}
                }
        env.append(variable)
    return Template(
        image=reader.text("image", longest=512),
        image_pull_policy=reader.choice("imagePullPolicy", ("", "Always", "IfNotPresent", "Never")),
        command=reader.texts("command"),
        args=reader.texts("args"),
        env=tuple(env),
        labels=reader.texts_by_name("labels"),
        annotations=reader.texts_by_name("annotations"),
    )


def _data(reader: _Reader) -> Data:
    config_map = reader.at("configMapRef")
    claim, _, path = reader.text("pvc").partition("/")
    given = [reader.text("name"), config_map.text("name"), claim]
    if sum(map(bool, given)) > 1:
        raise SpecError(f"{reader.path} takes one of name, configMapRef and pvc")
    if claim and (not path or not _OBJECT_NAME.match(claim.replace(".", "-"))):
        raise SpecError(f"{reader.path}.pvc must be claim/path")
    _check_path(f"{reader.path}.pvc", path)
    key = config_map.required("key") if given[1] else ""
    return Data(given[0], given[1], key, claim, path)


def _scheduling(reader: _Reader) -> Scheduling:
    topology = reader.at("topology")
    tolerations = [_toleration(entry) for entry in reader.objects("tolerations")]
    return Scheduling(
        queue=reader.text("queueName", _SCHEDULING.queue),
        priority_class=reader.text("priorityClassName"),
        is_preemptible=reader.choice(
            "preemptionPolicy", ("CheckpointThenEvict", "Never"), "CheckpointThenEvict"
        )
        == "CheckpointThenEvict",
        grace_s=reader.number("preemptionGraceSeconds", _SCHEDULING.grace_s, least=1, most=3600),
        rules=Rules(
            node_selector=reader.texts_by_name("nodeSelector"),
            tolerations=tuple(toleration for toleration, _ in tolerations),
            gpu_products=reader.texts("gpuProducts"),
            min_gpu_memory_gib=reader.number("minGPUMemoryGiB", 0, least=1),
            required_level=topology.text("requiredLevel"),
            preferred_level=topology.text("preferredLevel"),
        ),
        tolerations=tuple(original for _, original in tolerations),
    )


def _toleration(reader: _Reader) -> tuple[Toleration, Mapping[str, object]]:
    found = Toleration(
        key=reader.text("key"),
        operator=reader.choice("operator", ("Exists", "Equal"), "Equal"),
        value=reader.text("value"),
        effect=reader.choice("effect", ("", "NoSchedule", "PreferNoSchedule", "NoExecute")),
    )
    if not found.key and found.operator != "Exists":
        raise SpecError(f"{reader.path} without a key must have the operator Exists")
    seconds = reader.optional_number("tolerationSeconds", least=0)
    original: dict[str, object] = {"operator": found.operator}
    for name, value in (("key", found.key), ("value", found.value), ("effect", found.effect)):
        if value:
            original[name] = value
    if seconds is not None:
        original["tolerationSeconds"] = seconds
    return found, original


def _checkpoint(reader: _Reader) -> Checkpointing:
    final_name = reader.text("finalName", _CHECKPOINTING.final_name)
    if not _CHECKPOINT_ID.fullmatch(final_name):
        raise SpecError(
            f"{reader.path}.finalName may have 63 letters, digits and . _ - alone, and begins with "
            "a letter or digit"
        )
    return Checkpointing(
        every_steps=reader.number("everySteps", _CHECKPOINTING.every_steps, least=1),
        keep_last=reader.number("keepLast", _CHECKPOINTING.keep_last, least=1, most=1000),
        final_name=final_name,
        resume_from=reader.text("resumeFrom"),
        uri=reader.text("uri"),
        secret=reader.at("secretRef").text("name"),
    )


def _rule(reader: _Reader) -> FailureRule:
    codes = reader.items("exitCodes")
    if not all(isinstance(code, int) and 1 <= code <= 255 for code in codes):
        raise SpecError(f"{reader.path}.exitCodes must be numbers from 1 to 255")
    return FailureRule(
        action=Reaction(reader.choice("action", [entry.value for entry in Reaction])),
        roles=frozenset(reader.texts("roles")),
        exit_codes=frozenset(codes),
        pod_conditions=frozenset(reader.texts("podConditions")),
    )
