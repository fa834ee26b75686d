"""The entry point: connects, creates runs and samplers, lists and deletes."""

from __future__ import annotations

import asyncio
import atexit
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tinsmith.account.audit_forms import AuditClient
from tinsmith.account.session_forms import SessionClient
from tinsmith.account.usage_forms import UsageClient
from tinsmith.checkpoints.checkpoint_forms import CheckpointClient
from tinsmith.client_forms import ClientForms
from tinsmith.episodes.episode_forms import EpisodeClient
from tinsmith.jobs.job_forms import JobClient
from tinsmith.keys.key_forms import KeyClient
from tinsmith.matches.match_forms import MatchClient
from tinsmith.rollouts.play_forms import PlayableEnvironments
from tinsmith.rollouts.rollout_forms import RolloutClient
from tinsmith.rpc.core import ClientCore
from tinsmith.sampling.opening import open_sampler
from tinsmith.sampling.sampler_calls import SamplerSource
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.settings import Origin, RetryPolicy, resolve_settings
from tinsmith.tracing import switch
from tinsmith.training.list_forms import TrainingRunListClient
from tinsmith.training.run_forms import TrainingRun
from tinsmith.version import __version__

_LAST_METRICS_S = 3.0
"""Time that metrics get to be recorded in when a client is closed."""


