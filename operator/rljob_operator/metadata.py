"""Name, labels and owner of every object that the operator makes for a job. Pure."""

from __future__ import annotations

from typing import Any

from rljob_api import API_VERSION, KIND, ResolvedJob
from rljob_operator import names

Document = dict[str, Any]


def metadata(job: ResolvedJob, uid: str, name: str, component: str) -> Document:
    """`metadata` of an object that Kubernetes deletes together with its job."""
    made: Document = {
        "name": name,
        "labels": {
            "app.kubernetes.io/name": "rljob",
            "app.kubernetes.io/instance": job.metadata.name,
            "app.kubernetes.io/component": component,
            "app.kubernetes.io/part-of": "rljob",
            "app.kubernetes.io/managed-by": "rljob-operator",
            names.JOB_LABEL: job.metadata.name,
            names.JOB_UID_LABEL: uid,
        },
        "annotations": {},
        "ownerReferences": owner(job, uid),
    }
    if job.metadata.namespace is not None:
        made["namespace"] = job.metadata.namespace
    return made


def owner(job: ResolvedJob, uid: str) -> list[Document]:
    """The reference by which Kubernetes deletes an object together with its job."""
    return [
        {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": job.metadata.name,
            "uid": uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]
