"""What the driver of a job would refuse or lose, read as it will read it, before anything is held.

A driver with an image or a command of its author's own may have other settings of its recipe.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tinsmith import names
from tinsmith.driver.agents import agent_key_variable, read_agents
from tinsmith.driver.methods import read_method
from tinsmith.errors import ConfigurationError
from tinsmith.jobs.methods import BUILT_IN_DATA, HUB_METHODS, RECIPE_METHODS
from tinsmith.recipes.tasks.hub_data import HUB, is_of_hub, parse_address
from tinsmith_jobs.checkpoint_references import job_of
from tinsmith_jobs.method import describe_agents, describe_method
from tinsmith_jobs.spec import (
    COORDINATOR,
    DRIVER,
    ENVIRONMENT,
    FULL,
    WORKER,
    Adapter,
    JobSpec,
    Method,
    Template,
)
from tinsmith_jobs.spec_reader import SpecError

_NEED_PACKAGES = frozenset({"log_to"})
"""Refused where a package is missing, which the image of drivers may have."""
_OF_DATA = frozenset({Method.SUPERVISED, Method.DPO, Method.DISTILLATION})
"""Methods that train on what data says, and play nothing."""
_ANY_MODEL = "of-a-pool"
OWN_VARIABLES = frozenset(
    {
        *("HOME", "OPENAI_API_KEY", "OPENAI_BASE_URL", "POD_IP", "TINSMITH_TERMINATION_LOG"),
        *("TINSMITH_ADDRESS", "TINSMITH_API_KEY", "TINSMITH_PROJECT", "TINSMITH_JOB"),
        *("TINSMITH_JOB_AGENT", "TINSMITH_JOB_AGENTS", "TINSMITH_JOB_METHOD", "TINSMITH_JOB_UID"),
    }
)
"""Variables of drivers and workers with what the job is, its keys and its addresses."""


def check_recipe(job: JobSpec, *, is_local: bool = False, has_begun: bool = False) -> None:
    """Refuse settings that the driver of a job would refuse.

    Args:
        job: What is to be run.
        is_local: Whether the driver runs beside this process, which runs no images.
        has_begun: Whether it ran before, perhaps under a release that took what has no effect: that
            ends no job.

    Raises:
        SpecError: If the recipe has no such setting, or not with this value, or its data cannot be
            read by a driver of the cluster; if a checkpoint is none, or a variable would be lost;
            if something would be of no use.
    """
    _check_variables(job)
    _check_checkpoint("spec.serve.checkpoint", job.serve_checkpoint, job.serve_checkpoint)
    driver = job.role(DRIVER)
    template = driver.template if driver is not None else Template()
    is_own = bool(template.command or (template.image and not is_local))
    is_new = not is_local and not has_begun
    if is_new:
        _check_templates(job)
        _check_idle_fields(job)
    if job.method.value not in RECIPE_METHODS or is_own:
        return
    _check_short_checkpoint("spec.checkpoint.resumeFrom", job.checkpoint.resume_from)
    if is_new:
        _check_idle_roles(job)
    if not is_local:
        _check_data(job)
    unseen = frozenset() if is_local else _NEED_PACKAGES
    parameters = {name: value for name, value in job.parameters.items() if name not in unseen}
    model = job.model.name if job.model is not None else _ANY_MODEL
    described = describe_method(replace(job, parameters=parameters), model=model, data="")
    agents = describe_agents(job, model=model, address="")
    try:
        method = read_method(described, Path(), read_agents({"TINSMITH_JOB_AGENTS": agents}))
    except ConfigurationError as error:
        advice = f"; {error.remedy}" if error.remedy else ""
        raise SpecError(
            f"spec.method is refused: {error.message}{advice}", "spec.method"
        ) from error
    if job.method is Method.EVALUATE:
        for name in method.config.checkpoint.split(","):
            _check_short_checkpoint("spec.method.parameters.checkpoint", name.strip())
    if is_new and getattr(method.config, "rollouts", "") == "server":
        _check_coordinator(job)
    if not is_local and job.model is not None:
        _check_judge(getattr(method.config, "judge", ""), job.model.name)


def _check_variables(job: JobSpec) -> None:
    """Refuse variables that Tinsmith's own would replace."""
    own = OWN_VARIABLES | {agent_key_variable(agent.name) for agent in job.agents}
    for role in job.roles:
        given = {str(entry["name"]) for entry in role.template.env}
        lost = sorted(given & own) if role.kind in (DRIVER, WORKER) else []
        if lost:
            raise SpecError(
                f"template.env of the {role.name} sets {lost[0]}, which Tinsmith sets itself; drop "
                "it, or take another name",
                "spec.roles",
            )


def _check_templates(job: JobSpec) -> None:
    """Refuse what a template says twice, or for nothing."""
    for role in job.roles:
        template = role.template
        names = [str(entry["name"]) for entry in template.env]
        texts = " ".join(str(entry.get("value", "")) for entry in template.env)
        twice = next((n for n in names if names.count(n) > 1 and f"$({n})" not in texts), "")
        if twice:
            raise SpecError(
                f"template.env of the {role.name} sets {twice} twice, and the first has no effect; "
                "drop one",
                "spec.roles",
            )
        mounts = [*template.mounts, *(m for each in template.init_containers for m in each.mounts)]
        mounted = {mount.volume for mount in mounts}
        idle = next((each.name for each in template.volumes if each.name not in mounted), "")
        if idle:
            raise SpecError(
                f"the volume {idle} of the {role.name} is mounted nowhere; name it in "
                "template.volumeMounts, or drop it",
                "spec.roles",
            )


