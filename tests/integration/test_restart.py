"""What survives: restarts under a working client, lost clients, other tenants, and company."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import duration_pb2
from grpc_status import rpc_status
from tests.integration.servers import (
    BASE_MODEL,
    TIMEOUT_S,
    Deployment,
    EmbeddedThread,
    bearer,
    create_key,
    new_request_id,
    weight_files,
)

import tinsmith
from tinsmith.rpc.error_codec import decode_status
from tinsmith.tensors import encode_tokens
from tinsmith.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    keys_pb2,
    models_pb2,
    sampler_pb2,
    sampler_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    trainer_control_pb2,
    trainer_control_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
)
from tinsmith_runtime.errors import TinsmithError

MakeEmbedded = Callable[..., EmbeddedThread]
ADAM = tinsmith.AdamParams(learning_rate=1e-2)
GREEDY = tinsmith.SamplingParams(max_tokens=6, temperature=0.0, seed=0, stop=[])
PROMPT = [5, 6, 7]


def make_datum(seed: int, num_tokens: int = 24) -> tinsmith.Datum:
    tokens = np.random.default_rng(seed).integers(3, 200, num_tokens + 1)
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(num_tokens)}
    return tinsmith.Datum(tinsmith.ModelInput.from_ints(tokens[:-1]), inputs)


def submit_steps(
    run: tinsmith.TrainingRun, seeds: range
) -> list[tinsmith.OperationFuture[tinsmith.OptimStepResponse]]:
    updates = []
    for seed in seeds:
        run.forward_backward([make_datum(seed)])
        updates.append(run.optim_step(ADAM))
    return updates


def bits_of(run: tinsmith.TrainingRun, name: str = "bits") -> dict[str, bytes]:
    return weight_files(run.save_state(name).result())


def poll(condition: Callable[[], bool], what: str) -> None:
    """Return once a condition holds."""
    deadline_s = time.monotonic() + TIMEOUT_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, what
        pause.wait(0.02)


# Restarts.


def test_a_client_works_on_across_a_restart(make_embedded: MakeEmbedded) -> None:
    server = make_embedded()
    with server.start().client() as client:
        calm = client.create_lora_training_run(BASE_MODEL, rank=8, seed=3)
        submit_steps(calm, range(12))
        wanted = bits_of(calm)
        live = calm.sampler().sample(PROMPT, sampling_params=GREEDY).result().sequences[0]

        run = client.create_lora_training_run(BASE_MODEL, rank=8, seed=3)
        sampler = run.sampler()
        before = submit_steps(run, range(6))
        before[0].result()
        # Some of these are done, some wait, and some were not sent yet.
        server.stop()
        during = submit_steps(run, range(6, 12))
        saved = run.save_state("during")
        drawn = sampler.sample(PROMPT, sampling_params=GREEDY)
        server.start()
        assert [update.result().version for update in before + during] == list(range(1, 13))
        assert weight_files(saved.result()) == wanted
        assert drawn.result().sequences[0].stop_reason == "length"
        assert sampler.sample(PROMPT, sampling_params=GREEDY).result().sequences[0] == live
        # The session lives on as well: it holds new runs and samplers.
        other = client.create_sampler(checkpoint=saved.result())
        assert other.sample(PROMPT, sampling_params=GREEDY).result().sequences[0] == live
        assert bits_of(calm, "again") == wanted
        assert {info.name for info in client.runs.list()} == {calm.name, run.name}


def test_a_run_is_attached_again(make_embedded: MakeEmbedded) -> None:
    server = make_embedded()
    with server.start().client() as client:
        run = client.create_lora_training_run(BASE_MODEL, rank=8, seed=3)
        submit_steps(run, range(2))
        # Accumulated, not applied.
        run.forward_backward([make_datum(2)]).result()
        # From the same client, while the first handle is idle.
        second = client.runs.get(run.name)
        assert second.version == 2
        assert second.optim_step(ADAM).result().version == 3
    server.stop()
    with server.start().client() as client:
        run_id = run.name.rpartition("/")[2]
        third = client.runs.get(run_id)
        assert (third.name, third.version) == (run.name, 3)
        assert third.info.rank == 8
        submit_steps(third, range(3, 5))
        found = bits_of(third)
        calm = client.create_lora_training_run(BASE_MODEL, rank=8, seed=3)
        submit_steps(calm, range(5))
        assert found == bits_of(calm)
        with pytest.raises(tinsmith.NotFoundError) as caught:
            client.runs.get("none")
        assert caught.value.reason == "RUN_NOT_FOUND"


# Lost clients.


def test_an_expired_session_parks_its_runs(make_embedded: MakeEmbedded) -> None:
    server = make_embedded(
        scheduler={
            # Longer than what comes before the session is to be lost, on a busy machine.
            "session_timeout_s": 8.0,
            "heartbeat_interval_s": 0.8,
            "reap_interval_s": 0.02,
        }
    )
    deployment = server.start()
    metadata = bearer(deployment.api_key)
    with deployment.client() as client, deployment.scheduler_stub() as scheduler:
        # A client that dies: its session gets no heartbeat and is not finished.
        session = scheduler.CreateSession(
            scheduler_pb2.CreateSessionRequest(
                parent="projects/default", request_id=new_request_id()
            ),
            metadata=metadata,
        )
        name = _create_run(deployment, session.name)
        handle = scheduler.CreateSamplingSession(
            scheduler_pb2.CreateSamplingSessionRequest(
                parent=session.name, request_id=new_request_id(), run=name
            ),
            metadata=metadata,
        )
        run = client.runs.get(name)
        submit_steps(run, range(2))[-1].result()
        with grpc.insecure_channel(_trainer_of(deployment, name)) as channel:
            trainer: Any = trainer_pb2_grpc.TrainerServiceStub(channel)

            def is_resident() -> bool:
                request = trainer_pb2.GetRunStatusRequest(run=name)
                return bool(trainer.GetRunStatus(request, metadata=metadata).resident)

            poll(lambda: not is_resident(), "the run was not parked")
        error = _refusal(
            lambda: scheduler.CreateSamplingSession(
                scheduler_pb2.CreateSamplingSessionRequest(
                    parent=session.name, request_id=new_request_id(), run=name
                ),
                metadata=metadata,
            )
        )
        assert error.reason == "SESSION_FINISHED"
        error = _refusal(
            lambda: scheduler.GetSamplingSession(
                scheduler_pb2.GetSamplingSessionRequest(name=handle.name), metadata=metadata
            )
        )
        assert error.reason == "SAMPLING_SESSION_NOT_FOUND"
        # Parked, not lost: the next operation brings it back, bit for bit.
        submit_steps(run, range(2, 4))
        found = bits_of(run)
        calm = client.create_lora_training_run(BASE_MODEL, rank=8, seed=3)
        submit_steps(calm, range(4))
        assert found == bits_of(calm)


def _create_run(deployment: Deployment, session: str) -> str:
    """Create a run from a session without heartbeats, and return its name."""
    metadata = bearer(deployment.api_key)
    with grpc.insecure_channel(deployment.address) as channel:
        scheduler: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        operation = scheduler.CreateTrainingRun(
            scheduler_pb2.CreateTrainingRunRequest(
                parent=session,
                request_id=new_request_id(),
                base_model=BASE_MODEL,
                adapter=models_pb2.AdapterConfig(
                    lora=models_pb2.LoraConfig(rank=8, seed=3, train_attention=True, train_mlp=True)
                ),
            ),
            metadata=metadata,
        )
        operation = operations_pb2_grpc.OperationsStub(channel).WaitOperation(
            operations_pb2.WaitOperationRequest(
                name=operation.name, timeout=duration_pb2.Duration(seconds=20)
            ),
            metadata=metadata,
        )
    run = scheduler_pb2.TrainingRun()
    assert operation.response.Unpack(run), operation
    return run.name


def _trainer_of(deployment: Deployment, run: str) -> str:
    with deployment.scheduler_stub() as scheduler:
        request = scheduler_pb2.GetTrainingRunRequest(name=run)
        found = scheduler.GetTrainingRun(request, metadata=bearer(deployment.api_key))
    return str(found.trainer_address)


def _refusal(call: Callable[[], Any]) -> TinsmithError:
    """Return the typed error that a call is refused with."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    status = rpc_status.from_call(caught.value)
    assert status is not None, caught.value
    return decode_status(status)


