"""Jobs of hostile authors on a real API server: each is refused, and has no pod at any time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import ApiError, Json, TestCluster
from tests.e2e.lab import Lab, start_lab
from tests.fakes.hostile_jobs import HOSTILE_JOBS, HostileJob


@pytest.fixture(scope="module")
def lab(resources: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A controller whose deployment has Secrets of all kinds."""
    folder = tmp_path_factory.mktemp("lab")
    settings: Json = {
        "image_repository": "registry/tinsmith",
        "trusted_images": "registry/env",
        "database_secret_name": "tinsmith-keys",
        "storage_secret_name": "storage",
        "image_pull_secrets": "regcred",
        "protected_secret_names": "hub",
    }
    with (
        resources.namespace() as name,
        start_lab(resources, name, folder, **settings) as lab,
        lab.nodes(1),
    ):
        yield lab


@pytest.mark.parametrize("case", HOSTILE_JOBS, ids=lambda case: case.name)
def test_a_hostile_job_is_refused_and_gets_no_pod(lab: Lab, case: HostileJob) -> None:
    name = case.name[:40].strip("-")
    manifest = {
        "apiVersion": "tinsmith.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "labels": case.labels},
        "spec": case.spec,
    }
    problem = _problem(lab, manifest)
    if problem is not None:
        # The schema's own words, which may differ from the controller's.
        assert problem.status == 422
        return
    status = lab.jobs.wait_phase(name, "Failed")
    assert case.word in status["failure"]["message"]
    assert not status.get("epoch")
    assert not status.get("assignments")
    assert not lab.jobs.pods(name)
    lab.check_log()


def _problem(lab: Lab, manifest: Json) -> ApiError | None:
    """Create a job; return why the API server refuses it, if it does."""
    try:
        lab.cluster.api.create(lab.jobs.url(), manifest)
    except ApiError as error:
        return error
    return None
