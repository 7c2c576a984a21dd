"""Where a job's judge is: each address that cannot be is refused with one sentence, which repeats no secret."""

from __future__ import annotations

import pytest

from rljob_api import JobInvalid, load_jobs

JOB = """
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: test}
spec:
  model: {source: org/model}
  data: {train: {source: org/data}, prompt: question}
  algorithm: {preset: grpo}
  reward: {functions: [{type: judge, judge: {baseUrl: "%s", model: m, template: "{response}"}}]}
"""
PATH = "spec.reward.functions[0].judge.baseUrl"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("https://me:secret@host/v1", "contains a user, and perhaps a password"),
        ("https://secret@host/v1", "contains a user, and perhaps a password"),
        ("https://host/v1?key=secret", "contains a query or fragment"),
        ("https://host/v1#secret", "contains a query or fragment"),
        ("ftp://host/v1", '"ftp://host/v1" does not begin with http:// or https://'),
        ("ftp://me:secret@host/v1", "does not begin with http:// or https://"),
        ("host:8000/v1", '"host:8000/v1" does not begin with http:// or https://'),
        ("http://host:65536/v1", '"http://host:65536/v1" has the port 65536; use 1 to 65535'),
        ("http://host:99999999", '"http://host:99999999" has the port 99999999; use 1 to 65535'),
        ("http://host:0/v1", "has the port 0; use 1 to 65535"),
        ("http://[::1]:70000/v1", "has the port 70000; use 1 to 65535"),
        ("http://[::1", '"http://[::1" lacks the "]" after its IPv6 address'),
        ("http://[::1:8000/v1", 'lacks the "]" after its IPv6 address'),
        ("http://::1/v1", "is not the address of an endpoint"),
        ("http://host:port/v1", "is not the address of an endpoint"),
        ("http://:8000/v1", "is not the address of an endpoint"),
        ("http://ho st/v1", "is not the address of an endpoint"),
    ],
)
def test_an_address_that_cannot_be_is_refused_with_one_sentence(address: str, said: str) -> None:
    with pytest.raises(JobInvalid) as caught:
        load_jobs(JOB % address)
    (violation,) = caught.value.violations
    assert (violation.path, said in str(violation)) == (PATH, True), str(violation)
    assert violation.remedy
    assert "secret" not in str(violation)


@pytest.mark.parametrize(
    "address",
    [
        *("http://host", "http://host/", "https://api.example.com/v1", "http://10.0.0.1:8000/v1/", "http://host:1"),
        *("http://host:65535/v1", "http://[::1]:8000/v1", "http://[fe80::1]/a_b/c-d/~e/%20", "http://judge.team-a:80"),
    ],
)
def test_addresses_of_endpoints(address: str) -> None:
    load_jobs(JOB % address)
