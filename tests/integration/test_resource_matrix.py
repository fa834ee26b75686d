"""Each HTTP route that names a resource, for each kind of resource and a key of another project.

What is foreign, absent, deleted or expired is answered alike, so that no name can be probed. What
is published may be read, and not changed. A route without a row fails.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.servers import EmbeddedThread
from tests.support.wait import until

import tinsmith
from tinsmith_gateway.access.permissions import HTTP_PERMISSIONS

Row = tuple[str, dict[str, Any] | None]
"""Path and body of a request."""


@dataclass(frozen=True)
class Resource:
    """Names of one resource, in the words of each route."""

    model_id: str
    name: str
    session: str
    sampling_session: str
    episode: str

    @property
    def path(self) -> str:
        return f"tinker://{self.model_id}/weights/{self.name}"


_CHECKPOINT = "/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}"


def _of_checkpoint(suffix: str, body: dict[str, Any] | None = None) -> Callable[[Resource], Row]:
    def row(each: Resource) -> Row:
        return (
            f"/api/v1/training_runs/{each.model_id}/checkpoints/weights/{each.name}{suffix}",
            body,
        )

    return row


def _of_model(route: str, **body: Any) -> Callable[[Resource], Row]:
    return lambda each: (route, {"model_id": each.model_id, "seq_id": 1, **body})


def _of_episode(route: str, **body: Any) -> Callable[[Resource], Row]:
    return lambda each: (route, {"episode_uuid": each.episode, **body})


_DATUM = {
    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]},
        "weights": {"data": [1.0, 1.0], "dtype": "float32", "shape": [2]},
    },
}
_PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
# Those that a stranger to the project may call about what is published come first.
_READS: Mapping[tuple[str, str], Callable[[Resource], Row]] = {
    ("POST", "/api/v1/weights_info"): lambda each: (
        "/api/v1/weights_info",
        {"tinker_path": each.path},
    ),
}
_ROWS: Mapping[tuple[str, str], Callable[[Resource], Row]] = {
    **_READS,
    ("DELETE", _CHECKPOINT): _of_checkpoint(""),
    ("DELETE", f"{_CHECKPOINT}/publish"): _of_checkpoint("/publish"),
    ("POST", f"{_CHECKPOINT}/publish"): _of_checkpoint("/publish"),
    ("PUT", f"{_CHECKPOINT}/ttl"): _of_checkpoint("/ttl", {"ttl_seconds": 3600}),
    ("GET", f"{_CHECKPOINT}/external_weights_urls"): _of_checkpoint("/external_weights_urls"),
    ("GET", "/api/v1/samplers/{sampling_session_id}"): lambda each: (
        f"/api/v1/samplers/{each.sampling_session}",
        None,
    ),
    ("GET", "/api/v1/sessions/{session_id}"): lambda each: (
        f"/api/v1/sessions/{each.session}",
        None,
    ),
    ("GET", "/api/v1/sessions/{session_id}/trace_export"): lambda each: (
        f"/api/v1/sessions/{each.session}/trace_export",
        None,
    ),
    ("POST", "/api/v1/sessions/{session_id}/finish"): lambda each: (
        f"/api/v1/sessions/{each.session}/finish",
        {"reason": {"type": "success"}},
    ),
    ("GET", "/api/v1/training_runs/{model_id}"): lambda each: (
        f"/api/v1/training_runs/{each.model_id}",
        None,
    ),
    ("GET", "/api/v1/training_runs/{model_id}/checkpoints"): lambda each: (
        f"/api/v1/training_runs/{each.model_id}/checkpoints",
        None,
    ),
    ("POST", "/api/v1/get_info"): _of_model("/api/v1/get_info"),
    ("POST", "/api/v1/session_heartbeat"): lambda each: (
        "/api/v1/session_heartbeat",
        {"session_id": each.session},
    ),
    ("POST", "/api/v1/join_sampling_session"): lambda each: (
        "/api/v1/join_sampling_session",
        {"sampling_session_id": each.sampling_session},
    ),
    ("POST", "/can_continue_episode"): _of_episode("/can_continue_episode"),
    ("POST", "/heartbeat_episode"): _of_episode("/heartbeat_episode"),
    ("POST", "/abort_episode"): _of_episode("/abort_episode"),
    ("POST", "/is_episode_claimed"): _of_episode("/is_episode_claimed"),
    ("POST", "/end_episode"): _of_episode("/end_episode", workflow_output={"reward": 1.0}),
    ("GET", "/episodes/{episode}"): lambda each: (f"/episodes/{each.episode}", None),
    ("GET", "/page/api/episodes/{episode}"): lambda each: (
        f"/page/api/episodes/{each.episode}",
        None,
    ),
    ("GET", "/page/api/jobs/{job}"): lambda each: (f"/page/api/jobs/{each.name}", None),
    ("GET", "/page/api/matches/{match}"): lambda each: (f"/page/api/matches/{each.name}", None),
    ("GET", "/page/api/runs/{run}"): lambda each: (f"/page/api/runs/{each.model_id}", None),
    ("GET", "/page/api/runs/{run}/checkpoints"): lambda each: (
        f"/page/api/runs/{each.model_id}/checkpoints",
        None,
    ),
    ("GET", "/page/api/runs/{run}/curves"): lambda each: (
        f"/page/api/runs/{each.model_id}/curves",
        None,
    ),
}
_ANSWERED_LATER: Mapping[tuple[str, str], Callable[[Resource], Row]] = {
    ("POST", "/api/v1/forward_backward"): _of_model(
        "/api/v1/forward_backward",
        forward_backward_input={"data": [_DATUM], "loss_fn": "cross_entropy"},
    ),
    ("POST", "/api/v1/optim_step"): _of_model(
        "/api/v1/optim_step", adam_params={"learning_rate": 0.1}
    ),
    ("POST", "/api/v1/save_weights"): _of_model("/api/v1/save_weights", path="other"),
    ("POST", "/api/v1/save_weights_for_sampler"): _of_model(
        "/api/v1/save_weights_for_sampler", path="other"
    ),
    ("POST", "/api/v1/save_weights_external"): _of_model(
        "/api/v1/save_weights_external", path="other"
    ),
    ("POST", "/api/v1/asample"): lambda each: (
        "/api/v1/asample",
        {
            "sampling_session_id": each.sampling_session,
            "seq_id": 0,
            "prompt": _PROMPT,
            "sampling_params": {"max_tokens": 1},
        },
    ),
}
"""The refusal is in the future."""


_NO_RESOURCE = {
    ("DELETE", "/api/v1/auth/apikey/me"),
    ("GET", "/api/v1/audit"),
    ("GET", "/api/v1/auth/apikey/me"),
    ("GET", "/api/v1/billing/usage/checkpoints/current"),
    ("GET", "/api/v1/billing/usage/events"),
    ("GET", "/api/v1/checkpoints"),
    ("GET", "/api/v1/get_server_capabilities"),
    ("GET", "/api/v1/sessions"),
    ("GET", "/api/v1/training_runs"),
    ("GET", "/get_current_batch_rollout_pool_information"),
    ("GET", "/get_engine_status"),
    ("GET", "/page/api/capabilities"),
    ("GET", "/page/api/checkpoints"),
    ("GET", "/page/api/episodes"),
    ("GET", "/page/api/events"),
    ("GET", "/page/api/jobs"),
    ("GET", "/page/api/matches"),
    ("GET", "/page/api/me"),
    ("GET", "/page/api/metrics"),
    ("GET", "/page/api/runs"),
    ("GET", "/page/api/samplers"),
    ("GET", "/v1/models"),
    ("POST", "/api/v1/client/config"),
    ("POST", "/api/v1/client/dynamic_config"),
    ("POST", "/api/v1/create_session"),
    ("POST", "/api/v1/sessions/search"),
    ("POST", "/api/v1/telemetry"),
    ("POST", "/claim_episode"),
    ("POST", "/get_episode_buffer"),
    ("POST", "/register_episode"),
    ("POST", "/start_engine"),
    ("POST", "/stop_engine"),
    ("POST", "/submit_episode"),
    ("POST", "/sync_train_config"),
    ("POST", "/update_engine_status"),
}
"""They list or make what is the caller's own."""
_BY_FUTURE = {
    ("POST", "/api/v1/cancel_future"),
    ("POST", "/api/v1/retrieve_future"),
    ("POST", "/api/v1/retrieve_futures"),
}
"""They name a future that the caller was given: `test_a_future_is_its_project_s_alone`."""
_OWN_SESSION = {
    ("POST", "/api/v1/create_model"),
    ("POST", "/api/v1/create_sampling_session"),
    ("POST", "/api/v1/copy_weights"),
    ("POST", "/api/v1/load_weights"),
    ("PUT", "/api/v1/sessions/{session_id}/project"),
}
"""They make something in a session: `test_what_is_made_needs_a_session_of_one_s_own`."""
_BY_MODEL = {
    ("GET", "/v1/models/{id:path}"),
    ("POST", "/detokenize"),
    ("POST", "/tokenize"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
}
"""They name a model: `test_a_model_is_a_checkpoint_or_a_run_of_one_s_own`."""


def test_every_route_has_a_row() -> None:
    tables = [set(_ROWS), set(_ANSWERED_LATER), _NO_RESOURCE, _BY_FUTURE, _OWN_SESSION, _BY_MODEL]
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert set().union(*tables) == set(HTTP_PERMISSIONS)


class Service:
    """A project that has one of everything, and the key of another that has nothing."""

    def __init__(self, address: str, client: tinsmith.Client) -> None:
        run = client.create_lora_training_client("tiny", rank=1)
        saved = {name: run.save_state(name).result() for name in ("kept", "shared", "gone", "old")}
        client.checkpoints.publish(saved["shared"].name)
        client.checkpoints.delete(saved["gone"].name)
        client.checkpoints.update(saved["old"].name, ttl_seconds=1)
        sampler = client.create_sampling_client(base_model="tiny")
        [episode] = client.episodes.create([tinsmith.EpisodeSpec({"q": "1"})])
        self.kept = Resource(
            model_id=_id(run.name),
            name="kept",
            session=_id(client.session),
            sampling_session=_id(sampler.name),
            episode=_id(episode.name),
        )
        self.absent = Resource(
            model_id=_other(self.kept.model_id),
            name="kept",
            session=_other(self.kept.session),
            sampling_session=_other(self.kept.sampling_session),
            episode=_other(self.kept.episode),
        )
        self.own_key = client.keys.create(role="admin").secret
        self.others_key = client.keys.create(role="admin", project="b").secret
        self.address = address
        made = self.answer(self.others_key, "POST", ("/api/v1/create_session", {}))
        self.others_session = json.loads(made[1])["session_id"]
        until(lambda: "old" not in {_id(each.name) for each in client.checkpoints.list()})

    def answer(self, key: str, method: str, row: Row) -> tuple[int, str]:
        """Return the status and text of an answer, or of the future that it leads to."""
        path, body = row
        with httpx.Client(
            base_url=f"http://{self.address}",
            headers={"authorization": f"Bearer {key}"},
            timeout=30,
        ) as http:
            answer = http.request(method, path, json=body)
            if answer.status_code == 200 and "request_id" in answer.json():
                future = {"request_id": answer.json()["request_id"]}
                answer = http.post("/api/v1/retrieve_future", json=future)
                while answer.status_code == 408:
                    answer = http.post("/api/v1/retrieve_future", json=future)
            return answer.status_code, answer.text


def _id(name: str) -> str:
    return name.rpartition("/")[2]


def _other(name: str) -> str:
    """Return a name that no resource has."""
    return f"{name[:-1]}{'9' if name[-1] != '9' else '8'}"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Service]:
    server = EmbeddedThread(tmp_path_factory.mktemp("resources"), model_dir)
    deployment = server.start()
    try:
        with deployment.client() as client:
            yield Service(deployment.address, client)
    finally:
        server.stop()


