"""Jobs as resources of a cluster: its controller runs them, here they are made, read and changed.

The one module that talks to an API server. The client blocks, so every call runs in a thread of its
own pool, with a deadline. The namespace of a project comes from the operator's settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import json
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import urllib3
from kubernetes import client, config, watch

from tinsmith.jobs.json_form import API_VERSION, KIND
from tinsmith.names import JobName
from tinsmith_jobs.naming import (
    EPOCH_LABEL,
    INDEX_LABEL,
    RETRY_ANNOTATION,
    ROLE_LABEL,
    UID_LABEL,
)
from tinsmith_runtime.errors import (
    AlreadyExistsError,
    ClusterRefusedError,
    ClusterUnavailableError,
    ConfigError,
    InvalidFieldError,
    JobFinishedError,
    JobLogMissingError,
    JobNotFoundError,
    JobsDisabledError,
    TinsmithError,
)
from tinsmith_runtime.records import RequestIdentity
from tinsmith_scheduler.jobs.launcher import FINISHED_PHASES, has_failed
from tinsmith_scheduler.store.job_reports import job_not_found
from tinsmith_scheduler.store.records import Job, Json, LogPart, LogPosition, PageRequest

ResultT = TypeVar("ResultT")

_GROUP, _VERSION = API_VERSION.split("/")
_PLURAL = "trainingjobs"
_REQUEST = "tinsmith.dev/request"
_MAX_THREADS = 64
_WATCH_S = 10
_LOG_POLL_S = 1.0
_LOG_BYTES = 2**20


class KubernetesLauncher:
    """Implements `Launcher` on a cluster.

    Args:
        namespaces: Namespace of the jobs of each project.
        timeout_s: Deadline of each call.
        api: Connection to the API server; that of the pod's service account, or of the user's
            kubeconfig, if it is left out.
    """

    def __init__(
        self,
        namespaces: Mapping[str, str],
        *,
        timeout_s: float,
        api: client.ApiClient | None = None,
    ) -> None:
        self._namespaces = dict(namespaces)
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="cluster")
        api = api or _connect()
        self._objects = client.CustomObjectsApi(api)
        self._core = client.CoreV1Api(api)

    async def start(self, address: str) -> None:
        """Do nothing: the controller of the cluster goes on with jobs."""

    async def stop(self) -> None:
        """Give the threads back; jobs go on."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def create(
        self, name: JobName, spec: Json, labels: Mapping[str, str], request: RequestIdentity
    ) -> Job:
        """Make the resource."""
        namespace = self._namespace(name.project)
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {
                "name": name.job,
                "labels": dict(labels),
                "annotations": {_REQUEST: request.digest.hex()},
            },
            "spec": spec,
        }
        try:
            made = await self._call(
                self._objects.create_namespaced_custom_object,
                _GROUP,
                _VERSION,
                namespace,
                _PLURAL,
                body,
            )
        except JobNotFoundError as error:
            raise JobsDisabledError(
                f"the cluster has no namespace {namespace}, or no resource {KIND}; its operator "
                "installs the chart and makes the namespace"
            ) from error
        except AlreadyExistsError:
            made = await self._read(name)
            if _look_up(made, "metadata", "annotations", _REQUEST) != request.digest.hex():
                raise AlreadyExistsError(f"job {name} exists", job=name) from None
        return _job(name.project, made)

    async def get(self, name: JobName) -> Job:
        """Return a job."""
        return _job(name.project, await self._read(name))

    async def list(self, project: str, page: PageRequest) -> tuple[list[Job], str]:
        """Return jobs of a project by name."""
        options: dict[str, Any] = {"limit": page.size}
        if page.token:
            options["_continue"] = page.token
        found = await self._call(
            self._objects.list_namespaced_custom_object,
            _GROUP,
            _VERSION,
            self._namespace(project),
            _PLURAL,
            **options,
        )
        token: str = _look_up(found, "metadata", "continue", default="")
        return [_job(project, each) for each in found["items"]], token

    async def cancel(self, name: JobName) -> Job:
        """Save and end a job for good."""
        job = await self.get(name)
        return job if _is_finished(job) else await self._patch(name, {"spec": {"cancel": True}})

    async def set_suspended(self, name: JobName, *, suspended: bool) -> Job:
        """Let a job wait, or go on."""
        job = await self.get(name)
        if _is_finished(job):
            raise JobFinishedError(f"job {name} is {job.status['phase']}", job=name)
        return await self._patch(name, {"spec": {"suspend": suspended}})

    async def retry(self, name: JobName) -> Job:
        """Tell the controller which end of a job it is to undo."""
        job = await self.get(name)
        if not has_failed(job):
            return job
        asked = {RETRY_ANNOTATION: job.status["completionTime"]}
        return await self._patch(name, {"metadata": {"annotations": asked}})

    async def delete(self, name: JobName) -> None:
        """Have the resource deleted, which ends the job."""
        with contextlib.suppress(JobNotFoundError):
            await self._call(
                self._objects.delete_namespaced_custom_object,
                _GROUP,
                _VERSION,
                self._namespace(name.project),
                _PLURAL,
                name.job,
                name=name,
            )

    async def watch(self, name: JobName, revision: str) -> AsyncIterator[Job]:
        """Yield a job whenever it has another revision, until it has ended or is gone."""
        job = await self.get(name)
        while True:
            if job.revision != revision:
                yield job
                revision = job.revision
            if _is_finished(job):
                return
            await self._run(functools.partial(self._wait_changed, name, revision))
            try:
                job = await self.get(name)
            except JobNotFoundError:
                return

    async def read_log(self, name: JobName, wanted: LogPosition) -> AsyncIterator[LogPart]:
        """Yield what a pod of a job printed.

        Positions are the times that the cluster puts before lines.
        """
        position = wanted.position
        if position and _parse_time(position) is None:
            raise InvalidFieldError("position", "is not a position of this log")
        is_first = True
        while True:
            job = await self.get(name)
            # Asked first: what is printed before the end is read after it.
            is_over = not wanted.follow or _is_finished(job)
            pod = await self._pod_of(name, job, wanted)
            if not pod and (is_first or is_over):
                raise JobLogMissingError(
                    f"job {name} has no pod {wanted.role} {wanted.index}; it is "
                    f"{job.status.get('phase', 'new')}",
                    job=name,
                )
            tail_lines = wanted.tail_lines if is_first and not position else 0
            try:
                part = await self._read_part(name, pod, position, tail_lines) if pod else None
            except JobLogMissingError:
                # A new pod of the role has printed nothing so far: its log is waited for.
                if is_first or is_over:
                    raise
                part = None
            is_first = False
            if part is not None:
                position = part.position
                yield part
            elif is_over:
                return
            else:
                await asyncio.sleep(_LOG_POLL_S)

    async def _pod_of(self, name: JobName, job: Job, wanted: LogPosition) -> str:
        """Return the newest pod of a role and index; empty if there is none.

        The cluster is asked, not the status: a job that ended has given its places back, and its
        pods stay for their logs.
        """
        found = await self._call(
            self._core.list_namespaced_pod,
            self._namespace(name.project),
            label_selector=f"{UID_LABEL}={job.uid},{INDEX_LABEL}={wanted.index}",
        )
        pods = [
            pod.metadata
            for pod in found.items
            if (pod.metadata.annotations or {}).get(ROLE_LABEL) == wanted.role
        ]
        newest = max(pods, key=lambda pod: int(pod.labels.get(EPOCH_LABEL, "0")), default=None)
        return "" if newest is None else str(newest.name)

    async def _read_part(
        self, name: JobName, pod: str, position: str, tail_lines: int
    ) -> LogPart | None:
        options: dict[str, Any] = {"timestamps": True, "limit_bytes": _LOG_BYTES}
        if tail_lines:
            options["tail_lines"] = tail_lines
        since = _parse_time(position) if position else None
        if since is not None:
            age = datetime.datetime.now(datetime.UTC) - since
            # The API server counts in whole seconds; what was sent before is left out below.
            options["since_seconds"] = max(int(age.total_seconds()) + 2, 1)
        try:
            text: str = await self._call(
                self._read_text,
                pod,
                self._namespace(name.project),
                name=name,
                **options,
            )
        except (JobNotFoundError, InvalidFieldError) as error:
            raise JobLogMissingError(
                f"pod {pod} of job {name} has no log yet, or is gone", job=name
            ) from error
        lines = []
        for line in text.splitlines(keepends=True):
            time, _, printed = line.partition(" ")
            if line.endswith("\n") and time > position:
                lines.append(printed)
                position = time
        return LogPart("".join(lines), position) if lines else None

    def _read_text(self, pod: str, namespace: str, **options: Any) -> str:
        # As bytes: what the client makes of them is the text of a Python literal.
        response = self._core.read_namespaced_pod_log(
            pod, namespace, _preload_content=False, **options
        )
        data: bytes = response.data
        return data.decode(errors="replace")

    def _wait_changed(self, name: JobName, revision: str) -> None:
        """Return once a job may have another revision, or after a while."""
        stream = watch.Watch()
        try:
            for _ in stream.stream(
                self._objects.list_namespaced_custom_object,
                _GROUP,
                _VERSION,
                self._namespace(name.project),
                _PLURAL,
                field_selector=f"metadata.name={name.job}",
                resource_version=revision,
                timeout_seconds=_WATCH_S,
                _request_timeout=_WATCH_S + self._timeout_s,
            ):
                return
        except client.ApiException as error:
            # The revision is too old to be watched: the job is read anew.
            if error.status != 410:
                raise
        finally:
            stream.stop()

    async def _patch(self, name: JobName, changes: Json) -> Job:
        changed = await self._call(
            self._objects.patch_namespaced_custom_object,
            _GROUP,
            _VERSION,
            self._namespace(name.project),
            _PLURAL,
            name.job,
            changes,
            name=name,
            _content_type="application/merge-patch+json",
        )
        return _job(name.project, changed)

    async def _read(self, name: JobName) -> dict[str, Any]:
        found: dict[str, Any] = await self._call(
            self._objects.get_namespaced_custom_object,
            _GROUP,
            _VERSION,
            self._namespace(name.project),
            _PLURAL,
            name.job,
            name=name,
        )
        return found

    def _namespace(self, project: str) -> str:
        namespace = self._namespaces.get(project, "")
        if not namespace:
            raise JobsDisabledError(
                f"project {project} has no namespace for jobs; the operator adds it to "
                "job_namespaces of the scheduler"
            )
        return namespace

    async def _call(
        self,
        method: Callable[..., Any],
        *args: Any,
        name: JobName | None = None,
        **options: Any,
    ) -> Any:
        options["_request_timeout"] = self._timeout_s
        return await self._run(functools.partial(method, *args, **options), name)

    async def _run(self, call: Callable[[], ResultT], name: JobName | None = None) -> ResultT:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, call)
        except client.ApiException as error:
            raise _typed(error, name) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ClusterUnavailableError(
                f"the API server of the cluster does not answer ({type(error).__name__}); send the "
                "request again"
            ) from error


