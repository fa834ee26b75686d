"""Why a job cannot be run whose author the operators need not trust."""

from __future__ import annotations

from tinsmith_controller.kueue.names import too_many_roles
from tinsmith_controller.pods.deployment import Deployment
from tinsmith_controller.pods.image_policy import check_images
from tinsmith_controller.pods.template_parts import check_claims, check_sizes
from tinsmith_jobs.spec import JobSpec


def refusal_of(deployment: Deployment, job: JobSpec, has_kueue_label: bool) -> str:
    """Return one sentence; empty if the job may be run.

    Args:
        deployment: With what the operators allow.
        job: What it asks for.
        has_kueue_label: Whether it has the label by which Kueue queues jobs.
    """
    return (
        deployment.author_policy.refusal(job, has_kueue_label=has_kueue_label)
        or (too_many_roles(job.roles) if has_kueue_label else "")
        or check_images(job, deployment.trusted_images, deployment.own_secrets())
        or check_claims(job, deployment)
        or check_sizes(job, deployment)
    )
