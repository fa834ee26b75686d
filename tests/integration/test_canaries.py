"""What a tenant says reaches no other tenant, no log and no metric; no key is kept in clear."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tests.integration.servers import BASE_MODEL, TIMEOUT_S, Deployment, create_key, pods
from tests.support.pods import PodProcess

import tinsmith

_KEYS = 1_000
_SECRET = re.compile(rb"ts[ke]_[0-9A-Za-z]{12}_[0-9A-Za-z_-]{43}")
"""What opens a door; the check behind it does not."""
_KEY = re.compile(rb"(%s)[0-9a-f]{12}" % _SECRET.pattern)
_CANARIES = {
    "label": "canarylabelquagga",
    "display": "canarydisplayocelot",
    "checkpoint": "canarycheckpointdugong",
    "prompt": "canarypromptaxolotl",
    "tool": "canarytoolpangolin",
    "stop": "canarystopnumbat",
    "run": "canaryrunokapi",
}
_NAMES = {"run", "checkpoint"}
_OWN = re.compile(r'projects/singer/|project="singer"')


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path
) -> Iterator[tuple[Deployment, Path, dict[str, PodProcess]]]:
    folder = tmp_path_factory.mktemp("canaries")
    with pods(folder, model_dir, "gateway") as (deployment, processes):
        yield deployment, folder, processes


def _say_everything(deployment: Deployment, key: str) -> None:
    """Put a canary into each text that a tenant can give, in calls that work and that fail."""
    with deployment.client(api_key=key, labels={"team": _CANARIES["label"]}) as client:
        run = client.create_lora_training_run(
            BASE_MODEL,
            rank=4,
            display_name=_CANARIES["display"],
            user_metadata={"note": _CANARIES["label"]},
            run_id=_CANARIES["run"],
        )
        tokens = run.get_tokenizer().encode(_CANARIES["prompt"])
        datum = tinsmith.Datum(
            tinsmith.ModelInput.from_ints(tokens[:-1]),
            {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        run.forward_backward([datum])
        run.optim_step(tinsmith.AdamParams(learning_rate=1e-3)).result()
        run.save_state(_CANARIES["checkpoint"]).result()
        parameters = tinsmith.SamplingParams(max_tokens=4, stop=[_CANARIES["stop"]])
        run.sampler().sample(tokens, sampling_params=parameters).result()
        with pytest.raises(tinsmith.TinsmithError):
            client.create_sampler(checkpoint=f"{run.name}/checkpoints/{_CANARIES['prompt']}")
    chat = openai.OpenAI(base_url=f"http://{deployment.address}/v1", api_key=key, max_retries=0)
    with chat:
        messages = [{"role": "user", "content": _CANARIES["prompt"]}]
        chat.chat.completions.create(
            model=BASE_MODEL,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=2,
            user=_CANARIES["label"],
            stop=[_CANARIES["stop"]],
        )
        with pytest.raises(openai.APIError):
            chat.chat.completions.create(
                model=_CANARIES["tool"],
                messages=messages,  # type: ignore[arg-type]
            )


def _hear_everything(deployment: Deployment, key: str) -> str:
    """Return what another tenant is told by every list, and by errors about names of the first."""
    heard: list[object] = []
    with deployment.client(api_key=key) as client:
        heard += [client.runs.list(), client.checkpoints.list(), client.list_models()]
        run = client.create_lora_training_run(BASE_MODEL, rank=4, run_id="theirs")
        tokens = run.get_tokenizer().encode("Repeat: abc")
        drawn = run.sampler().sample(
            tokens, sampling_params=tinsmith.SamplingParams(max_tokens=4), num_samples=4
        )
        heard.append(drawn.result())
        heard.append(run.save_state("theirs").result())
    with openai.OpenAI(base_url=f"http://{deployment.address}/v1", api_key=key) as chat:
        heard.append(chat.models.list().model_dump_json())
    return repr(heard)


def _rows(folder: Path) -> Iterator[tuple[str, str]]:
    for path in [*folder.rglob("*.db"), *folder.rglob("*.sqlite")]:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            for (table,) in names.fetchall():
                for row in connection.execute(f'SELECT * FROM "{table}"'):
                    yield f"{path.name}:{table}", repr(row)


def _metrics(process: PodProcess) -> str:
    url = f"http://{process.metrics_address}/metrics"
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        return str(answer.read().decode())


def test_canaries_of_a_tenant_stay_with_the_tenant(
    served: tuple[Deployment, Path, dict[str, PodProcess]],
) -> None:
    deployment, folder, processes = served
    _say_everything(deployment, create_key(deployment, "singer"))
    heard = _hear_everything(deployment, create_key(deployment, "listener"))
    logs = [line for each in processes.values() for line in each.log.read_text().splitlines()]
    pages = {pod: _metrics(process) for pod, process in processes.items()}
    assert all("tinsmith_" in page for page in pages.values())
    series = [line for page in pages.values() for line in page.splitlines()]
    rows = list(_rows(folder))
    kept = "".join(row for _, row in rows)
    # The canaries were there to be found: durable ones are in rows of their own tenant.
    assert {kind for kind, text in _CANARIES.items() if text in kept} >= {
        *_NAMES,
        "label",
        "display",
    }
    for kind, canary in _CANARIES.items():
        assert canary not in heard
        lines = [line for line in [*logs, *series] if canary in line]
        # Names of resources are in the operators' log, and runs in their metrics, beside their own
        # project alone.
        assert not lines or kind in _NAMES, lines
        assert not [line for line in lines if not _OWN.search(line) or "listener" in line]
        assert not [place for place, row in rows if canary in row and "listener" in row]


def test_a_thousand_keys_are_in_no_file_and_no_log(
    served: tuple[Deployment, Path, dict[str, PodProcess]],
) -> None:
    deployment, folder, _ = served
    issued = set()
    with deployment.client() as client:
        for _ in range(_KEYS):
            issued.add(client.keys.create().secret.encode())
    with deployment.client(api_key=sorted(issued)[0].decode()) as client:
        client.runs.list()
    assert len(issued) == _KEYS
    opening = {found[1] for key in issued if (found := _KEY.fullmatch(key))}
    assert len(opening) == _KEYS
    found = [
        (path.name, secret)
        for path in folder.rglob("*")
        if path.is_file()
        for secret in _SECRET.findall(path.read_bytes())
        if secret in opening
    ]
    assert found == []
