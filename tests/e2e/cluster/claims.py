"""Gives every PersistentVolumeClaim a folder of this machine, as a provisioner does."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.cluster.api import ApiClient, ApiError, Json
from tests.e2e.cluster.informer import Informer

_VOLUMES = "/api/v1/persistentvolumes"


class ClaimProvisioner:
    """Creates a volume for each claim; the real controller binds the two.

    The claims of any storage class are met, and none is refused for its size.
    """

    def __init__(self, api: ApiClient, folder: Path) -> None:
        self._api = api
        self._folder = folder
        self._claims = Informer(api, "/api/v1/persistentvolumeclaims", self._changed)

    def start(self) -> None:
        self._claims.start()

    def stop(self) -> None:
        self._claims.stop()

    def _changed(self, kind: str, claim: Json) -> None:
        name = f"claim-{claim['metadata']['uid']}"
        if kind == "DELETED":
            # Its protection waits until the claim is gone, which it is.
            self._api.delete(f"{_VOLUMES}/{name}")
        elif not claim["spec"].get("volumeName"):
            try:
                self._api.create(_VOLUMES, self._volume(name, claim))
            except ApiError as error:
                if error.status != 409:  # it was made when the claim was seen before
                    raise

    def _volume(self, name: str, claim: Json) -> Json:
        metadata, spec = claim["metadata"], claim["spec"]
        reference = {"namespace": metadata["namespace"], "name": metadata["name"]}
        return {
            "metadata": {"name": name},
            "spec": {
                "capacity": {"storage": spec["resources"]["requests"]["storage"]},
                "accessModes": spec["accessModes"],
                "storageClassName": spec.get("storageClassName", ""),
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {**reference, "uid": metadata["uid"]},
                "hostPath": {"path": str(self._folder / name)},
            },
        }
