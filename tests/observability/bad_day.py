"""A bad day of pods in processes: deaths, late agents, callers past their bounds."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import tinsmith
from tests.fakes.certificates import make_pod_certificates
from tests.integration.servers import BASE_MODEL, Deployment, pods
from tests.support.pods import PodProcess
from tests.support.wait import TIMEOUT_S, until
from tinsmith.matches import MatchSpec

_ENVIRONMENT = "unruly"
UNRULY = Path(__file__).parents[1] / "unit/environment"
"""Where workers find its module: PYTHONPATH of the process that starts the pods."""
_SETTINGS = {
    "environment": {"environments": f"{_ENVIRONMENT}=unruly_environments:UnrulyEnvironment"},
    "gateway": {"max_requests_per_project": 2},
}


@contextlib.contextmanager
def bad_pods(
    folder: Path, model_dir: Path
) -> Iterator[tuple[Deployment, Mapping[str, PodProcess]]]:
    """Run all pods as processes that speak TLS, with an environment that does as it is told."""
    certificates = folder / "certificates"
    make_pod_certificates(certificates)
    with pods(
        folder,
        model_dir,
        "gateway",
        "environment",
        "coordinator",
        certificates=certificates,
        settings=_SETTINGS,
    ) as running:
        yield running


def live_a_bad_one(deployment: Deployment, processes: Mapping[str, PodProcess]) -> None:
    """Do once what must not trouble others, each in the way that it happens."""
    with deployment.client() as client:
        _come_late(client)
        _keep_no_time(client)
        _crash_environments(client)
        _ask_for_an_endless_form(client)
        _flood(deployment)
        _talk_no_http(deployment)
        _kill_the_trainer(client, processes["trainer"])


def _come_late(client: tinsmith.Client) -> None:
    """End an episode that was cancelled meanwhile."""
    sampler = client.create_sampler(base_model=BASE_MODEL)
    client.episodes.create([tinsmith.EpisodeSpec(task={})], sampler=sampler, queue="late")
    with (
        contextlib.suppress(tinsmith.TinsmithError),
        client.episodes.agent(queue="late").episode(timeout_s=TIMEOUT_S) as held,
    ):
        client.episodes.cancel([held.episode])
        held.end(tinsmith.WorkflowOutput(reward=1.0))


def _keep_no_time(client: tinsmith.Client) -> None:
    """Let one of two agents wait at a barrier that the other one never comes to."""
    spec = MatchSpec(agents=("black", "white"), num_games=1, num_epochs=1, barrier_timeout_s=1)
    match = client.matches.create(spec)
    client.matches.join(match.name, "black")
    until(lambda: client.matches.get(match.name).state == "aborted")


def _crash_environments(client: tinsmith.Client) -> None:
    for action in ("raise", "die"):
        instance = client.environments.create_instance(_ENVIRONMENT)
        with contextlib.suppress(tinsmith.TinsmithError):
            instance.step(action)


def _ask_for_an_endless_form(client: tinsmith.Client) -> None:
    sampler = client.create_sampler(base_model=BASE_MODEL)
    params = tinsmith.SamplingParams(max_tokens=2, regex="a?" * 32_000)
    with contextlib.suppress(tinsmith.InvalidArgumentError):
        sampler.sample([5, 6], sampling_params=params).result()


def _flood(deployment: Deployment) -> None:
    """Send requests beside each other until one is refused."""
    is_over = threading.Event()
    refused: list[int] = []

    def send() -> None:
        body = b'{"model": "tiny", "prompt": "1+1=", "max_tokens": 64}'
        headers = {
            "Authorization": f"Bearer {deployment.api_key}",
            "Content-Type": "application/json",
        }
        while not is_over.is_set():
            request = urllib.request.Request(
                f"http://{deployment.address}/v1/completions", body, headers
            )
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                    answer.read()
            except urllib.error.HTTPError as error:
                refused.append(error.code)
                is_over.set()

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert set(refused) == {429}


def _talk_no_http(deployment: Deployment) -> None:
    host, _, port = deployment.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        connection.sendall(b"GET no-such-version\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass


def _kill_the_trainer(client: tinsmith.Client, trainer: PodProcess) -> None:
    """Train, publish, kill, and go on with the same run."""
    run = client.create_lora_training_run(BASE_MODEL, rank=2)
    datum = tinsmith.Datum(
        tinsmith.ModelInput.from_ints([5, 6, 7]),
        {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},
    )

    def step() -> None:
        run.forward_backward([datum])
        run.optim_step(tinsmith.AdamParams(learning_rate=1e-3)).result()

    step()
    run.sampler().sample([5, 6], sampling_params=tinsmith.SamplingParams(max_tokens=2)).result()
    step()
    trainer.kill()
    trainer.start()
    step()
