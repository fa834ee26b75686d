"""Restricts what roles that hold the deployment's secrets may run.

Trainers, samplers, environments and coordinators hold the key of the pods and the database's
password. The author of a TrainingJob may not thereby read them: an image of theirs, a command, or a
variable that makes Python load other code, would. So these roles take only images that the
operators trust, with their own entry points and with settings alone. No role may ask for those
Secrets by name, nor for the keys of another workload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tinsmith_controller.pods.pod_env import SERVER_KINDS
from tinsmith_jobs.naming import is_key_secret
from tinsmith_jobs.spec import Role

EVERYTHING = "*"
_SETTING = "TINSMITH_"


def check_images(
    roles: Sequence[Role], trusted_images: Sequence[str], own_secrets: Sequence[str]
) -> str:
    """Return why a job cannot be run, in one sentence; empty if it can.

    Args:
        roles: Of the job.
        trusted_images: Beginnings of the names of images; `*` trusts whatever a job says.
        own_secrets: Names of the deployment's Secrets.
    """
    if EVERYTHING in trusted_images:
        return ""
    for role in roles:
        stolen = sorted(
            name for name in _asked_secrets(role) if name in own_secrets or is_key_secret(name)
        )
        if stolen:
            return f"the {role.name} may not read the Secret {stolen[0]} of the deployment"
        if role.kind not in SERVER_KINDS:
            continue
        template = role.template
        if template.image and not template.image.startswith(tuple(trusted_images)):
            return (
                f"the {role.name} may not run the image {template.image}, because it would get the "
                "secrets of the deployment: ask its operators to add it to the trusted images"
            )
        if template.command or template.args:
            return (
                f"the {role.name} may not have a command of its own, because it gets the secrets "
                "of the deployment; build it into an image that the operators trust"
            )
        foreign = [str(e["name"]) for e in template.env if not _is_setting(str(e["name"]))]
        if foreign:
            return (
                f"the {role.name} may have variables that begin with {_SETTING} alone, because it "
                f"gets the secrets of the deployment; {foreign[0]} does not"
            )
    return ""


def _is_setting(name: str) -> bool:
    return name.startswith(_SETTING)


def _asked_secrets(role: Role) -> set[str]:
    sources = [entry.get("valueFrom") for entry in role.template.env]
    references = [source.get("secretKeyRef") for source in sources if isinstance(source, Mapping)]
    return {str(entry["name"]) for entry in references if isinstance(entry, Mapping)}
