"""What the API server says of the pods that the operator makes of a job, said beforehand and with the job file's paths.

``fields.json`` holds the names and types of everything in a pod, from Kubernetes' own published schema; the modules
beside it hold what Kubernetes checks beyond that, one theme each. ``tests/integration/test_malformed_jobs.py`` holds
all of it against a real API server.
"""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.pod_template import (
    containers,
    disks,
    environment,
    mounts,
    network,
    resources,
    scheduling,
    security,
    volumes,
)
from rljob_api.pod_template.fields import ROOT
from rljob_api.pod_template.located import Located
from rljob_api.pod_template.registry import PodSeen
from rljob_api.pod_template.shape import violations
from rljob_api.violations import Violation

THEMES = (containers, disks, environment, mounts, network, resources, scheduling, security, volumes)
"""The modules whose checks are asked."""


def broken(template: Located) -> Iterator[Violation]:
    """Everything wrong with a pod template, as the operator would send it: one thing of each place."""
    said: set[str] = set()
    for violation in violations(template, ROOT, PodSeen(template)):
        if violation.path not in said:
            said.add(violation.path)
            yield violation


__all__ = ["broken"]
