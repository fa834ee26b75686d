"""The life of a checkpoint as a user sees it, through SDK and embedded server."""

from __future__ import annotations

import asyncio
import datetime
import json
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.local_servers import local_server
from tests.integration.servers import Deployment

import tinsmith
from tinsmith.local_servers import Announcement
from tinsmith.v1 import keys_pb2

TOKENS = [5, 9, 12, 40, 7, 22, 31, 60]
# Float32 on both sides; the sums are in another order.
TOLERANCE = 2e-4


@pytest.fixture
def owner(embedded: Deployment) -> Iterator[tinsmith.Client]:
    with embedded.client() as client:
        yield client


@pytest.fixture
def stranger(embedded: Deployment) -> Iterator[tinsmith.Client]:
    """A client of another project."""
    with embedded.key_stub() as stub:
        request = keys_pb2.CreateKeyRequest(
            parent="projects/borrower", request_id=str(uuid.uuid4())
        )
        metadata = (("authorization", f"Bearer {embedded.api_key}"),)
        key = stub.CreateKey(request, metadata=metadata, timeout=10)
    with embedded.client(api_key=key.secret, project="borrower") as client:
        yield client


def train(run: tinsmith.TrainingRun, num_steps: int = 2) -> None:
    datum = tinsmith.Datum(
        tinsmith.ModelInput.from_ints(TOKENS[:-1]),
        {"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},
    )
    for _ in range(num_steps):
        run.forward_backward([datum])
        run.optim_step(tinsmith.AdamParams(learning_rate=2e-2)).result()


def scores(client: tinsmith.Client, checkpoint: tinsmith.Checkpoint) -> Any:
    """Return the log-probabilities that the server gives the tokens."""
    found = client.create_sampler(checkpoint=checkpoint).compute_logprobs(TOKENS).result()
    return np.array(found[1:], np.float32)


def transformers_scores(folder: Path, adapter: Path | None = None) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        AutoTokenizer.from_pretrained(folder)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0].float()
    logprobs = torch.log_softmax(logits, -1)
    return logprobs[torch.arange(len(TOKENS) - 1), torch.tensor(TOKENS[1:])].numpy()


def test_a_checkpoint_is_published_copied_exported_imported_and_deleted(
    owner: tinsmith.Client,
    stranger: tinsmith.Client,
    embedded: Deployment,
    tmp_path: Path,
) -> None:
    run = owner.create_lora_training_run("tiny", 4, seed=3)
    train(run)
    saved = run.save_state("best", ttl_seconds=3600, user_metadata={"note": "good"}).result()
    assert saved.expire_time is not None
    left = saved.expire_time - datetime.datetime.now(datetime.UTC)
    assert 3000 < left.total_seconds() < 3700
    assert owner.checkpoints.get(saved) == saved
    assert {file.file for file in saved.files} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "optimizer.safetensors",
    }
    kept = owner.checkpoints.update(saved, keep=True, labels={"note": "better"})
    assert (kept.expire_time, kept.labels) == (None, {"note": "better"})

    # Another project sees nothing of it until it is published.
    attempts = [
        lambda: stranger.checkpoints.get(saved),
        lambda: stranger.create_sampler(checkpoint=saved),
        lambda: stranger.create_training_run_from_checkpoint(saved),
        lambda: stranger.checkpoints.delete(saved),
        lambda: stranger.checkpoints.publish(saved),
        lambda: stranger.checkpoints.download(saved, tmp_path / "stolen"),
    ]
    for attempt in attempts:
        with pytest.raises(tinsmith.NotFoundError) as refused:
            attempt()
        assert refused.value.reason == "CHECKPOINT_NOT_FOUND"
    assert owner.checkpoints.publish(saved).is_published
    assert stranger.checkpoints.get(saved).is_published
    assert stranger.checkpoints.list() == []
    for attempt in attempts[3:]:
        with pytest.raises(tinsmith.NotFoundError):
            attempt()

    wanted = scores(owner, saved)
    np.testing.assert_array_equal(scores(stranger, saved), wanted)
    begun = stranger.create_training_run_from_checkpoint(saved)
    assert (begun.version, begun.info.base_model, begun.info.rank) == (2, "tiny", 4)
    copied = stranger.checkpoints.copy(saved, begun, "mine").result()
    assert copied.source_checkpoint == saved.name
    assert copied.files == saved.files
    # With the optimizer, both go on with the same bits.
    train(run, 1)
    train(begun, 1)
    np.testing.assert_array_equal(
        scores(owner, run.save_weights_for_sampler("next").result()),
        scores(stranger, begun.save_weights_for_sampler("next").result()),
    )
    owner.checkpoints.unpublish(saved)
    with pytest.raises(tinsmith.NotFoundError):
        stranger.checkpoints.get(saved)
    np.testing.assert_array_equal(scores(stranger, copied), wanted)

    # Exports load elsewhere and compute the same.
    told: list[tuple[int, int]] = []
    merged = owner.checkpoints.export(
        saved, "merged", progress=lambda done, total: told.append((done, total))
    ).result()
    files = owner.checkpoints.download(
        merged, tmp_path / "merged", progress=lambda done, total: told.append((done, total))
    )
    assert told[-1] == (merged.size_bytes, merged.size_bytes)
    assert {path.name for path in files} >= {"config.json", "model.safetensors", "tokenizer.json"}
    np.testing.assert_allclose(transformers_scores(tmp_path / "merged"), wanted, atol=TOLERANCE)
    peft = owner.checkpoints.export(saved).result()
    owner.checkpoints.download(peft, tmp_path / "peft")
    np.testing.assert_allclose(
        transformers_scores(embedded.model_dir, tmp_path / "peft"), wanted, atol=TOLERANCE
    )
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "tiny"

    # What was downloaded comes back as a checkpoint, here of the other project.
    imported = stranger.checkpoints.import_adapter(
        tmp_path / "peft", begun, "back", labels={"from": "disk"}
    )
    assert (imported.kind, imported.labels) == ("sampler", {"from": "disk"})
    np.testing.assert_array_equal(scores(stranger, imported), wanted)
    again = stranger.create_training_run_from_checkpoint(imported, include_optimizer=False)
    train(again, 1)

    owner.checkpoints.delete(saved)
    for gone in (saved, merged):
        with pytest.raises(tinsmith.NotFoundError):
            owner.checkpoints.download(gone, tmp_path / "gone")
    np.testing.assert_array_equal(scores(stranger, copied), wanted)


