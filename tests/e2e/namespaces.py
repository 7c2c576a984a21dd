"""Namespaces of the suite's own: only `restricted` pods are admitted, and a pod reads the volume with the results."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from world import ENVIRONMENT, RESULTS, RLJOB, Settings, World, claim, reader

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
PROVISIONED = "pv.kubernetes.io/provisioned-by"
"""By which a volume is known that was made for its claim."""
LIVE: list[World] = []
"""The worlds whose namespaces are there."""


def ignore(_world: World, _problem: BaseException) -> None:
    """What becomes of a failure unless somebody wants to know."""


on_failure: Callable[[World, BaseException], None] = ignore
"""Called before a namespace is deleted because of a failure: afterwards nobody can look at it."""


@contextmanager
def fresh_namespace(settings: Settings) -> Iterator[World]:
    """A namespace that is gone, with everything in it, when the context ends; its volumes may be claimed again."""
    made = World(f"rljob-e2e-{secrets.token_hex(3)}", settings)
    LIVE.append(made)
    try:
        labels = {"name": made.namespace, "labels": RESTRICTED}
        made.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": labels})
        made.apply(claim(RESULTS, settings.storage_class, "ReadWriteMany"))
        if settings.mounts_environment:
            made.apply(claim(ENVIRONMENT, settings.environment_class, "ReadOnlyMany"))
            made.kubectl("wait", f"pvc/{ENVIRONMENT}", "--for=jsonpath={.status.phase}=Bound", "--timeout=60s")
            volume = made.get("pv", made.get("pvc", ENVIRONMENT)["spec"]["volumeName"])
            made.environment_path = volume["metadata"]["annotations"]["rljob.dev/path"]
        made.apply(reader(settings.image or default_image(made)))
        made.kubectl("wait", "pod/reader", "--for=condition=Ready", "--timeout=120s", seconds=130)
        yield made
    except BaseException as problem:
        on_failure(made, problem)
        raise
    finally:
        made.kubectl("delete", "rlj", "--all", "--wait=false")
        gone = ("--ignore-not-found", "--timeout=180s")
        made.kubectl("delete", "namespace", made.namespace, *gone, seconds=190)
        free_volumes(made)
        LIVE.remove(made)


def free_volumes(world: World) -> None:
    """Volumes that somebody made by hand stay bound to the claims of a namespace that is gone, and are few: they are
    made free. What was written to them stays. Those that a provisioner made are its own business.
    """
    remove = json.dumps([{"op": "remove", "path": "/spec/claimRef"}])

    def freed() -> bool:
        held = [volume for volume in world.list("pv") if _is_kept_for(world.namespace, volume)]
        for volume in held:
            # Kubernetes notices some moments later that the claim is gone.
            if volume["status"]["phase"] == "Released":
                world.kubectl("patch", "pv", volume["metadata"]["name"], "--type=json", "--patch", remove)
        return not held

    world.until("the namespace's volumes are free", freed, seconds=60)


def _is_kept_for(namespace: str, volume: dict[str, Any]) -> bool:
    spec = volume["spec"]
    by_hand = PROVISIONED not in volume["metadata"].get("annotations", {})
    claimed = spec.get("claimRef", {}).get("namespace") == namespace
    return claimed and by_hand and spec["persistentVolumeReclaimPolicy"] == "Retain"


def default_image(world: World) -> str:
    """The trainer image that the operator was installed with."""
    found = json.loads(world.kubectl("get", "deployments", "--all-namespaces", "--selector", RLJOB, "-o", "json"))
    arguments = found["items"][0]["spec"]["template"]["spec"]["containers"][0]["args"]
    (image,) = [item.partition("=")[2] for item in arguments if item.startswith("--default-image=")]
    return str(image)
