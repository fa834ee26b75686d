"""Forms of strangers are tried in processes that end in time, before the sampler compiles them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from tinsmith_runtime.confined.process import (
    ConfinedProcess,
    ConfinedProcesses,
    Confinement,
    NotBegunError,
    RefusedByWorkError,
    WorkEndedError,
)
from tinsmith_runtime.errors import WorkerUnavailableError
from tinsmith_runtime.fairness.fair_slots import FairSlots

MAX_COMPILE_S = 3.0
"""What a form may take to be compiled, of the clock and of a core."""
MAX_COMPILE_BYTES = 2**30
"""Address space of the process that tries it."""
MAX_TRIED = 2
"""Forms that are compiled at once, of one project one."""
_START_S = 60.0
_WORKER = "tinsmith_sampler.forms.worker"


class FormTrials:
    """The confined processes of a sampler, at which projects take turns."""

    def __init__(self) -> None:
        self._processes = ConfinedProcesses(
            Confinement(
                timeout_s=MAX_COMPILE_S,
                start_timeout_s=_START_S,
                memory_bytes=MAX_COMPILE_BYTES,
                max_processes=MAX_TRIED,
            )
        )
        self._slots = FairSlots(MAX_TRIED, 1)

    def hold(self, project: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Wait for a place to compile a form of a project, and keep it in this context."""
        return self._slots.hold(project)

    def of_model(
        self, directory: Path, vocab_size: int, end_tokens: Sequence[int]
    ) -> FormTrialsOfModel:
        """Return what tries forms of a base model; see `FormCompiler` for the arguments."""
        first = {
            "directory": str(directory.absolute()),
            "vocab_size": vocab_size,
            "end_tokens": list(end_tokens),
        }
        # What one form did to a process says nothing of the next form: no pause.
        return FormTrialsOfModel(
            [
                ConfinedProcess(_WORKER, first, self._processes, work="form", max_pause_s=0.0)
                for _ in range(MAX_TRIED)
            ]
        )

    def close(self) -> None:
        """End the processes."""
        self._processes.close()


class FormTrialsOfModel:
    """Tries forms with the tokens of one base model.

    Args:
        idle: A process for each place; none has begun.
    """

    def __init__(self, idle: list[ConfinedProcess]) -> None:
        # The last one that came free is the first to be taken: mostly one is enough.
        self._idle = idle

    async def check(self, kind: str, source: str) -> None:
        """Compile a form, and keep nothing. The caller holds a place.

        Raises:
            ValueError: If it is no such form, or takes too much time or memory.
            WorkerUnavailableError: If the process that tries forms did not come up.
        """
        process = self._idle.pop()
        try:
            await asyncio.to_thread(process.call, {"kind": kind, "source": source})
        except RefusedByWorkError as error:
            raise ValueError(str(error)) from error
        except NotBegunError as error:
            # No fault of the form; a machine that is busy may do better in a moment.
            raise WorkerUnavailableError(
                f"the process that tries forms of answers did not come up: {error}; send the "
                "request again"
            ) from error
        except WorkEndedError as error:
            raise ValueError(f"cannot be compiled: it {error}; send a smaller form") from error
        finally:
            self._idle.append(process)
