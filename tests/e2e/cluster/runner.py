"""Runs one container of a pod: starts, probes, restarts and ends it."""

from __future__ import annotations

import http.client
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.cluster.api import Json
from tests.e2e.cluster.container import Container, Mount
from tests.e2e.cluster.nodes import timestamp
from tests.e2e.cluster.pod_status import ContainerState, should_restart, terminated
from tests.e2e.cluster.pod_values import ConfigError, expand
from tests.e2e.cluster.probes import Probe

_MAX_BACKOFF_S = 30.0
_CONFIG_RETRY_S = 0.5
_MAX_MESSAGE = 4096
_TAIL_LINES = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """What a container image would bring.

    Attributes:
        entrypoint: Used where the pod has no `command`.
        command: Used where the pod has neither `command` nor `args`.
        env: Variables that the pod may override.
    """

    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What a container gets from its pod and its kubelet.

    Attributes:
        folder: For the files of this container.
        environment: Returns the variables, or raises ConfigError.
        mounts: Returns the volumes and `/etc/hosts`.
        backoff_s: Wait before the first restart, doubled with every further one.
        grace_s: Time between SIGTERM and SIGKILL if a probe finds it dead.
    """

    folder: Path
    address: str
    hostname: str
    image: Image
    environment: Callable[[Json, Mapping[str, str]], dict[str, str]]
    mounts: Callable[[Json], list[Mount]]
    executor: Executor
    backoff_s: float
    grace_s: float
    base_environment: Mapping[str, str]


class ContainerRunner:
    """One container over all its starts; driven by `step` from one thread.

    Args:
        spec: Its part of the pod.
        policy: When it is started again: `Always`, `OnFailure` or `Never`.
        surroundings: What it gets.
    """

    def __init__(self, spec: Json, policy: str, surroundings: Surroundings) -> None:
        self.state = ContainerState(spec["name"], spec["image"])
        self._spec = spec
        self._policy = policy
        self._with = surroundings
        self._container: Container | None = None
        self._probes: dict[str, Probe] = {}
        self._num_starts = 0
        self._next_start_s = 0.0
        self._kill_reason = ""
        self._kill_at_s = 0.0

    @property
    def container(self) -> Container | None:
        """What runs at this moment."""
        return self._container

    @property
    def is_done(self) -> bool:
        """Whether it ended and is not started again."""
        return "terminated" in self.state.state

    def log(self, *, previous: bool = False) -> Path:
        """Return the file that holds the output of the latest start, or of the one before."""
        number = max(self._num_starts - (2 if previous else 1), 0)
        return self._with.folder / f"{number}.log"

    def step(self) -> None:
        """Bring it one step on."""
        if self.is_done:
            return
        if self._container is None:
            if time.monotonic() >= self._next_start_s:
                self._start()
        elif (code := self._container.poll()) is not None:
            self._end(code)
        elif not self.state.is_running:
            if self._container.has_started:
                self._begin(self._container)
        else:
            self._probe(self._container)

    def terminate(self, grace_s: float) -> None:
        """Run its hook for the end, if it has one, then send SIGTERM; returns at once."""
        container = self._container
        if container is None:
            return
        hook = self._spec.get("lifecycle", {}).get("preStop")
        if hook is None:
            container.terminate()
            return

        def run_hook() -> None:
            try:
                if "exec" in hook:
                    container.execute(hook["exec"]["command"], grace_s)
                elif "httpGet" in hook:
                    _call(self._with.address, hook["httpGet"], grace_s)
            except (OSError, subprocess.TimeoutExpired, http.client.HTTPException):
                pass  # a hook that fails does not keep the container
            container.terminate()

        threading.Thread(target=run_hook, name="preStop", daemon=True).start()

    def kill(self) -> None:
        """Kill it; it counts as ended with 137."""
        if self._container is not None:
            self._container.kill()

    def finish(self) -> bool:
        """Take note of an end without starting again; say whether it has ended."""
        if self._container is not None:
            if (code := self._container.poll()) is None:
                return False
            self._policy = "Never"
            self._end(code)
        return True

    def _start(self) -> None:
        spec, image = self._spec, self._with.image
        try:
            environment = self._with.environment(spec, {**self._with.base_environment, **image.env})
            mounts = self._with.mounts(spec)
        except ConfigError as error:
            reason = "CreateContainerConfigError"
            self.state.state = {"waiting": {"reason": reason, "message": str(error)}}
            self._next_start_s = time.monotonic() + _CONFIG_RETRY_S
            return
        command = spec.get("command") or list(image.entrypoint)
        args = spec.get("args") or ([] if spec.get("command") else list(image.command))
        argv = [expand(part, environment) for part in [*command, *args]]
        if not argv:
            message = f"no entry point for {spec['image']}: name it in the kubelet's images"
            self.state.state = {"waiting": {"reason": "ErrImagePull", "message": message}}
            self._next_start_s = time.monotonic() + _CONFIG_RETRY_S
            return
        number, self._num_starts = self._num_starts, self._num_starts + 1
        folder = self._with.folder / str(number)
        folder.mkdir(parents=True)
        message_file = self._message_file(number)
        message_file.touch()
        message_path = spec.get("terminationMessagePath", "/dev/termination-log")
        self._container = Container(
            folder / "container",
            argv,
            env=environment,
            mounts=[*mounts, Mount(message_file, message_path)],
            hostname=self._with.hostname,
            cwd=spec.get("workingDir") or "/",
            log=self.log(),
        )

    def _begin(self, container: Container) -> None:
        self.state.state = {"running": {"startedAt": timestamp()}}
        for key, initially in (("startup", False), ("readiness", False), ("liveness", True)):
            if probe := self._spec.get(f"{key}Probe"):
                self._probes[key] = Probe(
                    probe,
                    self._spec,
                    container,
                    self._with.address,
                    self._with.executor,
                    initially=initially,
                )
        self._probe(container)

    def _probe(self, container: Container) -> None:
        startup = self._probes.get("startup")
        if startup is not None and not self.state.is_started:
            startup.step()
            if not startup.succeeded:
                self._kill_if_failed(startup, container, "startup")
                return
        self.state.is_started = True
        if (liveness := self._probes.get("liveness")) is not None:
            liveness.step()
            self._kill_if_failed(liveness, container, "liveness")
        readiness = self._probes.get("readiness")
        if readiness is not None:
            readiness.step()
        self.state.is_ready = readiness is None or readiness.succeeded

    def _kill_if_failed(self, probe: Probe, container: Container, kind: str) -> None:
        if probe.message and not self._kill_reason:
            self._kill_reason = f"{kind} probe failed: {probe.message}"
            self._kill_at_s = time.monotonic() + self._with.grace_s
            self.terminate(self._with.grace_s)
        elif self._kill_reason and time.monotonic() > self._kill_at_s:
            container.kill()

    def _end(self, code: int) -> None:
        message = self._message(code) or self._kill_reason
        running = self.state.state.get("running", {})
        ended = terminated(code, running.get("startedAt") or timestamp(), message)
        self.state.is_ready = self.state.is_started = False
        self._container, self._probes, self._kill_reason = None, {}, ""
        shutil.rmtree(self._with.folder / str(self._num_starts - 1), ignore_errors=True)
        if not should_restart(self._policy, code):
            self.state.state = ended
            return
        wait_s = min(self._with.backoff_s * 2**self.state.num_restarts, _MAX_BACKOFF_S)
        self._next_start_s = time.monotonic() + wait_s
        self.state.num_restarts += 1
        self.state.last = ended
        reason = f"back-off {wait_s:g}s restarting failed container"
        self.state.state = {"waiting": {"reason": "CrashLoopBackOff", "message": reason}}

    def _message_file(self, number: int) -> Path:
        return self._with.folder / str(number) / "termination-log"

    def _message(self, code: int) -> str:
        text = self._message_file(self._num_starts - 1).read_text(errors="replace")
        policy = self._spec.get("terminationMessagePolicy")
        if not text and code and policy == "FallbackToLogsOnError":
            lines = self.log().read_text(errors="replace").splitlines()
            text = "\n".join(lines[-_TAIL_LINES:])
        return text[-_MAX_MESSAGE:]


def _call(address: str, action: Json, timeout_s: float) -> None:
    connection = http.client.HTTPConnection(
        action.get("host") or address, int(action["port"]), timeout=timeout_s
    )
    try:
        connection.request("GET", action.get("path", "/"))
        connection.getresponse()
    finally:
        connection.close()
