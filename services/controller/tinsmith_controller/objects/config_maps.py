"""The ConfigMaps that jobs name, read one at a time as a job is looked at.

A kubelet says nothing in the status of a pod whose ConfigMap is not there. So it is looked for
here, before nodes are given to its job. A copy of all ConfigMaps would be as large as the data of
all jobs. What was not looked for yet counts as missing, so a restarted process gives no nodes
either.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from tinsmith_controller.kube.api_client import CONFIG_MAPS, ApiError, Json, Resource
from tinsmith_jobs.conditions import ENDED
from tinsmith_jobs.plan.observed import ObservedJob, ObservedPool, PodPhase, PodView
from tinsmith_jobs.spec import DRIVER, JobSpec, PoolSpec, Role, Template

LOOK_AGAIN_S = 10.0
"""Age from which what is known is read again."""


_KIND = "configMap"
"""Of volumes."""


class Readable(Protocol):
    """What is asked of the API server."""

    def get(self, resource: Resource, namespace: str, name: str) -> Json:
        """Return an object."""
        ...


@dataclass(frozen=True, slots=True)
class _Found:
    """One ConfigMap at one time.

    Attributes:
        keys: Names of its entries; None if it does not exist.
        is_readable: Whether the controller may read it; if not, that is left to the kubelet.
        time: When it was read.
    """

    keys: frozenset[str] | None
    is_readable: bool
    time: datetime.datetime


class ConfigMaps:
    """What is known of the ConfigMaps of each workload."""

    def __init__(self, cluster: Readable) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._found: dict[str, Mapping[str, _Found]] = {}

    def refresh(self, item: ObservedJob | ObservedPool, now: datetime.datetime) -> bool:
        """Read the ConfigMaps that a workload names, unless that was done a moment ago.

        Returns:
            Whether something is known now that was not before.

        Raises:
            ApiError: If the server does not answer.
        """
        names = {name for name, _ in _references(item.spec)}
        with self._lock:
            before = self._found.get(item.uid, {})
        after = {name: self._read(item.key.namespace, name, before, now) for name in names}
        if after:
            with self._lock:
                self._found[item.uid] = after
        return _content(before) != _content(after)

    def forget(self, uid: str) -> None:
        """Forget a workload that is gone."""
        with self._lock:
            self._found.pop(uid, None)

    def problems(self, item: ObservedJob | ObservedPool, role: Role | None = None) -> list[str]:
        """Return a sentence about each ConfigMap or entry that is missing.

        Args:
            item: The workload.
            role: The role whose pods need them; all by default.
        """
        with self._lock:
            known = self._found.get(item.uid, {})
        told: dict[str, None] = {}
        for name, key in sorted(_references(item.spec, role)):
            found = known.get(name)
            if found is None:
                told[f"the ConfigMap {name}, which was not looked for yet"] = None
            elif found.keys is None:
                told[
                    f"the ConfigMap {name}, which does not exist in namespace {item.key.namespace}"
                ] = None
            elif found.is_readable and key and key not in found.keys:
                there = ", ".join(sorted(found.keys)) or "no entry"
                told[f"the entry {key} of the ConfigMap {name}, which has {there}"] = None
        return list(told)

    def _read(
        self, namespace: str, name: str, known: Mapping[str, _Found], now: datetime.datetime
    ) -> _Found:
        before = known.get(name)
        if before is not None and (now - before.time).total_seconds() < LOOK_AGAIN_S:
            return before
        try:
            content = self._cluster.get(CONFIG_MAPS, namespace, name)
        except ApiError as error:
            if error.is_forbidden:
                return _Found(frozenset(), False, now)
            if not error.is_not_found:
                raise
            return _Found(None, True, now)
        entries = {**(content.get("data") or {}), **(content.get("binaryData") or {})}
        return _Found(frozenset(entries), True, now)


def needs_config_maps(item: ObservedJob | ObservedPool, pods: Mapping[str, PodView]) -> bool:
    """Return whether ConfigMaps of a workload are worth a look: it begins, or its pods do not."""
    if item.is_deleting or item.status.phase in ENDED or not _references(item.spec):
        return False
    return item.status.assigned_time is None or any(map(_says_nothing, pods.values()))


def with_problems(
    item: ObservedJob | ObservedPool, pods: Mapping[str, PodView], config_maps: ConfigMaps
) -> dict[str, PodView]:
    """Return pods, those that say nothing with what is missing for them."""
    found = dict(pods)
    for name, pod in pods.items():
        role = item.spec.role(pod.role) if item.spec is not None else None
        if role is not None and _says_nothing(pod):
            missing = config_maps.problems(item, role)
            mounted = _mounted(role.template)
            if missing:
                found[name] = replace(pod, problem=f"waits for {' and '.join(missing)}")
            elif mounted:
                sentence = f"waits for its node, which has to mount {' and '.join(mounted)}"
                found[name] = replace(pod, problem=sentence)
    return found


def _says_nothing(pod: PodView) -> bool:
    """Whether a pod has a node, and its kubelet neither starts it nor says why."""
    return pod.phase is PodPhase.PENDING and bool(pod.node) and not pod.problem


def _references(spec: JobSpec | PoolSpec | None, role: Role | None = None) -> set[tuple[str, str]]:
    """Return names of ConfigMaps, each with an entry that is needed; empty for the whole map."""
    if spec is None:
        return set()
    roles = spec.roles if role is None else (role,)
    found: set[tuple[str, str]] = set()
    for each in roles:
        found.update(_named_in(each.template))
        if each.kind == DRIVER and isinstance(spec, JobSpec) and spec.data.config_map:
            found.add((spec.data.config_map, spec.data.config_map_key))
    return found


def _mounted(template: Template) -> list[str]:
    """Return the Secrets and claims of volumes; the controller does not read those."""
    return [
        f"the Secret {volume.source['secretName']}"
        if volume.kind == "secret"
        else f"the claim {volume.source['claimName']}"
        for volume in template.volumes
        if volume.kind in ("secret", "persistentVolumeClaim") and not volume.source.get("optional")
    ]


def _named_in(template: Template) -> Iterator[tuple[str, str]]:
    references = [
        source.get("configMapKeyRef") or source.get("configMapRef")
        for source in template.variable_sources
    ]
    references += [volume.source for volume in template.volumes if volume.kind == _KIND]
    for reference in references:
        if not isinstance(reference, Mapping) or reference.get("optional"):
            continue
        name = str(reference["name"])
        yield from ((name, str(each["key"])) for each in reference.get("items", ()))
        yield name, str(reference.get("key", ""))


def _content(found: Mapping[str, _Found]) -> dict[str, frozenset[str] | None]:
    return {name: each.keys for name, each in found.items()}
