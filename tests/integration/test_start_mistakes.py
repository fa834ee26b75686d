"""What is told of a server that cannot start: one line on stderr that says what to do."""

from __future__ import annotations

import json
import logging
import os
import pty
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tinsmith import cli

TAKEN: list[socket.socket] = []
Prepare = Callable[[Path, Path], list[str]]


def config(text: str) -> Prepare:
    """Return what starts a server with a file of settings."""

    def prepare(folder: Path, _: Path) -> list[str]:
        (folder / "settings.toml").write_text(text)
        return ["--config", str(folder / "settings.toml")]

    return prepare


def model(change: Callable[[Path], object]) -> Prepare:
    """Return what starts a server on a model directory that was changed."""

    def prepare(folder: Path, model_dir: Path) -> list[str]:
        copy = folder / "changed"
        shutil.copytree(model_dir, copy)
        change(copy)
        return ["--model", str(copy)]

    return prepare


def unknown_architecture(directory: Path) -> None:
    content = json.loads((directory / "config.json").read_text())
    content |= {"model_type": "quux", "architectures": ["QuuxForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(content))


def data_dir_below_a_file(folder: Path, _: Path) -> list[str]:
    (folder / "file").touch()
    return ["--data-dir", str(folder / "file" / "data")]


def spoilt_key(folder: Path, _: Path) -> list[str]:
    (folder / "data").mkdir()
    (folder / "data" / "api_key").write_text("nonsense")
    return []


def taken_port(*_: Path) -> list[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    TAKEN.append(listener)
    return ["--port", str(listener.getsockname()[1])]


def flags(*arguments: str) -> Prepare:
    return lambda *_: list(arguments)


MISTAKES: dict[str, tuple[Prepare, tuple[str, ...]]] = {
    "port-too-high": (flags("--port", "99999"), ("99999", "choose 1 to 65535")),
    "port-taken": (taken_port, ("cannot be bound", "`tinsmith status`", "--port 0")),
    "log-level": (flags("--log-level", "LOUD"), ("log level LOUD", "choose DEBUG, INFO")),
    "data-dir": (data_dir_below_a_file, ("file/data cannot be written", "--data-dir")),
    "data-dir-key": (spoilt_key, ("data/api_key holds no key", "backup")),
    "metrics": (flags("--metrics-address", "here"), ("metrics_address must be host:port",)),
    "device": (flags("--device", "gpu"), ("auto, cpu, cuda or cuda:N", "'gpu'")),
    "dtype": (flags("--dtype", "float16"), ("auto, float32 or bfloat16", "'float16'")),
    "two-models": (flags("--model", "a=tiny", "--model", "a=tiny"), ("named 'a'", "NAME=SOURCE")),
    "no-such-model": (flags("--model", "/no/model"), ("there is no model directory /no/model",)),
    "hub-away": (flags("--model", "owner/name"), ("owner/name", "the hub did not give it")),
    "no-config": (model(lambda path: (path / "config.json").unlink()), ("holds no config.json",)),
    "no-tokenizer": (
        model(lambda path: (path / "tokenizer.json").unlink()),
        ("changed holds no tokenizer.json", "save_pretrained"),
    ),
    "architecture": (model(unknown_architecture), ("config.json", "`quux`", "transformers")),
    "config-missing": (flags("--config", "/no/file.toml"), ("/no/file.toml cannot be read",)),
    "config-no-toml": (config("x"), ("settings.toml is not TOML",)),
    "config-no-table": (config("max_runs = 1"), ("max_runs outside of a table", "[trainer]")),
    "config-table": (config("[trainr]"), ("unknown table trainr", "did you mean trainer?")),
    "config-key": (
        config("[trainer]\nmax_run = 1"),
        ("[trainer] of ", "unknown setting max_run", "did you mean max_runs"),
    ),
    "config-type": (config('[trainer]\nmax_runs = "x"'), ("[trainer] of ", "max_runs", "int")),
    "config-fixed": (
        config('[trainer]\ndata_dir = "x"'),
        ("[trainer] of ", "data_dir is given by `tinsmith up` itself", "use --data-dir"),
    ),
    "config-value": (config("[trainer]\nmax_runs = 0"), ("max_runs must be positive, got 0",)),
}


@pytest.fixture(autouse=True)
def _own_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the root logger back as it was: the command sends it to a stream of this test."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.getLogger().level)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_that_says_what_to_do(
    name: str,
    tmp_path: Path,
    model_dir: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare, says = MISTAKES[name]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "40")  # a long line is not broken
    arguments = prepare(tmp_path, model_dir)
    if "--model" not in arguments:
        arguments += ["--model", str(model_dir)]
    if "--data-dir" not in arguments:
        arguments += ["--data-dir", str(tmp_path / "data")]
    if "--port" not in arguments:
        arguments += ["--port", "0"]
    with pytest.raises(SystemExit) as caught:
        cli.main(["up", "--num-threads", "1", *arguments])
    while TAKEN:
        TAKEN.pop().close()
    assert caught.value.code == 1
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert len(output.err) < 400
    for part in says:
        assert part in output.err
    assert "pip install" not in output.err


POD = [sys.executable, "-m", "tinsmith_trainer"]


def variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if "TINSMITH_" not in name}


def test_a_pod_names_the_variable_of_a_setting_that_has_no_value() -> None:
    ended = subprocess.run(POD, env=variables(), capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert "data_dir (TINSMITH_DATA_DIR)" in json.loads(line)["problem"]


def test_a_pod_tells_a_person_in_words() -> None:
    ours, theirs = pty.openpty()
    ended = subprocess.run(POD, env=variables(), stderr=theirs, check=False)
    os.close(theirs)
    text = os.read(ours, 4096).decode()
    os.close(ours)
    assert ended.returncode == 2
    assert text.startswith("error: settings without a value: data_dir (TINSMITH_DATA_DIR)")
    assert text.count("\n") == 1
