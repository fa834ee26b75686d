"""Keys of pods under the root secret that tests give their deployments."""

from __future__ import annotations

from tinsmith_runtime.rpc.pod_identity import PodCredentials, PodIdentity, PodKey, PodRole

POD_KEY = "pod-key-of-the-tests"
"""The root secret."""
Metadata = tuple[tuple[str, str], ...]


def credentials(role: str, *, pool: str = "") -> PodCredentials:
    """Return what a pod of a role that knows the root secret has."""
    return PodCredentials.read(POD_KEY, PodRole(role), pool=pool)


def pod(role: str, *, pool: str = "") -> Metadata:
    """Return the call metadata that carries the key of a pod."""
    key = PodKey.derive(POD_KEY, PodIdentity(PodRole(role), pool=pool))
    return (("authorization", f"Bearer {key}"),)
