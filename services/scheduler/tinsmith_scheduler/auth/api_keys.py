"""API keys: made, listed, revoked and checked.

All keys are held in memory, because every call of every client is checked against them; the table
survives a restart. A change is visible once it is committed. So a revoked key is refused here at
once, and at other pods when their cached answer expires.

The bootstrap project is the operators': its admin keys manage the keys of every project, so that a
project gets its first key. Admin keys of other projects manage their own.
"""

from __future__ import annotations

import hmac
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import sqlalchemy as sa

from tinsmith.names import KeyName
from tinsmith_runtime.errors import (
    AlreadyExistsError,
    ConfigError,
    KeyExpiredError,
    KeyInvalidError,
    KeyNotFoundError,
    KeyRevokedError,
    RoleMissingError,
)
from tinsmith_runtime.records import RequestIdentity
from tinsmith_runtime.rpc.auth import ApiKey, Caller
from tinsmith_runtime.rpc.key_checks import check_secret
from tinsmith_runtime.rpc.permissions import KeyRole
from tinsmith_runtime.rpc.pod_identity import POD_KEY_PREFIX, verify_pod_key
from tinsmith_runtime.rpc.requests import decode_page_token, encode_page_token
from tinsmith_runtime.sql import Database, insert
from tinsmith_scheduler.auth.key_index import KeyIndex
from tinsmith_scheduler.store.database import record_action, remember, reused
from tinsmith_scheduler.store.job_reports import begin_report
from tinsmith_scheduler.store.records import Key, KeyState, NewJobKey, PageRequest
from tinsmith_scheduler.store.retention import BOOTSTRAP_NAME, forget_keys
from tinsmith_scheduler.store.tables import keys, projects, requests


