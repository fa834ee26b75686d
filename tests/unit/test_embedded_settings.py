"""What `tinsmith up` is told by its file of settings, and what it tells its user."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tinsmith.cli.app import DESCRIPTIONS
from tinsmith_local.commands import parse_exact, up
from tinsmith_local.embedded import (
    EmbeddedConfig,
    EmbeddedServer,
    make_data_dir,
    tokenizer_ids,
)
from tinsmith_local.overrides import read_overrides
from tinsmith_local.serving import describe
from tinsmith_runtime.devices import Hardware, choose_device
from tinsmith_runtime.errors import ConfigError


def announced(tmp_path: Path, address: str) -> str:
    config = EmbeddedConfig(data_dir=tmp_path, models={"tiny": "somewhere"})
    server = EmbeddedServer(config)
    server.address, server.api_key = address, "tsk_abc_secret"
    return describe(server, config)


def test_all_clients_are_pointed_at_the_one_address(tmp_path: Path) -> None:
    text = announced(tmp_path, "127.0.0.1:7077")
    for part in (
        "TINSMITH_ADDRESS=127.0.0.1:7077",
        "TINKER_BASE_URL=http://127.0.0.1:7077 TINKER_API_KEY=tml-abc_secret",
        "OPENAI_BASE_URL=http://127.0.0.1:7077/v1",
    ):
        assert part in text


def test_with_tls_all_addresses_say_so(tmp_path: Path) -> None:
    text = announced(tmp_path, "https://127.0.0.1:7077")
    assert "TINSMITH_ADDRESS=https://127.0.0.1:7077" in text
    assert "TINKER_BASE_URL=https://127.0.0.1:7077 " in text


def test_the_gateway_has_a_table(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[gateway]\nmax_requests_per_project = 3\n")
    assert read_overrides(file) == {"gateway": {"max_requests_per_project": 3}}
    file.write_text("[gateway]\nmax_request_per_project = 3\n")
    with pytest.raises(ConfigError, match="max_request_per_project"):
        read_overrides(file)


@pytest.mark.parametrize("line", ['engine = "vllm"', 'vllm_python = "/opt/vllm/bin/python"'])
def test_one_process_samples_with_the_engine_that_it_trains_with(tmp_path: Path, line: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f"[sampler]\n{line}\n")
    with pytest.raises(ConfigError, match="is given by `tinsmith up` itself"):
        read_overrides(file)


def test_clients_of_this_machine_load_a_tokenizer_from_the_directory(tmp_path: Path) -> None:
    models = {"tiny": str(tmp_path), "Qwen/Qwen3-8B": "Qwen/Qwen3-8B", "short": "owner/model"}
    of_hub = {"Qwen/Qwen3-8B": "Qwen/Qwen3-8B", "short": "owner/model"}
    assert tokenizer_ids(models, is_loopback=True) == {"tiny": str(tmp_path), **of_hub}
    assert tokenizer_ids(models, is_loopback=False) == of_hub
    relative = os.path.relpath(tmp_path)
    assert tokenizer_ids({"tiny": relative}, is_loopback=True) == {"tiny": str(tmp_path)}


def test_the_list_of_commands_says_what_the_command_says() -> None:
    assert DESCRIPTIONS["up"] == up.__doc__


def test_the_device_is_named_and_a_gpu_that_is_left_out_is_mentioned(tmp_path: Path) -> None:
    config = EmbeddedConfig(data_dir=tmp_path, models={"tiny": "somewhere"})
    server = EmbeddedServer(config)
    server.address, server.api_key = "127.0.0.1:1", "tsk_abc_secret"
    server.device_choice = choose_device("cuda", "auto", Hardware(("NVIDIA H200",), True, 1))
    assert "  device   cuda:0 NVIDIA H200, bfloat16\n" in describe(server, config)
    assert "warning" not in describe(server, config)
    server.device_choice = choose_device("cpu", "auto", Hardware(("NVIDIA H200",), True, 1))
    assert "warning: computing on the CPU although" in describe(server, config)


def test_the_table_of_a_pod_wins_over_the_flags(tmp_path: Path) -> None:
    config = EmbeddedConfig(
        data_dir=tmp_path,
        models={"tiny": "somewhere"},
        device="auto",
        overrides={"trainer": {"device": "cpu", "dtype": "bfloat16", "num_threads": 3}},
    )
    server = EmbeddedServer(config)
    server._scheduler_address = "127.0.0.1:1"
    found = server._trainer_config()
    assert (found.device, found.dtype, found.num_threads) == ("cpu", "bfloat16", 3)


@pytest.mark.parametrize(
    ("pod", "setting"),
    [
        *((pod, "listen_address") for pod in ("scheduler", "trainer", "sampler", "gateway")),
        ("scheduler", "metrics_address"),
        ("sampler", "storage_uri"),
        ("sampler", "base_models"),
        ("environment", "math_problems_path"),
    ],
)
def test_what_the_server_says_itself_is_in_no_table(tmp_path: Path, pod: str, setting: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f'[{pod}]\n{setting} = "x:1"\n')
    with pytest.raises(ConfigError, match=f"{setting} is given by `tinsmith up`"):
        read_overrides(file)


def test_every_table_that_is_taken_makes_a_server(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        '[trainer]\nstorage_uri = "file:///s"\nmetrics_address = "127.0.0.1:0"\n'
        "[sampler]\nmax_samples = 3\nnum_threads = 2\n[gateway]\npins_clients = true\n"
        'tokenizer_ids = "tiny=owner/name"\n[scheduler]\njob_launcher = ""\n'
    )
    models = {"tiny": str(tmp_path)}
    config = EmbeddedConfig(data_dir=tmp_path, models=models, overrides=read_overrides(file))
    server = EmbeddedServer(config)
    server._scheduler_address = "127.0.0.1:1"
    assert server._trainer_config().storage() == "file:///s"
    assert server._sampler_config("file:///s").max_samples == 3
    assert server._gateway_config().tokenizers() == {"tiny": "owner/name"}
    assert server._scheduler_config().job_launcher == ""
    assert server._coordinator_config().data_dir == tmp_path
    assert server._environment_config().pod_key


@pytest.mark.parametrize(("text", "exact"), [("auto", None), ("true", True), ("false", False)])
def test_exactness_is_asked_for_in_words(text: str, exact: bool | None) -> None:
    assert parse_exact(text) is exact


def test_an_unknown_word_for_exactness_names_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="--exact is 'maybe'; use auto, true or false"):
        parse_exact("maybe")


@pytest.mark.parametrize(
    ("exactness", "shown"),
    [
        pytest.param({"a": "exact"}, "bits     exact: ", id="exact"),
        pytest.param({"a": "fast", "b": "fast"}, "bits     fast: NOT exact", id="fast"),
        pytest.param(
            {"a": "exact", "b": "fallback"},
            "nobody beside it; b fallback: NOT exact",
            id="one-of-two",
        ),
    ],
)
def test_the_banner_says_what_is_promised_of_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exactness: dict[str, str], shown: str
) -> None:
    monkeypatch.setattr(EmbeddedServer, "exactness", exactness)
    assert shown in announced(tmp_path, "127.0.0.1:7077")


def test_the_banner_names_the_file_of_the_log(tmp_path: Path) -> None:
    text = announced(tmp_path, "127.0.0.1:7077")
    assert f"  log      {tmp_path}/server.log, and here; a line of JSON" in text


def test_the_folder_of_a_server_is_closed_to_others(tmp_path: Path) -> None:
    new, earlier, foreign = (tmp_path / name for name in ("new", "earlier", "foreign"))
    earlier.mkdir(mode=0o755)
    (earlier / "api_key").write_text("tsk_x")
    foreign.mkdir(mode=0o755)
    (foreign / "notes").touch()
    for folder in (new, earlier, foreign):
        make_data_dir(folder)
    modes = {folder.name: folder.stat().st_mode & 0o777 for folder in (new, earlier, foreign)}
    assert modes == {"new": 0o700, "earlier": 0o700, "foreign": 0o755}


def test_a_wrong_model_and_a_taken_port_are_told_before_torch_is_loaded(tmp_path: Path) -> None:
    program = """
import sys
import typer
from tinsmith_local.commands import up
try:
    typer.run(up)
finally:
    assert "torch" not in sys.modules
"""

    def told(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program, "--data-dir", str(tmp_path / "data"), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1, done.stdout
        assert not (tmp_path / "data").exists()
        [line] = done.stdout.splitlines()
        return line

    missing = tmp_path / "missing"
    assert told("--model", str(missing)) == (
        f"error: there is no model directory {missing}; check the path"
    )
    assert "holds no config.json" in told("--model", f"mine={tmp_path}")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        line = told("--port", str(other.getsockname()[1]))
    assert "is another process using the port?" in line
    assert line.endswith("--port 0 takes a free port")
