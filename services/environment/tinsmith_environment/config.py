"""Settings of the environment pod."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tinsmith.names import is_valid_id
from tinsmith_runtime.config import require_positive
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.pod.settings import WorkerConfig
from tinsmith_runtime.variables import parse_variables


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentConfig(WorkerConfig):
    """Settings of one environment pod."""

    num_workers: int = 0
    """Processes that are ready for environments at any time; 0 takes one for each core."""
    max_instances: int = 1024
    """Live episodes over all projects."""
    max_project_instances: int = 512
    """Live episodes of one project."""
    max_starting_instances: int = 64
    """Episodes of all projects that are being started, beside those that are played."""
    max_project_starting_instances: int = 32
    """Episodes of one project that are being started."""
    client_grace_s: float = 30.0
    """Removes the instances of a client that has had no stream of steps for this long."""
    instance_ttl_s: float = 3600.0
    """Removes an instance that is not used for this long."""
    step_timeout_s: float = 60.0
    """Longest time of one `reset` or `step`; its worker is then stopped."""
    worker_start_timeout_s: float = 60.0
    """Longest time that a worker process takes to start."""
    max_stream_steps: int = 1024
    """Steps of one stream that run at once; the stream is read no faster."""
    environments: str = ""
    """Further environments, `name=module:Class`, separated by commas."""
    python_path: str = ""
    """Folders in which workers look for the modules of environments, separated by `:`."""
    math_problems_path: Path | None = None
    """JSONL file in GSM8K's layout that `math` takes its problems from; arithmetic without it."""
    show_worker_output: bool = False
    """Whether what environments print goes to standard error; it may hold prompts."""
    max_workers: int = 512
    """Most worker processes. Each serves one project; with enough of them, one episode each."""
    max_project_workers: int = 256
    """Most worker processes of one project; then its episodes share them."""
    worker_idle_s: float = 60.0
    """Ends a worker process that was not used for this long, above num_workers of them."""
    worker_uid_base: int = 0
    """First of the users that workers run as, one each; 0 leaves them the pod's. Needs a pod that
    may change its user."""
    worker_variables: str = ""
    """Names of further variables of the pod that workers get, separated by commas."""
    closed_folders: str = ""
    """Folders that are empty for workers, separated by colons; of no use with `worker_uid_base`."""
    max_worker_processes: int = 128
    """Processes below one worker; with more of them it is stopped."""
    max_worker_memory_bytes: int = 8 * 2**30
    """Address space of each process of a worker; 0 sets no limit."""
    max_worker_file_bytes: int = 256 * 2**20
    """Of each file that a worker writes; 0 sets no limit."""
    max_worker_open_files: int = 512
    """Open files of each process of a worker; 0 sets no limit."""
    max_worker_cpu_s: int = 86_400
    """Processor time of each process of a worker; 0 sets no limit."""
    max_worker_output_bytes: int = 2**20
    """Of what one worker prints, if it is shown; the rest is dropped."""
    max_worker_reply_bytes: int = 32 * 2**20
    """Of one answer of a worker, with its images; half of what a message may be."""
    worker_name: str = "environment-0"

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ConfigError(f"num_workers must not be negative, got {self.num_workers}")
        require_positive(
            self,
            "max_instances",
            "max_project_instances",
            "max_starting_instances",
            "max_project_starting_instances",
            "client_grace_s",
            "instance_ttl_s",
            "step_timeout_s",
            "worker_start_timeout_s",
            "max_stream_steps",
            "max_workers",
            "max_project_workers",
            "worker_idle_s",
            "max_worker_processes",
            "max_worker_output_bytes",
            "max_worker_reply_bytes",
        )
        for setting in (
            "worker_uid_base",
            "max_worker_memory_bytes",
            "max_worker_file_bytes",
            "max_worker_open_files",
            "max_worker_cpu_s",
        ):
            if getattr(self, setting) < 0:
                raise ConfigError(f"{setting} must not be negative")
        if self.worker_uid_base and os.geteuid() != 0:
            raise ConfigError("worker_uid_base needs a pod that runs as root")
        self.further_variables()
        if self.max_worker_reply_bytes > self.max_message_bytes // 2:
            raise ConfigError(
                f"max_worker_reply_bytes must be at most {self.max_message_bytes // 2}, or an "
                "answer does not fit into a message of max_message_bytes"
            )
        if self.math_problems_path is not None and not self.math_problems_path.is_file():
            raise ConfigError(f"math_problems_path {self.math_problems_path} is not a file")
        self.class_paths()
        self.server()

    @property
    def effective_num_workers(self) -> int:
        """Number of worker processes to start."""
        return self.num_workers or os.cpu_count() or 1

    def closed_folder_list(self) -> tuple[str, ...]:
        """Return the folders that are empty for workers."""
        return tuple(filter(None, self.closed_folders.split(os.pathsep)))

    def further_variables(self) -> frozenset[str]:
        """Return the names of `worker_variables`.

        Raises:
            ConfigError: If one of them is a setting of the pod.
        """
        return parse_variables("worker_variables", self.worker_variables)

    def class_paths(self) -> dict[str, str]:
        """Return the class of each further environment by its name.

        Raises:
            ConfigError: If an entry is not `name=module:Class`.
        """
        found = {}
        for entry in filter(None, (part.strip() for part in self.environments.split(","))):
            name, _, class_path = entry.partition("=")
            module_name, _, class_name = class_path.partition(":")
            if not (is_valid_id(name) and module_name and class_name):
                raise ConfigError(f"environments: {entry!r} is not name=module:Class")
            found[name] = class_path
        return found