def _without_names(text: str, *resources: Resource) -> str:
    for each in resources:
        for number, value in enumerate(dataclasses.astuple(each)):
            text = text.replace(value, f"NAME{number}")
    return re.sub(r'"(request_id|id)":"[^"]*"', "", text)


_ALL = {**_ROWS, **_ANSWERED_LATER}


@pytest.mark.parametrize(("method", "path"), sorted(_ALL))
def test_what_is_foreign_is_answered_as_what_is_absent(
    service: Service, method: str, path: str
) -> None:
    row = _ALL[method, path]
    foreign = service.answer(service.others_key, method, row(service.kept))
    absent = service.answer(service.others_key, method, row(service.absent))
    assert foreign[0] == absent[0]
    assert _without_names(foreign[1], service.kept) == _without_names(absent[1], service.absent)
    text = foreign[1].lower()
    assert foreign[0] >= 400 or '"error"' in text or "false" in text, foreign


@pytest.mark.parametrize("name", ["gone", "old"])
@pytest.mark.parametrize(
    ("method", "path"), [each for each in sorted(_ROWS) if each[1].startswith(_CHECKPOINT)]
)
def test_what_is_deleted_or_expired_is_answered_as_what_is_absent(
    service: Service, method: str, path: str, name: str
) -> None:
    ended, absent = (replace(service.kept, name=each) for each in (name, "never"))
    found = service.answer(service.own_key, method, _ROWS[method, path](ended))
    assert found[0] in (400, 404)
    wanted = service.answer(service.own_key, method, _ROWS[method, path](absent))
    assert found[1].replace(name, "NAME") == wanted[1].replace("never", "NAME")


