"""Restricts what roles that hold the deployment's secrets may run.

Trainers, samplers, environments and coordinators hold the key of the pods and the database's
password. The author of a TrainingJob may not thereby read them: an image of theirs, a command, or a
variable that makes Python load other code, would. So would files of theirs beside Python's own. So
these roles take only images that the operators trust, with their own entry points, with settings
alone, and with further files below `/mnt`. No role may ask for those
Secrets by name, nor for the keys of another workload.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinsmith_controller.pods.pod_env import SERVER_KINDS
from tinsmith_controller.pods.template_parts import asked_secrets
from tinsmith_jobs.naming import is_key_secret
from tinsmith_jobs.spec import JobSpec

EVERYTHING = "*"
_FILES = "/mnt/"
"""Where no program of an image lies."""
_CODE_PATH = "TINSMITH_PYTHON_PATH"
"""Where an environment pod finds classes besides those of its image."""
_SETTINGS_OF_ENGINES = """
NUM_THREADS EXACT COMPILED MAX_RESIDENT_RUNS MAX_PARKED_BYTES MAX_RUNS MAX_BATCH_TOKENS
MAX_BATCH_DATUMS CYCLE_TOKENS MAX_QUEUED_OPERATIONS MAX_QUEUED_TOKENS MAX_QUEUED_BYTES
RANK_TIMEOUT_S SNAPSHOT_REPLAY_S RESULT_RETENTION_S UNRETRIEVED_RETENTION_S GAP_TIMEOUT_S
MAX_ATTEMPTS EXPORT_SHARD_BYTES MAX_CONCURRENT_SEQUENCES CACHE_BYTES MAX_QUEUED_SEQUENCES
MAX_SAMPLES MAX_TOPK_LOGPROBS MAX_LOADED_WEIGHTS SESSION_TTL_S WEIGHT_POLL_INTERVAL_S
VLLM_MAX_ADAPTER_RANK VLLM_MAX_BATCH_ADAPTERS VLLM_TENSOR_PARALLEL_SIZE VLLM_START_TIMEOUT_S
VLLM_STALL_TIMEOUT_S
"""
_SETTINGS_OF_OTHERS = """
ENVIRONMENTS PYTHON_PATH MATH_PROBLEMS_PATH NUM_WORKERS MAX_INSTANCES INSTANCE_TTL_S
STEP_TIMEOUT_S WORKER_START_TIMEOUT_S MAX_STREAM_STEPS SHOW_WORKER_OUTPUT MAX_OPEN_EPISODES
MAX_TRAJECTORY_BYTES RETENTION_S SWEEP_INTERVAL_S DRAIN_TIMEOUT_S LOG_LEVEL
"""
_SETTINGS = frozenset(
    f"TINSMITH_{name}" for name in (_SETTINGS_OF_ENGINES + _SETTINGS_OF_OTHERS).split()
)
"""What the author of a job may set of a pod that holds keys.

None of them changes the pod's identity, its peers, its store or its credentials.
"""


_FIELDS = {
    "TINSMITH_DTYPE": "spec.model.dtype",
    "HF_TOKEN": "spec.model.hubTokenSecretRef",
    "HUGGING_FACE_HUB_TOKEN": "spec.model.hubTokenSecretRef",
}
"""What has a field of the spec, since all pods of a job need the same."""


def check_images(job: JobSpec, trusted_images: Sequence[str], own_secrets: Sequence[str]) -> str:
    """Return why a job cannot be run, in one sentence; empty if it can.

    Args:
        job: What it asks for.
        trusted_images: Names of images, or folders of a registry that end in `/`; `*` trusts
            whatever a job says.
        own_secrets: Names of the deployment's Secrets.
    """
    if EVERYTHING in trusted_images:
        return ""
    asked = [("checkpoint.secretRef", job.checkpoint.secret)]
    models = [("model", job.model), *((f"roles.agents {a.name}", a.model) for a in job.agents)]
    asked += [
        (f"{where}.hubTokenSecretRef", model.hub_token_secret)
        for where, model in models
        if model is not None
    ]
    for field, name in asked:
        if name and (name in own_secrets or is_key_secret(name)):
            return f"spec.{field} may not name the Secret {name} of the deployment"
    for role in job.roles:
        stolen = sorted(
            name for name in asked_secrets(role) if name in own_secrets or is_key_secret(name)
        )
        if stolen:
            return f"the {role.name} may not read the Secret {stolen[0]} of the deployment"
        if role.kind not in SERVER_KINDS:
            continue
        template = role.template
        if template.image and not any(_is_of(template.image, one) for one in trusted_images):
            return (
                f"the {role.name} may not run the image {template.image}, because it would get the "
                "secrets of the deployment: ask its operators to add it to the trusted images"
            )
        if template.init_containers or template.env_from or template.service_account:
            return (
                f"the {role.name} may not have initContainers, envFrom or serviceAccountName, "
                "because it gets the secrets of the deployment: those are for the driver and for "
                "workers"
            )
        elsewhere = [m.path for m in template.mounts if not m.path.startswith(_FILES)]
        if elsewhere:
            return (
                f"the {role.name} may not have files of the job at {elsewhere[0]}, because it gets "
                f"the secrets of the deployment: mount them below {_FILES}"
            )
        if template.mounts and any(e["name"] == _CODE_PATH for e in template.env):
            return (
                f"the {role.name} may not have {_CODE_PATH} beside files of the job, because it "
                "gets the secrets of the deployment; build the code into an image that the "
                "operators trust"
            )
        if template.command or template.args:
            return (
                f"the {role.name} may not have a command of its own, because it gets the secrets "
                "of the deployment; build it into an image that the operators trust"
            )
        foreign = [str(e["name"]) for e in template.env if str(e["name"]) not in _SETTINGS]
        if foreign and foreign[0] in _FIELDS:
            return f"the {role.name} may not set {foreign[0]}: {_FIELDS[foreign[0]]} says it"
        if foreign:
            return (
                f"the {role.name} may not set {foreign[0]}, because it gets the secrets of the "
                "deployment: only settings that say how it works are its author's"
            )
    return ""


def _is_of(image: str, trusted: str) -> bool:
    """Whether an image is a trusted one, at any tag, or lies in a trusted folder."""
    if trusted.endswith("/"):
        return image.startswith(trusted)
    return image == trusted or image.startswith((f"{trusted}:", f"{trusted}@", f"{trusted}/"))