def test_a_run_that_can_not_load_does_not_come_to_be(owner: tinsmith.Client) -> None:
    run = owner.create_lora_training_run("tiny", 2)
    weights = run.save_weights_for_sampler("w").result()
    known = {info.name for info in owner.runs.list()}
    with pytest.raises(tinsmith.FailedPreconditionError) as refused:
        owner.create_training_run_from_checkpoint(weights)
    assert refused.value.reason == "CHECKPOINT_INCOMPATIBLE"
    folder = Path(weights.manifest_uri.removeprefix("file://")).parent
    (folder / "adapter_model.safetensors").write_bytes(b"broken")
    with pytest.raises(tinsmith.DataLossError):
        owner.create_training_run_from_checkpoint(weights, include_optimizer=False)
    active = {info.name for info in owner.runs.list() if info.state == "active"}
    assert active <= known


def test_a_full_parameter_run_is_exported_as_a_model(
    owner: tinsmith.Client, tmp_path: Path
) -> None:
    run = owner.create_full_training_run("tiny")
    train(run, 1)
    saved = run.save_weights_for_sampler("w").result()
    with pytest.raises(tinsmith.FailedPreconditionError) as refused:
        owner.checkpoints.export(saved, "peft").result()
    assert refused.value.reason == "CHECKPOINT_INCOMPATIBLE"
    merged = owner.checkpoints.export(saved, "merged").result()
    owner.checkpoints.download(merged, tmp_path)
    found = transformers_scores(tmp_path)
    np.testing.assert_allclose(found, scores(owner, saved), atol=TOLERANCE)
    begun = owner.create_training_run_from_checkpoint(saved, include_optimizer=False)
    assert begun.info.adapter == "full"


def test_a_download_goes_on_where_it_stopped(owner: tinsmith.Client, tmp_path: Path) -> None:
    saved = owner.create_lora_training_run("tiny", 32).save_state("s").result()
    name = "adapter_model.safetensors"
    source = Path(saved.manifest_uri.removeprefix("file://")).parent / name
    (tmp_path / f"{name}.part").write_bytes(source.read_bytes()[:1000])
    told: list[int] = []
    owner.checkpoints.download(saved, tmp_path, progress=lambda done, _: told.append(done))
    assert (tmp_path / name).read_bytes() == source.read_bytes()
    assert not list(tmp_path.glob("*.part"))
    assert told[-1] == saved.size_bytes
    before = (tmp_path / name).stat().st_mtime_ns
    owner.checkpoints.download(saved, tmp_path)
    assert (tmp_path / name).stat().st_mtime_ns == before
    # A part that is wrong is found out, and not kept.
    (tmp_path / name).unlink()
    (tmp_path / f"{name}.part").write_bytes(b"wrong")
    with pytest.raises(tinsmith.DataLossError):
        owner.checkpoints.download(saved, tmp_path)
    owner.checkpoints.download(saved, tmp_path)
    assert (tmp_path / name).read_bytes() == source.read_bytes()


