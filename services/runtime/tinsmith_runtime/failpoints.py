"""Named points at which a test may kill, delay or watch a process; without settings, nothing.

`TINSMITH_FAILPOINTS="trainer.commit=sleep:0.02,trainer.compute=kill:3"` sleeps at each commit and
sends SIGKILL to the process when a computation begins for the third time.
`TINSMITH_FAILPOINT_TRACE=FILE` keeps the name of the last point that was passed in a file, which
outlives a kill: that is how a chaos test knows what it interrupted.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from tinsmith_runtime.errors import ConfigError

_TRACE_BYTES = 64

NAMES = frozenset(
    {
        "controller.write",
        "controller.wrote",
        "sampler.load",
        "sampler.loaded",
        "sampler.sample",
        "sampler.sampled",
        "scheduler.activated",
        "scheduler.adopt",
        "scheduler.adopted",
        "scheduler.create",
        "scheduler.created",
        "scheduler.move",
        "scheduler.moving",
        "scheduler.place",
        "scheduler.placed",
        "scheduler.release",
        "scheduler.released",
        "trainer.adopt",
        "trainer.adopted",
        "trainer.commit",
        "trainer.committed",
        "trainer.compute",
        "trainer.computed",
        "trainer.delete",
        "trainer.deleted",
        "trainer.export",
        "trainer.exported",
        "trainer.hand_over",
        "trainer.handed_over",
        "trainer.idle",
        "trainer.intend",
        "trainer.intended",
        "trainer.leave",
        "trainer.left",
        "trainer.load",
        "trainer.loaded",
        "trainer.renew",
        "trainer.renewed",
        "trainer.replay",
        "trainer.replayed",
        "trainer.save",
        "trainer.save_written",
        "trainer.snapshot",
        "trainer.snapshot_written",
        "trainer.snapshotted",
        "trainer.submit",
        "trainer.submitted",
    }
)
"""All points. A present tense stands before what it names, a past tense behind it."""


@dataclass(slots=True)
class _Action:
    kind: str
    argument: float
    num_hits: int = 0

    def run(self) -> None:
        self.num_hits += 1
        if self.kind == "sleep":
            time.sleep(self.argument)
        elif self.num_hits == int(self.argument):
            os.kill(os.getpid(), signal.SIGKILL)


def parse(text: str) -> dict[str, _Action]:
    """Return the action of each point that the setting names.

    Raises:
        ConfigError: a point does not exist, or an action cannot be read.
    """
    actions = {}
    for entry in filter(None, text.split(",")):
        name, _, action = entry.partition("=")
        kind, _, argument = action.partition(":")
        if kind not in ("sleep", "kill"):
            raise ConfigError(f"failpoint {entry!r} is not NAME=sleep:SECONDS or NAME=kill:N")
        if name not in NAMES:
            raise ConfigError(f"failpoint {name!r} does not exist")
        actions[name] = _Action(kind, float(argument or 1))
    return actions


_actions = parse(os.environ.get("TINSMITH_FAILPOINTS", ""))
_trace_path = os.environ.get("TINSMITH_FAILPOINT_TRACE")
_trace = os.open(_trace_path, os.O_WRONLY | os.O_CREAT, 0o600) if _trace_path else None


def passing(name: str) -> None:
    """Mark that the process is about to do what the name says, or has done it."""
    if _trace is not None:
        os.pwrite(_trace, name.encode().ljust(_TRACE_BYTES), 0)
    action = _actions.get(name)
    if action is not None:
        action.run()
