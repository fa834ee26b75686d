"""A manifest means the same to the command line as to kubectl, or is refused by key and line."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tinsmith.cli.jobs import spec_of_recipe
from tinsmith.errors import ConfigurationError
from tinsmith.jobs.json_form import JobFormatError, parse_manifest
from tinsmith.jobs.methods import METHODS
from tinsmith.kubectl_yaml import parse_value, read_documents
from tinsmith_jobs.recipe_check import check_recipe
from tinsmith_jobs.spec_codec import decode_job
from tinsmith_jobs.spec_reader import SpecError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1.5e3", 1500.0),
        ("-.5", -0.5),
        (".inf", float("inf")),
        ("12", 12),
        ("-12", -12),
        ("1_000", 1000),
        ("010", 8),
        ("0o10", 8),
        ("0x10", 16),
        ("2026-11-22", "2026-11-22"),
        ("2026-11-22T10:00:00Z", "2026-11-22T10:00:00Z"),
        ("1:30", "1:30"),
        ("1.2.3", "1.2.3"),
        ("yes", True),
        ("off", False),
        ("~", None),
        ("'1'", "1"),
        ("{1: a, true: b}", {"1": "a", "true": "b"}),
        ("{<<: {a: 1}, a: 2}", {"a": 2}),
    ],
)
def test_a_value_is_read_as_kubectl_reads_it(text: str, value: Any) -> None:
    read = parse_value(text, name="a")
    assert read == value
    assert type(read) is type(value)


def test_a_key_that_is_there_twice_is_refused_by_name_and_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("spec:\n  model: {name: a}\n  method: {}\n  model: {name: b}\n")
    with pytest.raises(ConfigurationError) as caught:
        read_documents(path)
    assert "line 4: the key 'model' of line 2 is there again" in caught.value.message
    path.write_text("labels: {1: a, '1': b}\n")
    with pytest.raises(ConfigurationError, match="the key '1' of line 1 is there again"):
        read_documents(path)


def test_what_is_no_yaml_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("a: 1\nb: [\n")
    with pytest.raises(ConfigurationError, match=r"job.yaml is no YAML .*: line 3: "):
        read_documents(path)
    path.write_text("? [a]\n: b\n")
    with pytest.raises(ConfigurationError, match="a key is a list or a map"):
        read_documents(path)
    path.write_bytes(b"a: \xff\n")
    with pytest.raises(ConfigurationError, match="is not UTF-8"):
        read_documents(path)


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ("{name: 20261122}", 'metadata.name is a number: put it in quotation marks, "20261122"'),
        ("{name: yes}", 'metadata.name is true or false: put it in quotation marks, "true"'),
        ("{name: [a]}", "metadata.name is no text"),
        ("{}", "metadata.name is missing"),
        ("{name: a, labels: {run: 7}}", 'metadata.labels.run is a number: put it in .* "7"'),
        ("{name: a, labels: [b]}", "metadata.labels is no map"),
    ],
)
def test_a_name_or_label_that_is_no_text_is_refused_as_the_cluster_does(
    metadata: str, told: str
) -> None:
    kind = "apiVersion: tinsmith.dev/v1alpha1, kind: TrainingJob"
    manifest = parse_value(f"{{{kind}, metadata: {metadata}, spec: {{}}}}", name="manifest")
    with pytest.raises(JobFormatError, match=told):
        parse_manifest(manifest)


def test_a_date_is_a_name() -> None:
    manifest = parse_value(
        "{apiVersion: tinsmith.dev/v1alpha1, kind: TrainingJob, metadata: {name: 2026-11-22},"
        " spec: {}}",
        name="manifest",
    )
    assert parse_manifest(manifest)[0] == "2026-11-22"


def test_settings_of_a_submitted_recipe_are_read_alike() -> None:
    spec = spec_of_recipe("supervised", "tiny", 0, "lora", ["learning_rate=1e-3", "tag=1:30"])
    assert spec["method"]["parameters"] == {"learning_rate": 1e-3, "tag": "1:30"}
    with pytest.raises(ConfigurationError, match="stop is no YAML: line 1"):
        spec_of_recipe("supervised", "tiny", 0, "lora", ["stop=[a"])


@pytest.mark.parametrize("recipe", METHODS)
def test_a_recipe_of_the_command_line_is_a_job(recipe: str) -> None:
    """A custom loop has no command there, which its refusal says."""
    spec = spec_of_recipe(recipe, "tiny", 0, "lora", [])
    spec["model"]["source"] = "hf://a/b"
    with (
        pytest.raises(SpecError, match=r"spec\.roles\.driver")
        if recipe == "custom"
        else contextlib.nullcontext()
    ):
        check_recipe(decode_job("job", spec))
