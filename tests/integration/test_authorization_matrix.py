"""Each method and route, called with each kind of key, on a running deployment.

A call that is let through fails later, by its empty request; so nothing is made or changed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.longrunning import operations_pb2
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from tests.integration.servers import Deployment, EmbeddedThread

from tinsmith.rpc.error_codec import decode_rpc_error
from tinsmith.v1 import (
    checkpoint_pb2,
    coordinator_pb2,
    environment_pb2,
    episode_pb2,
    job_pb2,
    keys_pb2,
    run_metrics_pb2,
    sampler_pb2,
    scheduler_pb2,
    trainer_control_pb2,
    trainer_pb2,
    usage_pb2,
    workers_pb2,
)
from tinsmith_gateway.access.permissions import HTTP_PERMISSIONS
from tinsmith_runtime.rpc.permissions import KEY_PERMISSIONS, KeyRole, may_call
from tinsmith_runtime.rpc.pod_identity import PodIdentity, PodKey, PodRole

_MODULES = (
    checkpoint_pb2,
    coordinator_pb2,
    environment_pb2,
    episode_pb2,
    job_pb2,
    keys_pb2,
    operations_pb2,
    run_metrics_pb2,
    sampler_pb2,
    scheduler_pb2,
    trainer_control_pb2,
    trainer_pb2,
    usage_pb2,
    workers_pb2,
)
_POD_OF = {
    "tinsmith.v1.SchedulerService": "scheduler",
    "tinsmith.v1.KeyService": "scheduler",
    "tinsmith.v1.WorkerService": "scheduler",
    "tinsmith.v1.JobService": "scheduler",
    "tinsmith.v1.RunMetricsService": "scheduler",
    "tinsmith.v1.UsageService": "scheduler",
    "google.longrunning.Operations": "trainer",
    "tinsmith.v1.TrainerService": "trainer",
    "tinsmith.v1.TrainerControlService": "trainer",
    "tinsmith.v1.CheckpointService": "trainer",
    "tinsmith.v1.SamplerService": "sampler",
    "tinsmith.v1.EnvironmentService": "environment",
    "tinsmith.v1.CoordinatorService": "coordinator",
    "tinsmith.v1.EpisodeService": "coordinator",
}
# The gateway does not know them.
_OF_PODS = ("tinsmith.v1.TrainerControlService", "tinsmith.v1.WorkerService")
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for module in _MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if f"/{service.full_name}/{method.name}" in KEY_PERMISSIONS
}
_BAD = {
    "none": ("KEY_MISSING", ""),
    "malformed": ("KEY_INVALID", "tsk_nonsense"),
    "unknown": ("KEY_INVALID", f"tsk_{'0' * 12}_{'A' * 43}"),
}


class Keys:
    """A key of each kind, and where each pod is."""

    def __init__(self, server: EmbeddedThread, deployment: Deployment) -> None:
        with deployment.client() as client:
            new = {role: client.keys.create(role=role) for role in KeyRole}
            self.of_role = {role: key.secret for role, key in new.items()}
            revoked = client.keys.create()
            client.keys.revoke(revoked.name)
            foreign = client.keys.create(role="admin", project="b")
            # Its life is over before it is first shown.
            expired = client.keys.create(ttl_seconds=0.001)
            run = client.create_lora_training_client("tiny", rank=1)
            checkpoint = run.save_state("kept").result()
            sampler = client.create_sampling_client(base_model="tiny")
            names = [
                run.name,
                run.name.replace("trainingRuns", "sessions"),
                checkpoint.name,
                sampler.name,
                new[KeyRole.MEMBER].name,
                f"{run.name}/operations/1",
            ]
        self.bad: Mapping[str, tuple[str, str]] = {
            **_BAD,
            "revoked": ("KEY_REVOKED", revoked.secret),
            "expired": ("KEY_EXPIRED", expired.secret),
        }
        self.of_pod = {
            role: str(PodKey.derive(server.pod_key, PodIdentity(role))) for role in PodRole
        }
        self.gateway = deployment.address
        self.foreign = foreign.secret
        self.names = names
        self.addresses = {"scheduler": server.scheduler_address}
        with grpc.insecure_channel(server.scheduler_address) as channel:
            answer = channel.unary_unary(
                "/tinsmith.v1.WorkerService/ListWorkers",
                request_serializer=workers_pb2.ListWorkersRequest.SerializeToString,
                response_deserializer=workers_pb2.ListWorkersResponse.FromString,
            )(
                workers_pb2.ListWorkersRequest(),
                metadata=(("authorization", f"Bearer {self.of_pod[PodRole.GATEWAY]}"),),
                timeout=10,
            )
        for worker in answer.workers:
            role = workers_pb2.Worker.Role.Name(worker.role).removeprefix("ROLE_").lower()
            self.addresses[role] = worker.address


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Keys]:
    server = EmbeddedThread(tmp_path_factory.mktemp("matrix"), model_dir)
    deployment = server.start()
    try:
        yield Keys(server, deployment)
    finally:
        server.stop()


def reason_of(channel: grpc.Channel, method: str, key: str) -> str:
    """Return the reason of the refusal of an empty request; empty if it was answered."""
    descriptor = METHODS[method]
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    kinds = (descriptor.client_streaming, descriptor.server_streaming)
    try:
        if kinds == (False, False):
            channel.unary_unary(method)(b"", metadata=metadata, timeout=20)
        elif kinds == (False, True):
            stream: Any = channel.unary_stream(method)(b"", metadata=metadata, timeout=20)
            next(stream, None)
            stream.cancel()
        else:
            next(channel.stream_stream(method)(iter([b""]), metadata=metadata, timeout=20), None)
    except grpc.RpcError as error:
        return decode_rpc_error(error).reason
    return ""


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_method_takes_the_keys_that_the_table_says(keys: Keys, method: str) -> None:
    pod = _POD_OF[method.split("/")[1]]
    with grpc.insecure_channel(keys.addresses[pod]) as channel:
        for reason, key in keys.bad.values():
            assert reason_of(channel, method, key) == reason
        for role, key in (*keys.of_role.items(), *keys.of_pod.items()):
            is_refused = reason_of(channel, method, key) == "ROLE_MISSING"
            assert is_refused is not may_call(role, method), role


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_gateway_passes_on_what_the_table_says_and_no_key_of_a_pod(
    keys: Keys, method: str
) -> None:
    if method.split("/")[1] in _OF_PODS:
        return
    with grpc.insecure_channel(keys.gateway) as channel:
        for reason, key in keys.bad.values():
            assert reason_of(channel, method, key) == reason
        for role, key in keys.of_role.items():
            is_refused = reason_of(channel, method, key) == "ROLE_MISSING"
            assert is_refused is not may_call(role, method), role
        for role, key in keys.of_pod.items():
            assert reason_of(channel, method, key) == "ROLE_MISSING", role


@pytest.mark.parametrize(("method", "path"), sorted(HTTP_PERMISSIONS))
def test_a_route_takes_the_keys_that_the_table_says(keys: Keys, method: str, path: str) -> None:
    target = path.replace("{", "").replace("}", "").replace(":path", "")
    if (method, path) == ("DELETE", "/api/v1/auth/apikey/me"):
        # It would delete the key that is shown.
        return
    with httpx.Client(base_url=f"http://{keys.gateway}", timeout=30) as client:

        def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return client.request(method, target, headers=headers, content=b"").status_code

        for _, key in keys.bad.values():
            assert status(key) == 401
        for role, key in keys.of_role.items():
            is_allowed = role in HTTP_PERMISSIONS[method, path]
            assert (status(key) == 403) is not is_allowed, role
        for role, key in keys.of_pod.items():
            assert status(key) == 403, role


def _refusal(channel: grpc.Channel, method: str, name: str, key: str) -> tuple[str, str]:
    """Return reason and text of the answer to a request whose first field is a name."""
    descriptor = METHODS[method]
    message = message_factory.GetMessageClass(descriptor.input_type)()
    setattr(message, descriptor.input_type.fields[0].name, name)
    body, metadata = message.SerializeToString(), (("authorization", f"Bearer {key}"),)
    try:
        if descriptor.server_streaming:
            stream: Any = channel.unary_stream(method)(body, metadata=metadata, timeout=20)
            next(stream, None)
            stream.cancel()
        else:
            channel.unary_unary(method)(body, metadata=metadata, timeout=20)
    except grpc.RpcError as error:
        found = decode_rpc_error(error)  # type: ignore[arg-type]
        return found.reason, found.message.replace(name, "NAME")
    return "", ""


_NAMED = sorted(
    method
    for method, descriptor in METHODS.items()
    if not descriptor.client_streaming
    # Those of trainers and samplers tell every caller the same.
    and not method.endswith(("TrainerService/GetCapabilities", "SamplerService/GetCapabilities"))
    and descriptor.input_type.fields
    and descriptor.input_type.fields[0].type == FieldDescriptor.TYPE_STRING
    and may_call(KeyRole.ADMIN, method)
)


@pytest.mark.parametrize("method", _NAMED)
def test_what_is_foreign_is_answered_as_what_is_absent(keys: Keys, method: str) -> None:
    with grpc.insecure_channel(keys.addresses[_POD_OF[method.split("/")[1]]]) as channel:
        for name in keys.names:
            absent = f"{name[:-1]}{'9' if name[-1] != '9' else '8'}"
            foreign = _refusal(channel, method, name, keys.foreign)
            assert foreign == _refusal(channel, method, absent, keys.foreign), name
            assert foreign[0], f"{method} answered for {name}"


@pytest.mark.parametrize("through_gateway", [True, False])
@pytest.mark.parametrize("service", sorted(_POD_OF))
def test_a_caller_without_a_good_key_is_refused_though_its_request_never_comes(
    keys: Keys, service: str, through_gateway: bool
) -> None:
    method = next(name for name in sorted(METHODS) if name.split("/")[1] == service)
    if through_gateway and service in _OF_PODS:
        return
    never = threading.Event()

    def request() -> Iterator[bytes]:
        never.wait(60)
        yield b""

    address = keys.gateway if through_gateway else keys.addresses[_POD_OF[service]]
    with grpc.insecure_channel(address) as channel:
        for reason, key in keys.bad.values():
            metadata = (("authorization", f"Bearer {key}"),) if key else ()
            call = channel.stream_stream(method)(request(), metadata=metadata, timeout=30)
            with pytest.raises(grpc.RpcError) as refused:
                next(call)
            assert decode_rpc_error(refused.value).reason == reason
        never.set()