# Tenants.


@pytest.fixture(scope="module")
def tenants(embedded: Deployment) -> Iterator[tuple[tinsmith.Client, tinsmith.Client]]:
    """Two clients of the same service with keys of two projects."""
    key = create_key(embedded, "other")
    with embedded.client() as ours, embedded.client(api_key=key, project="other") as theirs:
        yield ours, theirs


@pytest.fixture(scope="module")
def their_key(embedded: Deployment) -> str:
    return create_key(embedded, "other")


def test_tenants_do_not_see_each_other(
    tenants: tuple[tinsmith.Client, tinsmith.Client],
) -> None:
    ours, theirs = tenants
    run = ours.create_lora_training_run(BASE_MODEL, rank=8, display_name="ours")
    submit_steps(run, range(1))
    saved = run.save_state("secret").result()
    their_run = theirs.create_lora_training_run(BASE_MODEL, rank=8, display_name="theirs")
    their_saved = their_run.save_state("secret").result()

    names = {info.name for info in theirs.runs.list()}
    assert names == {their_run.name}
    assert their_run.name not in {info.name for info in ours.runs.list()}
    assert {found.name for found in theirs.checkpoints.list()} == {their_saved.name}
    assert saved.name in {found.name for found in ours.checkpoints.list()}
    looks: list[tuple[str, Callable[[], Any]]] = [
        ("RUN_NOT_FOUND", lambda: theirs.runs.get(run.name)),
        ("RUN_NOT_FOUND", lambda: theirs.runs.delete(run.name)),
        ("RUN_NOT_FOUND", lambda: theirs.checkpoints.list(run.name)),
        ("RUN_NOT_FOUND", lambda: theirs.create_sampler(run=run.name)),
        ("CHECKPOINT_NOT_FOUND", lambda: theirs.create_sampler(checkpoint=saved)),
        ("CHECKPOINT_NOT_FOUND", lambda: their_run.load_state(saved).result()),
        ("CHECKPOINT_NOT_FOUND", lambda: theirs.checkpoints.get(saved.name)),
        ("CHECKPOINT_NOT_FOUND", lambda: theirs.checkpoints.delete(saved.name)),
    ]
    for reason, look in looks:
        with pytest.raises(tinsmith.NotFoundError) as caught:
            look()
        assert caught.value.reason == reason
    # Nothing happened to what they could not see.
    assert ours.checkpoints.get(saved.name) == saved
    assert submit_steps(run, range(1, 2))[0].result().version == 2


