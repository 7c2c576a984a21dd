"""Users' documents for a cluster whose jobs mount the checkout instead of starting from the trainer's image.

Jobs that name no image start from the small default image of such a cluster, in which there is no trainer: their pods
get the volume with the checkout and its environment, at the path it has on the host.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

from testcluster.addons import ENVIRONMENT_CLASS
from testcluster.building import MOUNTED_IMAGE

VOLUME = "environment"
"""Name of the claim, and of the volume in the pods."""
TRAINER_IMAGES = ("rljob/trainer:", "docker.io/rljob/trainer:")
SECTIONS = ("head", "rollout", "trainer")
OPTIONAL = ("rewardModel", "judge")
"""Sections whose pods are there where the job has them."""

Document = dict[str, Any]


def fitted(documents: list[Document], checkout: Path) -> list[Document]:
    """The documents, and the claim for the environment in each namespace where a job needs it, before the jobs."""
    made = [deepcopy(document) for document in documents]
    namespaces: dict[str | None, None] = {}
    for document in made:
        if document.get("kind") == "RLJob" and "image" not in document["spec"]:
            for section in (*SECTIONS, *(name for name in OPTIONAL if name in document["spec"])):
                # Nothing is changed in place: in YAML one section may stand for all of them.
                part = document["spec"].get(section, {})
                document["spec"][section] = {**part, "pod": mounting(part.get("pod", {}), checkout)}
            namespaces[document["metadata"].get("namespace")] = None
        elif document.get("kind") == "Pod":
            for container in document["spec"]["containers"]:
                if container["image"].startswith(TRAINER_IMAGES):
                    container["image"] = MOUNTED_IMAGE
    return [*map(_claim, namespaces), *made]


def mounting(pod: Document, checkout: Path) -> Document:
    """The pod settings of a job, and with them the volume of the claim `VOLUME` where the environment expects it."""
    volume = {"name": VOLUME, "persistentVolumeClaim": {"claimName": VOLUME, "readOnly": True}}
    mount = {"name": VOLUME, "mountPath": str(checkout), "readOnly": True}
    return {
        **pod,
        "volumes": [*pod.get("volumes", []), volume],
        "volumeMounts": [*pod.get("volumeMounts", []), mount],
    }


def _claim(namespace: str | None) -> Document:
    """None: the namespace that kubectl uses."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": VOLUME} | ({} if namespace is None else {"namespace": namespace}),
        "spec": {
            "storageClassName": ENVIRONMENT_CLASS,
            "accessModes": ["ReadOnlyMany"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
