"""Namespaces of the suite's own: only `restricted` pods are admitted, and a pod reads the volume with the results."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from world import ENVIRONMENT, RESULTS, RLJOB, Settings, World, claim, reader

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


@contextmanager
def fresh_namespace(settings: Settings) -> Iterator[World]:
    """A namespace that is gone, with everything in it, when the context ends."""
    made = World(f"rljob-e2e-{secrets.token_hex(3)}", settings)
    made.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": made.namespace, "labels": RESTRICTED}})
    try:
        made.apply(claim(RESULTS, settings.storage_class, "ReadWriteMany"))
        if settings.mounts_environment:
            made.apply(claim(ENVIRONMENT, settings.environment_class, "ReadOnlyMany"))
            made.kubectl("wait", f"pvc/{ENVIRONMENT}", "--for=jsonpath={.status.phase}=Bound", "--timeout=60s")
            volume = made.get("pv", made.get("pvc", ENVIRONMENT)["spec"]["volumeName"])
            made.environment_path = volume["metadata"]["annotations"]["rljob.dev/path"]
        made.apply(reader(settings.image or default_image(made)))
        made.kubectl("wait", "pod/reader", "--for=condition=Ready", "--timeout=120s", seconds=130)
        yield made
    finally:
        made.kubectl("delete", "rlj", "--all", "--wait=false")
        made.kubectl("delete", "namespace", made.namespace, "--timeout=180s", seconds=190)


def default_image(world: World) -> str:
    """The trainer image that the operator was installed with."""
    found = json.loads(world.kubectl("get", "deployments", "--all-namespaces", "--selector", RLJOB, "-o", "json"))
    arguments = found["items"][0]["spec"]["template"]["spec"]["containers"][0]["args"]
    (image,) = [item.partition("=")[2] for item in arguments if item.startswith("--default-image=")]
    return str(image)
