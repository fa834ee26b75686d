"""The unmodified `tinker` SDK against the services, with nothing set but URL and key."""

from __future__ import annotations

import datetime
import gc
import json
import subprocess
import sys
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from typing import Literal

import numpy as np
import pyrage
import pytest
import tinker
import torch
from safetensors.torch import load as load_safetensors
from tests.integration.servers import BASE_MODEL, Deployment
from tests.integration.tinker_users import (
    GREEDY,
    PROMPT,
    TOKENS,
    connected,
    key_of,
    supervised,
    train,
    url_of,
)
from tinker import types

import tinsmith

# The SDK leaves the connections of its first call open until they are collected.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning"
)


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


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


def test_a_model_learns_and_its_sampling_client_says_what_it_learned(
    service: tinker.ServiceClient, model: tinker.TrainingClient
) -> None:
    losses = train(model, 12)
    assert losses[-1] < 0.1 * losses[0]
    sampler = model.save_weights_and_get_sampling_client().result()
    answer = sampler.sample(PROMPT, num_samples=2, sampling_params=GREEDY).result()
    assert [sequence.tokens[:4] for sequence in answer.sequences] == [TOKENS[4:8]] * 2
    base = service.create_sampling_client(base_model=BASE_MODEL).result()
    untrained = base.sample(PROMPT, num_samples=1, sampling_params=GREEDY).result()
    assert untrained.sequences[0].tokens[:4] != TOKENS[4:8]


def test_training_gives_the_bits_that_the_native_sdk_gives(
    embedded: Deployment, model: tinker.TrainingClient
) -> None:
    losses = train(model, 4)
    with embedded.client() as client:
        run = client.create_lora_training_run(BASE_MODEL, rank=8, seed=3, train_unembed=True)
        datum = tinsmith.Datum(
            model_input=tinsmith.ModelInput.from_ints(TOKENS[:-1]),
            loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * 7},
        )
        native = []
        for _ in range(4):
            gradient = run.forward_backward([datum] * 2, "cross_entropy")
            run.optim_step(tinsmith.AdamParams(learning_rate=1e-2)).result()
            native.append(gradient.result().loss)
    assert losses == native


def test_the_tokenizer_of_a_model_that_is_on_no_hub_is_there(
    embedded: Deployment, model: tinker.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    info = model.get_info()
    assert info.model_data.tokenizer_id == str(embedded.model_dir.resolve())
    tokenizer = model.get_tokenizer()
    with embedded.client() as client:
        ours = client.get_tokenizer(BASE_MODEL)
    assert tokenizer.encode("Repeat: abc") == list(ours.encode("Repeat: abc"))


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("cispo", None),
        ("dro", {"beta": 0.1}),
        ("gspo", None),
    ],
)
def test_policy_losses_take_what_the_sampler_returned(
    model: tinker.TrainingClient, loss: str, config: dict[str, float] | None
) -> None:
    sampler = model.save_weights_and_get_sampling_client().result()
    drawn = sampler.sample(
        PROMPT, num_samples=2, sampling_params=types.SamplingParams(max_tokens=6, seed=1)
    ).result()
    data = []
    for sequence, advantage in zip(drawn.sequences, (1.0, -1.0), strict=True):
        assert sequence.logprobs is not None
        tokens = TOKENS[:4] + list(sequence.tokens)
        mask = np.array([0.0] * 3 + [1.0] * len(sequence.tokens), dtype=np.float32)
        inputs = {
            "target_tokens": np.array(tokens[1:]),
            "logprobs": np.array([0.0] * 3 + list(sequence.logprobs), dtype=np.float32),
            "advantages": mask * advantage,
        }
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = mask
        data.append(
            types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        )
    output = model.forward_backward(data, loss, config).result()
    # The sampler's log-probabilities are those of the trainer, up to the rounding of a decode.
    assert output.metrics["ratio:mean"] == pytest.approx(1.0, abs=1e-5)
    assert [one["logprobs"].shape for one in output.loss_fn_outputs] == [
        [datum.model_input.length] for datum in data
    ]
    model.optim_step(types.AdamParams(learning_rate=1e-3)).result()


def test_a_loss_over_several_targets_takes_sparse_tensors(model: tinker.TrainingClient) -> None:
    targets = torch.zeros(7, 4, dtype=torch.int64)
    weights = torch.zeros(7, 4)
    targets[:, 0], weights[:, 0] = torch.tensor(TOKENS[1:]), 1.0
    inputs = types.ModelInput.from_ints(TOKENS[:-1])
    sparse = types.Datum(
        model_input=inputs, loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )
    wide = model.forward([sparse], "cross_entropy").result()
    plain = model.forward([supervised(TOKENS)], "cross_entropy").result()
    assert wide.loss_fn_outputs[0]["logprobs"].shape == [7, 4]
    assert wide.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-6)


