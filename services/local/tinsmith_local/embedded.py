"""All services in one process: the same pods, each with its own port, behind the gateway.

Clients are given the gateway's address; on loopback native ones go on to the pods directly, which
saves a hop. This is the one package that may import every pod. It differs from separate processes
in a single point: trainer and sampler are given one engine host, so live weights pass between them
as a copy of a row instead of a checkpoint.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tinsmith.local_servers import LocalServer
from tinsmith.names import DEFAULT_PROJECT
from tinsmith.tracing import switch
from tinsmith.whole_files import write_whole
from tinsmith_coordinator.config import CoordinatorConfig
from tinsmith_coordinator.pod import CoordinatorPod
from tinsmith_engine.base.hardware import device_choice_of
from tinsmith_engine.host import EngineHost, load_engines
from tinsmith_environment.config import EnvironmentConfig
from tinsmith_environment.pod import EnvironmentPod
from tinsmith_gateway.config import GatewayConfig
from tinsmith_gateway.pod import GatewayPod
from tinsmith_local.ports import DEFAULT_PORT, bound_or_told
from tinsmith_runtime.config import is_loopback, parse_models
from tinsmith_runtime.devices import DeviceChoice, check_device, check_dtype
from tinsmith_runtime.errors import ConfigError, KeyInvalidError
from tinsmith_runtime.ledger.records import FencedError
from tinsmith_runtime.pod.base import Pod
from tinsmith_runtime.rpc.auth import ApiKey
from tinsmith_runtime.rpc.server import check_address
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.engines.embedded_engine import EmbeddedEngines
from tinsmith_sampler.pod import SamplerPod
from tinsmith_scheduler.config import SchedulerConfig
from tinsmith_scheduler.pod import SchedulerPod
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.pod import TrainerPod

logger = logging.getLogger(__name__)

_KEY_FILE = "api_key"
_PRIVATE_FOLDER_MODE = 0o700
_FENCED_EXIT_CODE = 3
_FAILED_EXIT_CODE = 4
_LISTING_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedConfig:
    """Settings of the embedded server."""

    data_dir: Path
    """Ledger, checkpoints and the API key; everything survives a restart."""
    models: dict[str, str]
    """Directory or hub id by base model."""
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """Port of the gateway; the other pods pick free ones."""
    metrics_address: str | None = None
    num_threads: int = 0
    """Threads of one operation; 0 takes all cores."""
    device: str = "cpu"
    """Where models compute: cpu, cuda, cuda:N, or auto, which is the GPU if torch can use one."""
    dtype: str = "float32"
    """Of the base models: float32, bfloat16, or auto, which follows the device."""
    exact: bool | None = None
    """Whether a run's bits must depend on nothing beside it; None keeps that where the machine can,
    and says where it cannot."""
    compiled: bool | None = None
    """Whether elementwise kernels are compiled at start; unset does so on a GPU alone."""
    math_problems_path: Path | None = None
    """JSONL file in GSM8K's layout that the math environment takes its problems from."""
    hidden_folders: tuple[Path, ...] = ()
    """Folders that environments find empty beside `data_dir`; they must be there."""
    overrides: dict[str, dict[str, object]] = field(default_factory=dict)
    """Further settings by pod: `scheduler`, `trainer`, `sampler`, `environment`, `coordinator`,
    `gateway`."""

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("no base model: name one, or make one with `models build-tiny`")
        check_device(self.device)
        check_dtype(self.dtype)
        check_address("listen_address", f"{self.host}:{self.port}")


