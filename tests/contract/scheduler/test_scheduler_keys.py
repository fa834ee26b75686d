from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.fakes.scheduler_fake_trainer import (
    Metadata,
    Rig,
    bearer,
    expect_rpc_error,
    new_id,
    running_rig,
)
from tests.support.pod_keys import pod

from tinsmith.v1 import keys_pb2, scheduler_pb2
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.rpc.auth import ApiKey
from tinsmith_scheduler.config import SchedulerConfig
from tinsmith_scheduler.pod import SchedulerPod

Code = grpc.StatusCode


@pytest.fixture
async def rig(tmp_path: Path, database_url: str) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, database_url=database_url) as rig:
        yield rig


def create_key(project: str = "default", **fields: Any) -> keys_pb2.CreateKeyRequest:
    fields = {"request_id": new_id(), **fields}
    return keys_pb2.CreateKeyRequest(parent=f"projects/{project}", **fields)


def capabilities(project: str = "default") -> scheduler_pb2.GetCapabilitiesRequest:
    return scheduler_pb2.GetCapabilitiesRequest(parent=f"projects/{project}")


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        pytest.param((), "KEY_MISSING", id="missing"),
        pytest.param(bearer("nonsense"), "KEY_INVALID", id="malformed"),
        pytest.param(bearer(str(ApiKey.generate())), "KEY_INVALID", id="unknown"),
        pytest.param((("authorization", "Basic abc"),), "KEY_MISSING", id="other-scheme"),
    ],
)
async def test_bad_credentials(rig: Rig, metadata: Metadata, reason: str) -> None:
    with expect_rpc_error(Code.UNAUTHENTICATED, reason=reason):
        await rig.stub.GetCapabilities(capabilities(), metadata=metadata)


async def test_wrong_secret_of_a_known_key_is_invalid(rig: Rig) -> None:
    known = ApiKey.parse(rig.admin_key)
    forged = ApiKey(known.key_id, ApiKey.generate().secret)
    with expect_rpc_error(Code.UNAUTHENTICATED, reason="KEY_INVALID"):
        await rig.stub.GetCapabilities(capabilities(), metadata=bearer(str(forged)))


async def test_created_key_works_until_revoked(rig: Rig) -> None:
    key = await rig.key_stub.CreateKey(create_key(display_name="mine"), metadata=rig.admin)
    assert key.secret.startswith("tsk_")
    assert key.tinker_secret == "tml-" + key.secret.removeprefix("tsk_")
    assert key.role == "member"
    for spelling in (key.secret, key.tinker_secret):
        await rig.stub.GetCapabilities(capabilities(), metadata=bearer(spelling))
    revoke = keys_pb2.RevokeKeyRequest(name=key.name)
    for _ in range(2):
        revoked = await rig.key_stub.RevokeKey(revoke, metadata=rig.admin)
        assert revoked.state == keys_pb2.Key.STATE_REVOKED
        assert (revoked.secret, revoked.tinker_secret) == ("", "")
    with expect_rpc_error(Code.UNAUTHENTICATED, reason="KEY_REVOKED"):
        await rig.stub.GetCapabilities(capabilities(), metadata=bearer(key.secret))
    await rig.restart()
    with expect_rpc_error(Code.UNAUTHENTICATED, reason="KEY_REVOKED"):
        await rig.stub.GetCapabilities(capabilities(), metadata=bearer(key.secret))


async def test_repeated_create_key_is_refused(rig: Rig) -> None:
    request = create_key()
    await rig.key_stub.CreateKey(request, metadata=rig.admin)
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="REQUEST_ID_REUSED"):
        await rig.key_stub.CreateKey(request, metadata=rig.admin)


async def test_key_management_needs_admin(rig: Rig) -> None:
    user = await rig.user()
    calls = [
        (rig.key_stub.CreateKey, create_key()),
        (rig.key_stub.ListKeys, keys_pb2.ListKeysRequest(parent="projects/default")),
        (rig.key_stub.RevokeKey, keys_pb2.RevokeKeyRequest(name="projects/default/keys/x")),
    ]
    for metadata in (user, pod("gateway")):
        for method, request in calls:
            with expect_rpc_error(Code.PERMISSION_DENIED, reason="ROLE_MISSING"):
                await method(request, metadata=metadata)


async def test_admins_of_other_projects_manage_their_own_keys(rig: Rig) -> None:
    other = await rig.key_stub.CreateKey(create_key("b", role="admin"), metadata=rig.admin)
    b_admin = bearer(other.secret)
    await rig.key_stub.CreateKey(create_key("b"), metadata=b_admin)
    with expect_rpc_error(Code.PERMISSION_DENIED, reason="ROLE_MISSING"):
        await rig.key_stub.CreateKey(create_key("c"), metadata=b_admin)
    with expect_rpc_error(Code.PERMISSION_DENIED, reason="ROLE_MISSING"):
        await rig.key_stub.ListKeys(
            keys_pb2.ListKeysRequest(parent="projects/default"), metadata=b_admin
        )
    admin_id = ApiKey.parse(rig.admin_key).key_id
    messages = []
    for name in (f"projects/default/keys/{admin_id}", "projects/default/keys/000000000000"):
        with expect_rpc_error(Code.NOT_FOUND, reason="KEY_NOT_FOUND") as error:
            await rig.key_stub.RevokeKey(keys_pb2.RevokeKeyRequest(name=name), metadata=b_admin)
        messages.append(error[0].message.replace(name, ""))
    assert messages[0] == messages[1]


