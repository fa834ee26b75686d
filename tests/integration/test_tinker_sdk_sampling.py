"""Tinker's own SDK over the gateway: sampling, and what an account shows."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest
import tinker
from tests.integration.servers import BASE_MODEL, Deployment
from tests.integration.tinker_users import (
    GREEDY,
    PROMPT,
    TOKENS,
    connected,
    fetch,
    key_of,
    train,
    url_of,
)
from tests.integration.tinker_users import (
    collected as collected,
)
from tinker import types

# The SDK leaves the connections of its first call open until they are collected.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning"
)


@pytest.fixture(scope="module")
def service(embedded: Deployment) -> Iterator[tinker.ServiceClient]:
    with connected(embedded, user_metadata={"team": "a"}, display_name="a day of work") as client:
        yield client


@pytest.fixture(scope="module")
def rest(embedded: Deployment) -> tinker.RestClient:
    return tinker.RestClient(base_url=url_of(embedded), api_key=key_of(embedded))


@pytest.fixture(scope="module")
def sampler(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=BASE_MODEL).result()


@pytest.fixture
def model(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(BASE_MODEL, rank=8, seed=3).result()


class TestSampling:
    """Everything that a request for samples may ask for."""

    def test_a_seed_repeats_and_samples_differ(self, sampler: tinker.SamplingClient) -> None:
        params = types.SamplingParams(max_tokens=8, seed=11)
        drawn = [
            sampler.sample(PROMPT, num_samples=3, sampling_params=params).result() for _ in range(2)
        ]
        first, second = ([list(one.tokens) for one in each.sequences] for each in drawn)
        assert first == second
        assert len({tuple(tokens) for tokens in first}) > 1
        ids = {one.sequence_id for each in drawn for one in each.sequences}
        assert len(ids) == 6

    def test_stops_end_a_sample_and_no_stops_end_nothing(
        self, sampler: tinker.SamplingClient
    ) -> None:
        (free,) = (
            sampler.sample(
                PROMPT,
                num_samples=1,
                sampling_params=types.SamplingParams(max_tokens=12, temperature=0, stop=[]),
            )
            .result()
            .sequences
        )
        assert (len(free.tokens), free.stop_reason) == (12, "length")
        stop = free.tokens[3]
        (stopped,) = (
            sampler.sample(
                PROMPT,
                num_samples=1,
                sampling_params=types.SamplingParams(max_tokens=12, temperature=0, stop=[stop]),
            )
            .result()
            .sequences
        )
        assert stopped.stop_reason == "stop"
        assert list(stopped.tokens) == list(free.tokens[: free.tokens.index(stop) + 1])

    def test_scores_of_the_prompt_and_of_samples(self, sampler: tinker.SamplingClient) -> None:
        whole = types.ModelInput.from_ints(TOKENS)
        targets = np.array([[token, token + 1, -1] for token in TOKENS[1:]], dtype=np.int64)
        answer = sampler.sample(
            whole,
            num_samples=1,
            sampling_params=types.SamplingParams(max_tokens=2, temperature=0),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=3,
            topk_sample_logprobs=2,
            target_prompt_logprobs=types.TensorData.from_numpy(targets),
            prompt_alt_tokens_k=2,
        ).result()
        scores = answer.prompt_logprobs
        assert scores is not None
        assert scores[0] is None
        assert scores[1:] == sampler.compute_logprobs(whole).result()[1:]
        assert answer.target_prompt_logprobs is not None
        scored = answer.target_prompt_logprobs.to_numpy()
        np.testing.assert_array_equal(scored[:, 0], np.array(scores[1:], dtype=np.float32))
        assert (scored[:, 2] == 0).all()
        assert answer.topk_prompt_logprobs is not None
        assert answer.topk_prompt_logprobs[0] is None
        assert all(len(row or []) == 3 for row in answer.topk_prompt_logprobs[1:])
        (sequence,) = answer.sequences
        assert sequence.topk_logprobs is not None
        assert [row[0][0] for row in sequence.topk_logprobs if row] == list(sequence.tokens)
        assert answer.prompt_alt_tokens is not None
        assert answer.prompt_alt_tokens.tokens.shape == [7, 2]

    def test_only_the_end_of_a_prompt_is_scored(self, sampler: tinker.SamplingClient) -> None:
        whole = types.ModelInput.from_ints(TOKENS)
        every = sampler.compute_logprobs(whole).result()
        last = sampler.compute_logprobs(whole, prompt_logprobs_last_n=3).result()
        assert last == [None] * 5 + every[5:]

    def test_a_pickled_client_samples_elsewhere(
        self, sampler: tinker.SamplingClient, embedded: Deployment
    ) -> None:
        program = (
            "import os, sys, tinker; from tinker import types\n"
            "client = tinker.SamplingClient.from_sampler_handle(sys.argv[1])\n"
            "answer = client.sample(types.ModelInput.from_ints([5, 6, 7, 8]), num_samples=1,\n"
            "    sampling_params=types.SamplingParams(max_tokens=5, temperature=0)).result()\n"
            "print(list(answer.sequences[0].tokens), flush=True)\n"
            # The SDK's thread goes on, and on a busy machine the interpreter's end aborts in it.
            "os._exit(0)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, sampler.get_sampler_handle()],
            env={"TINKER_BASE_URL": url_of(embedded), "TINKER_API_KEY": key_of(embedded)},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, (done.returncode, done.stderr)
        here = sampler.sample(PROMPT, num_samples=1, sampling_params=GREEDY).result()
        assert done.stdout.strip() == str(list(here.sequences[0].tokens)), done.stderr


class TestAccounts:
    """Sessions, runs, keys and what was used."""

    def test_a_session_lists_what_was_made_in_it(
        self, service: tinker.ServiceClient, model: tinker.TrainingClient, rest: tinker.RestClient
    ) -> None:
        session_id = model.model_id.partition(":")[0]
        assert session_id in rest.list_sessions().result().sessions
        session = rest.get_session(session_id).result()
        assert model.model_id in session.training_run_ids
        assert session.display_name == "a day of work"
        assert session.user_metadata == {"team": "a"}
        run = rest.get_training_run(model.model_id).result()
        assert (run.base_model, run.is_lora, run.lora_rank) == (BASE_MODEL, True, 8)
        listed = rest.list_training_runs(limit=1000).result().training_runs
        assert model.model_id in {one.training_run_id for one in listed}

    @pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning")
    def test_sessions_are_searched(
        self, model: tinker.TrainingClient, rest: tinker.RestClient
    ) -> None:
        session_id = model.model_id.partition(":")[0]
        for query, is_found in (
            (types.SessionSearchRequest(display_name="WORK day"), True),
            (types.SessionSearchRequest(session_id=session_id), True),
            (types.SessionSearchRequest(user_metadata={"team": "b"}), False),
        ):
            found = rest.search_sessions(query).result().sessions
            assert (session_id in {one.session_id for one in found}) is is_found

    def test_a_trace_of_a_session_can_be_opened(
        self, model: tinker.TrainingClient, rest: tinker.RestClient
    ) -> None:
        train(model, 1)
        url = rest.export_session_trace(model.model_id.partition(":")[0]).result()
        events = json.loads(fetch(url))["traceEvents"]
        assert {"forward_backward", "optim_step"} <= {event["name"] for event in events}

    def test_a_finished_session_takes_nothing_more(self, embedded: Deployment) -> None:
        with connected(embedded) as client:
            model = client.create_lora_training_client(BASE_MODEL, rank=8).result()
            session_id = model.model_id.partition(":")[0]
        rest = tinker.RestClient(base_url=url_of(embedded), api_key=key_of(embedded))
        assert session_id in rest.list_sessions().result().sessions
        late = {"session_id": session_id, "model_seq_id": 1, "base_model": BASE_MODEL}
        request = urllib.request.Request(
            f"{url_of(embedded)}/api/v1/create_model",
            json.dumps(late).encode(),
            {"X-API-Key": key_of(embedded)},
        )
        with pytest.raises(urllib.error.HTTPError) as refusal:
            urllib.request.urlopen(request, timeout=30)
        assert refusal.value.code == 400
        assert json.loads(refusal.value.read())["reason"] == "SESSION_FINISHED"

    def test_what_was_used_and_done_is_told(
        self, embedded: Deployment, model: tinker.TrainingClient, rest: tinker.RestClient
    ) -> None:
        train(model, 1)
        admin = tinker.AdminClient(base_url=url_of(embedded), api_key=key_of(embedded))
        hour = datetime.datetime.now(tz=datetime.UTC).replace(minute=0, second=0, microsecond=0)
        usage = admin.get_billing_usage(
            # An hour more than is needed, should one end while the test runs.
            starting_on=hour - datetime.timedelta(hours=1),
            ending_before=hour + datetime.timedelta(hours=2),
        ).result()
        session_id = model.model_id.partition(":")[0]
        trained = [
            event
            for event in usage.data
            if event.session_id == session_id and event.event_info.type == "training"
        ]
        assert sum(event.event_info.token_count for event in trained) >= 14
        assert {event.base_model for event in trained} == {BASE_MODEL}
        path = model.save_state("audited").result().path
        rest.publish_checkpoint_from_tinker_path(path).result()
        gone = model.save_weights_for_sampler("audited").result().path
        rest.delete_checkpoint_from_tinker_path(gone).result()
        entries = _audited(admin, "all", hour)
        assert {"session_create", "run_create"} <= {entry.event for entry in entries}
        assert entries == sorted(entries, key=lambda entry: entry.timestamp)
        of_checkpoints = _audited(admin, "checkpoints", hour)
        assert of_checkpoints == [one for one in entries if one.event.startswith("checkpoint_")]
        assert [
            (one.event, one.event_details["tinker_path"])
            for one in of_checkpoints
            if one.event_details["model_id"] == model.model_id
        ] == [("checkpoint_publish", path), ("checkpoint_delete", gone)]
        stored = admin.get_current_checkpoint_storage_usage().result()
        assert stored.data[0].project_id == "default"

    def test_a_wrong_key_is_told_so(self, embedded: Deployment) -> None:
        wrong = f"tml-{'a' * 12}_{'b' * 43}"
        with pytest.raises(tinker.AuthenticationError, match="unknown"):
            tinker.RestClient(base_url=url_of(embedded), api_key=wrong)

    def test_capabilities_name_the_model(self, rest: tinker.RestClient) -> None:
        (served,) = rest.get_server_capabilities().result().supported_models
        assert (served.model_name, served.trainable, served.sampleable) == (BASE_MODEL, True, True)


def _audited(
    admin: tinker.AdminClient, kind: Literal["all", "checkpoints"], began: datetime.datetime
) -> list[types.AuditLogEntry]:
    """Return what was done on the days since a test began: two of them around midnight."""
    now = datetime.datetime.now(tz=datetime.UTC)
    days = sorted({began.date(), now.date()})
    return [
        entry
        for day in days
        for entry in admin.get_audit_log(event_type=kind, day=day).result().entries
    ]
