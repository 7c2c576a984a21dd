"""What a job's status says of a cluster that the API server refuses, from the API server's own words."""

from __future__ import annotations

import pytest

from rljob_operator.executor import _why_refused

STRICT = 'RayCluster in version "v1" cannot be handled as a RayCluster: strict decoding error: '
OF_THE_POD = 'unknown field "spec.headGroupSpec.template.spec.hostUsers"'
OF_KUBERAY = 'unknown field "spec.authOptions"'
TOO_OLD = "KubeRay is too old: its RayCluster has no spec.authOptions; install 1.6 or newer, including its CRDs"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (STRICT + OF_KUBERAY, TOO_OLD),
        (f"{STRICT}{OF_THE_POD}, {OF_KUBERAY}", TOO_OLD),
        (STRICT + OF_THE_POD, f"the API server refuses the cluster: {OF_THE_POD}"),
        (
            'RayCluster.ray.io "a-c1" is invalid: spec.rayVersion: Too long',
            "the API server refuses the cluster: spec.rayVersion: Too long",
        ),
    ],
)
def test_only_fields_that_rljob_writes_itself_tell_of_an_old_kuberay(message: str, said: str) -> None:
    assert _why_refused(message) == said
