"""How worker processes are started: forked by a fork server, or as new interpreters.

The fork server needs Linux: its confinement, and that the pod adopts what dead workers leave. On
other systems each worker is a new interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tinsmith_environment.workers.confinement import ProcessLimits
from tinsmith_environment.workers.descendants import kill_tree
from tinsmith_environment.workers.fork_server import MAX_MESSAGE_BYTES
from tinsmith_runtime.errors import EnvironmentFailedError

logger = logging.getLogger(__name__)

_IS_LINUX = sys.platform == "linux"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSettings:
    """What every worker process is started with.

    Attributes:
        limits: Hard limits of each worker.
        variables: Environment variables.
        max_reply_bytes: Of one answer.
        has_own_user: Whether each worker has a user of its own.
        closed_folders: What workers find empty, where they have the pod's user.
        modules: What a fork server imports for its workers.
        shows_output: Whether what workers print goes to the pod's standard error.
        start_timeout_s: Longest time that a process takes to start.
    """

    limits: ProcessLimits
    variables: Mapping[str, str]
    max_reply_bytes: int
    has_own_user: bool
    closed_folders: Sequence[str] = ()
    modules: Sequence[str] = ()
    shows_output: bool = False
    start_timeout_s: float = 60.0

    def to_json(self) -> str:
        """Return what a process is told when it starts."""
        told = {
            "limits": self.limits.to_json(),
            "has_own_user": self.has_own_user,
            "max_reply_bytes": self.max_reply_bytes,
            "closed_folders": list(self.closed_folders),
            "modules": list(self.modules),
        }
        return json.dumps(told)


class StartedProcess(Protocol):
    """A process, from its start on."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None while its number is its own."""
        ...

    async def wait(self) -> int:
        """Return the exit code once it has ended."""
        ...


class WorkerStarter(Protocol):
    """Starts worker processes."""

    async def open(self) -> None:
        """Be ready to start workers.

        Raises:
            EnvironmentFailedError: If that fails.
        """
        ...

    async def start(self, calls: int, output: int, uid: int | None) -> StartedProcess:
        """Start a worker.

        Args:
            calls: Descriptor of its end of the socket for calls.
            output: Descriptor for what it prints.
            uid: User and group of the process; None for those of the pod.

        Raises:
            EnvironmentFailedError: If it cannot be started.
            OSError: If the system refuses.
        """
        ...

    async def close(self) -> None:
        """Start no more workers; those of a fork server end with it."""
        ...

    @property
    def pids(self) -> Sequence[int]:
        """Children of the pod that are not workers."""
        ...


def worker_starter(settings: ProcessSettings) -> WorkerStarter:
    """Return what starts workers on this system."""
    return ForkServer(settings) if _IS_LINUX else Interpreters(settings)


class Interpreters:
    """Starts each worker as a new interpreter; implements `WorkerStarter`."""

    def __init__(self, settings: ProcessSettings) -> None:
        self._settings = settings

    @property
    def pids(self) -> Sequence[int]:
        """Children of the pod that are not workers."""
        return ()

    async def open(self) -> None:
        """Be ready to start workers; nothing is needed."""

    async def start(self, calls: int, output: int, uid: int | None) -> StartedProcess:
        """Start a worker; see `WorkerStarter`."""
        return await _start("process", self._settings, stdin=calls, output=output, **_user_of(uid))

    async def close(self) -> None:
        """Start no more workers."""


@dataclass
class ForkedProcess:
    """A worker that the fork server forked; implements `StartedProcess`."""

    pid: int
    returncode: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> int:
        """Return the exit code once it has ended."""
        await self.ended.wait()
        assert self.returncode is not None
        return self.returncode

    def end(self, code: int) -> None:
        """Note the end."""
        if self.returncode is None:
            self.returncode = code
            self.ended.set()


