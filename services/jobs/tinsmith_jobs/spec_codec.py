"""The `spec` of a resource: reads its JSON into dataclasses, and checks all rules.

The API server checks the schema, but old servers drop its CEL rules, and an older definition may be
installed. So every rule is checked here too, and one machine has no API server. The result is a
spec, or one sentence for its author.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, unquote, urlsplit

from tinsmith.jobs.methods import SAMPLING_METHODS
from tinsmith.planning.several_devices import Work, published_family, refusal
from tinsmith_jobs.model_codec import check_path, read_model
from tinsmith_jobs.pod_fields_codec import read_labels, read_tolerations
from tinsmith_jobs.roles_codec import read_adapter, read_agents, read_role, read_roles
from tinsmith_jobs.spec import (
    COORDINATOR,
    DRIVER,
    ENVIRONMENT,
    FULL,
    MANAGED_BY,
    SAMPLER,
    TRAINER,
    VLLM,
    Checkpointing,
    Data,
    FailureRule,
    JobSpec,
    Method,
    PoolSpec,
    Reaction,
    Role,
    Rules,
    Scheduling,
)
from tinsmith_jobs.spec_reader import Reader, SpecError

MAX_NAME_LENGTH = 40
"""Of a job or pool: its name begins the names of pods, which Kubernetes limits."""

_OBJECT_NAME = re.compile(r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")
_CHECKPOINT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_S3 = "s3://"
_OBJECT = re.compile(r"s3://[a-z0-9][a-z0-9.-]+(/[^/?#@\s\x00-\x1f\x7f]+)+")
_NO_PART = re.compile(r"\.{0,2}|.*[/\x00-\x1f\x7f].*", re.DOTALL)
_MAX_FILE_BYTES = 255
"""What the name of a file may have."""
_MAX_PODS = 4096
"""The status lists all of them."""
_JOB = JobSpec(method=Method.CUSTOM)
_SCHEDULING = Scheduling()
_CHECKPOINTING = Checkpointing()
"""Defaults stand in the dataclasses alone."""
_STORE_PARAMETERS = frozenset({"endpoint", "public_endpoint", "region", "path_style"})
"""Never where credentials come from or are exchanged: those of the pod are the operators'."""