@pytest.mark.parametrize(
    ("method", "path"),
    [each for each in sorted(_ROWS) if each[1].startswith((_CHECKPOINT, "/api/v1/weights_info"))],
)
def test_what_is_published_is_read_and_not_changed(
    service: Service, method: str, path: str
) -> None:
    shared = replace(service.kept, name="shared")
    status, text = service.answer(service.others_key, method, _ROWS[method, path](shared))
    is_read = (method, path) in _READS
    assert (status == 200) is is_read, text
    if not is_read:
        never = replace(service.kept, name="never")
        absent = service.answer(service.others_key, method, _ROWS[method, path](never))
        assert status == absent[0]
        assert text.replace("shared", "NAME") == absent[1].replace("never", "NAME")


def test_what_is_made_needs_a_session_of_one_s_own(service: Service) -> None:
    for names in (service.kept, service.absent):
        rows: list[Row] = [
            (
                "/api/v1/create_model",
                {"session_id": names.session, "model_seq_id": 0, "base_model": "tiny"},
            ),
            (
                "/api/v1/create_sampling_session",
                {
                    "session_id": names.session,
                    "sampling_session_seq_id": 0,
                    "base_model": "tiny",
                },
            ),
        ]
        for row in rows:
            status, text = service.answer(service.others_key, "POST", row)
            assert status == 404 or "not exist" in text, (row, text)


