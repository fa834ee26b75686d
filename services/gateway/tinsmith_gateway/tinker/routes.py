"""Wires the endpoints of the Tinker protocol, and what they keep going in the background."""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

from starlette.routing import BaseRoute, Route

from tinsmith_gateway.access.permissions import access_of
from tinsmith_gateway.endpoint import Handler, endpoint
from tinsmith_gateway.services import Services
from tinsmith_gateway.tinker.account.account import Account
from tinsmith_gateway.tinker.account.checkpoints import Checkpoints
from tinsmith_gateway.tinker.account.downloads import DOWNLOADS_PATH, Downloads
from tinsmith_gateway.tinker.account.perfetto_trace import Traces
from tinsmith_gateway.tinker.account.sessions import Sessions
from tinsmith_gateway.tinker.promises.future_store import FutureStore
from tinsmith_gateway.tinker.promises.usage import HourlyUsage
from tinsmith_gateway.tinker.retrieval import Retrieval
from tinsmith_gateway.tinker.runs.numbered_calls import OrderedCalls
from tinsmith_gateway.tinker.runs.training import Training
from tinsmith_gateway.tinker.sampling.sample_futures import Samples
from tinsmith_gateway.tinker.sampling.sample_routes import Sampling
from tinsmith_gateway.tinker.wire.base_models import BaseModels
from tinsmith_gateway.tinker.wire.rendering import render_error

logger = logging.getLogger(__name__)

_PREFIX = "/api/v1"
SMALL_BODY_BYTES = 2**20
"""Limit of bodies that hold neither data nor a number which a refusal has to use up."""
NO_BODY_BYTES = 2**10
"""Limit of the body of a request that has none and needs no key."""
SWEEP_INTERVAL_S = 20.0


