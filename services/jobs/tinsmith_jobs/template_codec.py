"""What the author of a job wants different about the pods of a role: the fields of `template`.

They have the names and meanings of a pod's own. What the API server would refuse in a pod is
refused here, since a pod is made when its nodes are held already.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from tinsmith_jobs.naming import DATA_CONTAINER, POD_PATHS
from tinsmith_jobs.pod_fields_codec import read_annotations, read_labels, read_tolerations
from tinsmith_jobs.quantities import QuantityError, parse_quantity
from tinsmith_jobs.spec import SAMPLER, TRAINER, InitContainer, Mount, Template, Volume
from tinsmith_jobs.spec_reader import Reader

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,57}[a-z0-9])?")
"""As Kubernetes has it, with room for a prefix."""
_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LONGEST_NAME = 253
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?{_PART}(?:/{_PART})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@[A-Za-z0-9+._-]+:[0-9a-fA-F]{32,})?"
)
"""Host, path, tag and digest, as distribution/reference has them."""
_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PULL_POLICIES = ("", "Always", "IfNotPresent", "Never")
_FIELDS_OF_PODS = (
    *("metadata.name", "metadata.namespace", "metadata.uid"),
    *("spec.nodeName", "status.podIP", "status.hostIP"),
)
_SHARED_MEMORY = "/dev/shm"
_OF_THE_SYSTEM = ("/dev", "/proc", "/sys")


def read_template(reader: Reader, kind: str) -> Template:
    """Return what is different about a role's pods.

    Args:
        reader: At `template`.
        kind: What runs in them.
    """
    volumes = _volumes(reader)
    return Template(
        image=_image(reader, reader.text("image", longest=512)),
        image_pull_policy=reader.choice("imagePullPolicy", _PULL_POLICIES),
        command=reader.texts("command"),
        args=reader.texts("args"),
        env=_env(reader),
        env_from=_env_from(reader),
        labels=read_labels(reader, "labels"),
        annotations=read_annotations(reader, "annotations"),
        node_selector=read_labels(reader, "nodeSelector"),
        tolerations=read_tolerations(reader),
        volumes=volumes,
        mounts=_mounts(reader, volumes, kind),
        init_containers=_init_containers(reader, volumes, kind),
        pull_secrets=tuple(
            _dns_name(secret, "name") for secret in reader.objects("imagePullSecrets")
        ),
        service_account=_dns_name(reader, "serviceAccountName", is_required=False),
    )


def _env(reader: Reader) -> tuple[dict[str, object], ...]:
    env = []
    for entry in reader.objects("env"):
        variable: dict[str, object] = {"name": entry.required("name")}
        if entry.has("value"):
            variable["value"] = entry.text("value", longest=32768)
        source = entry.at("valueFrom")
        sources: dict[str, object] = {}
        for kind in ("secretKeyRef", "configMapKeyRef"):
            if source.has(kind):
                reference = source.at(kind)
                found = {"name": _dns_name(reference, "name"), "key": reference.required("key")}
                sources[kind] = found | _optional(reference)
        if source.has("fieldRef"):
            path = source.at("fieldRef").choice("fieldPath", _FIELDS_OF_PODS)
            sources["fieldRef"] = {"fieldPath": path}
        if len(sources) + entry.has("value") > 1 or (entry.has("valueFrom") and not sources):
            entry.refuse(f"{entry.path} must have a value, or one source in valueFrom")
        if sources:
            variable["valueFrom"] = sources
        env.append(variable)
    return tuple(env)


def _env_from(reader: Reader) -> tuple[dict[str, object], ...]:
    found = []
    for entry in reader.objects("envFrom"):
        source: dict[str, object] = {}
        for kind in ("secretRef", "configMapRef"):
            if entry.has(kind):
                reference = entry.at(kind)
                source[kind] = {"name": _dns_name(reference, "name")} | _optional(reference)
        if len(source) != 1:
            entry.refuse(f"{entry.path} must have one of secretRef and configMapRef")
        prefix = entry.text("prefix", longest=256)
        if prefix and not _PREFIX.fullmatch(prefix):
            entry.refuse(f"{entry.path}.prefix may have letters, digits and _ alone")
        found.append(({"prefix": prefix} if prefix else {}) | source)
    return tuple(found)


def _optional(reference: Reader) -> dict[str, object]:
    return {"optional": True} if reference.flag("optional") else {}


def _volumes(reader: Reader) -> tuple[Volume, ...]:
    readers = {
        "emptyDir": _empty_dir,
        "configMap": _config_map,
        "secret": _secret,
        "persistentVolumeClaim": _claim,
    }
    found: list[Volume] = []
    for entry in reader.objects("volumes"):
        name = _unused_name(entry, [volume.name for volume in found])
        kinds = [kind for kind in readers if entry.has(kind)]
        if len(kinds) != 1:
            entry.refuse(f"{entry.path} must have one of {', '.join(readers)}")
            continue
        [kind] = kinds
        found.append(Volume(name, kind, readers[kind](entry.at(kind))))
    return tuple(found)


def _empty_dir(reader: Reader) -> dict[str, object]:
    found: dict[str, object] = {}
    if reader.choice("medium", ("", "Memory")):
        found["medium"] = "Memory"
    if reader.has("sizeLimit"):
        size = reader.text("sizeLimit")
        try:
            is_positive = parse_quantity(size) > 0 and size == size.strip()
        except QuantityError:
            is_positive = False
        if not is_positive:
            reader.refuse(f"{reader.path}.sizeLimit must be an amount such as 8Gi")
        found["sizeLimit"] = size
    return found


def _config_map(reader: Reader) -> dict[str, object]:
    return {"name": _dns_name(reader, "name")} | _files(reader)


def _secret(reader: Reader) -> dict[str, object]:
    return {"secretName": _dns_name(reader, "secretName")} | _files(reader)


def _claim(reader: Reader) -> dict[str, object]:
    found: dict[str, object] = {"claimName": _dns_name(reader, "claimName")}
    return found | ({"readOnly": True} if reader.flag("readOnly") else {})


def _files(reader: Reader) -> dict[str, object]:
    """Return which files a volume has of a Secret or ConfigMap, and their mode."""
    found: dict[str, object] = _optional(reader)
    mode = reader.optional_number("defaultMode", least=0, most=0o777)
    if mode is not None:
        found["defaultMode"] = mode
    items = []
    for item in reader.objects("items"):
        path = item.required("path")
        if path and not _is_within(path):
            item.refuse(f"{item.path}.path must be a path without .. that does not begin with /")
        items.append({"key": item.required("key"), "path": path})
    return found | ({"items": items} if items else {})


def _mounts(reader: Reader, volumes: tuple[Volume, ...], kind: str) -> tuple[Mount, ...]:
    taken = [path for path in POD_PATHS.values() if path != _SHARED_MEMORY]
    if kind in (TRAINER, SAMPLER):
        taken.append(_SHARED_MEMORY)
    found: list[Mount] = []
    for entry in reader.objects("volumeMounts"):
        mount = Mount(
            volume=entry.required("name"),
            path=entry.required("mountPath").rstrip("/"),
            sub_path=entry.text("subPath"),
            is_read_only=entry.flag("readOnly"),
        )
        if mount.volume not in {volume.name for volume in volumes}:
            entry.refuse(f"{entry.path}.name: there is no volume {mount.volume!r} in volumes")
        if not mount.path.startswith("/") or not _is_within(mount.path[1:]) or ":" in mount.path:
            entry.refuse(f"{entry.path}.mountPath must be a path from / without .. and colons")
        if mount.path in {other.path for other in found}:
            entry.refuse(f"{entry.path}.mountPath is {mount.path}, which another mount has")
        own = _is_below(mount.path, taken)
        if own:
            entry.refuse(f"{entry.path}.mountPath is within {own}, which is Tinsmith's own")
        if mount.path != _SHARED_MEMORY and _is_below(mount.path, _OF_THE_SYSTEM):
            entry.refuse(
                f"{entry.path}.mountPath is {mount.path}, where the system's own files are"
            )
        if mount.sub_path and not _is_within(mount.sub_path):
            entry.refuse(f"{entry.path}.subPath must be a path without .. within the volume")
        found.append(mount)
    return tuple(found)


def _init_containers(
    reader: Reader, volumes: tuple[Volume, ...], kind: str
) -> tuple[InitContainer, ...]:
    found: list[InitContainer] = []
    for entry in reader.objects("initContainers"):
        name = _unused_name(entry, [kind, DATA_CONTAINER, *(container.name for container in found)])
        found.append(
            InitContainer(
                name=name,
                image=_image(entry, entry.required("image")),
                image_pull_policy=entry.choice("imagePullPolicy", _PULL_POLICIES),
                command=entry.texts("command"),
                args=entry.texts("args"),
                env=_env(entry),
                env_from=_env_from(entry),
                mounts=_mounts(entry, volumes, kind),
            )
        )
    return tuple(found)


def _unused_name(reader: Reader, used: list[str]) -> str:
    name = reader.required("name")
    if name and not _DNS_LABEL.fullmatch(name):
        reader.refuse(f"{reader.path}.name may have 59 small letters, digits and - alone")
    if name in used:
        reader.refuse(f"{reader.path}.name is {name}, which another one has")
    return name


def _dns_name(reader: Reader, name: str, *, is_required: bool = True) -> str:
    found = reader.required(name) if is_required else reader.text(name)
    if found and (len(found) > _LONGEST_NAME or not _DNS_NAME.fullmatch(found)):
        reader.refuse(f"{reader.path}.{name} is {found!r}, which no object may be called")
    return found


def _image(reader: Reader, image: str) -> str:
    if any(map(str.isspace, image)):
        reader.refuse(f"{reader.path}.image is {image!r}; an image has no spaces in its name")
    elif image and not _IMAGE.fullmatch(image):
        reader.refuse(
            f"{reader.path}.image is {image!r}, which no registry has; give "
            "registry.example.com/name:tag, with small letters alone in the name"
        )
    return image


def _is_below(path: str, folders: Iterable[str]) -> str:
    """Return the folder that a path is, or lies in; empty if it is none of them."""
    return next((each for each in folders if PurePosixPath(path).is_relative_to(each)), "")


def _is_within(path: str) -> bool:
    return bool(path) and not path.startswith(("/", "..")) and ".." not in path.split("/")