def _check_idle_roles(job: JobSpec) -> None:
    """Refuse pods that a recipe has no use for; evaluators of the author's may play."""
    unused = [role.name for role in job.roles if role.name in (ENVIRONMENT, COORDINATOR)]
    unused += ["agents"] if job.agents else []
    has_evaluators = any(job.parameters.get(name) for name in ("evaluators", "rare_evaluators"))
    if job.method in _OF_DATA and unused and not has_evaluators:
        raise SpecError(
            f"method {job.method.value} plays nothing; drop {', '.join(unused)} from spec.roles",
            "spec.roles",
        )


def _check_idle_fields(job: JobSpec) -> None:
    """Refuse fields that would have no effect."""
    if job.serve_checkpoint and not job.is_serving:
        raise SpecError(
            f"spec.serve is of method serve, and spec.method.type is {job.method.value}; drop one",
            "spec.serve",
        )
    if job.adapter.type == FULL and job.adapter.rank != Adapter().rank:
        raise SpecError(
            f"spec.adapter.rank is {job.adapter.rank}, and type full trains all weights; drop it",
            "spec.adapter",
        )
    model = job.model
    if model is None or model.source.startswith(HUB):
        return
    if model.cache_claim:
        raise SpecError(
            f"spec.model.cacheClaimName keeps what comes from a hub, and spec.model.source is "
            f"{model.source!r}; drop it",
            "spec.model",
        )
    data = job.data.name or job.parameters.get("data")
    if model.hub_token_secret and not (isinstance(data, str) and is_of_hub(data)):
        raise SpecError(
            "spec.model.hubTokenSecretRef is the key of a hub, and neither spec.model.source nor "
            "the data is of one; drop it",
            "spec.model",
        )


def _check_coordinator(job: JobSpec) -> None:
    """Refuse environments that the coordinator which plays does not reach.

    The shared one plays the shared environments; those of a job are known to its own alone.
    """
    if job.role(ENVIRONMENT) is not None and job.role(COORDINATOR) is None:
        raise SpecError(
            "rollouts is server, and the shared coordinator does not reach the environments of the "
            "job (spec.roles.environment); add `coordinator: {}` to spec.roles, leave rollouts "
            "out, or drop spec.roles.environment to play those that all jobs share",
            "spec.roles",
        )


def _check_judge(judge: str, model: str) -> None:
    """Refuse a judge that the samplers of a job do not serve."""
    if judge in ("", model):
        return
    if "/" not in judge:
        raise SpecError(
            f"spec.method.parameters.judge is {judge!r}, and the samplers of the job serve "
            f"{model!r}; give that, or a checkpoint of it",
            "spec.method",
        )
    _check_short_checkpoint("spec.method.parameters.judge", judge)


def _check_short_checkpoint(setting: str, given: str) -> None:
    """Refuse what names no checkpoint to a driver, which finds a short name in its own project."""
    _check_checkpoint(setting, given, names.whole_checkpoint(given, "default"))


def _check_checkpoint(setting: str, given: str, whole: str) -> None:
    if not given or names.is_valid_id(job_of(given)):
        return
    try:
        names.CheckpointName.parse(whole)
    except names.InvalidNameError as error:
        raise SpecError(
            f"{setting} is {given!r}; give projects/PROJECT/trainingRuns/RUN/checkpoints/"
            "CHECKPOINT, as the status of the job that saved it says, or trainingJobs/NAME for the "
            "final one of a job",
            setting.partition(".parameters.")[0],
        ) from error


def _check_data(job: JobSpec) -> None:
    """Refuse data that no pod of the driver has: it would be missed once the models are loaded."""
    method = job.method.value
    for field, setting, data in (
        ("spec.data.name", "spec.data.name", job.data.name),
        ("spec.method", "spec.method.parameters.data", job.parameters.get("data")),
    ):
        if not isinstance(data, str) or not data:
            continue
        if data in BUILT_IN_DATA[method] or Path(data).is_absolute():
            continue
        may_read_hub = method in HUB_METHODS
        if data.startswith(HUB) and may_read_hub:
            _check_address(setting, data, field)
            continue
        what = f"comes with no {method} and is no file of the driver's pod"
        if data.startswith(HUB):
            what = f"{method} does not read: the methods that do are {', '.join(HUB_METHODS)}"
        hub = " or hf://OWNER/NAME" if may_read_hub else ""
        raise SpecError(
            f"{setting} is {data!r}, which {what}; give spec.data.configMapRef, spec.data.pvc, or "
            f"s3://bucket/path{hub} as spec.data.name, or one of "
            f"{', '.join(BUILT_IN_DATA[method])}",
            field,
        )


def _check_address(setting: str, data: str, field: str) -> None:
    """Refuse an address that names no data set of the hub, or a folder that the pod lacks."""
    try:
        address = parse_address(data)
    except ConfigurationError as error:
        raise SpecError(f"{setting} is refused: {error.message}; {error.remedy}", field) from error
    if address.is_folder and not Path(address.name).is_absolute():
        raise SpecError(
            f"{setting} is {data!r}, and the driver's pod has no such folder; give "
            "hf://OWNER/NAME, or the absolute path of a folder on a volume",
            field,
        )