class Client(ClientForms):
    """A connection to a Tinsmith server; opens a session, and finishes it at the end.

    Methods without `_async` block; they may be called from any thread. Those with `_async` are for
    asyncio code. Use it as a context manager, or call `close`.

    Attributes:
        runs: Training runs of the project.
        checkpoints: Checkpoints of the project.
        keys: API keys of the project.
        environments: Environments of the server, and playing them.
        episodes: Episodes for remote agents.
        rollouts: Groups of episodes that the server plays.
        matches: Several agents that play and learn side by side.
        jobs: Training jobs.
        sessions: Sessions of the project's clients.
        audit: What was done in the project, for its admins.
        usage: What was used, and budgets.

    Example:
        >>> with tinsmith.Client() as client:
        ...     run = client.create_lora_training_run("tiny", rank=32)
    """

    def __init__(
        self,
        address: str | None = None,
        api_key: str | None = None,
        *,
        project: str | None = None,
        display_name: str = "",
        labels: Mapping[str, str] | None = None,
        ca_file: Path | str | None = None,
        operation_timeout_s: float = 3600.0,
        retry: RetryPolicy | None = None,
        session: str = "",
    ) -> None:
        """Connect.

        Args:
            address: `host:port`, `https://host:port` for TLS, else `TINSMITH_ADDRESS`, else the
                server of `tinsmith up`.
            api_key: The key, else `TINSMITH_API_KEY`, else that of the local server.
            project: Id of the project, else `TINSMITH_PROJECT`, else the one of the key.
            display_name: What the session is for, for people.
            labels: Labels of the session.
            ca_file: PEM file of the authorities to trust, for a server with a private certificate;
                else `TINSMITH_CA_FILE`, else gRPC's own list.
            operation_timeout_s: How long `result()` waits unless it is told otherwise.
            retry: How long and how often calls are sent again.
            session: Resumes the session of an earlier client, by its resource name or id,
                instead of opening one; `resumed_runs` are its runs. `display_name` and `labels`
                stay as they were.

        Raises:
            ConfigurationError: If address or key is missing, or the file of authorities not there.
            FailedPreconditionError: If the session to resume was finished.
            TinsmithError: If the server cannot be reached or refuses the key.
        """
        switch.start()
        settings = resolve_settings(
            address=address,
            api_key=api_key,
            project=project,
            ca_file=ca_file,
            operation_timeout_s=operation_timeout_s,
            retry=retry,
        )
        core = ClientCore(settings)
        super().__init__(core)
        self._closed = False
        self.runs = TrainingRunListClient(self._core)
        self.checkpoints = CheckpointClient(self._core)
        self.keys = KeyClient(self._core)
        self.environments = PlayableEnvironments(self._core)
        self.episodes = EpisodeClient(self._core)
        self.rollouts = RolloutClient(self._core)
        self.matches = MatchClient(self._core)
        self.jobs = JobClient(self._core)
        self.sessions = SessionClient(self._core)
        self.audit = AuditClient(self._core)
        self.usage = UsageClient(self._core)
        self._resumed_runs: list[TrainingRun] = []
        try:
            self._core.background.call(self._core.find_project())
            if session:
                self._resumed_runs = self._core.background.call(self._resume(session))
            else:
                self._core.background.call(
                    self._core.session.open(
                        self._core.project,
                        display_name=display_name,
                        labels=labels or {},
                        version=__version__,
                    )
                )
        except BaseException:
            self._shut_down("errored")
            raise
        reference = weakref.ref(self)
        self._at_exit = lambda: _close_at_exit(reference)
        atexit.register(self._at_exit)

    @classmethod
    async def connect_async(cls, *args: Any, **kwargs: Any) -> Self:
        """Connect without blocking the event loop; the arguments are those of `Client`.

        Returns:
            The client.

        Raises:
            ConfigurationError: As `Client`.
            TinsmithError: As `Client`.

        Example:
            >>> client = await tinsmith.Client.connect_async()
        """
        return await asyncio.to_thread(cls, *args, **kwargs)

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"{type(self).__name__}({self.address!r}, project={self.project!r}{state})"

    @property
    def project(self) -> str:
        """Id of the project."""
        return self._core.settings.project

    @property
    def address(self) -> str:
        """Address of the server."""
        return self._core.settings.address

    @property
    def origin(self) -> Origin:
        """The server and the project that it is connected to, without the key."""
        return self._core.origin

    @property
    def is_closed(self) -> bool:
        """Whether the client was closed."""
        return self._closed

    @property
    def session(self) -> str:
        """Resource name of the session: keep it, to resume after a crash.

        Raises:
            TinsmithError: If the session ended.
        """
        return self._core.session.name

    @property
    def resumed_runs(self) -> list[TrainingRun]:
        """The runs of a session that was resumed, oldest first; each goes on at its next number."""
        return list(self._resumed_runs)

    def reopen_sampler(self, source: SamplerSource) -> Sampler:
        """Open a sampler of the same weights as another one, such as that of another process.

        Args:
            source: What the other one samples from.

        Returns:
            The sampler.

        Raises:
            NotFoundError: If the run or the checkpoint was deleted.

        Example:
            >>> again = client.reopen_sampler(sampler.source)
        """
        return self._core.background.call(
            open_sampler(
                self._core,
                base_model=source.base_model,
                checkpoint=source.checkpoint,
                run=source.run,
                min_version=lambda: source.min_version,
                max_staleness=source.max_staleness,
            )
        )

    def close(self, outcome: str = "success") -> None:
        """Finish the session and fail what is pending. Repeating it changes nothing.

        Args:
            outcome: `success`, `errored` or `interrupted`, for people.
        """
        if self._closed or self._core.background.is_of_parent:
            # The session of a client that was forked belongs to the process that opened it.
            return
        atexit.unregister(self._at_exit)
        self._shut_down(outcome)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(_outcome_of(kind))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close, _outcome_of(kind))

    def _shut_down(self, outcome: str) -> None:
        self._closed = True
        try:
            self._core.background.call(self._close(outcome))
        finally:
            self._core.background.close()

    async def _close(self, outcome: str) -> None:
        for stream in list(self._core.streams):
            stream.close()
        await self._core.metric_log.close(_LAST_METRICS_S)
        await self._core.session.close(outcome)
        await self._core.transport.close()

    async def _resume(self, session: str) -> list[TrainingRun]:
        resumed = await self._core.session.resume(self._core.session_name(session))
        return [TrainingRun(self._core, each.run, each.status) for each in resumed]


class ServiceClient(Client):
    """`Client`, built with the arguments of Tinker's class of this name.

    Example:
        >>> service = tinsmith.ServiceClient(user_metadata={"team": "a"})
    """

    def __init__(
        self,
        user_metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        """Connect.

        Args:
            user_metadata: Labels of the session.
            project_id: Id of the project; that of the key if None.
            display_name: What the session is for, for people.
            base_url: `host:port`, `http://host:port`, or `https://host:port` for TLS; else
                `TINSMITH_ADDRESS`, else the server of `tinsmith up`.
            api_key: The key, else `TINSMITH_API_KEY`, else that of the local server.

        Raises:
            ConfigurationError: If address or key is missing.
            TinsmithError: If the server cannot be reached or refuses the key.
        """
        super().__init__(
            base_url,
            api_key,
            project=project_id,
            display_name=display_name or "",
            labels=user_metadata,
        )


def _outcome_of(kind: type[BaseException] | None) -> str:
    if kind is None:
        return "success"
    return "errored" if issubclass(kind, Exception) else "interrupted"


def _close_at_exit(reference: weakref.ref[Client]) -> None:
    client = reference()
    if client is not None:
        client.close("interrupted")