class TinkerWire:
    """The Tinker protocol of one gateway."""

    def __init__(self, services: Services) -> None:
        config = services.config
        self._services = services
        self._store = FutureStore(services.database)
        self._usage = HourlyUsage(services.database)
        models = BaseModels(config.aliases(), config.tokenizers())
        self._samples = Samples(
            self._store, services.upstream, services.callers, self._usage, services.threads
        )
        self._account = Account(models, self._usage, config.client_config())
        self._sessions = Sessions()
        self._training = Training(
            OrderedCalls(self._store),
            self._store,
            models,
            self._usage,
            services.threads,
            max_body_bytes=config.max_body_bytes,
        )
        self._sampling = Sampling(
            self._samples, self._store, models, default_poll_s=config.long_poll_s
        )
        self._retrieval = Retrieval(self._store, self._samples, long_poll_s=config.long_poll_s)
        self._downloads = Downloads(services)
        self._checkpoints = Checkpoints(self._downloads)
        self._traces = Traces(self._store, self._downloads)
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Go on with what was promised before a restart."""
        await self._store.load()
        await self._samples.load()
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Stop what goes on in the background; it goes on after the next start."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await self._samples.stop()
        await self._tidy()

    def routes(self) -> list[BaseRoute]:
        """Return the routes below `/api/v1`."""
        run = "/training_runs/{model_id}"
        # The id of a checkpoint holds a slash: `weights/<name>`.
        checkpoint = run + "/checkpoints/{kind}/{name}"
        session = "/sessions/{session_id}"
        return [
            self._route("POST", "/client/config", self._account.config),
            self._route("POST", "/client/dynamic_config", self._account.dynamic_config),
            self._route("GET", "/get_server_capabilities", self._account.capabilities),
            self._route("POST", "/telemetry", self._account.telemetry, body="text"),
            self._route("GET", "/auth/apikey/me", self._account.key),
            self._route("DELETE", "/auth/apikey/me", self._account.delete_key),
            self._route("GET", "/audit", self._account.audit),
            self._route("GET", "/billing/usage/events", self._account.usage),
            self._route("GET", "/billing/usage/checkpoints/current", self._account.storage),
            self._route("POST", "/create_session", self._sessions.create),
            self._route("POST", "/session_heartbeat", self._sessions.heartbeat, is_wait=True),
            self._route("GET", "/sessions", self._sessions.list),
            self._route("POST", "/sessions/search", self._sessions.search),
            self._route("GET", session, self._sessions.get),
            self._route("POST", session + "/finish", self._sessions.finish),
            self._route("PUT", session + "/project", self._sessions.assign_project),
            self._route("GET", session + "/trace_export", self._traces.export),
            self._route("POST", "/create_model", self._training.create_model),
            self._route("POST", "/get_info", self._training.get_info),
            self._route(
                "POST",
                "/forward_backward",
                self._training.forward_backward,
                takes_excess=True,
                body="batch",
            ),
            self._route("POST", "/optim_step", self._training.optim_step, body="text"),
            self._route("POST", "/save_weights", self._training.save_weights, body="text"),
            self._route(
                "POST",
                "/save_weights_for_sampler",
                self._training.save_weights_for_sampler,
                body="text",
            ),
            self._route(
                "POST",
                "/save_weights_external",
                self._training.save_weights_external,
                body="text",
            ),
            self._route("POST", "/load_weights", self._training.load_weights, body="text"),
            self._route("POST", "/create_sampling_session", self._sampling.create_session),
            self._route("POST", "/join_sampling_session", self._sampling.join_session),
            self._route("GET", "/samplers/{sampling_session_id}", self._sampling.get_sampler),
            self._route("POST", "/asample", self._sampling.sample, body="batch"),
            self._route("POST", "/retrieve_future", self._retrieval.retrieve, is_wait=True),
            self._route("POST", "/retrieve_futures", self._sampling.retrieve_futures, is_wait=True),
            self._route("POST", "/cancel_future", self._sampling.cancel),
            self._route("GET", "/training_runs", self._checkpoints.list_runs),
            self._route("GET", run, self._checkpoints.get_run),
            self._route("GET", run + "/checkpoints", self._checkpoints.list_of_run),
            self._route("GET", "/checkpoints", self._checkpoints.list_all),
            self._route("DELETE", checkpoint, self._checkpoints.delete),
            self._route("POST", checkpoint + "/publish", self._checkpoints.publish),
            self._route("DELETE", checkpoint + "/publish", self._checkpoints.unpublish),
            self._route("PUT", checkpoint + "/ttl", self._checkpoints.set_ttl),
            self._route(
                "GET", checkpoint + "/external_weights_urls", self._checkpoints.external_urls
            ),
            self._route("POST", "/weights_info", self._checkpoints.info),
            self._route("POST", "/copy_weights", self._checkpoints.copy),
            # The holder of a link needs no key: the link is one.
            self._open_route(DOWNLOADS_PATH + "/traces/{link}", self._traces.fetch),
            self._open_route(DOWNLOADS_PATH + "/{link}", self._downloads.fetch),
        ]

    def _route(
        self,
        method: str,
        path: str,
        handler: Handler,
        *,
        is_wait: bool = False,
        takes_excess: bool = False,
        body: Literal["small", "text", "batch"] = "small",
    ) -> Route:
        config = self._services.config
        limits = {
            "small": SMALL_BODY_BYTES,
            "text": config.max_text_body_bytes,
            "batch": config.max_body_bytes,
        }
        serve = endpoint(
            self._services,
            handler,
            render_error,
            access=access_of(method, _PREFIX + path),
            is_wait=is_wait,
            takes_excess=takes_excess,
            max_body_bytes=limits[body],
        )
        return Route(_PREFIX + path, serve, methods=[method])

    def _open_route(self, path: str, handler: Handler) -> Route:
        serve = endpoint(
            self._services, handler, render_error, access=None, max_body_bytes=NO_BODY_BYTES
        )
        return Route(path, serve, methods=["GET"])

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            await self._tidy()

    async def _tidy(self) -> None:
        config = self._services.config
        try:
            await self._usage.flush()
            await self._store.sweep(
                retrieved_s=config.sample_retention_s,
                unretrieved_s=config.unretrieved_retention_s,
            )
        except Exception:
            logger.exception("the sweep of futures failed")