class ForkServer:
    """Has workers forked by a process that is ready for it; implements `WorkerStarter`.

    One that dies takes its workers along, and the next start of a worker starts another one.
    """

    def __init__(self, settings: ProcessSettings) -> None:
        self._settings = settings
        self._turn = asyncio.Lock()
        self._socket: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._forked: dict[int, ForkedProcess] = {}
        self._answer: asyncio.Future[dict[str, Any]] | None = None

    @property
    def pids(self) -> Sequence[int]:
        """Children of the pod that are not workers."""
        return () if self._process is None else (self._process.pid,)

    async def open(self) -> None:
        """Start the fork server, unless it runs.

        Raises:
            EnvironmentFailedError: If it does not come up.
        """
        async with self._turn:
            await self._ready()

    async def start(self, calls: int, output: int, uid: int | None) -> StartedProcess:
        """Start a worker; see `WorkerStarter`."""
        async with self._turn:
            server = await self._ready()
            self._answer = asyncio.get_running_loop().create_future()
            message = json.dumps({"start": {"uid": uid}}).encode()
            try:
                socket.send_fds(server, [message], [calls, output])
                answer = await self._receive()
                return self._forked[int(answer["started"])]
            except (OSError, KeyError, TypeError, ValueError) as error:
                await self._drop()
                raise _did_not_start() from error

    async def close(self) -> None:
        """End the fork server and its workers."""
        async with self._turn:
            await self._drop()

    async def _ready(self) -> socket.socket:
        if self._socket is not None:
            return self._socket
        await self._drop()
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.setblocking(False)
        self._socket = own
        loop = asyncio.get_running_loop()
        self._answer = loop.create_future()
        loop.add_reader(own.fileno(), self._read)
        try:
            output = None if self._settings.shows_output else asyncio.subprocess.DEVNULL
            self._process = await _start(
                "fork_server", self._settings, stdin=other.fileno(), output=output
            )
            # From here on its end alone keeps the socket open, so that its death is heard.
            other.close()
            ready = await self._receive()
            logger.info("fork server started", extra={"modules": ready["preloaded"]})
            if ready["not_closed"]:
                logger.warning(
                    "workers may read the pod's files: set worker_uid_base",
                    extra={
                        "folders": list(self._settings.closed_folders),
                        "problem": ready["not_closed"],
                    },
                )
        except (OSError, KeyError, TypeError) as error:
            await self._drop()
            raise _did_not_start() from error
        except BaseException:
            await self._drop()
            raise
        finally:
            other.close()
        return own

    async def _receive(self) -> dict[str, Any]:
        """Return the answer to what was asked.

        Raises:
            EnvironmentFailedError: If there is none in time.
        """
        assert self._answer is not None
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                return await self._answer
        except (TimeoutError, EnvironmentFailedError) as error:
            await self._drop()
            raise _did_not_start() from error

    def _read(self) -> None:
        """Take one message; what is none ends the server, whose modules may have sent it."""
        assert self._socket is not None
        try:
            data = self._socket.recv(MAX_MESSAGE_BYTES)
            message = json.loads(data)
            for pid, code in message.get("ended", ()):
                self._forked.pop(int(pid)).end(int(code))
            if "started" in message:
                pid = int(message["started"])
                self._forked[pid] = ForkedProcess(pid)
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._disconnect()
            return
        if "ended" in message:
            # Only now may their numbers be given to other processes.
            reaped = [pid for pid, _ in message["ended"]]
            with contextlib.suppress(OSError):
                self._socket.send(json.dumps({"reap": reaped}).encode())
        elif self._answer is not None and not self._answer.done():
            self._answer.set_result(message)

    def _disconnect(self) -> None:
        """Give the server up with all that it forked, which ends with it in any case."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(_did_not_start())
            # Perhaps nothing waits for it.
            self._answer.exception()
        if self._process is not None and self._process.returncode is None:
            kill_tree(self._process.pid)
        for forked in self._forked.values():
            forked.end(-signal.SIGKILL)
        self._forked.clear()

    async def _drop(self) -> None:
        self._disconnect()
        process, self._process = self._process, None
        if process is not None:
            await process.wait()


async def _start(
    module: str, settings: ProcessSettings, *, stdin: int, output: int | None, **further: Any
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        # -P: the folder that the pod was started in is no place to import from.
        *(sys.executable, "-P", "-m", f"tinsmith_environment.workers.{module}"),
        settings.to_json(),
        stdin=stdin,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=output,
        env=dict(settings.variables),
        start_new_session=True,
        close_fds=True,
        **further,
    )


def _user_of(uid: int | None) -> dict[str, Any]:
    return {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}


def _did_not_start() -> EnvironmentFailedError:
    return EnvironmentFailedError(
        "the process that starts workers did not answer; see the log of the environment pod",
        cause="crashed",
    )