def _connect() -> client.ApiClient:
    settings = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=settings)
    except config.ConfigException:
        try:
            config.load_kube_config(client_configuration=settings)
        except config.ConfigException as error:
            raise ConfigError(
                f"job_launcher kubernetes found no cluster: {error}; run it in a pod, or with a "
                "kubeconfig"
            ) from error
    # The caller sends a call again, because it knows how much of its time is left.
    settings.retries = False
    return client.ApiClient(settings)


def _typed(error: client.ApiException, name: JobName | None) -> TinsmithError:
    """Return what an answer of the API server means."""
    message = _message_of(error)
    match error.status:
        case 404:
            return job_not_found(name) if name is not None else JobNotFoundError(message)
        case 409:
            return AlreadyExistsError(message)
        case 400 | 422:
            return InvalidFieldError("training_job.spec", message)
        case 410:
            return InvalidFieldError("page_token", "is too old; begin the list anew")
        case 401 | 403:
            return ClusterRefusedError(f"the cluster refuses the scheduler: {message}")
    return ClusterUnavailableError(f"the API server of the cluster fails: {message}")


def _message_of(error: client.ApiException) -> str:
    try:
        message = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        message = f"{error.status} {error.reason}"
    return " ".join(str(message).split())[:1000]


def _job(project: str, found: Mapping[str, Any]) -> Job:
    metadata = found["metadata"]
    created = datetime.datetime.fromisoformat(metadata["creationTimestamp"])
    return Job(
        name=str(JobName(project, metadata["name"])),
        uid=metadata["uid"],
        spec=found.get("spec", {}),
        status=found.get("status", {}),
        labels=metadata.get("labels") or {},
        create_time_s=created.timestamp(),
        revision=metadata["resourceVersion"],
    )


def _is_finished(job: Job) -> bool:
    return job.status.get("phase") in FINISHED_PHASES


def _parse_time(text: str) -> datetime.datetime | None:
    try:
        # Nine digits of a second are more than Python reads.
        return datetime.datetime.fromisoformat(f"{text.partition('.')[0].rstrip('Z')}+00:00")
    except ValueError:
        return None


def _look_up(value: Json, *path: str, default: Any = None) -> Any:
    """Return the value at a path; the default if a part of it is missing."""
    found: Any = value
    for key in path:
        if not isinstance(found, Mapping) or key not in found:
            return default
        found = found[key]
    return found
