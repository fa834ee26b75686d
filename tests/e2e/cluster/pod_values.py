"""What a pod is told: environment variables and the files of its volumes."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.e2e.cluster.api import ApiClient, Json, path

_REFERENCE = re.compile(r"\$(?:\$|\(([-._a-zA-Z][-._a-zA-Z0-9]*)\))")
_KEYED_FIELD = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")
_SUFFIXES = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_FILE_MODE = 0o644


class ConfigError(RuntimeError):
    """The pod names something that does not exist (yet); a kubelet tries again and again."""


class PodValues:
    """Reads what one pod refers to.

    Args:
        api: Client of the kubelet.
        pod: The pod, with its address in `status.podIP`.
    """

    def __init__(self, api: ApiClient, pod: Json) -> None:
        self._api = api
        self._pod = pod
        self._namespace: str = pod["metadata"]["namespace"]

    def environment(self, container: Json, base: Mapping[str, str]) -> dict[str, str]:
        """Return a container's environment.

        Raises:
            ConfigError: If a ConfigMap, Secret or key of it is missing that is not optional.
        """
        values = dict(base)
        for source in container.get("envFrom", []):
            for kind, key in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
                if reference := source.get(key):
                    data = self._data(kind, reference)
                    prefix = source.get("prefix", "")
                    values |= {prefix + name: value.decode() for name, value in data.items()}
        for entry in container.get("env", []):
            if "valueFrom" not in entry:
                values[entry["name"]] = expand(entry.get("value", ""), values)
            elif (value := self._value_from(entry["valueFrom"], container)) is not None:
                values[entry["name"]] = value
        return values

    def materialise(self, volume: Json, folder: Path) -> Path:
        """Write a volume's files and return the folder, or the path on this machine it stands for.

        Raises:
            ConfigError: If what it is made of is missing.
        """
        if "hostPath" in volume:
            host: Path = Path(volume["hostPath"]["path"])
            if "Create" in volume["hostPath"].get("type", ""):
                host.mkdir(parents=True, exist_ok=True)
            if not host.exists():
                raise ConfigError(f"hostPath {host} does not exist")
            return host
        if "persistentVolumeClaim" in volume:
            return self._claimed(volume["persistentVolumeClaim"]["claimName"])
        target: Path = folder / volume["name"]
        target.mkdir(parents=True, exist_ok=True)
        sources = volume["projected"]["sources"] if "projected" in volume else [volume]
        for source in sources:
            for name, data in self._files(source).items():
                file = target / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
                file.chmod(_mode(volume))
        if "emptyDir" in volume:
            target.chmod(0o777)
        return target

    def _files(self, source: Json) -> dict[str, bytes]:
        if "emptyDir" in source:
            return {}
        if token := source.get("serviceAccountToken"):
            return {token["path"]: self._token(token).encode()}
        if "downwardAPI" in source:
            items = source["downwardAPI"].get("items", [])
            return {item["path"]: self._item(item).encode() for item in items}
        for kind, key, name in (
            ("ConfigMap", "configMap", "name"),
            ("Secret", "secret", "secretName"),
        ):
            if reference := source.get(key):
                data = self._data(
                    kind, {**reference, "name": reference.get(name) or reference["name"]}
                )
                if "items" not in reference:
                    return data
                return {i["path"]: data[i["key"]] for i in reference["items"] if i["key"] in data}
        kinds = ", ".join(key for key in source if key != "name")
        raise ConfigError(f"the process kubelet has no volumes of kind {kinds}")

    def _item(self, item: Json) -> str:
        if "fieldRef" in item:
            return self._field(item["fieldRef"]["fieldPath"])
        containers = self._pod["spec"]["containers"]
        name = item["resourceFieldRef"]["containerName"]
        container = next(entry for entry in containers if entry["name"] == name)
        return _resource(container, item["resourceFieldRef"])

    def _value_from(self, source: Json, container: Json) -> str | None:
        if "fieldRef" in source:
            return self._field(source["fieldRef"]["fieldPath"])
        if "resourceFieldRef" in source:
            return _resource(container, source["resourceFieldRef"])
        key = "configMapKeyRef" if "configMapKeyRef" in source else "secretKeyRef"
        reference = source[key]
        data = self._data("ConfigMap" if key == "configMapKeyRef" else "Secret", reference)
        if reference["key"] in data:
            return data[reference["key"]].decode()
        if reference.get("optional"):
            return None
        raise ConfigError(f"couldn't find key {reference['key']} in {reference['name']}")

    def _field(self, field: str) -> str:
        if match := _KEYED_FIELD.fullmatch(field):
            values = self._pod["metadata"].get(match[1], {})
            return str(values.get(match[2], ""))
        if field in ("metadata.labels", "metadata.annotations"):
            values = self._pod["metadata"].get(field.partition(".")[2], {})
            return "\n".join(f'{name}="{value}"' for name, value in sorted(values.items()))
        if field == "status.podIPs":
            field = "status.podIP"
        value = self._pod
        for part in field.split("."):
            if part not in value:
                raise ConfigError(f"the pod has no field {field}")
            value = value[part]
        return str(value)

    def _data(self, kind: str, reference: Json) -> dict[str, bytes]:
        name = reference["name"]
        found = self._api.find(path("v1", f"{kind.lower()}s", self._namespace, name))
        if found is None:
            if reference.get("optional"):
                return {}
            raise ConfigError(f'{kind.lower()} "{name}" not found')
        data = found.get("data") or {}
        if kind == "Secret":
            return {key: base64.b64decode(value) for key, value in data.items()}
        binary = found.get("binaryData") or {}
        return {key: value.encode() for key, value in data.items()} | {
            key: base64.b64decode(value) for key, value in binary.items()
        }

    def _token(self, source: Json) -> str:
        metadata, spec = self._pod["metadata"], self._pod["spec"]
        bound = {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": metadata["name"],
            "uid": metadata["uid"],
        }
        body = {
            "expirationSeconds": source.get("expirationSeconds", 3600),
            "boundObjectRef": bound,
            **({"audiences": [source["audience"]]} if source.get("audience") else {}),
        }
        account = spec.get("serviceAccountName", "default")
        url = path("v1", "serviceaccounts", self._namespace, account, "token")
        made = self._api.create(
            url, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": body}
        )
        token: str = made["status"]["token"]
        return token

    def _claimed(self, name: str) -> Path:
        claim = self._api.get(path("v1", "persistentvolumeclaims", self._namespace, name))
        volume = self._api.get(path("v1", "persistentvolumes", "", claim["spec"]["volumeName"]))
        host = Path(volume["spec"]["hostPath"]["path"])
        host.mkdir(parents=True, exist_ok=True)
        return host


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by its value; `$$` is a dollar, and what is unknown stays as it is."""
    replace: Callable[[re.Match[str]], str] = lambda match: (  # noqa: E731
        "$" if match[1] is None else values.get(match[1], match[0])
    )
    return _REFERENCE.sub(replace, text)


def _resource(container: Json, reference: Json) -> str:
    section, _, name = reference["resource"].partition(".")
    amounts = container.get("resources", {}).get(section, {})
    if name not in amounts:
        raise ConfigError(f"container {container['name']} sets no {reference['resource']}")
    quotient = quantity(amounts[name]) / (quantity(reference.get("divisor") or "0") or 1)
    return str(int(-(-quotient // 1)))  # rounded up, as Kubernetes does


def quantity(text: str) -> float:
    """Return an amount such as `500m` or `2Gi` as a number."""
    match = re.fullmatch(r"([0-9.]+)(\D*)", text)
    if not match or match[2] not in {*_SUFFIXES, ""}:
        raise ConfigError(f"no amount: {text}")
    return float(match[1]) * _SUFFIXES.get(match[2], 1)


def _mode(volume: Json) -> int:
    for kind in ("configMap", "secret", "projected", "downwardAPI"):
        if kind in volume:
            return int(volume[kind].get("defaultMode", _FILE_MODE))
    return _FILE_MODE