def decode_job(
    name: str, spec: object, *, is_local: bool = False, is_accepted: bool = False
) -> JobSpec:
    """Return the spec of a TrainingJob.

    Args:
        name: Of the job.
        spec: Its JSON.
        is_local: Whether one machine runs the job, in trainers and samplers that serve already.
            Then the job needs neither a source of its model nor a trainer of its own.
        is_accepted: Whether it was accepted before, and holds nodes. Then it may have fields of a
            later release, whose controller accepted it.

    Raises:
        SpecError: If it cannot be run.
    """
    reader = Reader(spec, "spec")
    _check_name(reader, name)
    method = reader.at("method")
    kind = Method(method.choice("type", [entry.value for entry in Method]))
    adapter = read_adapter(reader.at("adapter"), _JOB.adapter)
    roles = reader.at("roles")
    job = JobSpec(
        method=kind,
        max_steps=method.optional_number("maxSteps", least=1),
        parameters=method.mapping("parameters"),
        model=read_model(reader.at("model"), is_local) if reader.has("model") else None,
        pool=reader.at("poolRef").required("name") if reader.has("poolRef") else "",
        adapter=adapter,
        serve_checkpoint=reader.at("serve").text("checkpoint"),
        roles=read_roles(roles, kind),
        agents=read_agents(roles, adapter, is_local=is_local),
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
    reader.check(may_have_others=is_accepted)
    _check_job(job, is_local=is_local)
    return job


def decode_pool(name: str, spec: object, *, is_accepted: bool = False) -> PoolSpec:
    """Return the spec of a TrainerPool; see `decode_job`.

    Raises:
        SpecError: If it cannot be run.
    """
    reader = Reader(spec, "spec")
    _check_name(reader, name)
    roles = tuple(
        read_role(reader.at(kind), kind, kind) for kind in (TRAINER, SAMPLER) if reader.has(kind)
    )
    pool = PoolSpec(
        model=read_model(reader.at("model")),
        roles=roles,
        scheduling=_scheduling(reader.at("scheduling")),
    )
    reader.check(may_have_others=is_accepted)
    if not roles:
        raise SpecError("spec needs trainer, sampler or both")
    _check_devices(pool, "spec")
    return pool


def is_left_alone(spec: object) -> bool:
    """Whether another controller manages a job; the rest of its spec may be wrong."""
    managed_by = spec.get("managedBy", MANAGED_BY) if isinstance(spec, Mapping) else MANAGED_BY
    return bool(managed_by != MANAGED_BY)


def _check_name(reader: Reader, name: str) -> None:
    if not _OBJECT_NAME.match(name):
        reader.refuse(
            "metadata.name may have small letters, digits and - alone, because it begins the names "
            "of pods and services"
        )
    if len(name) > MAX_NAME_LENGTH:
        reader.refuse(
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
    if job.pool and any(role.kind in (ENVIRONMENT, COORDINATOR) for role in job.roles):
        # Its key is that of the pool's trainers, and would not reach them.
        raise SpecError(
            "a job that uses a pool has no environment or coordinator of its own, and finds those "
            "of the deployment; drop spec.poolRef or the roles",
            "spec.poolRef",
        )
    if not job.pool and job.method.value in SAMPLING_METHODS and not _num_pods(job, SAMPLER):
        raise SpecError(
            f"method {job.method.value} samples, so it needs spec.roles.sampler",
            "spec.roles.sampler",
        )
    if job.method is Method.MATCH:
        _check_match(job, is_local=is_local)
    needs_trainer = job.method.trains and not (job.pool or is_local or job.method is Method.MATCH)
    if needs_trainer and not _num_pods(job, TRAINER):
        raise SpecError(
            f"method {job.method.value} trains, so it needs spec.roles.trainer",
            "spec.roles.trainer",
        )
    foreign = [role.name for role in job.roles if role.kind not in (SAMPLER, DRIVER)]
    foreign += ["agents"] if job.agents else []
    if job.is_serving and foreign:
        # Its samplers are among those that others use, so that its project finds them.
        raise SpecError(
            f"method serve has samplers alone; drop {', '.join(foreign)} from spec.roles",
            "spec.roles",
        )
    idle = [role.name for role in job.roles if role.kind == TRAINER and not role.agent]
    idle += ["agents"] if job.agents else []
    if job.method is Method.EVALUATE and idle:
        raise SpecError(
            f"method evaluate has no trainer and no agents; drop {', '.join(idle)} from spec.roles",
            "spec.roles",
        )
    if job.is_serving and job.pool:
        raise SpecError("method serve needs samplers of its own; drop spec.poolRef", "spec.poolRef")
    if job.checkpoint.uri and not job.checkpoint.uri.startswith(_S3):
        raise SpecError(
            f"spec.checkpoint.uri is {job.checkpoint.uri!r}; trainers of a job write to "
            "s3://bucket/prefix alone, for their disk goes with them",
            "spec.checkpoint.uri",
        )
    if job.checkpoint.uri and not job.checkpoint.secret:
        raise SpecError("spec.checkpoint.uri needs spec.checkpoint.secretRef")
    if job.data.object and not job.checkpoint.uri:
        raise SpecError(
            "spec.data.name is an object of a store, which is read with the keys of the job's own: "
            "set spec.checkpoint.uri and spec.checkpoint.secretRef",
            "spec.data.name",
        )
    if job.data.object and job.is_serving:
        raise SpecError("method serve reads no data; drop spec.data", "spec.data.name")
    if "#" in job.checkpoint.uri:
        # What follows it is no setting to one reader of the URI, and is one to another.
        raise SpecError(
            "spec.checkpoint.uri has a #; write s3://bucket/prefix?settings", "spec.checkpoint.uri"
        )
    query = parse_qsl(urlsplit(job.checkpoint.uri).query, keep_blank_values=True)
    unknown = sorted({name for name, _ in query} - _STORE_PARAMETERS)
    if unknown:
        raise SpecError(
            f"spec.checkpoint.uri may say {', '.join(sorted(_STORE_PARAMETERS))} of its store, not "
            f"{unknown[0]}",
            "spec.checkpoint.uri",
        )
    _check_devices(job, "spec.roles")
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


def _check_devices(spec: JobSpec | PoolSpec, path: str) -> None:
    """Refuse devices that a pod would have for nothing, before nodes are taken for it."""
    for role in spec.roles:
        model = spec.model_of(role)
        if role.kind not in (TRAINER, SAMPLER) or model is None:
            continue
        why = refusal(_work_of(spec, role), published_family(model.source), role.gpus)
        if why:
            raise SpecError(f"{path}: {role.name}.gpus is {role.gpus}: {why}", path)


def _work_of(spec: JobSpec | PoolSpec, role: Role) -> Work:
    if role.kind == TRAINER:
        return Work.FULL if spec.adapter_of(role).type == FULL else Work.ADAPTERS
    return Work.VLLM if role.engine == VLLM else Work.EMBEDDED


def _check_match(job: JobSpec, *, is_local: bool) -> None:
    if len(job.agents) < 2:
        raise SpecError("method match needs two spec.roles.agents at least", "spec.roles.agents")
    for agent in job.agents:
        names = {role.kind for role in job.roles if role.agent == agent.name and role.replicas}
        kinds = names & {TRAINER, SAMPLER}
        if agent.has_own_pods and len(kinds) < 2:
            raise SpecError(
                f"agent {agent.name} trains and samples in method match: give it a trainer and a "
                "sampler, or neither, to share those of the job",
                "spec.roles.agents",
            )
    is_shared = any(not agent.has_own_pods for agent in job.agents)
    own = {role.kind for role in job.roles if not role.agent and role.replicas}
    if is_shared and not (job.pool or is_local or {TRAINER, SAMPLER} <= own):
        raise SpecError(
            "agents without a trainer and a sampler share those of the job, so it needs "
            "spec.roles.trainer and spec.roles.sampler",
            "spec.roles",
        )


def _num_pods(job: JobSpec, kind: str) -> int:
    return sum(role.replicas for role in job.roles if role.kind == kind)


def _data(reader: Reader) -> Data:
    config_map = reader.at("configMapRef")
    claim, _, path = reader.text("pvc").partition("/")
    name = config_map.required("name") if reader.has("configMapRef") else ""
    given = [reader.text("name"), name, claim]
    if sum(map(bool, given)) > 1:
        reader.refuse(f"{reader.path} takes one of name, configMapRef and pvc")
    if claim and (not path or not _OBJECT_NAME.match(claim.replace(".", "-"))):
        reader.refuse(f"{reader.path}.pvc must be claim/path")
    check_path(reader, "pvc", path)
    key = config_map.required("key") if reader.has("configMapRef") else ""
    is_object = given[0].startswith(_S3)
    if is_object and not _is_object(given[0]):
        reader.refuse(
            f"{reader.path}.name is {given[0]!r}; give s3://bucket/path of one object, whose store "
            "has its settings from spec.checkpoint.uri"
        )
    return Data(
        name="" if is_object else given[0],
        object=given[0] if is_object else "",
        config_map=name,
        config_map_key=key,
        claim=claim,
        claim_path=path,
    )


def _is_object(uri: str) -> bool:
    """Whether a URI names one object, also once its `%` codes are read."""
    parts = uri.removeprefix(_S3).split("/")[1:]
    return bool(
        _OBJECT.fullmatch(uri)
        and not any(_NO_PART.fullmatch(unquote(part)) for part in parts)
        and len(parts[-1].encode()) <= _MAX_FILE_BYTES
    )


def _scheduling(reader: Reader) -> Scheduling:
    topology = reader.at("topology")
    return Scheduling(
        queue=reader.text("queueName", _SCHEDULING.queue),
        priority_class=reader.text("priorityClassName"),
        is_preemptible=reader.choice(
            "preemptionPolicy", ("CheckpointThenEvict", "Never"), "CheckpointThenEvict"
        )
        == "CheckpointThenEvict",
        grace_s=reader.number("preemptionGraceSeconds", _SCHEDULING.grace_s, least=1, most=3600),
        rules=Rules(
            node_selector=read_labels(reader, "nodeSelector"),
            tolerations=read_tolerations(reader),
            gpu_products=reader.texts("gpuProducts"),
            min_gpu_memory_gib=reader.number("minGPUMemoryGiB", 0, least=1),
            required_level=topology.text("requiredLevel"),
            preferred_level=topology.text("preferredLevel"),
        ),
    )


def _checkpoint(reader: Reader) -> Checkpointing:
    final_name = reader.text("finalName", _CHECKPOINTING.final_name)
    if not _CHECKPOINT_ID.fullmatch(final_name):
        reader.refuse(
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


def _rule(reader: Reader) -> FailureRule:
    codes = reader.items("exitCodes")
    if not all(isinstance(code, int) and 1 <= code <= 255 for code in codes):
        reader.refuse(f"{reader.path}.exitCodes must be numbers from 1 to 255")
        codes = []
    return FailureRule(
        action=Reaction(reader.choice("action", [entry.value for entry in Reaction])),
        roles=frozenset(reader.texts("roles")),
        exit_codes=frozenset(codes),
        pod_conditions=frozenset(reader.texts("podConditions")),
    )