class EmbeddedServer:
    """Scheduler, trainer, sampler, environment, coordinator and gateway in this process."""

    def __init__(self, config: EmbeddedConfig) -> None:
        self._config = config
        self._pod_key = secrets.token_urlsafe(32)
        self._engines: EngineHost | None = None
        self._pods: list[Pod] = []
        self._gateway: GatewayPod | None = None
        self._scheduler: SchedulerPod | None = None
        self._scheduler_address = ""
        self.api_key = ""
        self.address = ""
        """Where the gateway listens."""
        self.device_choice = DeviceChoice("cpu", "float32", "cpu")
        """Where the models compute; known once the server has started."""

    async def start(self) -> None:
        """Load the models, recover, and serve.

        Raises:
            ConfigError: If a setting is wrong, a port taken, or the data folder in use.
            ModelNotFoundError: If a base model cannot be loaded.
        """
        switch.start()
        config = self._config
        make_data_dir(config.data_dir)
        self.api_key = _api_key(config.data_dir)
        try:
            self._scheduler = scheduler = SchedulerPod(self._scheduler_config(), defer_jobs=True)
            await self._start(scheduler)
            self._scheduler_address = scheduler.address
            self._gateway = gateway = GatewayPod(self._gateway_config())
            # Reserved before the models are loaded, which takes long; served when all is there.
            self.address = bound_or_told(gateway.bind)
            trainer_config = self._trainer_config()
            self.device_choice = device_choice_of(trainer_config)
            trainer_config = replace(
                trainer_config, device=self.device_choice.device, dtype=self.device_choice.dtype
            )
            self._engines = await asyncio.to_thread(
                load_engines, trainer_config, max_resident_runs=trainer_config.max_resident_runs
            )
            trainer = TrainerPod(
                trainer_config, self._engines, on_fenced=_exit_fenced, on_failed=_exit_failed
            )
            await self._start(trainer)
            sampler_config = self._sampler_config(trainer_config.storage())
            sampler = SamplerPod(
                sampler_config,
                EmbeddedEngines(self._engines),
                export_live=trainer.export_live,
            )
            await self._start(sampler)
            environment = EnvironmentPod(self._environment_config())
            await self._start(environment)
            coordinator = CoordinatorPod(self._coordinator_config())
            await self._start(coordinator)
            for pod in (trainer, sampler, environment, coordinator):
                await pod.wait_listed(_LISTING_TIMEOUT_S)
            await gateway.start()
            await scheduler.start_jobs(self.address)
        except BaseException:
            await self.stop()
            raise

    @property
    def exactness(self) -> dict[str, str]:
        """What each base model promises of bits: `exact`, `fast` or `fallback`."""
        engines = self._engines.engines if self._engines is not None else {}
        return {name: engine.info.exactness for name, engine in engines.items()}

    async def stop(self) -> None:
        """Drain and stop everything: jobs, then the gateway, then the last started first."""
        if self._scheduler is not None:
            # Before the gateway: their drivers save through it.
            await self._scheduler.stop_jobs()
            self._scheduler = None
        if self._gateway is not None:
            await self._gateway.stop()
            self._gateway = None
        while self._pods:
            await self._pods.pop().stop()
        if self._engines is not None:
            await asyncio.to_thread(self._engines.thread.close, 30.0)
            self._engines = None

    async def _start(self, pod: Pod) -> None:
        self._pods.append(pod)
        await pod.start()

    def _scheduler_config(self) -> SchedulerConfig:
        settings: dict[str, Any] = {"job_launcher": "local"}
        return SchedulerConfig(
            data_dir=self._config.data_dir,
            pod_key=self._pod_key,
            bootstrap_key=self.api_key,
            listen_address=f"{self._config.host}:0",
            metrics_address=self._config.metrics_address,
            **settings | self._overrides("scheduler"),
        )

    def _trainer_config(self) -> TrainerConfig:
        models = ",".join(f"{name}={source}" for name, source in self._config.models.items())
        settings: dict[str, Any] = {
            "num_threads": self._config.num_threads,
            "device": self._config.device,
            "dtype": self._config.dtype,
            "exact": self._config.exact,
            "compiled": self._config.compiled,
        }
        return TrainerConfig(
            data_dir=self._config.data_dir,
            base_models=models,
            scheduler_address=self._scheduler_address,
            pod_key=self._pod_key,
            listen_address=f"{self._config.host}:0",
            **settings | self._overrides("trainer"),
        )

    def _sampler_config(self, storage_uri: str) -> SamplerConfig:
        return SamplerConfig(
            storage_uri=storage_uri,
            scheduler_address=self._scheduler_address,
            pod_key=self._pod_key,
            listen_address=f"{self._config.host}:0",
            **self._overrides("sampler"),
        )

    def _environment_config(self) -> EnvironmentConfig:
        return EnvironmentConfig(
            scheduler_address=self._scheduler_address,
            pod_key=self._pod_key,
            listen_address=f"{self._config.host}:0",
            math_problems_path=self._config.math_problems_path,
            # Keys and all databases; workers have the user of this server.
            closed_folders=os.pathsep.join(
                str(folder.resolve())
                for folder in (self._config.data_dir, *self._config.hidden_folders)
            ),
            **self._overrides("environment"),
        )

    def _gateway_config(self) -> GatewayConfig:
        is_local = is_loopback(self._config.host)
        settings: dict[str, Any] = {"pins_clients": not is_local}
        overrides = self._overrides("gateway")
        given = parse_models(str(overrides.pop("tokenizer_ids", "")), setting="tokenizer_ids")
        known = tokenizer_ids(self._config.models, is_loopback=is_local) | given
        settings["tokenizer_ids"] = ",".join(f"{name}={found}" for name, found in known.items())
        return GatewayConfig(
            data_dir=self._config.data_dir,
            scheduler_address=self._scheduler_address,
            pod_key=self._pod_key,
            listen_address=f"{self._config.host}:{self._config.port}",
            **settings | overrides,
        )

    def _coordinator_config(self) -> CoordinatorConfig:
        return CoordinatorConfig(
            data_dir=self._config.data_dir,
            scheduler_address=self._scheduler_address,
            pod_key=self._pod_key,
            listen_address=f"{self._config.host}:0",
            **self._overrides("coordinator"),
        )

    def _overrides(self, pod: str) -> dict[str, Any]:
        return dict(self._config.overrides.get(pod, {}))


