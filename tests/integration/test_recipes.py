"""The recipes end to end: they learn, score what was held out, and survive Ctrl-C."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.integration.servers import Deployment

import tinsmith
from tinsmith.recipes import arithmetic, rl, supervised
from tinsmith.recipes.observer import Observer
from tinsmith.recipes.run_log import RunLog, read_metrics

SUPERVISED = supervised.Config(
    adapter="full", learning_rate=3e-3, num_warmup_steps=2, num_steps=6, batch_size=8, save_every=2
)
RL = rl.Config(num_steps=2, num_problems=4, group_size=4, num_validation=8, max_tokens=4)


def weights_sha256(client: tinsmith.Client, name: str) -> dict[str, str]:
    folder = Path(client.get_checkpoint(name).manifest_uri.removeprefix("file://")).parent
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("*.safetensors"))
    }


def test_supervised_lowers_the_loss_and_leaves_metrics_and_a_picture(
    embedded: Deployment, tmp_path: Path
) -> None:
    with embedded.client() as client:
        config = dataclasses.replace(SUPERVISED, output_dir=tmp_path)
        summary = supervised.main(config, client)
        checkpoint = client.get_checkpoint(summary.checkpoint)
    assert checkpoint.version == config.num_steps
    assert summary.losses[-1] < summary.losses[0]
    assert set(summary.after.metrics) == {"held_out_words", "num_held_out_words"}
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_interrupted_supervised_run_goes_on_with_the_same_bits(
    embedded: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt_at(step: int) -> None:
        add = RunLog.add

        def add_then_interrupt(log: RunLog, current: int, metrics: dict[str, float]) -> None:
            add(log, current, metrics)
            if current == step:
                raise KeyboardInterrupt

        monkeypatch.setattr(RunLog, "add", add_then_interrupt)

    with embedded.client() as client:
        calm = supervised.main(dataclasses.replace(SUPERVISED, output_dir=tmp_path / "a"), client)
        config = dataclasses.replace(SUPERVISED, output_dir=tmp_path / "b")
        with monkeypatch.context():
            interrupt_at(2)
            with pytest.raises(KeyboardInterrupt):
                supervised.main(config, client)
        monkeypatch.undo()
        resumed = supervised.main(config, client)
        assert weights_sha256(client, resumed.checkpoint) == weights_sha256(client, calm.checkpoint)
    rows = read_metrics(tmp_path / "b" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert resumed.losses == calm.losses


def test_an_interrupt_while_a_step_is_awaited_repeats_no_step(
    embedded: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tinsmith.OperationFuture.result
    calls: list[int] = []

    def interrupted(
        future: tinsmith.OperationFuture[object], timeout_s: float | None = None
    ) -> object:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return result(future, timeout_s)

    with embedded.client() as client:
        calm = supervised.main(dataclasses.replace(SUPERVISED, output_dir=tmp_path / "a"), client)
        config = dataclasses.replace(SUPERVISED, output_dir=tmp_path / "b", save_every=0)
        with monkeypatch.context() as patch:
            patch.setattr(tinsmith.OperationFuture, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                supervised.main(config, client)
        resumed = supervised.main(config, client)
        assert client.get_checkpoint(resumed.checkpoint).version == config.num_steps
        assert weights_sha256(client, resumed.checkpoint) == weights_sha256(client, calm.checkpoint)


class Editable(Observer):
    """Of a run whose settings may change on the way."""

    may_change = True


def test_a_run_that_may_change_goes_on_with_other_settings(
    embedded: Deployment, tmp_path: Path
) -> None:
    config = dataclasses.replace(SUPERVISED, adapter="lora", output_dir=tmp_path, num_steps=3)
    with embedded.client() as client:

        def train(observer: Observer | None = None, **changes: Any) -> tuple[str, int]:
            summary = supervised.main(dataclasses.replace(config, **changes), client, observer)
            return summary.run, client.get_checkpoint(summary.checkpoint).version

        run, version = train()
        assert version == 3
        assert train(Editable(), num_steps=5, learning_rate=1e-4) == (run, 5)
        # Fewer than it did: nothing is trained, and nothing is lost.
        assert train(Editable(), num_steps=2, checkpoint="early") == (run, 5)
        other, version = train(Editable(), rank=2)
        assert (other != run, version) == (True, 3)
        # At a desk another setting is another experiment.
        assert train(rank=2, learning_rate=1e-3)[0] != other


def test_rl_on_problems_takes_steps_and_scores_held_out_ones(
    embedded: Deployment, tmp_path: Path
) -> None:
    with embedded.client() as client:
        summary = rl.main(dataclasses.replace(RL, output_dir=tmp_path), client)
    assert summary.num_validation == RL.num_validation
    assert 0 <= summary.before <= 1
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]
    assert (tmp_path / "reward.png").is_file()


@pytest.mark.parametrize("environment", ["math", "guessing"])
def test_rl_plays_a_served_environment(
    embedded: Deployment, tmp_path: Path, environment: str
) -> None:
    config = dataclasses.replace(
        RL, environment=environment, num_problems=2, group_size=2, num_validation=2
    )
    with embedded.client() as client:
        rl.main(dataclasses.replace(config, output_dir=tmp_path), client)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1]
    assert all(row["lost"] == 0 and row["turns"] >= 1 for row in rows)


def test_own_files_conversations_and_problems(embedded: Deployment, tmp_path: Path) -> None:
    conversations = tmp_path / "chat.jsonl"
    conversations.write_text(
        "".join(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": f"say {number}"},
                        {"role": "assistant", "content": str(number)},
                    ]
                }
            )
            + "\n"
            for number in range(20)
        )
    )
    problems = tmp_path / "problems.jsonl"
    arithmetic.write_jsonl(problems, [arithmetic.make_addition(n, 1) for n in range(20)])
    with embedded.client() as client:
        summary = supervised.main(
            dataclasses.replace(
                SUPERVISED, data=str(conversations), output_dir=tmp_path / "s", batch_size=4
            ),
            client,
        )
        rl.main(dataclasses.replace(RL, data=str(problems), output_dir=tmp_path / "r"), client)
    assert summary.after.metrics["held_out_loss"] < summary.before.metrics["held_out_loss"]
    assert len(summary.after.examples) == 2


def test_a_misspelt_adapter_is_refused(embedded: Deployment, tmp_path: Path) -> None:
    config = dataclasses.replace(SUPERVISED, adapter="lorra", output_dir=tmp_path)
    with embedded.client() as client, pytest.raises(ValueError, match="lora or full"):
        supervised.main(config, client)
