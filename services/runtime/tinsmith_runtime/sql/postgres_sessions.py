"""Sessions of a PostgreSQL server: how they are opened, and what their errors mean."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit

import asyncpg
import sqlalchemy as sa

from tinsmith_runtime.errors import ConfigError

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from asyncpg.connect_utils import SessionAttribute
Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

ResultT = TypeVar("ResultT")

_SCHEMES = ("postgresql", "postgres")
_SCHEMA_PATTERN = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_DURABLE = ("on", "remote_apply")

# Administrator's shutdown, crash, start, idle session: the server ends the session.
_SESSION_ENDS = ("57P01", "57P02", "57P03", "57P05", "25P03", "25P04")
_TOO_MANY_CONNECTIONS = "53300"
_READ_ONLY = "25006"
_DISK_FULL = "53100"
# Deadlock, serialization failure, lock timeout, cancelled by an administrator or a timeout, memory.
_PASSING = ("40P01", "40001", "55P03", "57014", "53200")
# Password or role, database, privilege: another attempt fails alike.
_WRONG_SETTINGS = ("28P01", "28000", "3D000", "42501")
_CONNECT_ERRORS = (
    OSError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    # None of the hosts takes writes; its class is private.
    asyncpg.InternalClientError,
)


class PassingError(Exception):
    """The server or the session cannot go on now; what was not committed can be run again.

    Args:
        message: What happened.
        keeps_session: Whether the same session can do it.
    """

    def __init__(self, message: str, *, keeps_session: bool = False) -> None:
        super().__init__(message)
        self.keeps_session = keeps_session


@dataclass(frozen=True, kw_only=True, slots=True)
class PostgresTarget:
    """A schema of a database, and how sessions on it behave."""

    url: str = field(repr=False)
    """`postgresql://user:password@host:port,host:port/database`; the host that takes writes is
    found out."""
    schema: str
    application_name: str = "tinsmith"
    answer_timeout_s: float = 30.0
    """Time after which a silent server counts as gone."""
    connect_timeout_s: float = 5.0
    _hosts: list[str] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in _SCHEMES:
            raise ConfigError("a database URL begins with postgresql://")
        if not _SCHEMA_PATTERN.fullmatch(self.schema):
            raise ConfigError(f"{self.schema!r} is not the name of a schema")
        self._hosts.extend(parts.netloc.rpartition("@")[2].split(","))

    @property
    def name(self) -> str:
        """What messages call the database: no user, no password."""
        parts = urlsplit(self.url)
        return f"{parts.netloc.rpartition('@')[2]}{parts.path} (schema {self.schema})"

    async def connect(self, *, is_leading: bool = False) -> Connection:
        """Open a session on the host that takes writes.

        Args:
            is_leading: Whether later sessions are to try the same host first, so that reads follow
                the writer to a new primary.

        Raises:
            ConfigError: If the credentials or the database are wrong.
            PassingError: If no host can be reached, or none takes writes.
        """
        problems: list[str] = []
        for host in tuple(self._hosts):
            try:
                session = await asyncpg.connect(
                    self._url_of(host),
                    timeout=self.connect_timeout_s,
                    server_settings=dict(self._settings()),
                    target_session_attrs=self._target(),
                )
            except asyncpg.ClientConfigurationError as error:
                raise ConfigError(f"the URL of {self.name} cannot be read: {error}") from error
            except _CONNECT_ERRORS as error:
                if sqlstate_of(error) in _WRONG_SETTINGS:
                    raise ConfigError(f"{self.name} refuses this process: {error}") from error
                problems.append(f"{host}: {error or type(error).__name__}")
                continue
            if is_leading and self._hosts[0] != host:
                self._hosts.remove(host)
                self._hosts.insert(0, host)
            return session
        raise PassingError("; ".join(problems))

    async def check_durable(self, session: Connection) -> None:
        """Refuse a server that tells of commits which a crash may take.

        Raises:
            ConfigError: If `synchronous_commit` is weaker than `on`.
        """
        found = await session.fetchval("SHOW synchronous_commit")
        if found not in _DURABLE:
            raise ConfigError(
                f"{self.name} has synchronous_commit={found}; acknowledged operations would be "
                "lost in a crash, set it to on"
            )

    def _url_of(self, host: str) -> str:
        parts = urlsplit(self.url)
        credentials, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{credentials}{at}{host}").geturl()

    def _target(self) -> SessionAttribute | None:
        # None leaves it to the URL; the enumeration is private to asyncpg, which takes its values.
        is_given = "target_session_attrs=" in urlsplit(self.url).query
        return None if is_given else cast("SessionAttribute", "read-write")

    def _settings(self) -> Mapping[str, str]:
        answer_ms = round(1000 * self.answer_timeout_s)
        return {
            "application_name": self.application_name,
            "search_path": f'"{self.schema}"',
            "default_transaction_isolation": "read committed",
            # The server has to give up before this side does, so that its errors arrive.
            "statement_timeout": str(answer_ms * 2 // 3),
            "lock_timeout": str(answer_ms // 3),
            "idle_in_transaction_session_timeout": str(answer_ms // 3),
            # A session whose client vanished holds its locks no longer than this.
            "tcp_keepalives_idle": "10",
            "tcp_keepalives_interval": "5",
            "tcp_keepalives_count": "3",
            # A commit that did not reach the standby is told by a warning.
            "client_min_messages": "warning",
        }


async def answer_within(session: Connection, timeout_s: float, call: Awaitable[ResultT]) -> ResultT:
    """Wait for the answer to a call; the connection is cut when it does not come.

    Cut, because a call that is cancelled makes asyncpg cancel the statement on the server. A COMMIT
    that is cancelled while it waits for the standby is acknowledged without it.
    """
    timer = asyncio.get_running_loop().call_later(timeout_s, session.terminate)
    try:
        return await call
    finally:
        timer.cancel()


def sqlstate_of(error: BaseException) -> str:
    """Return the SQLSTATE of an error of asyncpg or SQLAlchemy, empty if it has none."""
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    return getattr(cause, "sqlstate", None) or ""


def is_disk_full(error: BaseException) -> bool:
    """Whether the disk of the server is full."""
    return sqlstate_of(error) == _DISK_FULL


def is_read_only(error: BaseException) -> bool:
    """Whether a statement would have written where nothing may be written."""
    return sqlstate_of(error) == _READ_ONLY


def is_session_over(error: BaseException, session: Connection) -> bool:
    """Whether an error means that another session is needed."""
    sqlstate = sqlstate_of(error)
    return (
        session.is_closed()
        or sqlstate in (*_SESSION_ENDS, _READ_ONLY, _TOO_MANY_CONNECTIONS)
        or sqlstate.startswith("08")
        or isinstance(error, OSError)
    )


def is_passing(error: BaseException, session: Connection) -> bool:
    """Whether the same transaction may succeed later."""
    return is_session_over(error, session) or sqlstate_of(error) in _PASSING


def is_refusal(error: BaseException, session: Connection) -> bool:
    """Whether a server that is well said no to a COMMIT, so that it surely did not take place."""
    return (
        isinstance(error, asyncpg.PostgresError)
        and getattr(error, "severity_en", None) == "ERROR"
        and not is_session_over(error, session)
    )
