"""State in a bucket: a job without any claim of its own loses its head, and goes on from what the store has."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from ledger import check_every_prompt_once, rows_of
from namespaces import default_image
from resumes import check_resumed
from world import ENVIRONMENT, World, restricted_pod

pytestmark = pytest.mark.timeout(1500)
STORE = "store"
STEPS = 60
CREDENTIALS = {"id": "somebody", "secret": "of no importance"}
MAKE = "import fsspec, sys; fsspec.filesystem('s3').mkdir(sys.argv[1])"
READ = "import fsspec, sys; sys.stdout.buffer.write(fsspec.open(sys.argv[1]).open().read())"


class Store:
    """An S3 server (moto's) in a pod, for whose credentials there is a Secret."""

    def __init__(self, world: World) -> None:
        if not world.settings.mounts_environment:
            pytest.skip("the S3 server comes from the project's environment, which this cluster does not mount")
        self._world = world
        binaries = f"{world.environment_path}/.venv/bin"
        self._python = f"{binaries}/python"
        pod = restricted_pod(STORE, default_image(world), [f"{binaries}/moto_server", "-H", "0.0.0.0", "-p", "5000"])
        pod["metadata"]["labels"] = {"app": STORE}
        (container,) = pod["spec"]["containers"]
        container["readinessProbe"] = {"httpGet": {"path": "/", "port": 5000}, "periodSeconds": 1}
        container["volumeMounts"] = [
            {"name": ENVIRONMENT, "mountPath": world.environment_path, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ]
        claim = {"claimName": ENVIRONMENT, "readOnly": True}
        pod["spec"]["volumes"] = [
            {"name": ENVIRONMENT, "persistentVolumeClaim": claim},
            {"name": "tmp", "emptyDir": {}},
        ]
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": STORE},
            "spec": {"selector": {"app": STORE}, "ports": [{"port": 80, "targetPort": 5000}]},
        }
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": STORE},
            "stringData": CREDENTIALS,
        }
        world.apply(pod, service, secret)
        world.kubectl("wait", f"pod/{STORE}", "--for=condition=Ready", "--timeout=120s", seconds=130)
        self._ask(MAKE, "bucket")

    def read(self, address: str) -> bytes:
        """An object."""
        return self._ask(READ, address)

    def _ask(self, program: str, argument: str) -> bytes:
        own = {
            "AWS_ENDPOINT_URL": "http://127.0.0.1:5000",
            "AWS_ACCESS_KEY_ID": CREDENTIALS["id"],
            "AWS_SECRET_ACCESS_KEY": CREDENTIALS["secret"],
        }
        variables = " ".join(f"{name}='{value}'" for name, value in own.items())
        command = f'set -o pipefail; {variables} {self._python} -c "{program}" {argument} | base64'
        return base64.b64decode(self._world.kubectl("exec", STORE, "--", "bash", "-c", command))

    @property
    def environment(self) -> list[dict[str, Any]]:
        def of_secret(name: str, key: str) -> dict[str, Any]:
            return {"name": name, "valueFrom": {"secretKeyRef": {"name": STORE, "key": key}}}

        return [
            {"name": "AWS_ENDPOINT_URL", "value": f"http://{STORE}"},
            of_secret("AWS_ACCESS_KEY_ID", "id"),
            of_secret("AWS_SECRET_ACCESS_KEY", "secret"),
        ]

    def close(self) -> None:
        for kind in ("pod", "service", "secret"):
            self._world.kubectl("delete", kind, STORE, "--grace-period=0" if kind == "pod" else "--wait=false")


@pytest.fixture
def store(world: World) -> Iterator[Store]:
    made = Store(world)
    yield made
    made.close()


def test_a_job_whose_state_is_in_a_bucket_survives_its_head(world: World, store: Store) -> None:
    name = "bucket"
    pod = world.pod()
    pod["env"] = [*pod["env"], *store.environment]
    document = world.job_document(
        name,
        head={"pod": pod},
        rollout={"pod": pod},
        trainer={"pod": pod},
        checkpoint={"uri": "s3://bucket/runs"},
        stop={"steps": STEPS},
        validation={"every": STEPS, "atStart": False},
    )
    world.apply(document)
    world.until_condition(name, "CheckpointAvailable", "True")
    (head,) = world.pods(name, "head")
    world.kubectl("delete", "pod", head["metadata"]["name"], "--grace-period=0", "--force")
    job = world.until_finished(name)
    assert [attempt["reason"] for attempt in job["status"]["attempts"]] == ["HeadLost", "Completed"]

    state = f"s3://bucket/runs/{world.namespace}/{name}-{job['metadata']['uid']}"
    checkpoint = job["status"]["checkpoint"]
    assert checkpoint["step"] == STEPS
    assert checkpoint["uri"].startswith(f"{state}/checkpoints/step-{STEPS:08d}-")
    lines = [json.loads(line) for line in store.read(f"{state}/metrics.jsonl").splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert json.loads(store.read(f"{state}/summary.json"))["report"] == f"{state}/report.html"
    assert b"<svg" in store.read(f"{state}/report.html")
    rows = rows_of(store.read(f"{checkpoint['uri']}/ledger.sqlite"))
    check_every_prompt_once(rows, STEPS)
    check_resumed(job, store.read(f"{state}/logs/attempt-2.log").decode(), rows)
