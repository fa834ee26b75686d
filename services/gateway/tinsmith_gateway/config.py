"""Settings of the gateway pod."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tinsmith_runtime.config import parse_models, require_positive
from tinsmith_runtime.confined.process import Confinement
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.pod.settings import DatabaseConfig, ListenConfig
from tinsmith_runtime.rpc.in_flight import LimitSettings
from tinsmith_runtime.rpc.server import check_address

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,?#@*]+")
_CONFINED_STARTS = 3
"""A confined process may take so many times the time of other work to begin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig(ListenConfig, DatabaseConfig):
    """Settings of one gateway."""

    scheduler_address: str = ""
    """`host:port` of the scheduler."""
    listen_address: str = "127.0.0.1:0"
    """`host:port` for HTTP and gRPC alike."""
    public_url: str = ""
    """What clients call this gateway, for links in answers; as each request names it if empty."""
    tls_certificate: Path | None = None
    """PEM file of the certificate and its chain; serves TLS alone."""
    tls_key: Path | None = None
    """PEM file of its private key."""
    model_aliases: str = ""
    """`name=base model`, separated by commas: further names for base models, on all protocols."""
    tokenizer_ids: str = ""
    """`base model=hub id`, separated by commas: what clients of the Tinker wire load the tokenizer
    by; also a directory that they can read. Without an entry it is the name of the base model."""
    cors_origins: str = ""
    """Origins whose pages may call this gateway from a browser, separated by commas; `*` for all,
    none if empty. A call still needs its key: cookies are never used."""
    max_body_bytes: int = 64 * 2**20
    """Limit of one request."""
    max_text_body_bytes: int = 4 * 2**20
    """Limit of a JSON body that holds no batch: of OpenAI's API, episodes, steps and saves."""
    pins_clients: bool = True
    """Whether native clients are told to send every call here: right unless they can reach the
    pods' own addresses."""
    max_native_call_s: float = 3600.0
    """Deadline of a native call that has none, and the longest that one may have."""
    max_connections: int = 16_384
    """Connections; more are dropped at once."""
    handshake_timeout_s: float = 10.0
    """Time for TLS, for the first bytes of a connection, and for the head of a request."""
    max_head_bytes: int = 64 * 2**10
    """Limit of the head of an HTTP request."""
    body_timeout_s: float = 60.0
    """Longest pause within the body of an HTTP request."""
    body_deadline_s: float = 600.0
    """Time for the whole body of a request, HTTP or native."""
    min_body_bytes_per_s: int = 16 * 2**10
    """Least rate of the body of an HTTP request, once `body_timeout_s` have passed."""
    max_requests_per_project: int = 4096
    """Requests that one project may have in flight; 0 sets no limit, here and below."""
    max_waits_per_project: int = 8192
    """Long polls and heartbeats that one project may have in flight."""
    max_bytes_per_project: int = 2**30
    """Bytes of the bodies of the requests that one project may have in flight."""
    max_tokens_per_project: int = 16 * 2**20
    """Tokens of the HTTP requests that one project may have in flight."""
    max_requests: int = 16_384
    """Requests that all projects together may have in flight."""
    max_waits: int = 65_536
    """Long polls and heartbeats that all projects together may have in flight."""
    max_bytes: int = 3 * 2**29
    """Bytes of the bodies of the requests that all projects together may have in flight."""
    max_reads: int = 32
    """Native requests read at once, each of which may have `max_body_bytes`; more wait."""
    max_unknown_connections: int = 2048
    """Connections on which no good key was shown; of more, the oldest is dropped."""
    confined_timeout_s: float = 10.0
    """Time for one piece of work with the tokenizer or chat template of a job's own model."""
    confined_memory_bytes: int = 2**30
    """Address space of the process that has such a tokenizer."""
    max_confined_processes: int = 4
    """Processes that have such tokenizers; the one used longest ago gives way to a new one."""
    max_tokenizer_bytes: int = 2**28
    """Files of the tokenizers that are kept; those used longest ago go first."""
    call_timeout_s: float = 60.0
    """Time that a call to another pod may take, retries included."""
    long_poll_s: float = 25.0
    """How long a future is waited for before the client is told to ask again."""
    tinker_client_config: str = "{}"
    """JSON object that is merged into the answer of `client/config`."""
    sample_retention_s: float = 24 * 3600.0
    """How long a sample is kept after a client first got it."""
    unretrieved_retention_s: float = 7 * 24 * 3600.0
    """How long a sample is kept that was never asked for."""

    def __post_init__(self) -> None:
        if not self.scheduler_address or not self.pod_key:
            raise ConfigError("a gateway needs scheduler_address and pod_key")
        require_positive(
            self,
            "drain_timeout_s",
            "max_body_bytes",
            "max_text_body_bytes",
            "max_native_call_s",
            "max_connections",
            "handshake_timeout_s",
            "max_head_bytes",
            "body_timeout_s",
            "body_deadline_s",
            "min_body_bytes_per_s",
            "max_reads",
            "max_unknown_connections",
            "confined_timeout_s",
            "confined_memory_bytes",
            "max_confined_processes",
            "max_tokenizer_bytes",
            "call_timeout_s",
            "long_poll_s",
            "sample_retention_s",
            "unretrieved_retention_s",
        )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("tls_certificate and tls_key belong together: set both or none")
        check_address("listen_address", self.listen_address)
        self.origins()
        self.aliases()
        self.tokenizers()
        self.client_config()
        self.limits()

    def origins(self) -> tuple[str, ...]:
        """Return the origins whose pages may call.

        Raises:
            ConfigError: If one is no origin.
        """
        found = tuple(one.strip() for one in self.cors_origins.split(",") if one.strip())
        for origin in found:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins holds {origin!r}; an origin is scheme://host or "
                    "scheme://host:port, without a path"
                )
        return found

    def limits(self) -> LimitSettings:
        """Return what one key may have in flight."""
        return LimitSettings(
            max_requests_per_project=self.max_requests_per_project,
            max_waits_per_project=self.max_waits_per_project,
            max_bytes_per_project=self.max_bytes_per_project,
            max_tokens_per_project=self.max_tokens_per_project,
            max_requests=self.max_requests,
            max_waits=self.max_waits,
            max_bytes=self.max_bytes,
        )

    def confinement(self) -> Confinement:
        """Return the bounds of processes for what strangers wrote."""
        return Confinement(
            timeout_s=self.confined_timeout_s,
            start_timeout_s=_CONFINED_STARTS * self.confined_timeout_s,
            memory_bytes=self.confined_memory_bytes,
            max_processes=self.max_confined_processes,
        )

    def aliases(self) -> dict[str, str]:
        """Return the base model behind each further name."""
        return parse_models(self.model_aliases, setting="model_aliases")

    def tokenizers(self) -> dict[str, str]:
        """Return what the tokenizer of a base model is loaded by, where that is not its name."""
        return parse_models(self.tokenizer_ids, setting="tokenizer_ids")

    def client_config(self) -> dict[str, object]:
        """Return what is merged into the answer of `client/config`.

        Raises:
            ConfigError: If it is not a JSON object.
        """
        try:
            value = json.loads(self.tinker_client_config)
        except ValueError as error:
            raise ConfigError(f"tinker_client_config is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ConfigError("tinker_client_config must be a JSON object")
        return value
