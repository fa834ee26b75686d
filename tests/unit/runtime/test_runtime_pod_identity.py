from __future__ import annotations

import hashlib

import pytest
from google.longrunning import operations_pb2

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
from tinsmith_runtime.errors import ConfigError, KeyInvalidError, RoleMissingError
from tinsmith_runtime.rpc.auth import Authenticator, Caller
from tinsmith_runtime.rpc.permissions import KEY_PERMISSIONS, POD_PERMISSIONS, KeyRole
from tinsmith_runtime.rpc.pod_identity import (
    PodCredentials,
    PodIdentity,
    PodKey,
    PodRole,
    verify_pod_key,
)

TRAINER = PodIdentity(PodRole.TRAINER, "jobs", "grpo.0a1b")


class Scheduler:
    """Answers for keys as the scheduler does."""

    def __init__(self, *roots: str) -> None:
        self.roots = roots

    async def verify(self, key_id: str, secret_sha256: bytes, check: str = "") -> Caller:
        return Caller.of_pod(verify_pod_key(self.roots, key_id, secret_sha256))


def test_a_key_reads_back_and_hides_its_secret() -> None:
    key = PodKey.derive("root", TRAINER)
    assert PodKey.parse(str(key)) == key
    assert str(key).startswith("tsp_trainer_jobs_grpo.0a1b_")
    assert key.secret not in repr(key)


def test_the_derivation_is_that_of_the_chart() -> None:
    inner = hashlib.sha256(b"root\ntinsmith pod key\ntsp_gateway__").hexdigest()
    expected = hashlib.sha256(f"root\n{inner}".encode()).hexdigest()
    assert PodKey.derive("root", PodIdentity(PodRole.GATEWAY)).secret == expected


@pytest.mark.parametrize(
    "other",
    [
        PodIdentity(PodRole.SAMPLER, "jobs", "grpo.0a1b"),
        PodIdentity(PodRole.TRAINER, "elsewhere", "grpo.0a1b"),
        PodIdentity(PodRole.TRAINER, "jobs", ""),
        PodIdentity(PodRole.TRAINER, "jobs", "grpo.0a1c"),
    ],
    ids=["role", "namespace", "shared-pool", "pool"],
)
def test_the_secret_of_one_identity_is_no_good_for_another(other: PodIdentity) -> None:
    key = PodKey.derive("root", TRAINER)
    assert verify_pod_key(["root"], key.identity.key_id, key.secret_sha256) == TRAINER
    with pytest.raises(KeyInvalidError):
        verify_pod_key(["root"], other.key_id, key.secret_sha256)


@pytest.mark.parametrize(
    "text",
    ["tsp_", "tsp_trainer__", "tsp_king___" + "0" * 64, "tsp_trainer__A_" + "0" * 64, "tsp_x\n"],
)
def test_what_is_not_a_key_is_refused(text: str) -> None:
    with pytest.raises(KeyInvalidError):
        PodKey.parse(text)


async def test_two_roots_are_valid_while_the_root_is_rotated() -> None:
    old = PodCredentials.read("old", PodRole.SAMPLER)
    new = PodCredentials.read("new", PodRole.SAMPLER, previous="old")
    for credentials in (old, new):
        found = await Authenticator(Scheduler(), roots=new.roots).authenticate(
            f"Bearer {credentials.key}"
        )
        assert (found.role, found.is_pod) == (PodRole.SAMPLER, True)
    with pytest.raises(KeyInvalidError):
        await Authenticator(Scheduler(), roots=["new"]).authenticate(f"Bearer {old.key}")


async def test_a_pod_without_the_root_asks_the_scheduler() -> None:
    given = str(PodKey.derive("root", TRAINER))
    credentials = PodCredentials.read(given, PodRole.TRAINER, pool=TRAINER.pool)
    assert credentials.roots == ()
    caller = await Authenticator(Scheduler("root")).authenticate(f"Bearer {given}")
    assert (caller.role, caller.pool, caller.key_id) == (
        PodRole.TRAINER,
        TRAINER.pool,
        TRAINER.key_id,
    )
    with pytest.raises(KeyInvalidError):
        await Authenticator(Scheduler("other")).authenticate(f"Bearer {given}")


@pytest.mark.parametrize(
    ("role", "pool"),
    [(PodRole.SAMPLER, TRAINER.pool), (PodRole.TRAINER, ""), (PodRole.TRAINER, "other")],
)
def test_a_pod_with_the_key_of_another_does_not_start(role: PodRole, pool: str) -> None:
    with pytest.raises(ConfigError, match="give each pod its own key"):
        PodCredentials.read(str(PodKey.derive("root", TRAINER)), role, pool=pool)


def test_a_key_that_was_not_copied_whole_says_so() -> None:
    text = str(PodKey.derive("root", TRAINER))[:-1]
    with pytest.raises(ConfigError, match="copy it whole"):
        PodCredentials.read(text, PodRole.TRAINER, pool=TRAINER.pool)


def test_a_pool_that_cannot_stand_in_a_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="pool 'a_b'"):
        PodIdentity(PodRole.TRAINER, pool="a_b")


def test_a_key_calls_what_its_role_calls() -> None:
    pod = Caller.of_pod(PodIdentity(PodRole.ENVIRONMENT))
    pod.require_method("/tinsmith.v1.WorkerService/RegisterWorker")
    for method in (
        "/tinsmith.v1.JobService/EnsureJobKey",
        "/tinsmith.v1.SchedulerService/DeleteTrainingRun",
        "/tinsmith.v1.SamplerService/Sample",
    ):
        with pytest.raises(RoleMissingError):
            pod.require_method(method)
    forward = "/tinsmith.v1.TrainerService/Forward"
    Caller("p", KeyRole.MEMBER, "k").require_method(forward)
    for role in (KeyRole.VIEWER, KeyRole.AGENT, None):
        with pytest.raises(RoleMissingError):
            Caller("p", role, "k").require_method(forward)
    with pytest.raises(RoleMissingError):
        Caller("p", KeyRole.ADMIN, "k").require_method("/tinsmith.v1.JobService/Unknown")


def test_the_table_names_methods_of_the_contract() -> None:
    modules = (
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
    known = {
        f"/{service.full_name}/{method.name}"
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert set(POD_PERMISSIONS) == set(PodRole)
    assert set().union(*POD_PERMISSIONS.values()) <= known
    ours = {method for method in known if method.startswith("/tinsmith.v1.")}
    assert ours <= set(KEY_PERMISSIONS) <= known, "each method has a row"
