"""The pod template of each role, as the operator makes it (``rljob_operator.pods``), with paths of the job file.

Left out is what rljob itself brings and a job cannot touch: its volumes, variables, ports, labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rljob_api.cluster import CONTAINER_SECURITY, POD_SECURITY, TERMINATION_SECONDS
from rljob_api.pod_template.located import Located, located, merged
from rljob_api.pod_template.quantities import known
from rljob_api.spec.pod import Pod

CONTAINER = "ray"
"""Name of the container that Ray runs in."""
_AS_WRITTEN = ("nodeSelector", "affinity", "topologySpreadConstraints", "volumes", "imagePullSecrets")
_NAMES = ("priorityClassName", "runtimeClassName", "serviceAccountName")


def pod_template(path: str, pod: Pod, variables: Mapping[str, str], gpus: int, image: str) -> Located:
    """The template of the pods whose settings stand at ``path``. ``variables``: those of the pool's ``env``, which
    stands beside the settings; ``gpus``: as many of ``gpuResource`` as each pod has."""
    document = pod.document()
    template = f"{path}.template"
    spec = {name: located(f"{path}.{name}", document[name]) for name in (*_AS_WRITTEN, *_NAMES) if name in document}
    spec |= {
        "restartPolicy": Located(template, "Never"),
        "terminationGracePeriodSeconds": Located(template, TERMINATION_SECONDS),
        "securityContext": located(template, POD_SECURITY),
        "tolerations": Located(f"{path}.tolerations", _tolerations(path, pod)),
        "containers": Located(f"{template}.spec.containers", [_container(path, document, variables, gpus, image, pod)]),
    }
    metadata = {name: located(f"{path}.{name}", document.get(name, {})) for name in ("labels", "annotations")}
    own = {"metadata": Located(f"{template}.metadata", metadata), "spec": Located(f"{template}.spec", spec)}
    return merged(Located(template, own), located(template, pod.template))


def cpus_of_ray(path: str, pod: Pod, gpus: int) -> int | None:
    """The CPUs that KubeRay tells Ray of: the limit of the container that it runs in, or what that asks for, rounded
    up. None: it says neither, and Ray counts those of the node."""
    container = ray_container(path, pod, {}, gpus)
    resources = None if container is None else container.get("resources")
    if resources is None:
        return None
    for kind in ("limits", "requests"):
        amount = resources.entries(kind).get("cpu")
        value = None if amount is None else known(amount.value)
        if value is not None:
            return math.ceil(value)
    return None


def ray_container(path: str, pod: Pod, variables: Mapping[str, str], gpus: int) -> Located | None:
    """The container that Ray runs in, of whichever image; None where a template has taken its name. The arguments are
    those of ``pod_template``."""
    spec = pod_template(path, pod, variables, gpus, "any").get("spec")
    containers = [] if spec is None else spec.items("containers")
    return next((found for found in containers if found.text("name") == CONTAINER), None)


def _container(
    path: str, document: Mapping[str, Any], variables: Mapping[str, str], gpus: int, image: str, pod: Pod
) -> Located:
    resources = located(f"{path}.resources", document.get("resources", {}))
    if gpus:
        counted = Located(f"{path.removesuffix('.pod')}.gpusPerReplica", str(gpus))
        limits = resources.get("limits")
        known = limits.value if limits is not None else {}
        limit = Located(f"{path}.resources.limits", {**known, pod.gpu_resource: counted})
        resources = Located(resources.path, {**resources.value, "limits": limit})
    beside = f"{path.removesuffix('.pod')}.env"
    env = [
        *(located(f"{path}.env[{index}]", item) for index, item in enumerate(document.get("env", ()))),
        *(
            located(f"{beside}.{name}", {"name": name, "value": value})
            for name, value in variables.items()
            if name not in {item.name for item in pod.env}
        ),
    ]
    where = f"{path}.template.spec.containers"
    return Located(
        where,
        {
            "name": Located(where, CONTAINER),
            "image": Located("spec.image", image),
            "env": Located(f"{path}.env", env),
            "resources": resources,
            "securityContext": located(where, CONTAINER_SECURITY),
            "volumeMounts": located(f"{path}.volumeMounts", document.get("volumeMounts", [])),
        },
    )


def _tolerations(path: str, pod: Pod) -> list[Located]:
    return [
        located(f"{path}.tolerations[{index}]", {**item.document(), "operator": item.operator})
        for index, item in enumerate(pod.tolerations)
    ]