def test_a_foreign_key_is_refused_by_every_pod(
    embedded: Deployment, tenants: tuple[tinsmith.Client, tinsmith.Client], their_key: str
) -> None:
    """The same through raw calls, which skip what the SDK would not send."""
    ours, _ = tenants
    run = ours.create_lora_training_run(BASE_MODEL, rank=8)
    submit_steps(run, range(1))
    saved = run.save_state("secret").result()
    handle = ours.create_sampler(run=run)
    metadata = bearer(their_key)
    with embedded.scheduler_stub() as scheduler, embedded.key_stub() as keys:
        located = scheduler.GetSamplingSession(
            scheduler_pb2.GetSamplingSessionRequest(name=handle.name),
            metadata=bearer(embedded.api_key),
        )
        error = _refusal(
            lambda: scheduler.GetSamplingSession(
                scheduler_pb2.GetSamplingSessionRequest(name=handle.name), metadata=metadata
            )
        )
        assert error.reason == "SAMPLING_SESSION_NOT_FOUND"
        error = _refusal(
            lambda: scheduler.CreateSession(
                scheduler_pb2.CreateSessionRequest(
                    parent="projects/default", request_id=new_request_id()
                ),
                metadata=metadata,
            )
        )
        assert error.reason == "RESOURCE_NOT_FOUND"
        error = _refusal(
            lambda: keys.CreateKey(
                keys_pb2.CreateKeyRequest(parent="projects/other", request_id=new_request_id()),
                metadata=metadata,
            )
        )
        assert error.reason == "ROLE_MISSING"
    with grpc.insecure_channel(located.sampler_addresses[0]) as channel:
        sampler: Any = sampler_pb2_grpc.SamplerServiceStub(channel)
        request = sampler_pb2.SampleRequest(sampling_session=handle.name)
        request.prompt.chunks.add(tokens=encode_tokens(PROMPT))
        error = _refusal(lambda: sampler.Sample(request, metadata=metadata))
        assert error.reason == "SAMPLING_SESSION_NOT_FOUND"
        listed = sampler.ListLoadedWeights(
            sampler_pb2.ListLoadedWeightsRequest(parent="projects/other"), metadata=metadata
        )
        assert run.name not in {weights.source for weights in listed.weights}
    with grpc.insecure_channel(located.trainer_address) as channel:
        trainer: Any = trainer_pb2_grpc.TrainerServiceStub(channel)
        checkpoints = checkpoint_pb2_grpc.CheckpointServiceStub(channel)
        control = trainer_control_pb2_grpc.TrainerControlServiceStub(channel)
        operations = operations_pb2_grpc.OperationsStub(channel)
        calls: list[tuple[str, Callable[[], Any]]] = [
            (
                "RUN_NOT_FOUND",
                lambda: trainer.GetRunStatus(
                    trainer_pb2.GetRunStatusRequest(run=run.name), metadata=metadata
                ),
            ),
            (
                "RUN_NOT_FOUND",
                lambda: trainer.OptimStep(
                    trainer_pb2.OptimStepRequest(
                        run=run.name,
                        request_id=new_request_id(),
                        sequence_number=4,
                        adam=trainer_pb2.AdamParams(learning_rate=1.0),
                    ),
                    metadata=metadata,
                ),
            ),
            (
                "RUN_NOT_FOUND",
                lambda: operations.GetOperation(
                    operations_pb2.GetOperationRequest(name=f"{run.name}/operations/1"),
                    metadata=metadata,
                ),
            ),
            (
                "CHECKPOINT_NOT_FOUND",
                lambda: checkpoints.GetCheckpoint(
                    checkpoint_pb2.GetCheckpointRequest(name=saved.name), metadata=metadata
                ),
            ),
            (
                "ROLE_MISSING",
                lambda: control.ExportWeights(
                    trainer_control_pb2.ExportWeightsRequest(run=run.name), metadata=metadata
                ),
            ),
            (
                "ROLE_MISSING",
                lambda: control.ReleaseRun(
                    trainer_control_pb2.ReleaseRunRequest(
                        run=run.name,
                        epoch=1,
                        mode=trainer_control_pb2.ReleaseRunRequest.MODE_DELETE,
                    ),
                    metadata=metadata,
                ),
            ),
        ]
        for reason, call in calls:
            assert _refusal(call).reason == reason
    # None of it used up a number.
    assert submit_steps(run, range(1, 2))[0].result().version == 2


