"""What request handlers are given: the parts of the gateway, wired once by `pod`."""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith_gateway.access.authentication import Callers, Credential
from tinsmith_gateway.config import GatewayConfig
from tinsmith_gateway.project_threads import ProjectThreads
from tinsmith_gateway.serving.shutdown import Drain
from tinsmith_gateway.upstream.pod_client import Upstream
from tinsmith_runtime.confined.process import ConfinedProcesses
from tinsmith_runtime.rpc.in_flight import Limits
from tinsmith_runtime.sql import Database


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of one gateway.

    Attributes:
        config: Its settings.
        callers: Authenticates callers.
        upstream: Calls other pods.
        database: Where futures are kept.
        anonymous: The credential of a request that needs none.
        limits: What each key may have in flight.
        drain: Whether the gateway is shutting down.
        confined: Processes for what strangers wrote.
        threads: Run what requests cost, a few of each project at a time.
    """

    config: GatewayConfig
    callers: Callers
    upstream: Upstream
    database: Database
    anonymous: Credential
    limits: Limits
    drain: Drain
    confined: ConfinedProcesses
    threads: ProjectThreads