def test_a_large_batch_goes_in_chunks_and_gives_the_gradient_of_the_whole(
    service: tinker.ServiceClient,
) -> None:
    # 1,024 datums go in one chunk; these are two, and the second is sent first.
    batch = [supervised(TOKENS, weight=1e-3)] * 1100
    chunked = service.create_lora_training_client(BASE_MODEL, rank=8, seed=5).result()
    output = chunked.forward_backward(batch, "cross_entropy").result()
    step = chunked.optim_step(types.AdamParams()).result()
    assert len(output.loss_fn_outputs) == 1100
    single = service.create_lora_training_client(BASE_MODEL, rank=8, seed=5).result()
    once = single.forward_backward([supervised(TOKENS, weight=1.1)], "cross_entropy").result()
    assert output.metrics["loss:sum"] == pytest.approx(once.metrics["loss:sum"], rel=1e-4)
    alone = single.optim_step(types.AdamParams()).result()
    assert step.metrics is not None
    assert alone.metrics is not None
    assert step.metrics["grad_norm"] == pytest.approx(alone.metrics["grad_norm"], rel=1e-4)


def test_a_client_side_loss_gives_the_gradient_of_the_built_in_one(
    service: tinker.ServiceClient,
) -> None:
    def negative_likelihood(
        data: list[types.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        loss = -sum((one.sum() for one in logprobs), torch.zeros(()))
        return loss, {"seen:sum": float(len(data))}

    norms = []
    for is_custom in (True, False):
        model = service.create_lora_training_client(BASE_MODEL, rank=8, seed=7).result()
        data = [supervised(TOKENS)] * 2
        if is_custom:
            gradient = model.forward_backward_custom(data, negative_likelihood)
        else:
            gradient = model.forward_backward(data, "cross_entropy")
        # Sent while the custom loss is computed: its number is behind two that are not sent yet.
        update = model.optim_step(types.AdamParams())
        assert gradient.result().metrics["loss:sum"] > 0
        metrics = update.result().metrics
        assert metrics is not None
        norms.append(metrics["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_traced_loss_runs_on_the_server(service: tinker.ServiceClient) -> None:
    def weighted(
        logprobs: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/most:mean": -logprobs.min()}

    handle = service.create_custom_loss(weighted, {"logprobs": 1, "weights": 1}).result()
    assert handle.loss_id is not None
    data = [supervised(TOKENS), supervised(TOKENS[::-1], weight=0.5)]
    found = []
    for loss in (handle, None):
        model = service.create_lora_training_client(BASE_MODEL, rank=8, seed=9).result()
        gradient = (
            model.forward_backward(data, "cross_entropy")
            if loss is None
            else model.forward_backward_custom(data, loss)
        )
        update = model.optim_step(types.AdamParams()).result()
        assert update.metrics is not None
        found.append((gradient.result().metrics, update.metrics["grad_norm"]))
    (custom, custom_norm), (built_in, norm) = found
    assert custom["loss:sum"] == pytest.approx(built_in["loss:sum"], rel=1e-6)
    assert custom_norm == pytest.approx(norm, rel=1e-6)
    assert custom["custom/most:mean"] > 0


class TestMistakes:
    """A user's mistake is a failed future, and the next call goes on."""

    def test_a_refused_batch_fails_its_future_and_the_step_behind_it(
        self, model: tinker.TrainingClient
    ) -> None:
        wrong = model.forward_backward([supervised([5, 6, 10**8])], "cross_entropy")
        right = model.forward_backward([supervised(TOKENS)], "cross_entropy")
        update = model.optim_step(types.AdamParams())
        with pytest.raises(tinker.RequestFailedError, match="TOKEN_OUT_OF_VOCABULARY") as failure:
            wrong.result()
        assert failure.value.category == types.RequestErrorCategory.User
        assert right.result().metrics["loss:sum"] > 0
        # Sent before its client could know that half of the batch is missing.
        with pytest.raises(tinker.RequestFailedError, match="GRADIENT_INCOMPLETE"):
            update.result()
        train(model, 1)

    def test_a_loss_that_is_not_published_says_what_to_use(
        self, model: tinker.TrainingClient
    ) -> None:
        refused = model.forward_backward([supervised(TOKENS)], "stable_reinforce")
        with pytest.raises(tinker.RequestFailedError, match="importance_sampling"):
            refused.result()
        update = model.optim_step(types.AdamParams())
        with pytest.raises(tinker.RequestFailedError, match="GRADIENT_INCOMPLETE"):
            update.result()
        train(model, 1)

    def test_samples_for_that_loss_are_refused_at_once(self, service: tinker.ServiceClient) -> None:
        sampler = service.create_sampling_client(
            base_model=BASE_MODEL, record_stability_info=True
        ).result()
        drawing = sampler.sample(PROMPT, num_samples=1, sampling_params=GREEDY)
        with pytest.raises(tinker.BadRequestError, match="importance_sampling"):
            drawing.result()

    def test_a_loss_with_an_operation_that_is_not_listed_is_refused(
        self, service: tinker.ServiceClient, model: tinker.TrainingClient
    ) -> None:
        def noisy(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return (logprobs + torch.rand_like(logprobs)).sum(), {}

        handle = service.create_custom_loss(noisy, {"logprobs": 1}).result()
        refused = model.forward_backward_custom([supervised(TOKENS)], handle)
        with pytest.raises(tinker.RequestFailedError, match="rand_like"):
            refused.result()

    def test_another_optimizer_is_refused_and_the_next_step_works(
        self, model: tinker.TrainingClient
    ) -> None:
        model.forward_backward([supervised(TOKENS)], "cross_entropy").result()
        refused = model.optim_step(types.DimuonParams(learning_rate=1e-3))
        with pytest.raises(tinker.RequestFailedError, match="dimuon"):
            refused.result()
        train(model, 1)

    def test_a_name_that_can_not_be_one_uses_up_its_number_only(
        self, model: tinker.TrainingClient
    ) -> None:
        with pytest.raises(tinker.RequestFailedError, match="path must be"):
            model.save_state("a/b").result()
        train(model, 1)

    def test_an_unknown_model_and_path_are_not_found(self, service: tinker.ServiceClient) -> None:
        with pytest.raises(tinker.NotFoundError, match="gpt-9"):
            service.create_lora_training_client("gpt-9").result()
        with pytest.raises(tinker.NotFoundError, match="does not exist"):
            service.create_training_client_from_state("tinker://nobody/weights/x").result()

    def test_a_prompt_that_is_too_long_fails_its_sample(
        self, service: tinker.ServiceClient
    ) -> None:
        sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
        with pytest.raises(tinker.RequestFailedError, match="SEQUENCE_TOO_LONG"):
            sampler.sample(
                types.ModelInput.from_ints([5] * 5000), num_samples=1, sampling_params=GREEDY
            ).result()


class TestCheckpoints:
    """Saves of all kinds, and what can be done with them."""

    def test_a_model_goes_on_from_a_state_to_the_bit(
        self, service: tinker.ServiceClient, model: tinker.TrainingClient
    ) -> None:
        train(model, 3)
        saved = model.save_state("third").result()
        path = saved.path
        ahead = train(model, 2)
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        assert train(resumed, 2) == ahead
        restarted = service.create_training_client_from_state(path).result()
        assert train(restarted, 2)[0] == ahead[0]

    def test_a_state_is_loaded_into_a_model_that_trains(self, model: tinker.TrainingClient) -> None:
        train(model, 2)
        saved = model.save_state("second").result()
        ahead = train(model, 2)
        with pytest.warns(FutureWarning):
            loading = model.load_state_with_optimizer(saved.path)
        loading.result()
        assert train(model, 2) == ahead

    def test_a_name_is_taken_unless_it_may_be_overwritten(
        self, model: tinker.TrainingClient, rest: tinker.RestClient
    ) -> None:
        train(model, 1)
        first = model.save_state("latest").result()
        with pytest.raises(tinker.RequestFailedError, match="exists"):
            model.save_state("latest").result()
        train(model, 1)
        second = model.save_state("latest", overwrite=True).result()
        assert second.path == first.path
        with pytest.raises(tinker.RequestFailedError, match="exists"):
            model.save_state("latest").result()
        listed = rest.list_checkpoints(model.model_id).result().checkpoints
        assert [one.checkpoint_id for one in listed] == ["weights/latest"]

    def test_a_state_and_sampler_weights_may_share_a_name(
        self, service: tinker.ServiceClient, model: tinker.TrainingClient, rest: tinker.RestClient
    ) -> None:
        train(model, 12)
        model.save_state("final", ttl_seconds=7200, user_metadata={"step": "12"}).result()
        weights = model.save_weights_for_sampler("final").result()
        sampler = service.create_sampling_client(model_path=weights.path).result()
        answer = sampler.sample(PROMPT, num_samples=1, sampling_params=GREEDY).result()
        assert answer.sequences[0].tokens[:4] == TOKENS[4:8]
        listed = rest.list_checkpoints(model.model_id).result().checkpoints
        kinds = {one.checkpoint_id: one.checkpoint_type for one in listed}
        assert kinds == {"weights/final": "training", "sampler_weights/final": "sampler"}
        (state,) = (one for one in listed if one.checkpoint_type == "training")
        assert state.user_metadata == {"step": "12"}
        assert state.expires_at is not None

    def test_a_frozen_sampling_client_does_not_follow_and_an_inflight_one_does(
        self, model: tinker.TrainingClient
    ) -> None:
        frozen = model.save_weights_and_get_sampling_client().result()
        live = model.save_weights_and_get_sampling_client(kind="inflight").result()
        before = frozen.compute_logprobs(PROMPT).result()
        assert live.compute_logprobs(PROMPT).result() == before
        train(model, 3)
        model.save_weights_and_get_sampling_client(kind="inflight").result()
        assert frozen.compute_logprobs(PROMPT).result() == before
        assert live.compute_logprobs(PROMPT).result() != before

    def test_weights_are_published_limited_copied_and_deleted(
        self, model: tinker.TrainingClient, rest: tinker.RestClient
    ) -> None:
        train(model, 1)
        path = model.save_state("shared").result().path
        rest.publish_checkpoint_from_tinker_path(path).result()
        rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
        (shared,) = rest.list_checkpoints(model.model_id).result().checkpoints
        assert shared.public
        assert shared.expires_at is not None
        rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
        rest.unpublish_checkpoint_from_tinker_path(path).result()
        (private,) = rest.list_checkpoints(model.model_id).result().checkpoints
        assert not private.public
        assert private.expires_at is None
        info = rest.get_weights_info_by_tinker_path(path).result()
        assert (info.base_model, info.is_lora, info.lora_rank) == (BASE_MODEL, True, 8)
        copied = rest.copy_weights(path, "default").result()
        rest.delete_checkpoint_from_tinker_path(path).result()
        assert rest.list_checkpoints(model.model_id).result().checkpoints == []
        assert rest.get_weights_info_by_tinker_path(copied).result().lora_rank == 8

    def test_external_weights_are_what_peft_reads(
        self, model: tinker.TrainingClient, rest: tinker.RestClient
    ) -> None:
        train(model, 1)
        saved = model.save_weights_external("export").result()
        links = rest.get_external_weights_urls(saved.path).result()
        files = {name: _fetch(url) for name, url in links.urls.items()}
        assert set(files) == {"adapter_config.json", "adapter_model.safetensors"}
        assert json.loads(files["adapter_config.json"])["r"] == 8
        assert all("lora_" in name for name in load_safetensors(files["adapter_model.safetensors"]))
        assert links.expires > datetime.datetime.now(tz=datetime.UTC)

    def test_external_weights_are_encrypted_for_whom_they_are(
        self, model: tinker.TrainingClient, rest: tinker.RestClient
    ) -> None:
        identity = pyrage.x25519.Identity.generate()
        train(model, 1)
        saved = model.save_weights_external(
            "secret", age_encryption_recipients=[str(identity.to_public())]
        ).result()
        links = rest.get_external_weights_urls(saved.path).result()
        sealed = _fetch(links.urls["adapter_config.json.age"])
        assert json.loads(pyrage.decrypt(sealed, [identity]))["r"] == 8
        assert b"adapter" not in sealed


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
            "import sys, tinker; from tinker import types\n"
            "client = tinker.SamplingClient.from_sampler_handle(sys.argv[1])\n"
            "answer = client.sample(types.ModelInput.from_ints([5, 6, 7, 8]), num_samples=1,\n"
            "    sampling_params=types.SamplingParams(max_tokens=5, temperature=0)).result()\n"
            "print(list(answer.sequences[0].tokens))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, sampler.get_sampler_handle()],
            env={"TINKER_BASE_URL": url_of(embedded), "TINKER_API_KEY": key_of(embedded)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
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
        events = json.loads(_fetch(url))["traceEvents"]
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


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as answer:
        content: bytes = answer.read()
    return content
