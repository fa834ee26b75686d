"""The controller as one object, which `__main__` and tests start alike.

One replica works at a time. A few threads reconcile workloads, each workload in one at a time. The
assignment of nodes is one more key of their queue.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import logging
import threading
import time
from collections.abc import Callable

from tinsmith.backoff import backoff
from tinsmith_controller.assignment.queue_config import QueueConfigFile
from tinsmith_controller.assignment_loop import AssignmentLoop
from tinsmith_controller.config import ControllerConfig
from tinsmith_controller.kube.api_client import ApiError, Cluster
from tinsmith_controller.kube.leader_election import LeaderElection, NotLeaderError
from tinsmith_controller.kube.work_queue import WorkQueue
from tinsmith_controller.metrics import QUEUE_LENGTH, RECONCILE_SECONDS, RECONCILES
from tinsmith_controller.objects.caches import Caches
from tinsmith_controller.objects.events import EventRecorder
from tinsmith_controller.owned_objects import RetryLaterError
from tinsmith_controller.pods.deployment import Deployment
from tinsmith_controller.pods.job_refusal import refusal_of
from tinsmith_controller.reconciler import Reconciler
from tinsmith_controller.rpc.scheduler_client import (
    SchedulerClient,
    SchedulerError,
)
from tinsmith_controller.status_writer import StatusWriter
from tinsmith_jobs.naming import NamespacedName
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.rpc.pod_identity import PodCredentials, PodRole

logger = logging.getLogger(__name__)

_ASSIGN = NamespacedName("Assignment", "", "")
"""The key under which nodes are decided about."""
_GRPC_PROBES_SINCE = 24
_STOP_TIMEOUT_S = 20.0
_STUCK_S = 120.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0


class ControllerPod:
    """One replica of the controller.

    Args:
        config: Its settings.
        on_lost: Called if another replica took over, or may have; the process must end.

    Raises:
        ApiError: If the API server does not say its version.
    """

    def __init__(
        self, config: ControllerConfig, *, on_lost: Callable[[], None] = lambda: None
    ) -> None:
        self._config = config
        self._on_lost = on_lost
        self._cluster = Cluster(config.kubeconfig, num_connections=16 + 2 * config.num_workers)
        try:
            deployment = _deployment(config, self._cluster)
        except ApiError:
            self._cluster.close()
            raise
        self._scheduler = SchedulerClient(
            config.scheduler_address,
            PodCredentials.read(
                config.pod_key,
                PodRole.CONTROLLER,
                previous=config.previous_pod_key,
                tls=config.tls(),
            ),
        )
        self._queue: WorkQueue[NamespacedName] = WorkQueue(time.monotonic)
        self._election = LeaderElection(
            self._cluster,
            namespace=config.lease_namespace,
            name=config.lease_name,
            identity=config.replica(),
            ttl_s=config.lease_ttl_s,
        )
        self._stores = Caches(
            self._cluster,
            config.namespace_list(),
            on_workload=self._queue.add,
            on_capacity=lambda: self._queue.add(_ASSIGN, config.assignment_interval_s),
            on_gone=lambda uid: self._reconciler.forget(uid),
            check=functools.partial(refusal_of, deployment),
            has_kueue=config.kueue,
        )
        limits = config.limits()
        now = functools.partial(datetime.datetime.now, datetime.UTC)
        events = EventRecorder(self._cluster, identity=config.replica())
        policy = QueueConfigFile(config.queues_path)
        writer = StatusWriter(self._cluster, self._stores, self._election)
        self._reconciler = Reconciler(
            self._cluster,
            self._stores,
            writer,
            self._election,
            self._scheduler,
            events,
            policy,
            deployment=deployment,
            limits=limits,
            namespaces=config.namespace_list(),
            projects=config.project_map(),
            node_lost_s=config.node_lost_s,
            now=now,
        )
        self._assigner = AssignmentLoop(
            self._stores,
            writer,
            events,
            policy,
            defaults=deployment.requests,
            projects=config.project_map(),
            limits=limits,
            now=now,
        )
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._is_working = False
        self._active_s = time.monotonic()

    @property
    def is_alive(self) -> bool:
        """Whether its workers move; a replica that stands by does."""
        return not self._is_working or time.monotonic() - self._active_s < _STUCK_S

    def run(self) -> None:
        """Wait to be elected, and work until `stop`.

        Raises:
            ConfigError: If the cluster cannot be listed.
        """
        if not self._election.wait_elected() or self._stopped.is_set():
            return
        self._spawn("election", lambda: self._election.keep(self._lost))
        # Listed after the election: what the leader before wrote is in these lists.
        self._stores.start()
        if not self._stores.wait_synced(self._config.sync_timeout_s):
            if self._stopped.is_set():
                return
            raise ConfigError(
                f"the cluster could not be listed within {self._config.sync_timeout_s:.0f} s; are "
                "the resources installed, and may the controller list them?"
            )
        logger.info("elected", extra={"identity": self._config.replica()})
        self._active_s = time.monotonic()
        self._is_working = True
        for number in range(self._config.num_workers):
            self._spawn(f"worker-{number}", self._work)
        self._spawn("reports", self._fetch_reports)
        self._spawn("resync", self._resync)
        self._stopped.wait()

    def stop(self) -> None:
        """Finish what is being done, and give the lease back."""
        self._stopped.set()
        self._queue.close()
        self._stores.stop()
        end_s = time.monotonic() + _STOP_TIMEOUT_S
        for thread in self._threads:
            if thread.name != "election":
                thread.join(max(0.0, end_s - time.monotonic()))
        self._election.stop()
        self._cluster.close()

    def _lost(self) -> None:
        logger.critical("the lease was lost")
        self._on_lost()

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while not self._stopped.is_set():
            key = self._queue.take()
            self._active_s = time.monotonic()
            QUEUE_LENGTH.set(len(self._queue))
            if key is None:
                continue
            outcome, again_s = self._handle(key)
            RECONCILES.labels(key.kind, outcome).inc()
            self._queue.done(key, failed=outcome in ("failed", "conflict"))
            if again_s is not None:
                self._queue.add(key, again_s)

    def _handle(self, key: NamespacedName) -> tuple[str, float | None]:
        """Look at a key; return what came of it, and when to look again."""
        try:
            with RECONCILE_SECONDS.labels(key.kind).time():
                if key == _ASSIGN:
                    return "done", self._assigner.decide()
                return "done", self._reconciler.look(key)
        except NotLeaderError:
            return "not_leader", None
        except RetryLaterError as error:
            logger.info("later", extra={"workload": str(key), "problem": str(error)})
            return "failed", None
        except ApiError as error:
            if error.is_conflict or error.is_not_found:
                return "conflict", None
            logger.warning("request failed", extra={"workload": str(key), "problem": str(error)})
            return "failed", None
        except Exception:
            logger.exception("a look failed by a bug", extra={"workload": str(key)})
            return "failed", None

    def _fetch_reports(self) -> None:
        while not self._stopped.wait(self._config.report_interval_s):
            try:
                jobs = self._reconciler.identities()
                if not jobs:
                    continue
                reports = self._scheduler.reports([identity for _, identity in jobs.values()])
                for uid in self._reconciler.take_reports(reports):
                    if uid in jobs:
                        self._queue.add(jobs[uid][0])
            except SchedulerError as error:
                logger.warning("no reports", extra={"problem": str(error)})
            except Exception:
                logger.exception("reports failed by a bug")

    def _resync(self) -> None:
        while not self._stopped.wait(self._config.resync_interval_s):
            for record in self._stores.workloads():
                self._queue.add(record.item.key)
            self._queue.add(_ASSIGN)
            try:
                self._reconciler.revoke_orphans()
            except (SchedulerError, NotLeaderError) as error:
                logger.warning("keys of deleted jobs may be good", extra={"problem": str(error)})
            except Exception:
                logger.exception("keys of deleted jobs were not revoked by a bug")


async def open_pod(
    config: ControllerConfig,
    stopped: asyncio.Future[None],
    *,
    on_lost: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> ControllerPod | None:
    """Return a replica once the API server answers; None if it was stopped before.

    Args:
        config: Its settings; `sync_timeout_s` is how long the server is asked again.
        stopped: Done when the process is to end.
        on_lost: See `ControllerPod`.
        clock: Monotonic seconds.

    Raises:
        ConfigError: If the server refuses, or does not answer in time.
    """
    end_s = clock() + config.sync_timeout_s
    for pause_s in backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S):
        pod = None
        try:
            pod = await asyncio.to_thread(ControllerPod, config, on_lost=on_lost)
        except ApiError as failure:
            if not failure.may_pass or clock() + pause_s > end_s:
                raise ConfigError(f"the Kubernetes API does not answer: {failure}") from failure
            logger.warning("the Kubernetes API is asked again", extra={"problem": str(failure)})
            await asyncio.wait((stopped,), timeout=pause_s)
        if stopped.done():
            if pod is not None:
                await asyncio.to_thread(pod.stop)
            return None
        if pod is not None:
            return pod
    raise AssertionError("pauses have no end")


def _deployment(config: ControllerConfig, cluster: Cluster) -> Deployment:
    return Deployment(
        scheduler_address=config.scheduler_address,
        gateway_address=config.gateway_address,
        pod_root=config.pod_key,
        database_secret=config.database_secret_name,
        certificate_secrets=config.pod_certificate_secrets,
        storage_uri=config.storage_uri,
        storage_secret=config.storage_secret_name,
        storage_claim=config.storage_claim_name,
        image_repository=config.image_repository,
        image_tag=config.image_tag,
        trusted_images=config.trusted_image_list(),
        pull_secrets=config.pull_secrets(),
        protected_secrets=config.protected_secrets(),
        author_policy=config.author_policy(),
        service_account=config.service_account_name,
        volume_size=config.volume_size,
        cache_size=config.cache_size,
        device=config.device,
        has_grpc_probes=cluster.minor_version() >= _GRPC_PROBES_SINCE,
    )
