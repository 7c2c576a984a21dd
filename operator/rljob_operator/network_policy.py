"""Who may connect to a job's pods: the job's own pods, and the operator on the head. Pure.

Ray's services run whatever they are sent, so nobody else has business there. The policy is made by the operator, not by
the chart, because a policy lives in the namespace of the pods that it guards, and jobs are in any namespace. It belongs
to the RLJob, not to one cluster: an incarnation that replaces another is never without it. Egress stays open, since
models, data and checkpoints are anywhere. Policies add up: who wants to let somebody else in writes another one.
"""

from __future__ import annotations

from typing import Any

from rljob_api import ResolvedJob
from rljob_api.status import DRIVER_PORT
from rljob_operator import names
from rljob_operator.metadata import metadata
from rljob_operator.settings import Settings


def network_policy(job: ResolvedJob, uid: str, settings: Settings) -> dict[str, Any]:
    """The NetworkPolicy of a job. Pods with hostNetwork are beyond the reach of any such policy."""
    pods = {"matchLabels": {names.JOB_LABEL: job.metadata.name}}
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": settings.operator_namespace}},
        "podSelector": {"matchLabels": dict(names.OPERATOR_LABELS)},
    }
    ports = [{"port": port, "protocol": "TCP"} for port in (names.DASHBOARD_PORT, DRIVER_PORT)]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job, uid, names.network_policy(job.metadata.name), "network"),
        "spec": {
            "podSelector": pods,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": pods}]},
                {"from": [operator], "ports": ports},
                *(dict(rule) for rule in settings.ingress),
            ],
        },
    }