def test_weights_of_others_are_taken_only_if_they_are_published(service: Service) -> None:
    def made(names: Resource, number: int) -> tuple[int, str]:
        body = {
            "session_id": service.others_session,
            "sampling_session_seq_id": number,
            "model_path": names.path,
        }
        row = ("/api/v1/create_sampling_session", body)
        return service.answer(service.others_key, "POST", row)

    kept, absent = made(service.kept, 0), made(service.absent, 1)
    assert kept[0] == absent[0]
    assert kept[0] == 404
    assert _without_names(kept[1], service.kept) == _without_names(absent[1], service.absent)
    status, text = made(replace(service.kept, name="shared"), 2)
    assert status == 200, text


def test_a_future_is_its_project_s_alone(service: Service) -> None:
    with httpx.Client(
        base_url=f"http://{service.address}",
        headers={"authorization": f"Bearer {service.own_key}"},
        timeout=30,
    ) as http:
        path, body = _ANSWERED_LATER["POST", "/api/v1/asample"](service.kept)
        # The stranger may have asked for the first one itself, and was refused.
        future = http.post(path, json={**(body or {}), "seq_id": 7}).json()["request_id"]
    for path in ("/api/v1/retrieve_future", "/api/v1/cancel_future"):
        foreign, absent = (
            service.answer(service.others_key, "POST", (path, {"request_id": name}))
            for name in (future, _other(future))
        )
        assert foreign[0] == absent[0]
        assert foreign[1].replace(future, "NAME") == absent[1].replace(_other(future), "NAME")


def test_a_model_is_a_checkpoint_or_a_run_of_one_s_own(service: Service) -> None:
    def asked(names: Resource) -> list[tuple[int, str]]:
        model = f"tinker://{names.model_id}/weights/{names.name}"
        text = {"model": model, "prompt": [1, 2], "max_tokens": 1}
        chat = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        counted = {name: value for name, value in chat.items() if name != "max_tokens"}
        posts = {
            "/v1/completions": text,
            "/v1/chat/completions": chat,
            "/v1/responses": {"model": model, "input": "a", "max_output_tokens": 16},
            "/v1/messages": chat,
            "/v1/messages/count_tokens": counted,
            "/tokenize": {"model": model, "prompt": "a"},
            "/detokenize": {"model": model, "tokens": [1]},
        }
        found = [service.answer(service.others_key, "GET", (f"/v1/models/{model}", None))]
        return found + [
            service.answer(service.others_key, "POST", (path, body)) for path, body in posts.items()
        ]

    for kept, absent in zip(asked(service.kept), asked(service.absent), strict=True):
        assert kept[0] == absent[0] == 404, kept
        assert _without_names(kept[1], service.kept) == _without_names(absent[1], service.absent)
