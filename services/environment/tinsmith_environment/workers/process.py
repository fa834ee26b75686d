"""What a worker process does: it runs environments, one call at a time.

A fork server (`fork_server`) forks it; where there is none, it is started as
`python -m tinsmith_environment.workers.process`. Requests and replies travel on a socket that comes
as standard input. Before any environment is imported it is moved elsewhere, so that a `print` or
`input` of an environment cannot break the protocol. A pod that dies leaves no worker behind, even
one that hangs: the kernel ends it, and on systems other than Linux a second thread does.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

from tinsmith.environments.chat_messages import check_action_kind, read_action_kinds
from tinsmith.environments.environment import TEXT_ALONE
from tinsmith_environment.environment import Environment, InvalidActionError, InvalidSettingError
from tinsmith_environment.workers import protocol
from tinsmith_environment.workers.confinement import ProcessLimits, confine

FAILED = "failed"
INVALID = "invalid"
_MAX_MESSAGE_CHARACTERS = 500
_PARENT_POLL_S = 1.0


class _RefusedError(Exception):
    """The request is wrong; the environment is as it was."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem


class WorkerLoop:
    """Serves the requests of one pod.

    Args:
        max_reply_bytes: Of one reply; an environment that would send more has failed.
    """

    def __init__(self, max_reply_bytes: int = protocol.MAX_FRAME_BYTES) -> None:
        self._instances: dict[str, Environment] = {}
        self._max_reply_bytes = max_reply_bytes

    def answer(self, request: Mapping[str, Any]) -> bytes:
        """Return the reply to a request, as a frame."""
        try:
            return protocol.encode_frame(
                {"ok": True, **self._apply(request)}, max_bytes=self._max_reply_bytes
            )
        except _RefusedError as error:
            return protocol.encode_frame(
                {"ok": False, "kind": INVALID, "field": error.field, "problem": error.problem}
            )
        # BaseException: an environment that calls sys.exit() must not take the others along.
        except BaseException as error:
            return protocol.encode_frame({"ok": False, "kind": FAILED, **_describe(error)})

    def _apply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match request["op"]:
            case "describe":
                return _describe_class(_load_class(request["class_path"]))
            case "create":
                return self._create(request)
            case "step":
                return self._step(request)
            case "close":
                environment = self._instances.pop(request["instance"], None)
                if environment is not None:
                    environment.close()
                return {}
            case operation:
                raise ValueError(f"unknown operation {operation!r}")

    def _create(self, request: Mapping[str, Any]) -> dict[str, Any]:
        environment = _load_class(request["class_path"])(**request["settings"])
        try:
            observation = environment.reset(request["seed"], request["config"])
        except InvalidSettingError as error:
            raise _RefusedError(f"config.{error.setting}", error.problem) from error
        reply = {
            "observation": protocol.encode_observation(observation),
            "action_kinds": sorted(read_action_kinds(environment)),
        }
        self._instances[request["instance"]] = environment
        return reply

    def _step(self, request: Mapping[str, Any]) -> dict[str, Any]:
        environment = self._instances[request["instance"]]
        action = protocol.decode_action(request["action"])
        try:
            check_action_kind(action, read_action_kinds(environment))
            return {"result": protocol.encode_result(environment.step(action))}
        except InvalidActionError as error:
            raise _RefusedError("action", str(error)) from error


def _load_class(class_path: str) -> type[Environment]:
    module_name, _, class_name = class_path.partition(":")
    found = getattr(importlib.import_module(module_name), class_name)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise TypeError(f"{class_path} is not a subclass of tinsmith_environment.Environment")
    return found


def _describe_class(environment_class: type[Environment]) -> dict[str, Any]:
    # A property says it of an object, when there is one.
    is_of_objects = isinstance(inspect.getattr_static(environment_class, "action_kinds"), property)
    kinds = TEXT_ALONE if is_of_objects else read_action_kinds(environment_class)
    summary = (environment_class.__doc__ or "").strip().partition("\n")[0]
    return {
        "description": environment_class.description or summary,
        "default_config": dict(environment_class.default_config),
        "action_kinds": sorted(kinds),
    }


def _describe(error: BaseException) -> dict[str, str]:
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    message = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARACTERS]
    return {"message": message, "where": where}


def _end_with_parent(parent: int) -> None:
    """End this process once its parent is gone; for systems whose kernel does not."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(0)


def serve(told: Mapping[str, Any]) -> None:
    """Give up what environments have no use for, then answer requests until their end.

    Args:
        told: What the pod says of limits and of the user; see `WorkerStarter`.
    """
    parent = os.getppid()
    confine(ProcessLimits(**told["limits"]), has_own_user=told["has_own_user"])
    if os.getppid() != parent:
        # It died before its end could be noticed.
        os._exit(0)
    if sys.platform != "linux":
        threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    calls = socket.socket(fileno=os.dup(0))
    calls.setblocking(True)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lives as long as the process.
    loop = WorkerLoop(told["max_reply_bytes"])
    calls.sendall(protocol.encode_frame({"ok": True, "pid": os.getpid()}))
    requests = calls.makefile("rb")
    while header := requests.read(protocol.HEADER.size):
        request = protocol.decode_body(requests.read(protocol.decode_length(header)))
        calls.sendall(loop.answer(request))


def main() -> None:
    """Serve until the requests end, or the pod does."""
    serve(json.loads(sys.argv[1]))
    # Threads of environments hold nothing up.
    os._exit(0)


if __name__ == "__main__":
    main()
