"""Reads the JSON of a resource field by field; what is wrong is said with the path of the field.

A problem does not stop the reading: a default stands for the field, and `check` says at the end all
that was wrong, and which of the given fields there are not.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_NAMED_PROBLEMS = 10
"""Problems of one spec that are named; a job that has more is told how many."""
_OUTSIDE = "volumes are an emptyDir, configMap, secret or persistentVolumeClaim"
_OF_TEMPLATE = "it is a field of the role's template"
_OF_NODES = "nodes are chosen by nodeSelector, tolerations, gpuProducts and topology"
_HINTS = {
    **dict.fromkeys(("hostPath", "nfs", "csi", "projected", "ephemeral", "downwardAPI"), _OUTSIDE),
    **dict.fromkeys(
        ("volumes", "volumeMounts", "initContainers", "envFrom", "imagePullSecrets"), _OF_TEMPLATE
    ),
    **dict.fromkeys(("nodeSelector", "tolerations", "labels", "annotations"), _OF_TEMPLATE),
    **dict.fromkeys(("affinity", "nodeAffinity", "topologySpreadConstraints"), _OF_NODES),
    **dict.fromkeys(
        ("hostNetwork", "hostPID", "hostIPC"), "pods of jobs see nothing of their node"
    ),
    **dict.fromkeys(("cpu", "memory"), "it is an amount of requests or limits"),
    **dict.fromkeys(("image", "command", "args", "env", "imagePullPolicy"), _OF_TEMPLATE),
    **dict.fromkeys(("schedulerName", "nodeName"), _OF_NODES),
    **dict.fromkeys(
        ("securityContext", "privileged"), "pods of jobs have no privileges, and run as no root"
    ),
    **dict.fromkeys(
        (
            *("replicatedJobs", "pytorchReplicaSpecs", "tfReplicaSpecs", "mpiReplicaSpecs"),
            *("headGroupSpec", "workerGroupSpecs", "tasks"),
        ),
        "pods are described in spec.roles",
    ),
    **dict.fromkeys(("parallelism", "completions", "minAvailable"), "replicas of a role say it"),
    "runPolicy": "ttlSecondsAfterFinished, backoffLimit and suspend of spec say it",
    "spec": "the fields of a pod stand in the template itself",
    "metadata": "labels and annotations stand in the template itself",
    "runtimeClassName": "pods run in the default runtime of their node",
    "terminationGracePeriodSeconds": "spec.scheduling.preemptionGraceSeconds says it",
    "r": "it is rank",
    "priorityClassName": "it is a field of spec.scheduling",
    "resources": "it is a field of the role",
    "restartPolicy": "spec.failurePolicy and spec.backoffLimit say it",
    "containers": "a pod has one container, and initContainers before it",
}
"""Fields of pods that people write here, and what there is instead."""


class SpecError(ValueError):
    """A spec that cannot be run; the text is one sentence for its author.

    Args:
        message: The sentence.
        field: Path of the field that is wrong; the first word of the sentence by default.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field or message.partition(" ")[0].rstrip(":")


@dataclass(slots=True)
class _Findings:
    """What all readers of one document found.

    Attributes:
        problems: In the order in which they were found; the same one once.
        given: Names of the fields of each object that was read, by its path.
        known: Names that were asked for, by the path of their object.
    """

    problems: dict[str, SpecError] = field(default_factory=dict)
    given: dict[str, tuple[str, ...]] = field(default_factory=dict)
    known: dict[str, set[str]] = field(default_factory=dict)


