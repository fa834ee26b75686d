"""Writes variables.md: every environment variable that the client and the pods read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinsmith_controller.config import ControllerConfig
from tinsmith_coordinator.config import CoordinatorConfig
from tinsmith_environment.config import EnvironmentConfig
from tinsmith_gateway.config import GatewayConfig
from tinsmith_runtime.pod.settings_help import Setting, settings_of
from tinsmith_runtime.storage.settings import StorageSettings
from tinsmith_sampler.config import SamplerConfig
from tinsmith_scheduler.config import SchedulerConfig
from tinsmith_trainer.config import TrainerConfig

PAGE = Path(__file__).parent / "variables.md"
_HEAD = """# Environment variables

Generated from the code by `make docs`. All names begin with `TINSMITH_`. Those of pods are their
settings: the same words in lower case and without the prefix stand in the file of `--config`, and
the variable wins. An unknown name in the file is refused when the pod starts.
"""
_CLIENT = {
    "TINSMITH_ADDRESS": "Address of the server: `host:port`, or `https://host:port` for TLS.",
    "TINSMITH_API_KEY": "Key of the caller.",
    "TINSMITH_PROJECT": "Id of the project; that of the key by default.",
    "TINSMITH_CA_FILE": "PEM file of the authorities to trust, for a private certificate.",
    "TINSMITH_STATE_DIR": "Where each `tinsmith up` says where it is; `~/.tinsmith` by default.",
    "TINSMITH_CACHE_DIR": "Downloads that can be made again; `~/.cache/tinsmith` by default.",
    "TINSMITH_DEBUG": "1 shows the traces of failures on the command line.",
    "TINSMITH_TRACE": "Endpoint of an OTLP collector (gRPC) for traces, of pods too; else "
    "`OTEL_EXPORTER_OTLP_ENDPOINT`. See [traces](traces.md).",
}
_DRIVER = {
    "TINSMITH_JOB": "Resource name of the job.",
    "TINSMITH_JOB_UID": "Tells the job from others of its name.",
    "TINSMITH_JOB_METHOD": "`spec.method` and the model, as JSON.",
    "TINSMITH_JOB_AGENTS": "`spec.roles.agents`, as JSON.",
    "TINSMITH_AGENT_<NAME>_API_KEY": "Key of an agent, for the driver that trains it.",
    "TINSMITH_JOB_AGENT": "Name of the agent that a program plays for.",
    "TINSMITH_JOB_DIR": "Folder of the recipe; a temporary one by default.",
    "TINSMITH_TERMINATION_LOG": "Where a process says why it ended; Kubernetes reads it.",
}
_TESTS = {
    "TINSMITH_FAILPOINTS": "Faults that a process makes at named places.",
    "TINSMITH_FAILPOINT_TRACE": "File that names the places that were passed.",
}
PODS: Mapping[str, type[Any]] = {
    "scheduler": SchedulerConfig,
    "trainer": TrainerConfig,
    "sampler": SamplerConfig,
    "environment": EnvironmentConfig,
    "coordinator": CoordinatorConfig,
    "gateway": GatewayConfig,
    "controller": ControllerConfig,
}


def page() -> str:
    """Return the text of the page."""
    lines = [_HEAD]
    for title, variables in (
        ("Client and command line", _CLIENT),
        ("Drivers of jobs", _DRIVER),
        ("Faults, for tests", _TESTS),
    ):
        lines += [f"## {title}\n", "| variable | meaning |", "| --- | --- |"]
        lines += [f"| `{name}` | {meaning} |" for name, meaning in variables.items()]
        lines.append("")
    pods_of: dict[Setting, list[str]] = {}
    for pod, config_class in PODS.items():
        for setting in settings_of(config_class):
            pods_of.setdefault(setting, []).append(pod)
    lines += ["## Pods\n", "| variable | default | pods | meaning |", "| --- | --- | --- | --- |"]
    for setting in sorted(pods_of, key=lambda each: each.variable):
        pods = "all" if len(pods_of[setting]) == len(PODS) else ", ".join(pods_of[setting])
        lines.append(
            f"| `{setting.variable}` | {_default(setting)} | {pods} | {_cell(setting.meaning)} |"
        )
    lines += ["\n## Object stores, of every pod that has `storage_uri`\n"]
    lines += ["| variable | default | meaning |", "| --- | --- | --- |"]
    lines += [
        f"| `{setting.variable}` | {_default(setting)} | {_cell(setting.meaning)} |"
        for setting in settings_of(StorageSettings, prefix="TINSMITH_S3_")
    ]
    return "\n".join(lines) + "\n"


def _default(setting: Setting) -> str:
    return "required" if setting.is_required else f"`{setting.default}`" if setting.default else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
