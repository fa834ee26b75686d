"""The schema of the resource and the codec say the same of a spec: defaults, bounds and rules."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.fakes.job_specs import MODEL, REFUSED, TRAINING

from tinsmith.jobs.methods import RECIPE_METHODS
from tinsmith_jobs import spec_reader
from tinsmith_jobs.method import describe_method
from tinsmith_jobs.spec import JobSpec, Method
from tinsmith_jobs.spec_codec import decode_job, decode_pool
from tinsmith_jobs.spec_reader import SpecError

_CRD = Path(__file__).parents[3] / "k8s/crd/trainingjobs.tinsmith.dev.yaml"
_VERSION = yaml.safe_load(_CRD.read_text())["spec"]["versions"][0]
SCHEMA = _VERSION["schema"]["openAPIV3Schema"]["properties"]["spec"]


def _filled(schema: dict[str, Any], value: Any) -> Any:
    """Return a value with the defaults that an API server adds."""
    if not isinstance(value, dict):
        return value
    found = dict(value)
    for name, child in schema.get("properties", {}).items():
        if name not in found and "default" in child:
            found[name] = copy.deepcopy(child["default"])
        if name in found:
            found[name] = _filled(child, found[name])
    return found


def _bounds(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[Any]:
    """Yield the paths of whole numbers, each with a value at a bound and one beyond."""
    for name, child in schema.get("properties", {}).items():
        if child["type"] == "object":
            yield from _bounds(child, (*path, name))
        elif child["type"] == "integer":
            for word, step in (("minimum", -1), ("maximum", 1)):
                if word in child:
                    inside = child[word]
                    yield pytest.param(
                        (*path, name), inside, inside + step, id=".".join((*path, name, word))
                    )


def _with(path: tuple[str, ...], value: object) -> dict[str, Any]:
    spec = copy.deepcopy(TRAINING)
    inner = spec
    for name in path[:-1]:
        inner = inner.setdefault(name, {})
    inner[path[-1]] = value
    if path == ("roles", "sampler", "gpus"):
        inner["engine"] = "vllm"
    return spec


def test_the_defaults_of_the_schema_are_those_of_the_code() -> None:
    filled = _filled(SCHEMA, TRAINING)
    assert set(filled) > set(TRAINING)
    assert decode_job("job", filled) == decode_job("job", TRAINING)
    bare = JobSpec(method=Method.RL)
    job = decode_job("job", TRAINING)
    for name in ("adapter", "agents", "scheduling", "checkpoint", "managed_by", "suspend"):
        assert getattr(job, name) == getattr(bare, name)
    for name in ("startup_deadline_s", "stall_timeout_s", "backoff_limit", "ttl_s", "rules"):
        assert getattr(job, name) == getattr(bare, name)


@pytest.mark.parametrize(("path", "inside", "beyond"), list(_bounds(SCHEMA)))
def test_the_bounds_of_the_schema_are_those_of_the_code(
    path: tuple[str, ...], inside: int, beyond: int
) -> None:
    if path[0] == "roles" and path[-1] == "replicas":
        inside = 1
    decode_job("job", _with(path, inside))
    with pytest.raises(SpecError, match=path[-1]):
        decode_job("job", _with(path, beyond))


def test_the_methods_of_the_schema_are_those_of_the_code() -> None:
    methods = SCHEMA["properties"]["method"]["properties"]["type"]["enum"]
    assert set(methods) == {method.value for method in Method}
    assert set(methods) == {*RECIPE_METHODS, "custom", "serve"}


@pytest.mark.parametrize(("name", "spec", "message"), REFUSED)
def test_a_spec_that_can_not_be_run_is_refused(
    name: str, spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        decode_job(name, spec)


MOE = {"name": "moe", "source": "hf://Qwen/Qwen3-30B-A3B-Instruct-2507"}
VISION = {"name": "vl", "source": "hf://Qwen/Qwen2.5-VL-7B-Instruct"}


@pytest.mark.parametrize(
    ("model", "roles", "message"),
    [
        (MOE, {"trainer": {"gpus": 2}}, "trainer.gpus is 2: adapters of a model of the type qwen3"),
        (VISION, {"trainer": {"gpus": 8}}, "one device that holds it, and more replicas"),
        (MOE, {"sampler": {"gpus": 2}}, "sampler.gpus is 2: the embedded engine samples on one"),
        (VISION, {"sampler": {"gpus": 2, "engine": "vllm"}}, "reads images, which engine vllm"),
        (MODEL, {"sampler": {"gpus": 4}}, "take engine vllm"),
        (MODEL, {"trainer": {"gpus": 4}, "sampler": {"gpus": 4, "engine": "vllm"}}, ""),
        (MOE, {"trainer": {"gpus": 1}, "sampler": {"gpus": 4, "engine": "vllm"}}, ""),
        (VISION, {"trainer": {"gpus": 1}, "sampler": {"gpus": 1}}, ""),
        ({**MOE, "source": "pvc://models/moe"}, {"trainer": {"gpus": 2}}, ""),
    ],
)
def test_devices_that_a_pod_could_not_use_are_refused_before_nodes_are_taken(
    model: dict[str, str], roles: dict[str, Any], message: str
) -> None:
    both = {"trainer": {"gpus": 1}, "sampler": {"gpus": 1}} | roles
    job = {**TRAINING, "model": model, "roles": both}
    pool = {"model": model, **roles}
    if not message:
        decode_job("job", job)
        decode_pool("pool", pool)
        return
    with pytest.raises(SpecError, match=message) as refused:
        decode_job("job", job)
    assert refused.value.field == "spec.roles"
    with pytest.raises(SpecError, match=message):
        decode_pool("pool", pool)


def test_trainers_of_all_weights_are_spread_over_devices_whatever_the_model() -> None:
    roles = {"trainer": {"gpus": 8}, "sampler": {"gpus": 1}}
    job = {**TRAINING, "model": MOE, "adapter": {"type": "full"}, "roles": roles}
    assert decode_job("job", job).roles[0].gpus == 8


def test_a_driver_is_told_every_default() -> None:
    spec = {**TRAINING, "checkpoint": {"everySteps": 3}, "data": {"name": "d"}}
    assert describe_method(decode_job("job", spec), model="m", data="d") == (
        '{"adapter": {"rank": 32, "type": "lora"}, "checkpoint": {"everySteps": 3, '
        '"finalName": "final", "keepLast": 3}, "data": "d", "model": "m", "parameters": {}, '
        '"type": "rl"}'
    )


def _objects(schema: dict[str, Any], path: str = "spec") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a schema that have fields of their own, by path."""
    if schema.get("properties"):
        yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from _objects(child, f"{path}.{name}")
    if "items" in schema:
        yield from _objects(schema["items"], f"{path}[0]")