async def test_list_keys_in_pages_without_secrets(rig: Rig) -> None:
    for number in range(4):
        await rig.key_stub.CreateKey(create_key(display_name=str(number)), metadata=rig.admin)
    request = keys_pb2.ListKeysRequest(parent="projects/default", page_size=2)
    names = []
    while True:
        answer = await rig.key_stub.ListKeys(request, metadata=rig.admin)
        assert not any(key.secret or key.tinker_secret for key in answer.keys)
        names += [key.display_name for key in answer.keys]
        request.page_token = answer.next_page_token
        if not answer.next_page_token:
            break
    assert names == ["3", "2", "1", "0", "bootstrap"]


async def test_a_key_describes_itself(rig: Rig) -> None:
    key = await rig.key_stub.CreateKey(create_key("b", display_name="mine"), metadata=rig.admin)
    request = keys_pb2.GetCallerKeyRequest()
    own = await rig.key_stub.GetCallerKey(request, metadata=bearer(key.tinker_secret))
    assert (own.name, own.display_name, own.role) == (key.name, "mine", "member")
    assert (own.secret, own.tinker_secret) == ("", "")
    with expect_rpc_error(Code.PERMISSION_DENIED, reason="ROLE_MISSING"):
        await rig.key_stub.GetCallerKey(request, metadata=pod("gateway"))


async def test_a_key_revokes_itself_and_no_other(rig: Rig) -> None:
    own, other = [
        await rig.key_stub.CreateKey(create_key("b"), metadata=rig.admin) for _ in range(2)
    ]
    same_id_elsewhere = own.name.replace("projects/b", "projects/default")
    for name in (other.name, same_id_elsewhere):
        with expect_rpc_error(Code.PERMISSION_DENIED, reason="ROLE_MISSING"):
            await rig.key_stub.RevokeKey(
                keys_pb2.RevokeKeyRequest(name=name), metadata=bearer(own.secret)
            )
    revoke = keys_pb2.RevokeKeyRequest(name=own.name)
    revoked = await rig.key_stub.RevokeKey(revoke, metadata=bearer(own.secret))
    assert revoked.state == keys_pb2.Key.STATE_REVOKED
    with expect_rpc_error(Code.UNAUTHENTICATED, reason="KEY_REVOKED"):
        await rig.key_stub.RevokeKey(revoke, metadata=bearer(own.secret))
    await rig.stub.GetCapabilities(capabilities("b"), metadata=bearer(other.secret))


async def test_unknown_scope_is_refused(rig: Rig) -> None:
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await rig.key_stub.CreateKey(create_key(role="pod"), metadata=rig.admin)


async def test_verify_key_answers_pods_only(rig: Rig) -> None:
    key = ApiKey.parse(rig.admin_key)
    request = keys_pb2.VerifyKeyRequest(key_id=key.key_id, secret_sha256=key.secret_sha256)
    answer = await rig.key_stub.VerifyKey(request, metadata=pod("gateway"))
    assert (answer.project, answer.role) == ("default", "admin")
    with expect_rpc_error(Code.PERMISSION_DENIED, reason="ROLE_MISSING"):
        await rig.key_stub.VerifyKey(request, metadata=rig.admin)
    request.secret_sha256 = bytes(32)
    with expect_rpc_error(Code.UNAUTHENTICATED, reason="KEY_INVALID"):
        await rig.key_stub.VerifyKey(request, metadata=pod("gateway"))


async def test_revoked_bootstrap_key_stays_revoked(rig: Rig) -> None:
    name = f"projects/default/keys/{ApiKey.parse(rig.admin_key).key_id}"
    await rig.key_stub.RevokeKey(keys_pb2.RevokeKeyRequest(name=name), metadata=rig.admin)
    await rig.restart()
    with expect_rpc_error(Code.UNAUTHENTICATED, reason="KEY_REVOKED"):
        await rig.stub.GetCapabilities(capabilities(), metadata=rig.admin)


async def test_bootstrap_key_with_another_secret_does_not_start(
    tmp_path: Path,
) -> None:
    key = ApiKey.generate()
    pod = SchedulerPod(SchedulerConfig(data_dir=tmp_path, bootstrap_key=str(key)))
    await pod.start()
    await pod.stop()
    forged = str(ApiKey(key.key_id, ApiKey.generate().secret))
    pod = SchedulerPod(SchedulerConfig(data_dir=tmp_path, bootstrap_key=forged))
    with pytest.raises(ConfigError, match="another secret"):
        await pod.start()
    assert pod.address == ""
