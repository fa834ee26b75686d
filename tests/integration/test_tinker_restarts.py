"""The unmodified `tinker` SDK while services die under it: nothing is lost, doubled or changed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tinker
from tests.fakes.tinker_wire import Wire
from tests.integration.servers import BASE_MODEL, TIMEOUT_S, Deployment, pods
from tests.integration.tinker_users import PROMPT, TOKENS, connected, supervised
from tests.integration.tinker_users import collected as collected
from tests.support.pod_keys import POD_KEY
from tests.support.pods import PodProcess
from tinker import types

from tinsmith_local.process import ServerProcess

# The SDK leaves the connections of its first call open until they are collected.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning"
)

NUM_STEPS = 8
LONG = types.SamplingParams(max_tokens=24, seed=5, stop=[])


class Work:
    """One training with samples, every call on its way before any result is asked for."""

    def __init__(self, service: tinker.ServiceClient) -> None:
        self.model = service.create_lora_training_client(BASE_MODEL, rank=8, seed=3).result()
        self.sampler = service.create_sampling_client(base_model=BASE_MODEL).result()

    def run(self, disturb: Callable[[], None] = lambda: None) -> dict[str, object]:
        """Train and sample; return everything that came of it, to the bit.

        Args:
            disturb: Called when some calls have ended, some wait and some were not sent yet.
        """
        calls = [self._step(number) for number in range(NUM_STEPS // 2)]
        samples = [self._sample(seed) for seed in range(4)]
        exported = self.model.save_weights_external("halfway")
        calls[0][1].result()
        disturb()
        calls += [self._step(number) for number in range(NUM_STEPS // 2, NUM_STEPS)]
        samples += [self._sample(seed) for seed in range(4, 8)]
        saved = self.model.save_weights_and_get_sampling_client()
        outputs = [gradient.result() for gradient, _ in calls]
        updates = [update.result() for _, update in calls]
        learned = saved.result().sample(PROMPT, num_samples=2, sampling_params=LONG).result()
        assert exported.result().path == f"tinker://{self.model.model_id}/external_weights/halfway"
        return {
            "losses": [output.metrics["loss:sum"] for output in outputs],
            "scores": [list(output.loss_fn_outputs[0]["logprobs"].data) for output in outputs],
            "norms": [(update.metrics or {})["grad_norm"] for update in updates],
            "samples": [_tokens(sample.result()) for sample in samples],
            "learned": _tokens(learned),
        }

    def _step(
        self, number: int
    ) -> tuple[
        tinker.APIFuture[types.ForwardBackwardOutput], tinker.APIFuture[types.OptimStepResponse]
    ]:
        batch = [supervised(TOKENS[number % 3 :])]
        gradient = self.model.forward_backward(batch, "cross_entropy")
        return gradient, self.model.optim_step(types.AdamParams(learning_rate=1e-2))

    def _sample(self, seed: int) -> tinker.APIFuture[types.SampleResponse]:
        params = types.SamplingParams(max_tokens=24, seed=seed, stop=[])
        return self.sampler.sample(PROMPT, num_samples=2, sampling_params=params)


def _tokens(answer: types.SampleResponse) -> list[tuple[list[int], list[float] | None]]:
    return [(list(one.tokens), one.logprobs) for one in answer.sequences]


def test_the_whole_server_is_killed(tmp_path: Path, model_dir: Path) -> None:
    with ServerProcess(tmp_path, {BASE_MODEL: model_dir}) as server:
        deployment = Deployment(server.address, server.api_key, model_dir)
        with connected(deployment) as service:
            calm = Work(service).run()
            disturbed = Work(service)

            def kill() -> None:
                server.kill()
                server.start()

            assert disturbed.run(kill) == calm


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path
) -> Iterator[tuple[Deployment, dict[str, PodProcess]]]:
    """Scheduler, trainer, sampler and gateway as processes; the deployment is the gateway's."""
    with pods(tmp_path_factory.mktemp("pods"), model_dir, "gateway") as found:
        yield found


@pytest.fixture(scope="module")
def calm(cluster: tuple[Deployment, dict[str, PodProcess]]) -> dict[str, object]:
    with connected(cluster[0]) as service:
        return Work(service).run()


@pytest.mark.parametrize("pod", ["gateway", "trainer", "sampler"])
def test_one_pod_is_killed(
    cluster: tuple[Deployment, dict[str, PodProcess]], calm: dict[str, object], pod: str
) -> None:
    deployment, processes = cluster

    def kill() -> None:
        processes[pod].kill()
        processes[pod].start()

    with connected(deployment) as service:
        assert Work(service).run(kill) == calm


def test_the_gateway_is_killed_over_and_over(
    cluster: tuple[Deployment, dict[str, PodProcess]], calm: dict[str, object]
) -> None:
    deployment, processes = cluster
    with connected(deployment) as service:
        work = Work(service)
        with _killed_over_and_over(processes["gateway"], num_times=3):
            assert work.run() == calm


@contextlib.contextmanager
def _killed_over_and_over(process: PodProcess, *, num_times: int) -> Iterator[None]:
    """Kill a process and start it again, a few times, at random moments."""

    def kill() -> None:
        for _ in range(num_times):
            pause.wait(0.3)
            process.kill()
            process.start()

    pause = threading.Event()
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        killer.join(TIMEOUT_S)
    assert not killer.is_alive()


def test_a_sample_says_that_its_sampler_is_away(
    cluster: tuple[Deployment, dict[str, PodProcess]],
) -> None:
    deployment, processes = cluster
    url = f"http://{deployment.address}"
    client = Wire(url, {"x-api-key": deployment.api_key}, BASE_MODEL)
    try:
        handle = client.sampler()
        expected = client.samples(client.sample(handle, 0)["request_id"])
        processes["sampler"].kill()
        promised = client.sample(handle, 1)["request_id"]
        reason = ""
        while not reason:
            # Long polls tell the state at their end; a fresh promise is asked for at once.
            listed = client.post("retrieve_future", request_id=promised)
            assert listed.status_code == 408
            reason = listed.json().get("queue_state_reason", "")
        assert listed.json()["queue_state"] == "paused_capacity"
        assert "cannot be reached" in reason or "no sampler" in reason
        processes["sampler"].start()
        assert client.samples(promised).sequences == expected.sequences
    finally:
        client.close()


def test_no_key_is_in_a_log(cluster: tuple[Deployment, dict[str, PodProcess]]) -> None:
    deployment, processes = cluster
    secret = deployment.api_key.rpartition("_")[2]
    for pod, process in processes.items():
        text = process.log.read_text()
        assert text, f"{pod} logged nothing"
        assert secret not in text
        assert POD_KEY not in text