class Reader:
    """Reads one JSON object and knows where it is in the whole."""

    def __init__(self, value: object, path: str, findings: _Findings | None = None) -> None:
        self.path = path
        self._findings = findings or _Findings()
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            self.refuse(f"{path} must be an object")
            value = {}
        self._value: Mapping[str, Any] = value
        # A field without a value is as one that is left out.
        given = tuple(str(name) for name, entry in value.items() if entry is not None)
        self._findings.given[path] = given
        self._known = self._findings.known.setdefault(path, set())

    def refuse(self, message: str, field: str = "") -> None:
        """Take note of a problem; see `SpecError`."""
        self._findings.problems.setdefault(message, SpecError(message, field))

    def check(self, *, may_have_others: bool = False) -> None:
        """Return if nothing was wrong in all that was read, and every field was asked for.

        Args:
            may_have_others: Whether fields may be there that were not asked for.

        Raises:
            SpecError: With all problems.
        """
        unknown = [] if may_have_others else self._unknown()
        problems = [*self._findings.problems.values(), *map(SpecError, unknown)]
        if not problems:
            return
        told = [str(problem) for problem in problems[:MAX_NAMED_PROBLEMS]]
        if len(problems) > MAX_NAMED_PROBLEMS:
            told.append(f"and {len(problems) - MAX_NAMED_PROBLEMS} more")
        raise SpecError("; ".join(told), problems[0].field)

    def _unknown(self) -> list[str]:
        """Return a sentence about each field that no reader asked for."""
        found: list[str] = []
        told = set()
        for path, names in self._findings.given.items():
            known = self._findings.known[path]
            for name in names:
                if name in known:
                    continue
                [close, *_] = difflib.get_close_matches(name, sorted(known), 1) or [""]
                hint = _HINTS.get(name) or (f"did you mean {close}?" if close else "")
                if hint in told:
                    hint = ""
                told.add(hint)
                found.append(f"{path}.{name} is not a field{f' ({hint})' if hint else ''}")
        return found

    def _get(self, name: str, default: Any = None) -> Any:
        self._known.add(name)
        return self._value.get(name, default)

    def has(self, name: str) -> bool:
        """Whether a field is given."""
        return self._get(name) is not None

    def at(self, name: str) -> Reader:
        """Return the reader of an object within; an empty one if it is not given."""
        return Reader(self._get(name), f"{self.path}.{name}", self._findings)

    def text(self, name: str, default: str = "", *, longest: int = 4096) -> str:
        """Return a text."""
        value = self._get(name, default)
        if not isinstance(value, str) or len(value) > longest:
            self.refuse(f"{self.path}.{name} must be a text of at most {longest} characters")
            return default
        return value

    def required(self, name: str) -> str:
        """Return a text that must be given."""
        value = self._get(name)
        if value is None or value == "":
            self.refuse(f"{self.path}.{name} is required")
            return ""
        return self.text(name)

    def flag(self, name: str) -> bool:
        """Return a truth value; one that is not given is false."""
        value = self._get(name, False)
        if not isinstance(value, bool):
            self.refuse(f"{self.path}.{name} must be true or false")
            return False
        return value

    def optional_number(self, name: str, *, least: int, most: int = 2**31) -> int | None:
        """Return a whole number within bounds; None if it is not given."""
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.refuse(f"{self.path}.{name} must be a whole number from {least} to {most}")
            return None
        return value

    def number(self, name: str, default: int, *, least: int, most: int = 2**31) -> int:
        """Return a whole number within bounds."""
        value = self.optional_number(name, least=least, most=most)
        return default if value is None else value

    def choice(self, name: str, options: Sequence[str], default: str = "") -> str:
        """Return one of some words."""
        value = self._get(name, default)
        if value not in options:
            self.refuse(f"{self.path}.{name} must be one of {', '.join(options)}")
            return default if default in options else options[0]
        return str(value)

    def mapping(self, name: str) -> dict[str, Any]:
        """Return an object as it is."""
        value = self._get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.refuse(f"{self.path}.{name} must be an object")
            return {}
        return {str(key): entry for key, entry in value.items()}

    def texts_by_name(self, name: str) -> dict[str, str]:
        """Return texts by name."""
        found = {}
        for key, entry in self.mapping(name).items():
            if isinstance(entry, str):
                found[key] = entry
            else:
                self.refuse(f"{self.path}.{name}.{key} must be a text")
        return found

    def items(self, name: str) -> list[Any]:
        """Return a list as it is."""
        value = self._get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.refuse(f"{self.path}.{name} must be a list")
            return []
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts."""
        found = self.items(name)
        if not all(isinstance(entry, str) for entry in found):
            self.refuse(f"{self.path}.{name} must be a list of texts")
            return ()
        return tuple(found)

    def objects(self, name: str) -> list[Reader]:
        """Return the readers of a list of objects."""
        return [
            Reader(entry if entry is not None else "", f"{self.path}.{name}[{i}]", self._findings)
            for i, entry in enumerate(self.items(name))
        ]