# Company.


@pytest.mark.parametrize("num_tenants", [5])
def test_concurrent_runs_give_the_bits_of_each_alone(
    embedded: Deployment, num_tenants: int
) -> None:
    def train(client: tinsmith.Client, index: int) -> dict[str, Any]:
        run = client.create_lora_training_run(BASE_MODEL, rank=(4, 8, 16)[index % 3], seed=index)
        sampler = run.sampler()
        losses, drawn = [], []
        for step in range(5):
            # Other lengths, losses and batch sizes than the neighbours'.
            batch = [
                make_datum(100 * index + step + place, num_tokens=5 + 7 * ((index + place) % 4))
                for place in range(1 + index % 3)
            ]
            gradient = run.forward_backward(batch)
            update = run.optim_step(tinsmith.AdamParams(learning_rate=1e-2 / (1 + index)))
            losses.append(gradient.result().loss)
            update.result()
            params = tinsmith.SamplingParams(max_tokens=9, temperature=1.0, seed=step, stop=[])
            drawn.append(
                sampler.sample(PROMPT, sampling_params=params, num_samples=1 + index % 2).result()
            )
        return {"losses": losses, "drawn": drawn, "files": bits_of(run)}

    with embedded.client() as client:
        alone = [train(client, index) for index in range(num_tenants)]
        start = threading.Barrier(num_tenants)

        def train_together(index: int) -> dict[str, Any]:
            start.wait(TIMEOUT_S)
            return train(client, index)

        with ThreadPoolExecutor(num_tenants) as pool:
            together = list(pool.map(train_together, range(num_tenants)))
    for index in range(num_tenants):
        assert together[index] == alone[index], index
