"""The servers of this user on this machine: a file for each, and which of them commands use.

`tinsmith up` announces itself in `servers/` of the state directory and takes the file away at a
clean end. The file is locked for as long as the process lives. So one that a crash left behind is
told from a server that runs, even if another process got its number. Several servers run beside
each other without knowing of one another: clients take the newest, or the one that was chosen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from tinsmith.errors import ConfigurationError
from tinsmith.whole_files import write_whole

if sys.platform != "win32":
    import fcntl

_FOLDER = "servers"
_CHOSEN_FILE = "chosen"
_PRIVATE_MODE = 0o600


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LocalServer:
    """What a server wrote about itself.

    Attributes:
        address: `host:port` of its gateway; `https://host:port` with TLS.
        api_key: The key of its operators.
        project: Where clients work unless they say otherwise.
        pid: Its process.
        start_time: When it began to serve.
        data_dir: Where it keeps everything.
        models: Its base models.
        model_sources: Folder or hub id of each base model. Only this file says where folders are.
        device: What it computes on, in words.
        is_running: Whether the process still holds its file.
    """

    address: str
    api_key: str = dataclasses.field(repr=False)
    project: str
    pid: int
    start_time: datetime.datetime
    data_dir: str = ""
    models: tuple[str, ...] = ()
    model_sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    device: str = ""
    is_running: bool = True


def announcements(state_dir: Path) -> Path:
    """Return the folder that servers announce themselves in, made."""
    folder = state_dir / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Announcement:
    """The file of a server that runs; a context that takes it away at its end."""

    def __init__(self, state_dir: Path, server: LocalServer) -> None:
        self._state_dir = state_dir
        self._server = server
        self._path = announcements(state_dir) / f"{server.pid}.json"
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        """Write the file, complete and locked before it has its name; clear those of the dead."""
        for path in self._path.parent.glob("*.json"):
            with contextlib.suppress(ConfigurationError, FileNotFoundError):
                if not _read(path).is_running:
                    path.unlink()
        temporary = self._path.with_suffix(".writing")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._file = os.fdopen(os.open(temporary, flags, _PRIVATE_MODE), "w", encoding="utf-8")
        if sys.platform != "win32":
            # A file system without locks: the process number alone has to do.
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        json.dump(_encode(self._server), self._file)
        self._file.flush()
        os.fsync(self._file.fileno())
        temporary.replace(self._path)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the file away, and the choice if it was this server."""
        if self._file is None:
            return
        self._path.unlink(missing_ok=True)
        if chosen_address(self._state_dir) == self._server.address:
            choose(self._state_dir, "")
        self._file.close()
        self._file = None


def list_servers(state_dir: Path) -> list[LocalServer]:
    """Return the servers of this user, the newest first, also those that died.

    Raises:
        ConfigurationError: If a file cannot be read.
    """
    found = []
    for path in (state_dir / _FOLDER).glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            found.append(_read(path))
    return sorted(found, key=lambda server: (server.is_running, server.start_time), reverse=True)


def server_in_use(state_dir: Path) -> LocalServer | None:
    """Return the server that commands use: the chosen one, else the newest that runs.

    Raises:
        ConfigurationError: If the chosen one does not run, or none does though one is announced.
    """
    servers = list_servers(state_dir)
    running = [server for server in servers if server.is_running]
    chosen = chosen_address(state_dir)
    if chosen:
        for server in running:
            if server.address == chosen:
                return server
        others = " or ".join(f"`tinsmith use {server.address}`" for server in running)
        raise ConfigurationError(
            f"the server {chosen}, which was chosen with `tinsmith use`, does not run",
            remedy=others
            or "start it with `tinsmith up`, or take the choice back with `tinsmith use newest`",
        )
    if running:
        return running[0]
    if servers:
        last = servers[0]
        folder = f" --data-dir {last.data_dir}" if last.data_dir else ""
        raise ConfigurationError(
            f"no server runs on this machine; the last one, {last.address}, was killed",
            remedy=f"start it again: tinsmith up{folder}",
        )
    return None


def model_sources(state_dir: Path, address: str) -> Mapping[str, str]:
    """Return the folder or hub id of each base model of a server of this user, by name.

    Nothing is known of another server: its files are on another machine, or another user's.
    """
    for server in list_servers(state_dir):
        if server.address == address and server.is_running:
            return server.model_sources
    return {}


def chosen_address(state_dir: Path) -> str:
    """Return the address that `tinsmith use` named; empty if none."""
    try:
        return (state_dir / _CHOSEN_FILE).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


def choose(state_dir: Path, address: str) -> None:
    """Make commands use one server; an empty address takes that back."""
    path = state_dir / _CHOSEN_FILE
    if not address:
        path.unlink(missing_ok=True)
        return
    write_whole(path, address.encode())


def _encode(server: LocalServer) -> dict[str, object]:
    values = dataclasses.asdict(server)
    del values["is_running"]
    return values | {"start_time": server.start_time.isoformat()}


def _read(path: Path) -> LocalServer:
    with path.open(encoding="utf-8") as file:
        try:
            values = json.load(file)
            server = LocalServer(
                address=str(values["address"]),
                api_key=str(values["api_key"]),
                project=str(values["project"]),
                pid=int(values["pid"]),
                start_time=datetime.datetime.fromisoformat(values["start_time"]),
                data_dir=str(values.get("data_dir", "")),
                models=tuple(map(str, values.get("models", ()))),
                model_sources={
                    str(name): str(source)
                    for name, source in values.get("model_sources", {}).items()
                },
                device=str(values.get("device", "")),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{path} cannot be read: {error!r}", remedy="delete it, then run `tinsmith up`"
            ) from error
        return dataclasses.replace(server, is_running=_is_held(file) and _exists(server.pid))


def _is_held(file: IO[str]) -> bool:
    """Whether another process, or another part of this one, has the file locked."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _exists(pid: int) -> bool:
    if sys.platform == "win32":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
