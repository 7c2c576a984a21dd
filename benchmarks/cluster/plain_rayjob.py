"""The same training as a plain RayJob: pods and program of an RLJob, created by KubeRay without our operator."""

from __future__ import annotations

import json
from typing import Any

from rljob_api import check, resolve
from rljob_operator import names, objects
from rljob_operator.entrypoint import driver_command
from rljob_operator.settings import Settings

UID = "plain"
INCARNATION = 1
KEY = "00000000"
WITHOUT_OPERATOR = ("ownerReferences",)


def documents(job: dict[str, Any], namespace: str, image: str, backoff_limit: int = 0) -> list[dict[str, Any]]:
    """RayJob, ConfigMap with the job file, and Secret with the driver's token, for the RLJob document ``job``.

    KubeRay submits over HTTP: its default, a submitter pod, would take longer. ``backoff_limit``: how often it begins
    the job anew, on a new cluster.
    """
    placed = {**job, "metadata": {**job["metadata"], "namespace": namespace}}
    document, violations = check(placed)
    if document is None or violations:
        raise ValueError("; ".join(str(violation) for violation in violations))
    resolved = resolve(document)
    name = str(job["metadata"]["name"])
    settings = Settings(default_image=image, token_authentication=False)
    cluster = objects.ray_cluster(resolved, "", UID, 1, INCARNATION, KEY, settings)
    config = objects.config_map(resolved, job["spec"], UID, 1)
    for left_out in WITHOUT_OPERATOR:
        config["metadata"].pop(left_out)
    environment = {
        "RLJOB_NAMESPACE": namespace,
        "RLJOB_NAME": name,
        "RLJOB_UID": UID,
        "RLJOB_ATTEMPT": "1",
        "RLJOB_INCARNATION": str(INCARNATION),
    }
    return [
        config,
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": names.secret(names.cluster(name, INCARNATION), UID, KEY), "namespace": namespace},
            "stringData": {names.DRIVER_TOKEN_KEY: "0" * 64},
        },
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                "entrypoint": driver_command(1, 1),
                "submissionMode": "HTTPMode",
                "runtimeEnvYAML": json.dumps({"env_vars": environment}),
                "shutdownAfterJobFinishes": True,
                "backoffLimit": backoff_limit,
                "rayClusterSpec": cluster["spec"],
            },
        },
    ]
