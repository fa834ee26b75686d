"""Sessions, samplers, environments, lists and settings of a client."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from google.rpc import code_pb2
from tests.fakes.local_servers import local_server
from tests.fakes.sdk_fake_server import RUN, FakeServer, make_status, unavailable
from tests.support.wait import until
from tests.unit.sdk.conftest import FAST

import tinsmith
from tinsmith.local_servers import Announcement
from tinsmith.settings import resolve_settings

Data = list[tinsmith.Datum]


def test_missing_settings_name_both_variables() -> None:
    with pytest.raises(
        tinsmith.ConfigurationError, match="TINSMITH_ADDRESS and TINSMITH_API_KEY"
    ) as caught:
        tinsmith.Client()
    assert "address and API key" in str(caught.value)


def test_the_file_of_a_local_server_is_used(tmp_path: Path) -> None:
    environ = {"TINSMITH_STATE_DIR": str(tmp_path)}
    with Announcement(tmp_path, local_server("127.0.0.1:1", api_key="tsk_file", project="lab")):
        settings = resolve_settings(environ=environ)
    assert (settings.address, settings.api_key) == ("127.0.0.1:1", "tsk_file")
    assert settings.project == "lab"
    assert "tsk_file" not in repr(settings)


def test_the_project_of_the_file_is_that_of_its_key_alone(tmp_path: Path) -> None:
    server = local_server("127.0.0.1:1", api_key="tsk_file", project="lab")
    with Announcement(tmp_path, server):
        for key, project in (("tsk_file", "lab"), ("tsk_bob", "")):
            environ = {"TINSMITH_STATE_DIR": str(tmp_path), "TINSMITH_API_KEY": key}
            assert resolve_settings(environ=environ).project == project


@pytest.mark.parametrize(
    ("key_project", "given", "project"),
    [
        pytest.param("other", None, "other", id="of-the-key"),
        pytest.param("other", "mine", "mine", id="given"),
    ],
)
def test_the_project_is_that_of_the_key_unless_it_is_given(
    server: FakeServer, key_project: str, given: str | None, project: str
) -> None:
    server.update(key_project=key_project)
    with tinsmith.Client(server.address, "tsk_test", project=given) as client:
        assert client.project == project
        assert server.state.last["CreateSession"].parent == f"projects/{project}"
    assert server.state.calls["GetCallerKey"] == (0 if given else 1)


def test_the_local_key_goes_to_no_other_server(tmp_path: Path) -> None:
    environ = {"TINSMITH_STATE_DIR": str(tmp_path), "TINSMITH_ADDRESS": "elsewhere:1"}
    with (
        Announcement(tmp_path, local_server("a:1", api_key="tsk_file")),
        pytest.raises(tinsmith.ConfigurationError, match="no API key"),
    ):
        resolve_settings(environ=environ)


def test_a_wrong_key_is_refused_at_once(server: FakeServer) -> None:
    with pytest.raises(tinsmith.UnauthenticatedError, match="TINSMITH_API_KEY"):
        tinsmith.Client(server.address, "tsk_wrong")


def test_an_unreachable_server_is_tried_until_the_budget_is_used_up() -> None:
    retry = tinsmith.RetryPolicy(budget_s=0.3, initial_backoff_s=0.05)
    with pytest.raises(
        tinsmith.UnavailableError, match=r"^no server answers at 127\.0\.0\.1:1: Connection refused"
    ) as caught:
        tinsmith.Client("127.0.0.1:1", "tsk_test", retry=retry)
    # A trace of gRPC's own above it would say the same in forty lines.
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("raised", "outcome"),
    [
        pytest.param(None, "success", id="success"),
        pytest.param(ValueError, "errored", id="errored"),
        pytest.param(KeyboardInterrupt, "interrupted", id="interrupted"),
    ],
)
def test_the_session_ends_with_its_outcome(
    server: FakeServer, raised: type[BaseException] | None, outcome: str
) -> None:
    def use() -> None:
        with tinsmith.Client(server.address, "tsk_test"):
            if raised is not None:
                raise raised

    if raised is None:
        use()
    else:
        with pytest.raises(raised):
            use()
    assert server.state.outcome == outcome


def test_an_expired_session_says_so(server: FakeServer, client: tinsmith.Client) -> None:
    server.state.session_state = "expired"

    def refusal() -> tinsmith.FailedPreconditionError | None:
        """Return how a run is refused, once the client has heard of it."""
        try:
            client.create_lora_training_run("tiny")
        except tinsmith.FailedPreconditionError as error:
            return error
        return None

    assert "open a new Client" in str(until(refusal))


def test_a_run_may_be_given_an_id(server: FakeServer, client: tinsmith.Client) -> None:
    client.create_lora_training_run("tiny", run_id="mine")
    assert server.state.last["CreateTrainingRun"].training_run_id == "mine"
    client.create_full_training_run("tiny")
    assert server.state.last["CreateTrainingRun"].training_run_id == ""


def test_the_session_outlives_a_refused_heartbeat(
    server: FakeServer, client: tinsmith.Client
) -> None:
    server.state.fail_calls["HeartbeatSession"] = [unavailable()] * 3
    until(lambda: server.state.calls["HeartbeatSession"] > 3)
    client.create_lora_training_run("tiny")


def test_a_live_sampler_asks_for_the_version_that_the_client_knows(
    server: FakeServer, run: tinsmith.TrainingRun, data: Data
) -> None:
    sampler = run.sampler()
    prompt = tinsmith.ModelInput.from_ints([1, 2])
    assert sampler.sample(prompt).result(timeout=10).sequences[0].versions == [0, 0, 0]
    run.forward_backward(data)
    run.optim_step().result(timeout=10)
    params = tinsmith.SamplingParams(max_tokens=20, temperature=0.0, stop=["\n"])
    result = sampler.sample(prompt, sampling_params=params, num_samples=8).result(timeout=10)
    assert len(result.sequences) == 8
    assert result.sequences[0].tokens == [0, 1, 2]
    assert result.sequences[0].logprobs == [-0.5] * 3
    assert result.sequences[0].versions == [1, 1, 1]
    assert result.sequences[0].stop_reason == "stop"
    request = server.state.last["Sample"]
    assert list(request.params.stop_strings) == ["\n"]
    assert not request.params.HasField("stop_tokens")
    scored = sampler.compute_logprobs([1, 2]).result(timeout=10)
    assert scored == [None, -1.0]


@pytest.mark.parametrize(
    ("stop", "has_tokens", "token_ids", "strings"),
    [
        pytest.param(None, False, [], [], id="end-of-turn"),
        pytest.param([], True, [], [], id="nothing"),
        pytest.param([5, 6], True, [5, 6], [], id="ids"),
        pytest.param("###", False, [], ["###"], id="string"),
    ],
)
def test_stops_are_told_apart(
    server: FakeServer,
    client: tinsmith.Client,
    stop: object,
    has_tokens: bool,
    token_ids: list[int],
    strings: list[str],
) -> None:
    sampler = client.create_sampler(base_model="tiny")
    sampler.sample([1], sampling_params=tinsmith.SamplingParams(stop=stop)).result(timeout=10)  # type: ignore[arg-type]
    params = server.state.last["Sample"].params
    assert params.HasField("stop_tokens") == has_tokens
    assert list(params.stop_tokens.token_ids) == token_ids
    assert list(params.stop_strings) == strings


def test_a_sample_that_was_cut_off_is_drawn_again_with_its_seed(
    server: FakeServer, client: tinsmith.Client
) -> None:
    server.state.fail_calls["Sample"] = [unavailable(), unavailable()]
    client.create_sampler(base_model="tiny").sample([1]).result(timeout=10)
    seeds = {server.state.last["Sample"].params.seed}
    assert server.state.calls["Sample"] == 3
    assert seeds != {0}


def test_weights_are_saved_and_sampled(
    server: FakeServer, run: tinsmith.TrainingRun, client: tinsmith.Client
) -> None:
    sampler = run.save_weights_and_get_sampling_client("first")
    assert sampler.checkpoint == f"{RUN}/checkpoints/first"
    saved = run.save_state("second", user_metadata={"a": "b"}).result(timeout=10)
    assert saved.kind == "training"
    assert run.load_state_with_optimizer("second").result(timeout=10).version == 0
    assert server.state.last["load_checkpoint"].checkpoint == saved.name
    assert server.state.last["load_checkpoint"].include_optimizer
    run.load_state(saved).result(timeout=10)
    names = [checkpoint.name.rpartition("/")[2] for checkpoint in client.checkpoints.list(run)]
    assert names == ["first", "second"]
    assert len(client.checkpoints.list()) == 2
    client.checkpoints.delete(saved)
    assert server.state.last["DeleteCheckpoint"].name == saved.name


def test_checkpoints_of_a_run_without_a_trainer_are_listed_by_who_knows_them(
    server: FakeServer, run: tinsmith.TrainingRun, client: tinsmith.Client
) -> None:
    run.save_state("first").result(timeout=10)
    server.state.is_orphaned = True
    assert client.checkpoints.list() == [], "nobody knows them at the moment"

    server.state.checkpoint_address = server.address
    assert len(client.checkpoints.list()) == 1
    assert len(client.checkpoints.list(run)) == 1


def test_a_sampler_needs_one_source(client: tinsmith.Client) -> None:
    with pytest.raises(tinsmith.ConfigurationError, match="base_model="):
        client.create_sampler(base_model="tiny", run="run-1")


def test_runs_are_listed_and_deleted(server: FakeServer, client: tinsmith.Client) -> None:
    (run,) = client.runs.list()
    assert (run.name, run.state, run.adapter, run.rank) == (RUN, "active", "lora", 32)
    client.runs.delete("run-1")
    assert server.state.last["DeleteTrainingRun"].name == RUN
    with pytest.raises(tinsmith.NotFoundError, match=r"runs\.list"):
        client.runs.get("other")
    assert client.list_models()[0].base_model == "tiny"


def test_a_run_says_how_long_its_past_is_kept(server: FakeServer, client: tinsmith.Client) -> None:
    month_s = 30 * 24 * 3600.0
    create = "CreateTrainingRun"
    client.create_lora_training_run("tiny")
    assert not server.state.last[create].HasField("history_retention")
    client.create_lora_training_run("tiny", history_retention_seconds=month_s)
    assert server.state.last[create].history_retention.ToSeconds() == month_s
    client.create_full_training_run("tiny", history_retention_seconds=month_s)
    assert server.state.last[create].history_retention.ToSeconds() == month_s
    info = client.runs.update("run-1", history_retention_seconds=month_s)
    sent = server.state.last["UpdateTrainingRun"]
    assert (sent.name, list(sent.update_mask.paths)) == (RUN, ["history_retention"])
    assert info.history_retention_seconds == month_s


def test_creation_sends_what_is_asked_for(server: FakeServer, client: tinsmith.Client) -> None:
    client.create_lora_training_client(
        base_model="tiny", rank=4, seed=7, train_mlp=False, train_unembed=True
    )
    lora = server.state.last["CreateTrainingRun"].adapter.lora
    assert (lora.rank, lora.seed) == (4, 7)
    assert (lora.train_attention, lora.train_mlp, lora.train_unembedding) == (True, False, True)
    client.create_full_training_run("tiny")
    assert server.state.last["CreateTrainingRun"].adapter.WhichOneof("kind") == "full"


def test_creation_that_never_ends_times_out_with_the_reason(server: FakeServer) -> None:
    server.state.create_polls = -1_000_000
    with (
        tinsmith.Client(server.address, "tsk_test", operation_timeout_s=0.5) as client,
        pytest.raises(tinsmith.OperationTimeoutError, match="a trainer"),
    ):
        client.create_lora_training_run("tiny")


def test_an_environment_is_played(client: tinsmith.Client) -> None:
    listed = client.environments.list()
    assert [each.name.rpartition("/")[2] for each in listed] == ["echo", "mirror"]
    assert listed[0].description == "echoes"
    with client.environments.create_instance("echo", seed=3, config={"size": 4}) as instance:
        assert instance.observation.messages == [{"role": "user", "content": "hello"}]
        steps = [instance.step("one"), instance.step("two")]
        results = [step.result(timeout=10) for step in steps]
        assert [result.reward for result in results] == [0.0, 1.0]
        assert results[1].done
        assert results[1].observation.messages[0]["content"] == "two"


async def test_samples_are_gathered(server: FakeServer) -> None:
    async with await tinsmith.Client.connect_async(server.address, "tsk_test") as client:
        sampler = await client.create_sampler_async(base_model="tiny")
        results = await asyncio.gather(*(sampler.sample([token]) for token in range(20)))
        assert len(results) == 20


def test_a_failure_without_retry_info_is_not_sent_again(
    server: FakeServer, client: tinsmith.Client
) -> None:
    status = make_status(code_pb2.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED", "20 runs at most")
    server.state.fail_calls["CreateTrainingRun"] = [status]
    with pytest.raises(tinsmith.ResourceExhaustedError, match="20 runs at most"):
        client.create_lora_training_run("tiny")
    assert server.state.calls["CreateTrainingRun"] == 1


def test_a_blocking_wait_inside_the_clients_loop_is_refused(
    server: FakeServer, client: tinsmith.Client
) -> None:
    async def misuse() -> None:
        client.runs.list()

    with pytest.raises(RuntimeError, match="await instead"):
        client._core.background.call(misuse())


def test_the_policy_refuses_nonsense() -> None:
    with pytest.raises(tinsmith.ConfigurationError, match="budget_s"):
        tinsmith.RetryPolicy(budget_s=-1)
    assert FAST.budget_s == 20
