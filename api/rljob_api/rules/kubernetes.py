"""Rules about the pods as Kubernetes sees them: what the API server would refuse when the job's cluster is made."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from rljob_api.pod_template import broken
from rljob_api.pod_template.of_job import pod_template
from rljob_api.rules import pods, volumes
from rljob_api.rules import templates as _templates
from rljob_api.rules.registry import Job, JobRule, rule
from rljob_api.rules.templates import maps_in, templates
from rljob_api.spec.base import IMAGE
from rljob_api.spec.pod import Pod
from rljob_api.violations import Violation

_ANY_IMAGE = "rljob"
"""Stands for the one that the operator was installed with."""


_SAID_ALREADY: Sequence[JobRule] = (
    *(pods.variables_have_one_value, pods.variables_differ, pods.pull_secrets_differ, pods.tolerations_are_complete),
    *(volumes.volumes_have_names, volumes.mounts_have_volumes, volumes.mount_paths_are_free),
    *(_templates.templates_are_well_formed, _templates.templates_leave_ray_alone),
)
"""Rules of ours that look at the same places with better words."""


@rule(not_in_cel="the API server says it of the pods themselves, of which the operator makes a dry run")
def pods_pass_a_dry_run(job: Job) -> Iterator[Violation]:
    spec = job.spec
    said = {violation.path for other in _SAID_ALREADY for violation in other(job)}
    beside: Mapping[str, tuple[Mapping[str, str], int]] = {
        "spec.head.pod": ({}, 0),
        **{f"{path}.pod": (pool.env, pool.gpus_per_replica) for path, pool in job.pools},
    }
    for path, pod in job.pods:
        unused = path == "spec.rollout.pod" and job.resolved.placement == "colocated"
        if pod != Pod() and not unused:
            variables, gpus = beside[path]
            template = pod_template(path, pod, variables, gpus, spec.image or _ANY_IMAGE)
            yield from (found for found in broken(template) if not {found.path, found.path.rpartition(".")[0]} & said)


@rule(not_in_cel="the content of the template is hidden from CEL")
def images_are_references(job: Job) -> Iterator[Violation]:
    # The API server takes any text, and the kubelet gives up on what is no reference.
    for template, (where, pod) in zip(templates(job), job.pods, strict=True):
        places = [(f"{path}.image", container.get("image")) for path, container in template.containers]
        for path, volume in [*maps_in(f"{where}.volumes", list(pod.volumes)), *template.volumes]:
            if isinstance(image := volume.get("image"), dict):
                places.append((f"{path}.image.reference", image.get("reference")))
        for path, image in places:
            if isinstance(image, str) and image and not re.fullmatch(IMAGE[1:-1], image):
                yield Violation(path, f'"{image}" is not an image name', "write registry/name:tag")
