"""What all parts of one client share: settings, loop, channels, session."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tinsmith import names
from tinsmith.errors import NotFoundError, TinsmithError, UnimplementedError
from tinsmith.names import DEFAULT_PROJECT
from tinsmith.rpc.event_loop_thread import BackgroundLoop
from tinsmith.rpc.futures import ResultFuture
from tinsmith.rpc.metric_log import MetricLog
from tinsmith.rpc.operations import OperationStream
from tinsmith.rpc.session import Session
from tinsmith.rpc.transport import Endpoint, Transport
from tinsmith.settings import ClientSettings, Origin
from tinsmith.text.tokenizer import Tokenizer, TokenizerCache
from tinsmith.v1 import keys_pb2, scheduler_pb2

T = TypeVar("T")


class ClientCore:
    """Shared state of a client. Coroutine methods run in the background loop.

    Args:
        settings: Of the client.
        transport: Sends calls; one of its own by default.
        background: Where they are sent from; a loop of its own by default.
    """

    def __init__(
        self,
        settings: ClientSettings,
        *,
        transport: Transport | None = None,
        background: BackgroundLoop | None = None,
    ) -> None:
        self.settings = settings
        self.transport = transport or Transport(settings)
        self.background = background or BackgroundLoop()
        self.scheduler = Endpoint(settings.address)
        self.session = Session(self.background, self.transport, self.scheduler)
        self.metric_log = MetricLog(self.background, self.transport, self.scheduler)
        self.streams: weakref.WeakSet[OperationStream] = weakref.WeakSet()
        self._tokenizers = TokenizerCache()

    @property
    def project(self) -> str:
        """Resource name of the project."""
        return str(names.ProjectName(self.settings.project))

    @property
    def origin(self) -> Origin:
        """What another process needs to connect to the same project."""
        return Origin(self.settings.address, self.settings.project, self.settings.ca_file)

    async def find_project(self) -> None:
        """Take the project of the key, unless one was given."""
        if self.settings.project:
            return
        project = DEFAULT_PROJECT
        try:
            key = await self.transport.call(
                self.scheduler,
                lambda c: c.keys.GetCallerKey,
                keys_pb2.GetCallerKeyRequest(),
            )
            project = names.KeyName.parse(key.name).project
        except UnimplementedError as error:
            raise UnimplementedError(
                "the server is of an earlier release than this client; upgrade it, or install the "
                "client of its release"
            ) from error
        except TinsmithError as error:
            if error.reason != "KEY_NOT_FOUND":
                raise  # A pod has a secret and no key, and works in the default project.
        self.settings = dataclasses.replace(self.settings, project=project)

    def run_name(self, value: str) -> str:
        """Return the resource name of a run that may be given by its id alone, or `ID@latest`."""
        value = value.removesuffix(names.LATEST)
        if "/" not in value:
            return str(names.RunName(self.settings.project, value))
        return str(names.RunName.parse(value))

    def checkpoint_name(self, value: str | names.Named) -> str:
        """Return the resource name of a checkpoint that may be given as `run-1/final`."""
        return names.whole_checkpoint(names.name_of(value), self.settings.project)

    def session_name(self, value: str) -> str:
        """Return the resource name of a session that may be given by its id alone."""
        if "/" not in value:
            return str(names.SessionName(self.settings.project, value))
        return str(names.SessionName.parse(value))

    def future(self, coroutine: Coroutine[Any, Any, T], *, what: str) -> ResultFuture[T]:
        """Start a coroutine in the background and return a future of its result."""
        return ResultFuture(
            self.background,
            what=what,
            default_timeout_s=self.settings.operation_timeout_s,
            future=self.background.submit(coroutine),
        )

    async def get_run(self, name: str) -> scheduler_pb2.TrainingRun:
        """Ask the scheduler for a run."""
        request = scheduler_pb2.GetTrainingRunRequest(name=name)
        return await self.transport.call(
            self.scheduler, lambda c: c.scheduler.GetTrainingRun, request
        )

    def trainer_endpoint(self, run: scheduler_pb2.TrainingRun) -> Endpoint:
        """Return where a run is trained; the scheduler is asked again after a failure."""
        return self._run_endpoint(run, lambda found: found.trainer_address)

    def checkpoints_endpoint(self, run: scheduler_pb2.TrainingRun) -> Endpoint:
        """Return where the checkpoints of a run are listed, whether a trainer holds it or not."""
        # Older servers name only the trainer that holds it.
        return self._run_endpoint(
            run, lambda found: found.checkpoint_address or found.trainer_address
        )

    def _run_endpoint(
        self,
        run: scheduler_pb2.TrainingRun,
        address_of: Callable[[scheduler_pb2.TrainingRun], str],
    ) -> Endpoint:
        name = run.name

        async def locate() -> str:
            request = scheduler_pb2.GetTrainingRunRequest(name=name)
            found = await self.transport.call_once(
                self.scheduler, lambda c: c.scheduler.GetTrainingRun, request, timeout_s=10
            )
            return address_of(found)

        return Endpoint(address_of(run) or self.settings.address, locate)

    async def get_tokenizer(self, base_model: str, chat_template: str = "") -> Tokenizer:
        """Return the tokenizer of a base model, from the cache where the server allows.

        Args:
            base_model: Its name.
            chat_template: The source of a run's own template; that of the model if it is empty.
        """
        tokenizer = await self._get_tokenizer(base_model)
        return tokenizer.with_chat_template(chat_template) if chat_template else tokenizer

    async def _get_tokenizer(self, base_model: str) -> Tokenizer:
        key = f"{self.settings.address}/{base_model}"
        request = scheduler_pb2.GetTokenizerRequest(
            base_model=base_model, known_digest=self._tokenizers.known_digest(key)
        )
        answer = await self.transport.call(
            self.scheduler, lambda c: c.scheduler.GetTokenizer, request
        )
        if answer.files:
            self._tokenizers.store(key, answer.digest, dict(answer.files))
            return Tokenizer(dict(answer.files))
        files = self._tokenizers.load(answer.digest)
        if not files:
            raise NotFoundError(f"the server sent no tokenizer files for {base_model}")
        return Tokenizer(files)
