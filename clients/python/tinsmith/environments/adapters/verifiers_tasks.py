"""Tasks of a taskset of verifiers, by number.

A taskset is read from its beginning each time, and may load a data set for it. So the tasks of
those that were played last are kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tinsmith.environments.environment import InvalidSettingError
from tinsmith.errors import ConfigurationError

MAX_KEPT_TASKSETS = 8
MAX_ENDLESS_TASKS = 10_000
"""Of a taskset without an end: those that seeds choose among."""


@dataclass(slots=True)
class _Kept:
    lock: threading.Lock = field(default_factory=threading.Lock)
    tasks: Sequence[Any] | None = None


_kept: OrderedDict[Hashable, _Kept] = OrderedDict()
_lock = threading.Lock()


def choose(taskset: Any, seed: int, index: int) -> Any:
    """Return the task of an index, or where that is -1, of a seed.

    Raises:
        InvalidSettingError: If there is no task of this index.
        ConfigurationError: If the taskset is empty.
    """
    if index < -1:
        raise InvalidSettingError("index", f"must be -1 or more, got {index}")
    if not taskset.bounded:
        position = index if index >= 0 else seed % MAX_ENDLESS_TASKS
        found = list(islice(taskset, position, position + 1))
        if not found:
            raise InvalidSettingError("index", f"is {position}, and the taskset ended before")
        return found[0]
    tasks = _tasks(taskset)
    if not tasks:
        raise ConfigurationError(
            f"the taskset {taskset.config.id} of verifiers has no tasks",
            remedy="check its settings",
        )
    if index >= len(tasks):
        raise InvalidSettingError("index", f"is {index}, and there are {len(tasks)} tasks")
    return tasks[index if index >= 0 else seed % len(tasks)]


def _tasks(taskset: Any) -> Sequence[Any]:
    key = taskset if taskset.transform is not None else _key(taskset)
    with _lock:
        kept = _kept.setdefault(key, _Kept())
        _kept.move_to_end(key)
        while len(_kept) > MAX_KEPT_TASKSETS:
            _kept.popitem(last=False)
    # Others load meanwhile.
    with kept.lock:
        if kept.tasks is None:
            kept.tasks = list(taskset)
        return kept.tasks


def _key(taskset: Any) -> Hashable:
    return type(taskset), taskset.config.model_dump_json()