async def test_the_twins_for_asyncio(owner: tinsmith.Client, tmp_path: Path) -> None:
    run = await owner.create_lora_training_run_async("tiny", 2)
    saved = await run.save_state("a", ttl_seconds=60)
    assert (await owner.checkpoints.publish_async(saved)).is_published
    assert not (await owner.checkpoints.unpublish_async(saved)).is_published
    assert (await owner.checkpoints.update_async(saved, keep=True)).expire_time is None
    assert [found.name for found in await owner.checkpoints.list_async(run)] == [saved.name]
    assert (await owner.checkpoints.get_async(saved.name)).name == saved.name
    copied, exported = await asyncio.gather(
        owner.checkpoints.copy(saved, run, "b"), owner.checkpoints.export(saved)
    )
    await owner.checkpoints.download_async(exported, tmp_path)
    imported = await owner.checkpoints.import_adapter_async(tmp_path, run, "c")
    begun = await owner.create_training_run_from_checkpoint_async(copied)
    assert begun.version == 0
    for gone in (saved, copied, imported):
        await owner.checkpoints.delete_async(gone)
    assert await owner.checkpoints.list_async(run) == []


def test_the_command_line(
    embedded: Deployment,
    owner: tinsmith.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tinsmith import cli

    monkeypatch.setenv("TINSMITH_ADDRESS", embedded.address)
    monkeypatch.setenv("TINSMITH_API_KEY", embedded.api_key)
    monkeypatch.setenv("TINSMITH_STATE_DIR", str(tmp_path / "state"))

    def invoke(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(["checkpoints", *arguments])
        printed = capsys.readouterr()
        assert not ended.value.code, printed.err
        return printed.out

    def told(*arguments: str) -> Any:
        return json.loads(invoke(*arguments, "--json"))

    run = owner.create_lora_training_run("tiny", 2)
    saved = run.save_state("a").result()
    assert [row["name"] for row in told("list", "--run", run.name)] == [saved.name]
    assert told("info", saved.name)["size_bytes"] == saved.size_bytes
    assert "adapter_model.safetensors" in invoke("info", saved.name)
    assert told("publish", saved.name)["is_published"]
    assert not told("unpublish", saved.name)["is_published"]
    assert told("set-ttl", saved.name, "2h")["expire_time"]
    assert told("set-ttl", saved.name, "never")["expire_time"] is None
    copied = told("copy", saved.name, run.name, "b", "--ttl", "1d")
    assert (copied["source_checkpoint"], bool(copied["expire_time"])) == (saved.name, True)
    folder = tmp_path / "peft"
    assert told("export", saved.name, "--output", str(folder))["format"] == "peft"
    assert (folder / "adapter_config.json").is_file()
    settings = folder / "adapter_config.json"
    assert json.loads(settings.read_text())["base_model_name_or_path"] == "tiny"
    # A server of this machine says where the model lies, and PEFT finds it there.
    announced = local_server(embedded.address, model_sources={"tiny": "/models/tiny"})
    with Announcement(tmp_path / "state", announced):
        shown = invoke("export", saved.name, "--output", str(folder))
    assert "AutoModelForCausalLM.from_pretrained('/models/tiny')" in shown
    assert json.loads(settings.read_text())["base_model_name_or_path"] == "/models/tiny"
    assert told("import", str(folder), run.name, "c")["kind"] == "sampler"
    files = told("download", saved.name, str(tmp_path / "whole"))["files"]
    assert len(files) == 3
    assert "optimizer.safetensors" in invoke("download", saved.name, str(tmp_path / "again"))
    assert "merged" in invoke("export", saved.name, "--format", "merged")
    assert told("delete", saved.name)["deleted"] == [saved.name]
    with pytest.raises(SystemExit) as ended:
        cli.main(["checkpoints", "set-ttl", copied["name"], "soon"])
    assert ended.value.code
