"""What the page reads, over HTTP: runs of every protocol with their curves, live, and episodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from tests.integration.servers import BASE_MODEL, TIMEOUT_S, Deployment
from tests.integration.tinker_users import connected, train
from tests.support.wait import until

import tinsmith

DATUM = tinsmith.Datum(
    tinsmith.ModelInput.from_ints([5, 6, 7]),
    {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},
)


class Reader:
    """A browser with the key of a viewer."""

    def __init__(self, deployment: Deployment, key: str) -> None:
        self.http = httpx.Client(
            base_url=f"http://{deployment.address}/page/api",
            headers={"authorization": f"Bearer {key}"},
            timeout=TIMEOUT_S,
        )

    def get(self, path: str, **query: Any) -> Any:
        answer = self.http.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, **query: Any) -> Iterator[dict[str, Any]]:
        """Yield events; closing the generator closes the connection."""
        with self.http.stream("GET", "/events", params=query) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line[6:])

    def curves(self, run: str, **query: Any) -> dict[str, Any]:
        found = self.get(f"/runs/{run.rpartition('/')[2]}/curves", **query)
        return {curve["name"]: curve for curve in found["curves"]}


@pytest.fixture(scope="module")
def reader(embedded: Deployment) -> Iterator[Reader]:
    with embedded.client() as client:
        key = client.keys.create(role="viewer").secret
    reader = Reader(embedded, key)
    with reader.http:
        yield reader


def step(run: tinsmith.TrainingRun) -> None:
    run.forward_backward([DATUM])
    run.optim_step(tinsmith.AdamParams(learning_rate=1e-3)).result()


def test_a_run_has_what_was_logged_and_what_the_trainer_measured(
    embedded: Deployment, reader: Reader
) -> None:
    with embedded.client() as client:
        run = client.create_lora_training_run(BASE_MODEL, rank=4, display_name="curves")
        for number in range(3):
            step(run)
            run.log_metrics({"reward": number / 2, "env/turns": 4}, step=number)
        until(lambda: len(reader.curves(run.name).get("trainer/loss", {}).get("steps", [])) == 3)
    # The end of a client has sent what it logged.
    curves = reader.curves(run.name)
    assert curves["reward"]["steps"] == [0, 1, 2]
    assert curves["reward"]["means"] == [0.0, 0.5, 1.0]
    assert {"trainer/grad_norm", "trainer/learning_rate", "env/turns"} <= set(curves)
    losses = curves["trainer/loss"]["means"]
    assert losses == sorted(losses, reverse=True)
    assert set(reader.curves(run.name, name="reward")) == {"reward"}
    listed = reader.get("/runs", summary=["reward", "trainer/loss"])["training_runs"]
    [shown] = [each for each in listed if each["name"] == run.name]
    assert shown["metrics"]["reward"]["last_value"] == 1.0
    assert shown["metrics"]["trainer/loss"]["last_step"] == 2
    found = reader.get(f"/runs/{run.name.rpartition('/')[2]}")
    assert (found["display_name"], found["base_model"]) == ("curves", BASE_MODEL)
    with embedded.client() as client:
        again = client.runs.get_metrics(run.name, ["reward"])["reward"]
        assert again.means.tolist() == [0.0, 0.5, 1.0]


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning"
)
def test_a_run_of_the_tinker_sdk_has_curves(embedded: Deployment, reader: Reader) -> None:
    with connected(embedded) as service:
        model = service.create_lora_training_client(BASE_MODEL, rank=8, seed=3).result()
        train(model, 2)
        run = model.get_info().model_id.replace(":train:", "-train-")
        until(lambda: "trainer/loss" in reader.curves(run))


def test_events_bring_what_is_watched_and_then_what_changes(
    embedded: Deployment, reader: Reader
) -> None:
    with embedded.client() as client:
        run = client.create_lora_training_run(BASE_MODEL, rank=4)
        run.log_metrics({"reward": 1.0}, step=0)
        until(lambda: "reward" in reader.curves(run.name))
        run_id = run.name.rpartition("/")[2]
        events = reader.events(topic=["runs"], name=["reward"], chart=f"{run_id}:0:0")
        assert next(events)["type"] == "begin"
        first: dict[str, Any] = {}
        while first.keys() != {"curves", "runs"}:
            event = next(events)
            first[event["type"]] = event
        names = [each["name"] for each in first["runs"]["content"]["training_runs"]]
        assert run.name in names
        assert first["curves"]["curves"][0]["means"] == [1.0]
        run.log_metrics({"reward": 2.0}, step=1)
        changed = next(each for each in events if each["type"] == "curves")
        assert changed["run"] == run_id
        assert changed["revision"] > first["curves"]["revision"]
        assert changed["curves"][0]["steps"][-1] == 1
        client.runs.delete(run)
        gone = next(each for each in events if each["type"] == "gone")
        assert gone["error"]["reason"] == "RUN_NOT_FOUND"
        events.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"topic": "nonsense"},
        {"chart": "run-1"},
        {"chart": "run-1:x:0"},
        {"chart": "run-1:3:0"},
        {"chart": [f"run-{number}:0:0" for number in range(65)]},
    ],
    ids=["nothing", "topic", "form", "number", "width", "many"],
)
def test_bad_watches_are_refused(reader: Reader, query: dict[str, Any]) -> None:
    answer = reader.http.get("/events", params=query)
    if answer.status_code == 200:
        # What only the pods can tell is told by the stream.
        assert '"reason":"INVALID_FIELD"' in answer.text
    else:
        assert answer.status_code == 400
        assert answer.json()["error"]["reason"] == "INVALID_FIELD"


def test_an_agent_s_key_shows_who_it_is_and_no_more(embedded: Deployment) -> None:
    with embedded.client() as client:
        agent = Reader(embedded, client.keys.create(role="agent").secret)
    with agent.http:
        assert agent.get("/me")["role"] == "agent"
        answer = agent.http.get("/runs")
        assert (answer.status_code, answer.json()["error"]["reason"]) == (403, "ROLE_MISSING")


def test_lists_of_a_server_are_read_by_a_viewer(embedded: Deployment, reader: Reader) -> None:
    with embedded.client() as client:
        run = client.create_lora_training_run(BASE_MODEL, rank=4)
        saved = run.save_state("first").result()
    checkpoints = reader.get("/checkpoints", page_size=1000)["checkpoints"]
    assert saved.name in [each["name"] for each in checkpoints]
    own = reader.get(f"/runs/{run.name.rpartition('/')[2]}/checkpoints")["checkpoints"]
    assert [each["name"] for each in own] == [saved.name]
    models = reader.get("/capabilities")["models"]
    assert models[0]["model"]["base_model"] == BASE_MODEL
    for path in ("/jobs", "/matches", "/episodes", "/samplers", "/metrics"):
        assert isinstance(reader.get(path), dict)
    answer = reader.http.get("/runs", params={"page_size": "many"})
    assert answer.json()["error"]["reason"] == "INVALID_FIELD"


def test_an_episode_is_shown_token_by_token(embedded: Deployment, reader: Reader) -> None:
    with embedded.client() as client:
        sampler = client.create_sampler(base_model=BASE_MODEL)
        [registered] = client.episodes.create(
            [tinsmith.EpisodeSpec({"q": "1"})], queue="page", sampler=sampler
        )
        agent = client.episodes.agent(queue="page")
        with agent.episode() as episode:
            model = openai.OpenAI(
                base_url=episode.openai.base_url, api_key=episode.openai.api_key, max_retries=0
            )
            with model:
                said = model.chat.completions.create(
                    model=episode.openai.model,
                    messages=[{"role": "user", "content": "Repeat: tin"}],
                    max_tokens=4,
                    extra_body={"return_token_ids": True},
                )
            episode.end(tinsmith.WorkflowOutput(reward=0.5))
        shown = reader.get(f"/episodes/{registered.name.rpartition('/')[2]}")
    assert shown["outcome"]["reward"] == 0.5
    [trajectory] = shown["trajectories"]
    choice: Any = said.choices[0]
    sampled = [
        token
        for token, mask in zip(trajectory["tokens"], trajectory["mask"], strict=True)
        if mask > 0
    ]
    assert sampled == choice.token_ids
    columns = ("tokens", "texts", "mask", "logprobs", "versions")
    assert len({len(trajectory[name]) for name in columns}) == 1
    assert "tin" in "".join(trajectory["texts"])
