"""The unmodified `tinker_cookbook` against the services: its own loops, driven by user programs.

Each program of `cookbook/` runs in a process of its own that is told URL and key. The tiny model is
served under the name of a model that the cookbook knows. Its tokenizer lies in a Hugging Face cache
under that name, so the cookbook picks renderer and tokenizer as it does for users.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from tests.support.hugging_face_cache import fill_cache

from tinsmith_local.process import ServerProcess

MODEL_NAME = "Qwen/Qwen3-4B-Instruct-2507"
"""Its renderer needs no tokens but those of ChatML, which are all that the tiny model has."""

WORDS = ("cat", "dog", "sun", "tree")
PROMPT = "Shout."
"""What the teacher is told; it answers in capitals then."""

_PROGRAMS = Path(__file__).parent / "cookbook"
_PROGRAM_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class User:
    """Someone with the cookbook, a URL and a key."""

    environment: dict[str, str]
    folder: Path

    def run(self, *command: str) -> str:
        """Run a command to its end; return what it wrote.

        Raises:
            AssertionError: If it failed or took too long; says what it wrote.
        """
        status, output = self._run(*command)
        assert status == 0, f"{command} ended with {status}:\n{output}"
        return output

    def run_program(self, name: str, **arguments: object) -> str:
        """Run a program of `cookbook/` to its end; return what it wrote."""
        return self.run(*_command(name, arguments))

    def fail_program(self, name: str, **arguments: object) -> str:
        """Run a program that is to fail; return what it wrote."""
        status, output = self._run(*_command(name, arguments))
        assert status == 1, f"{name} ended with {status}, not 1:\n{output}"
        return output

    def write_lines(self, name: str, lines: list[str]) -> Path:
        """Write a file of the user's."""
        path = self.folder / name
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    def _run(self, *command: str) -> tuple[int | str, str]:
        with tempfile.TemporaryFile("w+", dir=self.folder) as output:
            try:
                status: int | str = subprocess.run(
                    command,
                    env=self.environment,
                    cwd=self.folder,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=_PROGRAM_TIMEOUT_S,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                status = f"no end after {_PROGRAM_TIMEOUT_S} s"
            output.seek(0)
            return status, output.read()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), {MODEL_NAME: model_dir}) as server:
        yield server


