"""The Kubernetes objects of a job: ConfigMap with the job file, Secret with the tokens, RayCluster. Pure.

`rljob render` prints what these functions return, and the operator sends the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from rljob_api import API_VERSION, KIND, ResolvedJob, Spec, schema
from rljob_api.spec.pod import Pod
from rljob_operator import names, pods
from rljob_operator.edited_groups import FIXED
from rljob_operator.metadata import metadata
from rljob_operator.pools import Role, WorkerGroup, pools
from rljob_operator.settings import Settings
from rljob_operator.tokens import JobTokens

Document = dict[str, Any]

_NO_LOG_MONITOR = {"include-log-monitor": "0"}
"""Leaves out the process that sends to drivers what workers print, 80 MB in each pod: ours do not ask for it. (It says
"0" because KubeRay leaves out an option that says false.)"""


def config_map(job: ResolvedJob, document: Mapping[str, Any], uid: str, generation: int) -> Document:
    """The job file for the pods. `document` is the job's spec as the user wrote it."""
    written = {
        "name": job.metadata.name,
        "namespace": job.metadata.namespace,
        "annotations": {"rljob.dev/uid": uid, names.GENERATION_ANNOTATION: str(generation)},
    }
    file = {"apiVersion": API_VERSION, "kind": KIND, "metadata": written, "spec": document}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, uid, names.config_map(job.metadata.name), "job"),
        "data": {names.JOB_FILE: json.dumps(file, indent=2, ensure_ascii=False)},
    }


def secret(job: ResolvedJob, uid: str, incarnation: int, tokens: JobTokens) -> Document:
    """The tokens of one incarnation."""
    name = names.secret(names.cluster(job.metadata.name, incarnation), uid, tokens.key)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, uid, name, "tokens"),
        "type": "Opaque",
        # Tokens never change, and the operator, which may only create Secrets, could not set changed ones right.
        "immutable": True,
        "stringData": {names.RAY_TOKEN_KEY: tokens.ray, names.DRIVER_TOKEN_KEY: tokens.driver},
    }


def ray_cluster(
    job: ResolvedJob, fingerprint: str, uid: str, generation: int, incarnation: int, key: str, settings: Settings
) -> Document:
    """The RayCluster of one incarnation. `key`: the id of the key from which its tokens derive.

    `spec.suspend` is left out on purpose: where a queue is used it belongs to Kueue.
    """
    name = names.cluster(job.metadata.name, incarnation)
    described = metadata(job, uid, name, "raycluster")
    described["annotations"] |= {
        names.INCARNATION_ANNOTATION: str(incarnation),
        names.GENERATION_ANNOTATION: str(generation),
        names.SPEC_HASH_ANNOTATION: fingerprint,
        names.ATTEMPT_ANNOTATION: "0",
        names.TOKEN_KEY_ANNOTATION: key,
    }
    # Without a queue of the job's own, too: Kueue may give the cluster its namespace's default one.
    priority = job.metadata.labels.get(names.PRIORITY_LABEL)
    if priority is not None:
        described["labels"][names.PRIORITY_LABEL] = priority
    if job.spec.queue_name is not None:
        described["labels"][names.QUEUE_LABEL] = job.spec.queue_name
        if any(pool.resizable for pool in pools(job)):
            described["annotations"][names.ELASTIC_ANNOTATION] = "true"
    head, tokens = Role(names.HEAD_ROLE, job.spec.head.pod, {}), names.secret(name, uid, key)
    spec: Document = {
        "rayVersion": settings.ray_version,
        "enableInTreeAutoscaling": False,
        "headGroupSpec": {
            # Nothing but Ray's own services and the driver runs on the head. Its autoscaler has nothing to do.
            "rayStartParams": {"num-cpus": "0", "no-monitor": "true", **_NO_LOG_MONITOR},
            "labels": {names.ROLE_LABEL: names.HEAD_ROLE},
            "template": pods.template(job, head, tokens, settings),
        },
        "workerGroupSpecs": [_group(job, pool, tokens, settings) for pool in pools(job)],
    }
    if settings.token_authentication:
        spec["authOptions"] = {"mode": "token", "secretName": tokens}
    fixed = [
        {field: group[field] for field in FIXED if field in group}
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])
    ]
    described["annotations"][names.MADE_AS_ANNOTATION] = _fingerprint(fixed)
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": described, "spec": spec}


def pod_templates(job: ResolvedJob, cluster: Mapping[str, Any]) -> list[Document]:
    """PodTemplates with the pods of a RayCluster of ours, of those roles whose pods the job says anything about.

    They are never stored: a dry run of them tells what the API server thinks of the pods. A RayCluster is taken with
    nearly any pod in it, and what is wrong would only appear in KubeRay's log.
    """
    said = {names.HEAD_ROLE: job.spec.head.pod, **{pool.name: pool.role.pod for pool in pools(job)}}
    templates = {names.HEAD_ROLE: cluster["spec"]["headGroupSpec"]["template"]}
    templates |= {group["groupName"]: group["template"] for group in cluster["spec"]["workerGroupSpecs"]}
    metadata = {"namespace": job.metadata.namespace} if job.metadata.namespace is not None else {}
    return [
        {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": f"{job.metadata.name}-{role}", **metadata},
            "template": templates[role],
        }
        for role, pod in said.items()
        if pod != Pod()
    ]


def spec_hash(spec: Spec) -> str:
    """Fingerprint of everything in a job's spec that a running incarnation cannot follow.

    Live fields (pool sizes, staleness, suspend ...) don't count, nor does whether a default is spelled out.
    """
    fixed = _without_live(spec.document(), schema.root().fields["spec"])
    return _fingerprint(fixed)


def _fingerprint(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def _without_live(value: Any, node: schema.Node) -> Any:
    if node.kind != "object" or not isinstance(value, Mapping):
        return value
    kept = {}
    for name, item in value.items():
        field = node.fields.get(name)
        if field is None or field.change.when != "live":
            rest = item if field is None else _without_live(item, field)
            # A section of live fields alone says as much as none, unless it is one that need not be there.
            optional = field is not None and field.kind == "object" and not (field.required or field.has_default)
            if rest or not item or optional:
                kept[name] = rest
    return kept


def _group(job: ResolvedJob, pool: WorkerGroup, tokens: str, settings: Settings) -> Document:
    return {
        "groupName": pool.name,
        "replicas": pool.replicas,
        "minReplicas": pool.lower_bound,
        "maxReplicas": pool.most,
        "numOfHosts": pool.hosts,
        "rayStartParams": {**_NO_LOG_MONITOR},
        # Become labels of the Ray node, by which the driver places ranks and engines, and of the pod.
        "labels": {names.ROLE_LABEL: pool.name},
        "template": pods.template(job, pool.role, tokens, settings),
    }
