"""The chart as Helm renders it, without a cluster."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm/tinsmith"
VALUE_SETS = tuple(sorted(path.stem for path in (CHART / "ci").glob("*-values.yaml")))
"""Files of values that the chart ships for checks."""

Manifest = dict[str, Any]


def load_values(name: str) -> dict[str, Any]:
    """Return one of `VALUE_SETS`."""
    return dict(yaml.safe_load((CHART / "ci" / f"{name}.yaml").read_text()))


def merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with changes on top, tables merged as Helm merges them."""
    merged = copy.deepcopy(dict(values))
    for key, change in changes.items():
        known = merged.get(key)
        both = isinstance(known, dict) and isinstance(change, Mapping)
        merged[key] = merge(known, change) if both else change
    return merged


def render(
    values: Mapping[str, Any], *, release: str = "tinsmith", namespace: str = "tinsmith"
) -> list[Manifest]:
    """Return all objects of a release; they are shared between tests, so leave them as they are.

    Raises:
        helm_python.HelmError: If the values are wrong.
    """
    return list(_render(json.dumps(values), release, namespace))


@functools.cache
def _render(values: str, release: str, namespace: str) -> tuple[Manifest, ...]:
    with helm_python.Chart.load(CHART) as chart:
        texts = chart.render(json.loads(values), name=release, namespace=namespace)
    return tuple(
        manifest
        for path, text in sorted(texts.items())
        if path.endswith(".yaml")
        for manifest in yaml.load_all(text, Loader=yaml.CSafeLoader)
        if manifest
    )


@dataclass(frozen=True)
class PodTemplate:
    """What a Deployment or StatefulSet makes pods from."""

    owner: Manifest

    @property
    def component(self) -> str:
        return str(self.owner["spec"]["template"]["metadata"]["labels"][COMPONENT])

    @property
    def namespace(self) -> str:
        return str(self.owner["metadata"]["namespace"])

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.owner["spec"]["template"]["metadata"]["labels"])

    @property
    def spec(self) -> dict[str, Any]:
        return dict(self.owner["spec"]["template"]["spec"])

    @property
    def containers(self) -> list[dict[str, Any]]:
        """Those of the start as well."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


COMPONENT = "app.kubernetes.io/component"
PODS = ("scheduler", "gateway", "coordinator", "environment", "controller", "checkpoints")
"""Components that are our own programs."""


def program_of(pod: str) -> str:
    """Return what a component runs, by which its image is called as well."""
    return "trainer" if pod == "checkpoints" else pod


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    """Return the objects of some kinds."""
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def pod_templates(manifests: list[Manifest]) -> list[PodTemplate]:
    """Return what pods are made from."""
    return [PodTemplate(owner) for owner in of_kind(manifests, "Deployment", "StatefulSet")]


def identity(manifest: Manifest) -> tuple[str, str, str]:
    """Return kind, namespace and name of an object."""
    metadata = manifest["metadata"]
    return manifest["kind"], metadata.get("namespace", ""), metadata["name"]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector of Kubernetes fits labels."""
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    for rule in selector.get("matchExpressions") or []:
        present, value = rule["key"] in labels, labels.get(rule["key"])
        fits = {
            "In": lambda value=value, rule=rule: value in rule["values"],
            "NotIn": lambda value=value, rule=rule: value not in rule["values"],
            "Exists": lambda present=present: present,
            "DoesNotExist": lambda present=present: not present,
        }[rule["operator"]]
        if not fits():
            return False
    return True


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value below one, with its path."""
    yield path, value
    children = value.items() if isinstance(value, dict) else []
    if isinstance(value, list):
        children = [(str(index), child) for index, child in enumerate(value)]
    for key, child in children:
        yield from walk(child, f"{path}.{key}")