def tokenizer_ids(models: Mapping[str, str], *, is_loopback: bool) -> dict[str, str]:
    """Return what clients load the tokenizers of base models by.

    A name such as `tiny` is free on the hub, or a stranger's. A directory is read by clients of
    this machine alone; those of others are given the name, unless a setting says better.

    Args:
        models: Directory or hub id by name.
        is_loopback: Whether all clients are on this machine.
    """
    found = {}
    for name, source in models.items():
        if not Path(source).is_dir():
            found[name] = source
        elif is_loopback:
            found[name] = str(Path(source).resolve())
    return found


def make_data_dir(path: Path) -> None:
    """Make the folder that a server keeps everything in, for its own user alone.

    Texts of users, weights and the key of the server lie there. A folder that is empty, or a
    server's, is closed to others; one that holds other files stays as it is.

    Raises:
        ConfigError: If it cannot be made or written to.
    """
    try:
        path.mkdir(mode=_PRIVATE_FOLDER_MODE, parents=True, exist_ok=True)
        if (path / _KEY_FILE).exists() or not any(path.iterdir()):
            path.chmod(_PRIVATE_FOLDER_MODE)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"data directory {path} cannot be written: {error.strerror}; name another one with"
            " --data-dir"
        ) from error


def describe_server(server: EmbeddedServer, config: EmbeddedConfig) -> LocalServer:
    """Return what clients of this user are told: where the server is and which key it takes."""
    return LocalServer(
        address=server.address,
        api_key=server.api_key,
        project=DEFAULT_PROJECT,
        pid=os.getpid(),
        start_time=datetime.datetime.now(datetime.UTC),
        data_dir=str(config.data_dir.resolve()),
        models=tuple(config.models),
        model_sources=tokenizer_ids(config.models, is_loopback=True),
        device=str(server.device_choice),
    )


def _api_key(data_dir: Path) -> str:
    """Return the key of this data folder, made with it."""
    path = data_dir / _KEY_FILE
    if path.is_file():
        try:
            return str(ApiKey.parse(path.read_text().strip()))
        except KeyInvalidError as error:
            raise ConfigError(
                f"{path} holds no key: {error.message}; restore it from a backup"
            ) from error
    key = str(ApiKey.generate())
    write_whole(path, key.encode(), is_secret=True)
    return key


def _exit_fenced(error: FencedError) -> None:
    logger.critical("fenced", extra={"problem": error.message})
    os._exit(_FENCED_EXIT_CODE)


def _exit_failed(error: Exception) -> None:
    """End at once: the trainer stands still, and starting again recovers everything."""
    logger.critical("the trainer cannot go on", extra={"problem": repr(error)})
    os._exit(_FAILED_EXIT_CODE)
