"""A scheduler and a coordinator, each as a process of its own."""

from __future__ import annotations

from pathlib import Path

from tests.support.pods import PodDeployment

from tinsmith_local.process import free_port

COORDINATOR = "coordinator"


def episode_pods(folder: Path) -> PodDeployment:
    """Return the two, not started yet; a coordinator that is started again keeps its address."""
    fixed = {COORDINATOR: {"listen_address": f"127.0.0.1:{free_port()}"}}
    return PodDeployment(folder, {}, ("scheduler", COORDINATOR), settings=fixed)
