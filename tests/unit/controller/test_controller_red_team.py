"""Jobs of hostile authors are refused with a sentence, by the spec or by the operators' policy."""

from __future__ import annotations

import pytest
from tests.fakes.hostile_jobs import (
    HOSTILE_JOBS,
    OWN_SECRETS,
    TRUSTED_IMAGES,
    HostileJob,
    good_spec,
)

from tinsmith_controller.pods.author_policy import AuthorPolicy
from tinsmith_controller.pods.image_policy import check_images
from tinsmith_jobs.spec import JobSpec
from tinsmith_jobs.spec_codec import decode_job
from tinsmith_jobs.spec_reader import SpecError


def refusal(job: JobSpec, policy: AuthorPolicy, *, has_kueue_label: bool = False) -> str:
    """Return what the controller says of a job."""
    return policy.refusal(job, has_kueue_label=has_kueue_label) or check_images(
        job, TRUSTED_IMAGES, OWN_SECRETS
    )


@pytest.mark.parametrize("case", HOSTILE_JOBS, ids=lambda case: case.name)
def test_a_hostile_job_is_refused_with_a_sentence(case: HostileJob) -> None:
    try:
        job = decode_job("job", case.spec)
    except SpecError as error:
        said = str(error)
    else:
        said = refusal(job, AuthorPolicy(), has_kueue_label=bool(case.labels))
    assert case.word in said


def test_there_are_thirty_and_each_tries_something_else() -> None:
    assert len({case.name for case in HOSTILE_JOBS}) == len(HOSTILE_JOBS) >= 30


def test_what_they_are_a_change_of_is_accepted() -> None:
    assert refusal(decode_job("job", good_spec()), AuthorPolicy()) == ""


def test_operators_allow_what_jobs_may_say() -> None:
    template = {
        "image": "mine:1",
        "labels": {"team": "a", "example.com/cost": "b", "tinsmith.dev/uid": "overridden"},
        "annotations": {"note": "a", "prometheus.io/scrape": "true"},
    }
    resources = {"limits": {"cpu": "1", "rdma/shared": "1", "hugepages-2Mi": "2Mi"}}
    spec = good_spec() | {
        "scheduling": {
            "priorityClassName": "spare",
            "tolerations": [{"key": "example.com/spot", "operator": "Exists"}],
        },
        "roles": {"trainer": {}, "driver": {"template": template, "resources": resources}},
    }
    job = decode_job("job", spec)
    policy = AuthorPolicy(
        labels=("example.com/",),
        annotations=("prometheus.io/scrape",),
        priority_classes=("spare",),
        tolerations=("example.com/spot",),
        resources=("rdma/", "hugepages-2Mi"),
        has_kueue=True,
    )
    assert refusal(job, policy, has_kueue_label=True) == ""
    assert "spare" in refusal(job, AuthorPolicy(priority_classes=("urgent",)))


def test_a_prefix_is_matched_whole() -> None:
    template = {"image": "mine:1", "labels": {"example.com.evil/x": "b"}}
    roles = {"trainer": {}, "driver": {"template": template}}
    job = decode_job("job", good_spec() | {"roles": roles})
    assert "example.com.evil/x" in refusal(job, AuthorPolicy(labels=("example.com/",)))