class Keys:
    """The keys of all projects; implements `KeyVerifier`.

    Args:
        database: Where they are kept.
        operator_project: The project whose admins manage the keys of every project.
        wall_clock: Seconds since the epoch.
        pod_roots: The root secrets, the one in use first, that the keys of pods and the checks of
            keys of users are derived from.
    """

    def __init__(
        self,
        database: Database,
        *,
        operator_project: str,
        wall_clock: Callable[[], float],
        pod_roots: Sequence[str],
    ) -> None:
        self._database = database
        self._operator_project = operator_project
        self._wall_clock = wall_clock
        self._pod_roots = tuple(pod_roots)
        self._keys = KeyIndex()

    async def load(self) -> None:
        """Read the keys; call once, before anything is served."""
        rows = await self._database.read(
            lambda connection: [_key(row) for row in connection.execute(sa.select(keys))]
        )
        self._keys = KeyIndex(rows)

    async def ensure(self, api_key: ApiKey, *, project: str, role: KeyRole) -> Key:
        """Make sure that a given key exists; one that was revoked stays revoked.

        Raises:
            ConfigError: If the id belongs to another secret or project.
        """
        known = self._keys.get(api_key.key_id)
        if known is None:
            return await self._add(api_key, project, role, BOOTSTRAP_NAME)
        if (known.secret_sha256, known.project) != (api_key.secret_sha256, project):
            raise ConfigError(
                f"bootstrap_key: the id {api_key.key_id} exists with another secret or project"
            )
        return known

    async def ensure_job_key(self, new: NewJobKey, caller: Caller) -> Key:
        """Return the key of a job, made unless it exists; one that was revoked stays revoked.

        The first key of a job makes its report, in the place of what another one of the name
        reported.

        Raises:
            AlreadyExistsError: If the id is that of another key.
        """
        known = self._keys.get(new.key_id)
        if known is None:
            known = await self._add(
                ApiKey(new.key_id, ""),
                new.job.project,
                new.role,
                new.display_name,
                caller=caller,
                job_key=new,
            )
        if (known.secret_sha256, known.job, known.job_uid, known.pool) != (
            new.secret_sha256,
            str(new.job),
            new.uid,
            new.pool,
        ):
            raise AlreadyExistsError(f"the key id {new.key_id} is in use", key=new.key_id)
        return known

    async def revoke_job_key(self, name: KeyName, caller: Caller) -> Key:
        """Refuse the key of a job from now on; repeating it succeeds.

        Raises:
            KeyNotFoundError: If no job has such a key.
        """
        key = self._keys.get(name.key)
        if key is None or key.project != name.project or not key.job:
            raise KeyNotFoundError(f"job key {name} does not exist", key=name)
        return await self._refuse(key, caller)

    async def revoke_keys_of_job(self, job: str, uid: str, caller: Caller) -> None:
        """Refuse all keys of a job from now on."""
        for key in list(self._keys.accepted_of_jobs(job, 0)):
            if key.job_uid == uid:
                await self._refuse(key, caller)

    def list_job_keys(self, page: PageRequest, job: str = "") -> tuple[list[Key], str]:
        """Return the keys of jobs that are accepted, oldest first, and the token that goes on.

        Args:
            page: Which part of the list.
            job: Name of the job whose keys are wanted; empty for those of all jobs.

        Raises:
            InvalidFieldError: If the page token is not one of this list.
        """
        list_name = f"jobKeys/{job}"
        after = decode_page_token(list_name, page.token) or 0
        found = list(itertools.islice(self._keys.accepted_of_jobs(job, after), page.size + 1))
        shown = found[: page.size]
        more = len(found) > len(shown)
        return shown, encode_page_token(list_name, shown[-1].serial) if more else ""

    async def verify(
        self,
        key_id: str,
        secret_sha256: bytes,
        check: str = "",  # noqa: ARG002 - of the protocol; a look-up is no call here
    ) -> Caller:
        """Return the caller behind a key; see `KeyVerifier`."""
        if key_id.startswith(POD_KEY_PREFIX):
            return Caller.of_pod(verify_pod_key(self._pod_roots, key_id, secret_sha256))
        key = self._keys.get(key_id)
        # Without a secret: whether a key that was good before still is.
        expected = key.secret_sha256 if key is not None and secret_sha256 else b""
        if not hmac.compare_digest(expected, secret_sha256) or key is None:
            raise KeyInvalidError("the API key is unknown to this server")
        if key.state is KeyState.REVOKED:
            raise KeyRevokedError(f"the API key {key_id} was revoked", key_id=key_id)
        if key.expire_time_s is not None and key.expire_time_s <= self._wall_clock():
            raise KeyExpiredError(f"the API key {key_id} has expired", key_id=key_id)
        return Caller(key.project, key.role, key_id, key.pool)

    def check_secrets(self) -> Sequence[str]:
        """Return what the checks of keys are made with, newest first."""
        return [check_secret(root) for root in self._pod_roots]

    async def create(
        self,
        caller: Caller,
        *,
        project: str,
        role: KeyRole,
        display_name: str,
        request: RequestIdentity,
        ttl_s: float | None = None,
    ) -> tuple[Key, ApiKey]:
        """Create a key, and its project with the first one.

        Raises:
            RoleMissingError: If the caller may not manage the keys of the project.
            RequestIdReusedError: If the request was answered before: the secret is not kept.
        """
        self.require_manager(caller, project)
        api_key = ApiKey.generate().checked(self._pod_roots[0])
        key = await self._add(
            api_key, project, role, display_name, caller=caller, request=request, ttl_s=ttl_s
        )
        return key, api_key

    async def list(self, caller: Caller, project: str, page: PageRequest) -> tuple[list[Key], str]:
        """Return keys of a project, newest first, and the token that goes on.

        Raises:
            RoleMissingError: If the caller may not manage the keys of the project.
            InvalidFieldError: If the page token is not one of this list.
        """
        self.require_manager(caller, project)
        list_name = f"projects/{project}/keys"
        before = decode_page_token(list_name, page.token)
        found = list(itertools.islice(self._keys.newest_of_project(project, before), page.size + 1))
        shown = found[: page.size]
        more = len(found) > len(shown)
        return shown, encode_page_token(list_name, shown[-1].serial) if more else ""

    async def revoke(self, caller: Caller, name: KeyName) -> Key:
        """Refuse a key from now on; repeating it succeeds. A key may revoke itself.

        Raises:
            RoleMissingError: If the caller is no admin, and the key is not its own.
            KeyNotFoundError: If the project has no such key, or is not the caller's.
        """
        if (caller.project, caller.key_id) != (name.project, name.key):
            caller.require_role(KeyRole.ADMIN)
        key = self._keys.get(name.key)
        is_own = caller.project in (name.project, self._operator_project)
        if key is None or key.project != name.project or not is_own:
            raise KeyNotFoundError(f"key {name} does not exist", key=name)
        return await self._refuse(key, caller)

    async def _refuse(self, key: Key, caller: Caller) -> Key:
        if key.state is KeyState.REVOKED:
            return key
        now_s = self._wall_clock()

        def write(connection: sa.Connection) -> None:
            connection.execute(
                sa.update(keys)
                .where(keys.c.key_id == key.key_id)
                .values(state=KeyState.REVOKED.value)
            )
            name = str(KeyName(key.project, key.key_id))
            record_action(connection, caller, "revoke_key", name, project=key.project, now_s=now_s)

        revoked = replace(key, state=KeyState.REVOKED)
        # Refused before the commit: should the commit fail, the caller revokes again.
        self._keys.put(revoked)
        try:
            await self._database.write(write)
        except BaseException:  # a caller that is gone too: whether it was committed is not known
            self._keys.put(key)
            raise
        return revoked

    async def forget(self, before_s: float) -> None:
        """Forget the keys that were refused before a time, in seconds since the epoch."""
        while gone := await self._database.write(
            lambda connection: forget_keys(connection, before_s)
        ):
            for key_id in gone:
                self._keys.drop(key_id)

    def of_caller(self, caller: Caller) -> Key:
        """Return the key that a call was made with.

        Raises:
            KeyNotFoundError: If it was made by a pod, whose secret is no key of a project.
        """
        key = None if caller.is_pod else self._keys.get(caller.key_id)
        if key is None:
            raise KeyNotFoundError("the caller is a pod, which has no key", key=caller.key_id)
        return key

    def require_manager(self, caller: Caller, project: str) -> None:
        """Raise `RoleMissingError` unless a caller may manage a project."""
        caller.require_role(KeyRole.ADMIN)
        if caller.project not in (project, self._operator_project):
            raise RoleMissingError(
                f"project {project} is managed by its own admins and by those of "
                f"project {self._operator_project}",
                key_id=caller.key_id,
            )

    def is_operator(self, caller: Caller) -> bool:
        """Whether a caller manages every project."""
        return caller.role is KeyRole.ADMIN and caller.project == self._operator_project

    def require_operator(self, caller: Caller) -> None:
        """Raise `RoleMissingError` unless a caller manages every project."""
        if not self.is_operator(caller):
            raise RoleMissingError(
                f"this is for admins of project {self._operator_project}, the operators'",
                key_id=caller.key_id,
            )

    async def _add(
        self,
        api_key: ApiKey,
        project: str,
        role: KeyRole,
        display_name: str,
        *,
        caller: Caller | None = None,
        request: RequestIdentity | None = None,
        job_key: NewJobKey | None = None,
        ttl_s: float | None = None,
    ) -> Key:
        now_s = self._wall_clock()

        def write(connection: sa.Connection) -> Key:
            if request is not None:
                # The secret is not stored, so that a repeat is refused and never answered.
                if _is_known(connection, request):
                    raise reused(request)
                remember(connection, request, b"", now_s=now_s)
            if job_key is not None:
                # Its caller may have gone between the commit and our taking note of it.
                query = sa.select(*keys.c).where(keys.c.key_id == api_key.key_id)
                known = connection.execute(query).first()
                if known is not None:
                    return _key(known)
            connection.execute(
                insert(connection, projects)
                .values(project=project, create_time_s=now_s)
                .on_conflict_do_nothing()
            )
            row = connection.execute(
                sa.insert(keys)
                .values(
                    key_id=api_key.key_id,
                    project=project,
                    secret_sha256=job_key.secret_sha256 if job_key else api_key.secret_sha256,
                    role=role.value,
                    state=KeyState.ACTIVE.value,
                    display_name=display_name,
                    create_time_s=now_s,
                    expire_time_s=now_s + ttl_s if ttl_s is not None else None,
                    pool=job_key.pool if job_key else "",
                    job=str(job_key.job) if job_key else "",
                    job_uid=job_key.uid if job_key else "",
                )
                .returning(*keys.c)
            ).one()
            if job_key is not None:
                begin_report(connection, str(job_key.job), job_key.uid)
            if caller is not None:
                name = str(KeyName(project, api_key.key_id))
                record_action(connection, caller, "create_key", name, project=project, now_s=now_s)
            return _key(row)

        key = await self._database.write(write)
        self._keys.put(key)
        return key


def _is_known(connection: sa.Connection, request: RequestIdentity) -> bool:
    query = sa.select(requests.c.method).where(
        requests.c.project == request.project, requests.c.request_id == request.request_id
    )
    return connection.execute(query).first() is not None


def _key(row: sa.Row[tuple[object, ...]]) -> Key:
    values = dict(row._mapping)
    del values["end_time_s"]
    return Key(**{**values, "state": KeyState(values["state"]), "role": KeyRole(values["role"])})