def _example(schema: dict[str, Any], path: str = "spec") -> Any:
    """Return a value with every field that a schema has; what fields mean does not matter."""
    if schema.get("properties"):
        return {name: _example(child) for name, child in schema["properties"].items()}
    if schema.get("type") == "array":
        return [_example(schema["items"])]
    return {"object": {}, "integer": 1, "boolean": False}.get(schema.get("type", ""), "a")


@pytest.mark.parametrize("kind", ["trainingjobs", "trainerpools"])
def test_a_server_keeps_the_fields_that_it_does_not_know(kind: str) -> None:
    schema = _spec_schema(kind)
    dropping = [
        path
        for path, each in _objects(schema)
        if not each.get("x-kubernetes-preserve-unknown-fields")
    ]
    assert not dropping, "what is written there would be dropped without a word"


def _spec_schema(kind: str) -> dict[str, Any]:
    crd = yaml.safe_load((_CRD.parent / f"{kind}.tinsmith.dev.yaml").read_text())
    [version] = crd["spec"]["versions"]
    return dict(version["schema"]["openAPIV3Schema"]["properties"]["spec"])


@pytest.mark.parametrize(
    ("kind", "decode"), [("trainingjobs", decode_job), ("trainerpools", decode_pool)]
)
def test_the_fields_of_the_schema_are_those_of_the_code(
    monkeypatch: pytest.MonkeyPatch, kind: str, decode: Any
) -> None:
    monkeypatch.setattr(spec_reader, "MAX_NAMED_PROBLEMS", 1000)
    with pytest.raises(SpecError) as caught:
        decode("job", _example(_spec_schema(kind)))
    assert "is not a field" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        pytest.param(("backofLimit",), r"spec\.backofLimit .*mean backoffLimit", id="top"),
        pytest.param(("roles", "trainer", "gpu"), r"trainer\.gpu .*did you mean gpus", id="role"),
        pytest.param(("roles", "samplr"), r"roles\.samplr .*did you mean sampler", id="role-name"),
        pytest.param(
            ("roles", "trainer", "volumes"),
            r"trainer\.volumes is not a field \(it is a field of the role's template\)",
            id="volumes",
        ),
        pytest.param(("scheduling", "wishes"), r"wishes is not a field$", id="nothing-like-it"),
    ],
)
def test_a_field_that_there_is_not_is_named(path: tuple[str, ...], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        decode_job("job", _with(path, 1))


def test_a_field_without_a_value_is_as_one_that_is_left_out() -> None:
    decode_job("job", {**TRAINING, "affinity": None})


def test_parameters_of_a_method_and_names_of_labels_are_free() -> None:
    spec = _with(("method", "parameters"), {"anything": {"nested": [1]}})
    spec["roles"]["trainer"]["template"] = {"labels": {"team": "a"}}
    decode_job("job", spec)


def test_everything_that_is_wrong_is_named_at_once() -> None:
    spec = _with(("roles", "trainer", "resources"), {"limits": {"memory": "64GB"}})
    spec["roles"]["trainer"] |= {"gpu": 8, "replicas": "two"}
    spec |= {"backofLimit": 0, "suspend": "false"}

    with pytest.raises(SpecError) as caught:
        decode_job("a.b", spec)

    assert caught.value.field == "metadata.name"
    for word in ("metadata.name", "64GB", "trainer.gpu ", "replicas", "backofLimit", "suspend"):
        assert word in str(caught.value)


def test_of_very_many_mistakes_the_first_are_named_and_the_rest_counted() -> None:
    spec = {**TRAINING, **{f"unknown{number}": 1 for number in range(15)}}
    with pytest.raises(SpecError, match=r"unknown9 is not a field; and 5 more$"):
        decode_job("job", spec)


@pytest.mark.parametrize("amount", [64, "64", "512m", "64k"])
def test_memory_without_its_unit_is_refused(amount: object) -> None:
    spec = _with(("roles", "trainer", "resources"), {"requests": {"memory": amount}})
    with pytest.raises(SpecError, match=f"{amount} is less than a MiB.*write Mi or Gi"):
        decode_job("job", spec)


def test_gpus_are_no_resource() -> None:
    spec = _with(("roles", "trainer", "resources"), {"limits": {"nvidia.com/gpu": 1}})
    with pytest.raises(SpecError, match="names GPUs; use the field gpus"):
        decode_job("job", spec)


@pytest.mark.parametrize("value", ["Jane Doe", "-a", "a" * 64, "a/b"])
def test_values_of_labels_are_those_that_kubernetes_takes(value: str) -> None:
    spec = _with(("roles", "trainer", "template"), {"labels": {"owner": value}})
    with pytest.raises(SpecError, match=r"labels\.owner is .*63 letters"):
        decode_job("job", spec)
    spec["roles"]["trainer"]["template"]["labels"] = {"owner": "Jane_Doe.1", "none": ""}
    decode_job("job", spec)
