"""The dtype of a base model: a field of jobs and pools, told to the pods that load the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tinsmith_controller.pods.deployment import Deployment
from tinsmith_controller.pods.image_policy import check_images
from tinsmith_controller.pods.pod_manifests import make_pod
from tinsmith_controller.pods.workload_context import WorkloadContext
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.spec import DTYPES
from tinsmith_jobs.spec_codec import decode_job, decode_pool
from tinsmith_jobs.spec_reader import SpecError
from tinsmith_jobs.status import Assignment

MODEL = {"name": "qwen3-0.6b", "source": "hf://Qwen/Qwen3-0.6B"}
DEPLOYMENT = Deployment(
    scheduler_address="scheduler:7070",
    gateway_address="gateway:7077",
    pod_root="root",
    database_secret="tinsmith-keys",
    storage_uri="s3://bucket/store",
    storage_secret="s3",
    image_repository="registry/tinsmith",
    image_tag="1.2.3",
)
CRDS = Path(__file__).parents[3] / "k8s" / "crd"


def job_of(model: dict[str, Any], **roles: Any) -> Any:
    roles = {"trainer": {}, "sampler": {}, **roles}
    return decode_job("math", {"method": {"type": "rl"}, "model": model, "roles": roles})


@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_trainers_and_samplers_are_told(dtype: str | None) -> None:
    job = job_of(MODEL | ({"dtype": dtype} if dtype else {}))
    assignments = tuple(
        Assignment(f"math-{role.name}", role.name, 0, "n1", role.gpus, 1) for role in job.roles
    )
    key = NamespacedName("TrainingJob", "ml", "math")
    owner = WorkloadContext(key, "uid-1", "project-a", job, assignments, "qwen3-0.6b")
    told = {}
    for entry in owner.assignments:
        [container] = make_pod(owner, entry, DEPLOYMENT)["spec"]["containers"]
        variables = {one["name"]: one.get("value") for one in container["env"]}
        if "TINSMITH_DTYPE" in variables:
            told[entry.role] = variables["TINSMITH_DTYPE"]
    assert told == dict.fromkeys(("trainer", "sampler"), dtype or "auto")


@pytest.mark.parametrize("dtype", ["float16", "BFLOAT16", "", 32])
def test_another_dtype_is_refused_by_its_field(dtype: Any) -> None:
    with pytest.raises(SpecError, match=r"spec\.model\.dtype"):
        job_of(MODEL | {"dtype": dtype})


def test_pools_have_it_as_well() -> None:
    pool = decode_pool("shared", {"model": MODEL | {"dtype": "bfloat16"}, "trainer": {}})
    assert pool.model.dtype == "bfloat16"


def test_what_a_server_has_loaded_keeps_its_dtype() -> None:
    spec = {"method": {"type": "supervised"}, "model": {"name": "m", "dtype": "bfloat16"}}
    with pytest.raises(SpecError, match="--dtype bfloat16"):
        decode_job("math", spec, is_local=True)


def test_a_template_that_sets_it_is_told_the_field() -> None:
    env = [{"name": "TINSMITH_DTYPE", "value": "float32"}]
    job = job_of(MODEL, sampler={"template": {"env": env}})
    problem = check_images(job, (), ())
    assert problem == "the sampler may not set TINSMITH_DTYPE: spec.model.dtype says it"


@pytest.mark.parametrize("crd", ["trainingjobs", "trainerpools"])
def test_the_schema_lists_the_same(crd: str) -> None:
    text = (CRDS / f"{crd}.tinsmith.dev.yaml").read_text()
    [version] = yaml.safe_load(text)["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    field = spec["properties"]["model"]["properties"]["dtype"]
    assert (tuple(field["enum"]), field["default"]) == (DTYPES, "auto")
