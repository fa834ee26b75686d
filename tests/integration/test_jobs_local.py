"""Jobs on one machine: a real server process, the command line, and drivers that are killed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.wait import until

import tinsmith
from tinsmith.jobs.job_calls import JobInfo
from tinsmith.names import shorten
from tinsmith_local.process import ServerProcess

TIMEOUT_S = 180.0
STEPS = 12
DATA = Path(__file__).with_name("conversations.jsonl")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("jobs")
    # Steps take long enough to be interrupted, however fast the machine is.
    slowly = {"TINSMITH_FAILPOINTS": "trainer.compute=sleep:0.4"}
    with ServerProcess(folder, {"tiny": model_dir}, environment=slowly) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[tinsmith.Client]:
    with connected(server) as client:
        yield client


def connected(server: ServerProcess) -> tinsmith.Client:
    return tinsmith.Client(server.address, server.api_key, operation_timeout_s=TIMEOUT_S)


def supervised(num_steps: int = STEPS, **parameters: object) -> dict[str, Any]:
    return {
        "model": {"name": "tiny"},
        "adapter": {"rank": 4},
        "method": {
            "type": "supervised",
            "maxSteps": num_steps,
            "parameters": {"data": str(DATA), "batch_size": 4, "max_tokens": 2, **parameters},
        },
        "checkpoint": {"everySteps": 3, "keepLast": 1},
        "scheduling": {"preemptionGraceSeconds": 30},
    }


def cli(server: ServerProcess, *words: str, code: int = 0) -> str:
    """Run a command of the command line in another process; return what it printed."""
    environment = {
        **os.environ,
        "TINSMITH_ADDRESS": server.address,
        "TINSMITH_API_KEY": server.api_key,
    }
    done = subprocess.run(
        [sys.executable, "-c", "from tinsmith.cli import main; main()", "jobs", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout + done.stderr


def job_when(read: Callable[[], JobInfo], condition: Callable[[JobInfo], bool]) -> JobInfo:
    """Return a job once a condition holds, which must be so before the job has ended."""

    def look() -> JobInfo | None:
        if condition(job := read()):
            return job
        assert not job.is_finished, job
        return None

    return until(look)


def step_of(job: JobInfo) -> int:
    return int(job.status.get("progress", {}).get("step", 0))


def weights_of(client: tinsmith.Client, job: JobInfo) -> dict[str, str]:
    """Return the hashes of the files of the last save."""
    checkpoint = client.checkpoints.get(job.checkpoint)
    folder = Path(checkpoint.manifest_uri.removeprefix("file://")).parent
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("*.safetensors"))
    }


def driver_pid(server: ServerProcess, job: JobInfo) -> int:
    return int((server.data_dir / "jobs" / job.uid / "driver.pid").read_text())


def finished(client: tinsmith.Client, name: str) -> JobInfo:
    job = client.jobs.wait(name, TIMEOUT_S)
    assert job.phase == "Succeeded", job
    assert step_of(job) == STEPS
    return job


@pytest.fixture(scope="module")
def undisturbed(server: ServerProcess) -> Mapping[str, str]:
    """The weights of a job that nothing happened to."""
    with connected(server) as client:
        client.jobs.create("undisturbed", supervised())
        return weights_of(client, finished(client, "undisturbed"))


def test_a_manifest_is_submitted_trained_and_its_checkpoint_loads(
    server: ServerProcess, client: tinsmith.Client, tmp_path: Path
) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(
        "apiVersion: tinsmith.dev/v1alpha1\n"
        "kind: TrainingJob\n"
        "metadata: {name: from-yaml, labels: {team: a}}\n"
        f"spec: {json.dumps(supervised())}\n"
    )
    assert cli(server, "submit", str(manifest)).strip().endswith("/trainingJobs/from-yaml")
    assert "Succeeded" in cli(server, "wait", "from-yaml", "--timeout", "60s")
    job = finished(client, "from-yaml")
    assert job.checkpoint.endswith("/checkpoints/final")
    assert job.labels == {"team": "a"}
    assert job.status["progress"]["summary"] == f"{STEPS}/{STEPS}"
    run = client.create_training_run_from_checkpoint(job.checkpoint)
    assert run.version == STEPS
    # Of the saves on the way one is kept, as the manifest says.
    saved = [
        each.name.rpartition("/")[2]
        for each in client.checkpoints.list(job.checkpoint.partition("/checkpoints/")[0])
    ]
    assert sorted(name.split("-")[0] for name in saved) == ["final", "step"]

    described = cli(server, "describe", "from-yaml")
    for text in ("Phase:        Succeeded", f"Progress:     {STEPS}/{STEPS}", "Complete", "loss"):
        assert text in described
    assert f"step {STEPS}/{STEPS}" in cli(server, "logs", "from-yaml")
    assert "from-yaml" in cli(server, "list")
    (listed,) = [
        each
        for each in json.loads(cli(server, "list", "--json"))
        if each["name"].endswith("/from-yaml")
    ]
    assert listed["phase"] == "Succeeded"
    cli(server, "delete", "from-yaml")
    error = cli(server, "describe", "from-yaml", code=1)
    assert error.count("\n") == 1
    assert "JOB_NOT_FOUND" in error


def test_a_suspended_job_goes_on_with_the_same_bits(
    server: ServerProcess, client: tinsmith.Client, undisturbed: Mapping[str, str]
) -> None:
    client.jobs.create("suspended", supervised())
    job_when(lambda: client.jobs.get("suspended"), lambda job: step_of(job) >= 1)
    client.jobs.suspend("suspended")
    job = job_when(lambda: client.jobs.get("suspended"), lambda job: job.phase == "Suspended")
    assert 0 < job.status["checkpoint"]["latest"]["step"] < STEPS
    assert job.status["assignments" if "assignments" in job.status else "conditions"]
    client.jobs.resume("suspended")
    assert weights_of(client, finished(client, "suspended")) == undisturbed
    job = client.jobs.get("suspended")
    assert (job.status["epoch"], job.status.get("restartCount", 0)) == (2, 0)


def test_a_driver_that_is_told_to_end_saves_and_goes_on_with_the_same_bits(
    server: ServerProcess, client: tinsmith.Client, undisturbed: Mapping[str, str]
) -> None:
    client.jobs.create("terminated", supervised())
    job = job_when(lambda: client.jobs.get("terminated"), lambda job: step_of(job) >= 1)
    os.kill(driver_pid(server, job), signal.SIGTERM)
    assert weights_of(client, finished(client, "terminated")) == undisturbed
    # It said that it saved: that is no failure.
    assert client.jobs.get("terminated").status.get("restartCount", 0) == 0


def test_a_driver_that_is_killed_goes_on_from_its_last_save_with_the_same_bits(
    server: ServerProcess, client: tinsmith.Client, undisturbed: Mapping[str, str]
) -> None:
    client.jobs.create("killed", supervised())
    job = job_when(lambda: client.jobs.get("killed"), lambda job: bool(job.checkpoint))
    os.kill(driver_pid(server, job), signal.SIGKILL)
    job = job_when(lambda: client.jobs.get("killed"), lambda job: "failure" in job.status)
    assert (job.phase, job.status["failure"]["exitCode"]) == ("Restarting", 137)
    assert weights_of(client, finished(client, "killed")) == undisturbed
    assert client.jobs.get("killed").status["restartCount"] == 1


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_job_survives_its_server(
    how: str, server: ServerProcess, undisturbed: Mapping[str, str]
) -> None:
    name = f"server-{how}"
    with connected(server) as client:
        client.jobs.create(name, supervised())
        job_when(lambda: client.jobs.get(name), lambda job: step_of(job) >= 1)
    getattr(server, how)()
    server.start()
    with connected(server) as client:
        assert weights_of(client, finished(client, name)) == undisturbed


def test_rl_goes_on_with_the_same_bits(server: ServerProcess, client: tinsmith.Client) -> None:
    spec = {
        **supervised(),
        "method": {
            "type": "rl",
            "maxSteps": STEPS,
            "parameters": {"num_problems": 2, "group_size": 4, "num_validation": 4},
        },
        "roles": {"sampler": {}},
    }
    client.jobs.create("rl-calm", spec)
    client.jobs.create("rl", spec)
    job_when(lambda: client.jobs.get("rl"), lambda job: step_of(job) >= 2)
    client.jobs.suspend("rl")
    job_when(lambda: client.jobs.get("rl"), lambda job: job.phase == "Suspended")
    client.jobs.resume("rl")
    calm = weights_of(client, finished(client, "rl-calm"))
    assert weights_of(client, finished(client, "rl")) == calm


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("dpo", {"batch_size": 2}),
        (
            "distillation",
            {"teacher_prompt": "add", "num_prompts": 2, "num_samples": 2, "num_validation": 2},
        ),
    ],
)
def test_preferences_and_distillation_are_methods_of_jobs(
    server: ServerProcess,
    client: tinsmith.Client,
    tmp_path: Path,
    kind: str,
    parameters: dict[str, object],
) -> None:
    data = tmp_path / "pairs.jsonl"
    rows = [{"prompt": str(number), "chosen": "yes", "rejected": "no"} for number in range(3)]
    data.write_text("\n".join(map(json.dumps, rows)))
    spec = {
        **supervised(),
        "method": {"type": kind, "maxSteps": 2, "parameters": {"data": str(data), **parameters}},
        "roles": {"sampler": {}},
    }
    client.jobs.create(kind, spec)
    job = client.jobs.wait(kind, TIMEOUT_S)
    assert (job.phase, step_of(job)) == ("Succeeded", 2)
    assert client.checkpoints.get(job.checkpoint).version == 2


def test_an_evaluation_scores_a_checkpoint_beside_its_base_model(
    server: ServerProcess, client: tinsmith.Client, undisturbed: Mapping[str, str]
) -> None:
    saved = shorten(finished(client, "undisturbed").checkpoint)
    evaluation = {
        "model": {"name": "tiny"},
        "method": {
            "type": "evaluate",
            "parameters": {
                "base_model": "tiny",
                "checkpoint": saved,
                "num_validation": 3,
                "num_samples": 2,
                "temperature": 1,
            },
        },
        "roles": {"sampler": {}},
    }
    client.jobs.create("scored", evaluation)
    client.jobs.create("scored-again", evaluation)

    jobs = [client.jobs.wait(name, TIMEOUT_S) for name in ("scored", "scored-again")]

    assert [job.phase for job in jobs] == ["Succeeded"] * 2, jobs
    progress = [job.status["progress"] for job in jobs]
    assert progress[0]["summary"] == "2/2"
    assert progress[0]["metrics"] == progress[1]["metrics"]
    names = {entry["name"] for entry in progress[0]["metrics"]}
    assert names > {"reward", "reward_low", "gain", "pass@2", "reward/tiny", f"reward/{saved}"}


def test_a_job_that_begins_from_a_checkpoint(
    server: ServerProcess, client: tinsmith.Client, undisturbed: Mapping[str, str]
) -> None:
    first = finished(client, "undisturbed")
    spec = supervised()
    spec["checkpoint"] = {"resumeFrom": first.checkpoint, "finalName": "second"}
    client.jobs.create("second", spec)
    second = finished(client, "second")
    assert second.checkpoint.endswith("/checkpoints/second")
    assert client.checkpoints.get(second.checkpoint).version == 2 * STEPS


def test_a_job_waits_for_the_job_whose_checkpoint_it_begins_from(client: tinsmith.Client) -> None:
    spec = supervised()
    spec["checkpoint"] = {"resumeFrom": "trainingJobs/earlier"}
    later = client.jobs.create("later", spec)
    waiting = client.jobs.watch(later.name)
    said = next(job.status["waitingFor"] for job in waiting if "waitingFor" in job.status)
    assert said == "the TrainingJob earlier, which does not exist"
    client.jobs.create("earlier", supervised())
    earlier, later = finished(client, "earlier"), finished(client, "later")
    assert later.status["namedCheckpoints"] == {"earlier": earlier.checkpoint}
    assert client.checkpoints.get(later.checkpoint).version == 2 * STEPS


def test_a_broken_job_fails_with_its_cause_in_one_sentence(
    server: ServerProcess, client: tinsmith.Client
) -> None:
    with pytest.raises(
        tinsmith.InvalidArgumentError,
        match=r"parameters\.learning_rat; did you mean learning_rate",
    ):
        client.jobs.create("misspelt", supervised(learning_rat=1))
    client.jobs.create("broken", supervised(data="/nowhere/chat.jsonl"))
    job = client.jobs.wait("broken", TIMEOUT_S)
    assert (job.phase, job.status.get("restartCount", 0)) == ("Failed", 0)
    assert "/nowhere/chat.jsonl cannot be read" in job.failure
    assert job.status["failure"]["exitCode"] == 2
    log = server.data_dir / "jobs" / job.uid / "termination.log"
    assert log.read_text().strip().startswith("/nowhere/chat.jsonl cannot be read")
    printed = cli(server, "wait", "broken", code=1)
    assert "cannot be read" in printed
    # A driver that never works is restarted as often as it may be, and then given up.
    spec = {
        **supervised(),
        "method": {"type": "custom"},
        "roles": {"driver": {"template": {"command": ["/bin/sh", "-c", "echo no; exit 7"]}}},
        "backoffLimit": 1,
    }
    client.jobs.create("never", spec)
    job = client.jobs.wait("never", TIMEOUT_S)
    assert job.status["failure"]["reason"] == "BackoffLimitExceeded"
    assert job.failure == "driver 0 ended with exit code 7: no (failure 2, backoffLimit is 1)"
    assert "".join(client.jobs.logs("never")) == "no\nno\n"


def test_a_job_waits_for_its_model_and_says_so(client: tinsmith.Client) -> None:
    spec = {**supervised(), "model": {"name": "large"}, "startupDeadlineSeconds": 2}
    client.jobs.create("waits", spec)
    job = job_when(lambda: client.jobs.get("waits"), lambda job: bool(job.waiting_for))
    assert job.phase == "Pending"
    assert "a trainer of the base model large, which is not there" in job.waiting_for
    job = client.jobs.wait("waits", TIMEOUT_S)
    assert job.status["failure"]["reason"] == "StartupDeadlineExceeded"


def test_jobs_queue_and_can_be_cancelled(client: tinsmith.Client) -> None:
    sleep = {
        **supervised(),
        "method": {"type": "custom"},
        "roles": {"driver": {"template": {"command": ["sleep", "60"]}}},
    }
    for number in range(3):
        client.jobs.create(f"queue-{number}", sleep)
    job = job_when(lambda: client.jobs.get("queue-2"), lambda job: bool(job.waiting_for))
    assert job.phase == "Queued"
    assert "one of 2 other jobs to end" in job.waiting_for
    for number in range(3):
        client.jobs.cancel(f"queue-{number}")
    for number in range(3):
        assert client.jobs.wait(f"queue-{number}", TIMEOUT_S).phase == "Cancelled"
        client.jobs.cancel(f"queue-{number}")
        with pytest.raises(tinsmith.FailedPreconditionError, match="JOB_FINISHED"):
            client.jobs.suspend(f"queue-{number}")


USERS_LOOP = """
import json, sys, time, tinsmith
job = tinsmith.driver.current()
first = json.loads(job.state)["step"] if job.state else 0
print("first", first, flush=True)
for step in range(first, 1000):
    job.report(step=step + 1, max_steps=1000, metrics={"reward": 0.5})
    if step + 1 == 20 and first:
        break
    time.sleep(0.01)
    if job.should_stop:
        job.save_state(json.dumps({"step": step + 1}).encode())
        sys.exit(job.stopped())
"""


def test_a_loop_of_ones_own_reports_stops_and_goes_on(
    client: tinsmith.Client, tmp_path: Path
) -> None:
    script = tmp_path / "loop.py"
    script.write_text(USERS_LOOP)
    command = {"template": {"command": [sys.executable, str(script)]}}
    path = {"name": "PYTHONPATH", "value": os.environ.get("PYTHONPATH", "")}
    command["template"]["env"] = [path]  # type: ignore[assignment]
    spec = {**supervised(), "method": {"type": "custom"}, "roles": {"driver": command}}
    client.jobs.create("own", spec)
    job_when(lambda: client.jobs.get("own"), lambda job: step_of(job) >= 1)
    client.jobs.suspend("own")
    job_when(lambda: client.jobs.get("own"), lambda job: job.phase == "Suspended")
    client.jobs.resume("own")
    job = client.jobs.wait("own", TIMEOUT_S)
    assert (job.phase, job.status["progress"]["reward"]) == ("Succeeded", "0.5")
    first, second = "".join(client.jobs.logs("own", follow=True)).split("\n")[:2]
    assert first == "first 0"
    assert int(second.split()[1]) > 0
