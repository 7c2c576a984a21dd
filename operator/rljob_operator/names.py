"""Every name, label, annotation and port by which the operator's objects find each other.

Nothing else in the operator spells one out. The limits behind them are KubeRay's: a RayCluster's name has at most 53
characters (`job` at most 40, enforced by the API, leaves room for `-c` and the number).
"""

from __future__ import annotations

from typing import Final

from rljob_api import cluster as _cluster
from rljob_api.rules import pods as _rules

GROUP: Final = "rljob.dev"
VERSION: Final = "v1alpha1"
PLURAL: Final = "rljobs"

FIELD_MANAGER: Final = "rljob-operator"
STATUS_MANAGER: Final = "rljob-operator-status"

JOB_LABEL: Final = "rljob.dev/job"
JOB_UID_LABEL: Final = "rljob.dev/job-uid"
OPERATOR_LABELS: Final = {"app.kubernetes.io/name": "rljob-operator"}
"""Labels by which network policies know the operator's own pods; the chart sets them."""
ROLE_LABEL: Final = _cluster.ROLE_LABEL
QUEUE_LABEL: Final = _rules.QUEUE_LABEL
PRIORITY_LABEL: Final = _rules.PRIORITY_LABEL
OF_KUEUE: Final = _rules.OF_KUEUE
"""With what Kueue's labels and annotations begin."""
ELASTIC_ANNOTATION: Final = _rules.ELASTIC_ANNOTATION

INCARNATION_ANNOTATION: Final = "rljob.dev/incarnation"
GENERATION_ANNOTATION: Final = _cluster.GENERATION_ANNOTATION
SPEC_HASH_ANNOTATION: Final = "rljob.dev/spec-hash"
ATTEMPT_ANNOTATION: Final = "rljob.dev/attempt"
"""Highest attempt that was ever started on the cluster. Written before the attempt is submitted, so that no restart of
the operator between two writes can start the same attempt twice or reuse a number."""
ATTEMPT_HEAD_ANNOTATION: Final = "rljob.dev/attempt-head"
"""UID of the head pod the attempt was started on: another head means that the attempt is lost."""
TOKEN_KEY_ANNOTATION: Final = "rljob.dev/token-key"
"""`TokenKey.id` of the key from which the cluster's tokens derive."""
MADE_AS_ANNOTATION: Final = "rljob.dev/made-as"
"""Fingerprint of the groups of a cluster as it was made: whether today's operator and job would write the same."""
FIRST_CRASH_ANNOTATION: Final = "rljob.dev/first-crash"
"""Since when pods of the cluster crash with no attempt running (`crash_loops`)."""

RAY_CLUSTER_LABEL: Final = "ray.io/cluster"
RAY_GROUP_LABEL: Final = "ray.io/group"
RAY_NODE_TYPE_LABEL: Final = "ray.io/node-type"

HEAD_ROLE: Final = _cluster.HEAD
ROLLOUT: Final = _cluster.ROLLOUT
TRAINER: Final = _cluster.TRAINER
REWARD_MODEL: Final = _cluster.REWARD_MODEL
JUDGE: Final = _cluster.JUDGE

DASHBOARD_PORT: Final = 8265

MAX_CLUSTER_NAME: Final = 53
MAX_WORKER_GROUPS: Final = 17

JOB_FOLDER: Final = "/etc/rljob/job"
"""Where the job's ConfigMap is mounted in all pods."""
JOB_FILE: Final = "job.json"
TOKEN_FOLDER: Final = "/etc/rljob/tokens"
"""Where the driver's token is mounted, in the head pod only."""
DRIVER_TOKEN_KEY: Final = "driver_token"
RAY_TOKEN_KEY: Final = "auth_token"
CODE_FOLDER: Final = _cluster.CODE_FOLDER
STORAGE_FOLDER: Final = _cluster.STORAGE_FOLDER


def cluster(job: str, incarnation: int) -> str:
    """Name of the RayCluster; a new incarnation is a new cluster."""
    return f"{job}-c{incarnation}"


def secret(cluster_name: str, uid: str, key: str) -> str:
    """Name of the Secret with a cluster's tokens.

    With a part of the job's UID and the id of the key they derive from: a Secret that is left of a former job of the
    same name, or of a try before the key was changed, has other tokens, and the operator, which may not read it, could
    not tell.
    """
    return f"{cluster_name}-{uid[:8]}-{key}"


def config_map(job: str) -> str:
    """Name of the ConfigMap that carries the job file."""
    return f"{job}-job"


def network_policy(job: str) -> str:
    """Name of the NetworkPolicy around the job's pods."""
    return f"{job}-pods"


def submission(job: str, attempt: int) -> str:
    """Ray's submission id. Ray refuses to use one twice, which makes submitting idempotent."""
    return f"{job}-a{attempt}"


def head_service(cluster_name: str) -> str:
    """Service that KubeRay puts before the head pod."""
    return f"{cluster_name}-head-svc"