@pytest.fixture(scope="module")
def user(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> User:
    folder = tmp_path_factory.mktemp("user")
    hugging_face = folder / "hugging_face"
    fill_cache(hugging_face / "hub", MODEL_NAME, model_dir)
    inherited = ("PATH", "TMPDIR", "LANG")
    return User(
        {
            **{name: os.environ[name] for name in inherited if name in os.environ},
            "TINKER_BASE_URL": f"http://{server.address}",
            "TINKER_API_KEY": server.api_key.replace("tsk_", "tml-", 1),
            "HOME": str(folder),
            "HF_HOME": str(hugging_face),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            # The cookbook asks its makers for their prices and does without: no server listens
            # here.
            "HTTPS_PROXY": "http://127.0.0.1:9",
        },
        folder,
    )


@pytest.fixture(scope="module")
def questions(user: User) -> Path:
    return user.write_lines("questions.txt", list(WORDS))


@pytest.fixture(scope="module")
def trained(user: User) -> Path:
    """The log of a training that was interrupted and went on; it knows words and shouted words."""
    conversations = _write_conversations(user, num_copies=5)
    log = user.folder / "supervised"
    arguments = {"model_name": MODEL_NAME, "file_path": conversations, "log_path": log}
    assert "the lights went out" in user.fail_program("supervised", **arguments, outage=True)
    output = user.run_program("supervised", **arguments)
    assert "Resumed training from tinker://" in output
    return log


class TestSupervised:
    """`tinker_cookbook.supervised.train`."""

    def test_the_loss_falls_and_so_does_that_of_the_evaluation(self, trained: Path) -> None:
        rows = _metrics(trained)
        losses = [row["train_mean_nll"] for row in rows]
        evaluated = [row["test/nll"] for row in rows if "test/nll" in row]
        assert losses[-1] < 0.1 * losses[0]
        assert len(evaluated) == 4
        assert evaluated[-1] < 0.2 * evaluated[0]

    def test_a_training_goes_on_where_it_was_interrupted(self, trained: Path) -> None:
        rows = _metrics(trained)
        assert [row["step"] for row in rows] == list(range(40))
        # Step 10 is the first after the last checkpoint before the outage.
        assert rows[10]["train_mean_nll"] < 0.5 * rows[0]["train_mean_nll"]
        names = [record["name"] for record in _checkpoints(trained)]
        assert names[:2] == ["000005", "000010"]
        assert names[-1] == "final"


@pytest.fixture(scope="module")
def prompts(user: User) -> Path:
    return user.write_lines("prompts.txt", [f"{word}?" for word in WORDS * 4])


@pytest.mark.parametrize(
    "loss_beside",
    ["", "importance_sampling", "stable_reinforce"],
    ids=["in turns", "beside", "beside with the cookbook's default"],
)
def test_the_reward_rises(user: User, prompts: Path, loss_beside: str) -> None:
    log = user.folder / f"reinforce-{loss_beside}"
    user.run_program(
        "reinforce",
        model_name=MODEL_NAME,
        file_path=prompts,
        log_path=log,
        loss_beside=loss_beside,
    )
    # A last row sums up what was used.
    rows = [row for row in _metrics(log) if "env/all/reward/total" in row]
    rewards = [row["env/all/reward/total"] for row in rows]
    assert len(rewards) == 16
    assert statistics.mean(rewards[:2]) < 0.6
    assert statistics.mean(rewards[-4:]) > 0.9
    # What the sampler said of its tokens is what the trainer says of them, for as long as both
    # have the same weights.
    same = rows[:1] if loss_beside else rows
    assert max(abs(row["optim/kl_sample_train_v1"]) for row in same) < 1e-4


def test_preferences_are_learned(user: User) -> None:
    comparisons = user.write_lines(
        "comparisons.jsonl",
        [
            json.dumps(
                {
                    "comparison": {
                        "prompt_conversation": [_says("user", word)],
                        "completion_A": [_says("assistant", word.upper())],
                        "completion_B": [_says("assistant", word)],
                    },
                    "label": "B",
                }
            )
            for word in WORDS * 4
        ],
    )
    log = user.folder / "prefer"
    user.run_program("prefer", model_name=MODEL_NAME, file_path=comparisons, log_path=log)
    first, *_, last = _metrics(log)
    # At the start the model is its own reference.
    assert first["dpo_loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert last["dpo_loss"] < 0.1
    assert last["accuracy"] == 1.0
    assert last["margin"] > 2.0


def test_a_student_does_unasked_what_the_prompt_asks_of_its_teacher(
    user: User, trained: Path, questions: Path
) -> None:
    log = user.folder / "distill_prompt"
    user.run_program(
        "distill_prompt",
        model_name=MODEL_NAME,
        teacher_log_path=trained,
        prompt=PROMPT,
        file_path=questions,
        log_path=log,
    )
    shouted = [word.upper() for word in WORDS]
    assert json.loads((log / "answers.json").read_text()) == {
        "taught": shouted,
        "before": list(WORDS),
        "after": shouted,
    }


def test_a_student_comes_to_its_teacher_by_what_it_says_itself(
    user: User, trained: Path, questions: Path
) -> None:
    log = user.folder / "distill_on_policy"
    user.run_program(
        "distill_on_policy",
        model_name=MODEL_NAME,
        # An early checkpoint, which is not yet sure of anything: what an untrained student says
        # is not unheard of for it.
        teacher_path=_checkpoints(trained)[0]["sampler_path"],
        file_path=questions,
        log_path=log,
    )
    divergences = [row["teacher_kl"] for row in _metrics(log)]
    assert statistics.mean(divergences[-6:]) < 0.85 * statistics.mean(divergences[:4])


def test_a_student_learns_the_likeliest_tokens_of_its_teacher(user: User, trained: Path) -> None:
    log = user.folder / "distill_off_policy"
    user.run_program(
        "distill_off_policy",
        model_name=MODEL_NAME,
        teacher_path=_checkpoints(trained)[-1]["sampler_path"],
        file_path=_write_conversations(user, num_copies=15),
        log_path=log,
    )
    losses = [row["train/loss:sum"] / row["train/num_loss_tokens:sum"] for row in _metrics(log)]
    assert len(losses) == 15
    assert losses[-1] < 0.4 * losses[0]


def test_an_exported_checkpoint_answers_elsewhere_as_it_was_taught(
    user: User, trained: Path, model_dir: Path
) -> None:
    folder = user.folder / "exported"
    user.run_program("export", model_name=MODEL_NAME, log_path=trained, output_dir=folder)
    assert sorted(path.name for path in (folder / "downloaded").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    with warnings.catch_warnings():
        # PEFT warns of tied embeddings, which matter only when merging; and of itself.
        warnings.simplefilter("ignore")
        base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, folder / "peft")
    for word in WORDS:
        prompt = tokenizer.apply_chat_template(
            [_says("user", word)], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        with torch.no_grad():
            output = model.generate(input_ids=prompt, max_new_tokens=8, do_sample=False)
        answer = tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
        assert answer == word


def test_the_command_line_lists_and_downloads_a_checkpoint(user: User, trained: Path) -> None:
    path = _checkpoints(trained)[-1]["state_path"]
    tinker = str(Path(sys.executable).with_name("tinker"))
    model_id = path.removeprefix("tinker://").partition("/")[0]
    listed = json.loads(
        user.run(tinker, "--format", "json", "checkpoint", "list", "--run-id", model_id)
    )
    assert path in [checkpoint["tinker_path"] for checkpoint in listed["checkpoints"]]
    user.run(tinker, "checkpoint", "download", path, "--output", str(user.folder / "by_command"))
    (folder,) = (user.folder / "by_command").iterdir()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"]) == ("LORA", 32)
    assert (folder / "adapter_model.safetensors").stat().st_size > 0


def _command(program: str, arguments: dict[str, object]) -> list[str]:
    settings = [f"{name}={value}" for name, value in arguments.items()]
    return [sys.executable, str(_PROGRAMS / f"{program}.py"), *settings]


def _says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _write_conversations(user: User, *, num_copies: int) -> Path:
    """Write conversations of words said after the user and, where the prompt asks, shouted."""
    rows = []
    for word in WORDS:
        asked = _says("user", word)
        rows.append([asked, _says("assistant", word)])
        rows.append([_says("system", PROMPT), asked, _says("assistant", word.upper())])
    lines = [json.dumps({"messages": row}) for row in rows * num_copies]
    return user.write_lines(f"conversations-{num_copies}.jsonl", lines)


def _metrics(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def _checkpoints(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]
