"""What an end-to-end test says: apply, kubectl, wait for a condition, read a file on the volume.

Everything goes through kubectl, as a user would do it, so the tests run against any cluster.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from testcluster import fitting

EXAMPLES = Path(__file__).parents[2] / "examples"
RESULTS = "results"
ENVIRONMENT = fitting.VOLUME
READER = "reader"
WAIT_SECONDS = 600.0
LOOK_SECONDS = 1.0
"""Between two questions: each is a kubectl, which takes a fifth of a second of the processors that the pods have."""
NONE_YET = {"status": "", "reason": "", "message": ""}
TRAINING, COMPLETED = ("True", "Training"), ("False", "Completed")
"""What `Running` says of a job."""
ON_THE_WAY = {("False", "Pending"), ("False", "Starting"), ("Unknown", "RayUnreachable")}
"""What it may say in between, or not: it depends on how fast pods and Ray are."""
RLJOB = "app.kubernetes.io/name=rljob-operator"
KUBERAY = "app.kubernetes.io/name in (kuberay, kuberay-operator)"
"""What the operators' pods are labelled with, whoever installed them."""


@dataclass(frozen=True)
class Settings:
    """What the suite has to be told about a cluster, by environment variables."""

    image: str = field(default_factory=lambda: os.environ.get("RLJOB_E2E_IMAGE", ""))
    """Image with the trainer in it. Empty: the operator's default image, with the environment from a volume."""
    storage_class: str = field(default_factory=lambda: os.environ.get("RLJOB_E2E_STORAGE_CLASS", "rljob-shared"))
    """Of volumes that pods of all nodes may write to."""
    environment_class: str = field(
        default_factory=lambda: os.environ.get("RLJOB_E2E_ENVIRONMENT_CLASS", "rljob-environment")
    )
    """Of volumes that hold the environment, annotated with the path where pods must mount it."""

    @property
    def mounts_environment(self) -> bool:
        return not self.image


@dataclass
class World:
    """A namespace whose pods must be `restricted`, with a volume for results."""

    namespace: str
    settings: Settings
    environment_path: str = ""
    kubeconfig: str = field(default_factory=lambda: os.environ.get("KUBECONFIG", ""))

    def kubectl(self, *arguments: str, text: str | None = None, seconds: float = 60) -> str:
        """Runs kubectl in the namespace; fails the test with what kubectl said."""
        command = [program(), "--namespace", self.namespace, *arguments]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=seconds)
        assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr.strip()}"
        return done.stdout

    def apply(self, *documents: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(documents))

    def get(self, kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", kind, name, "-o", "json"))
        return found

    def list(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        only = ["--selector", selector] if selector else []
        items: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, *only, "-o", "json"))["items"]
        return items

    def pods(self, job: str, role: str = "") -> list[dict[str, Any]]:
        """Pods of a job that are not being deleted."""
        selector = f"rljob.dev/job={job}" + (f",rljob.dev/role={role}" if role else "")
        return [pod for pod in self.list("pods", selector) if "deletionTimestamp" not in pod["metadata"]]

    def condition(self, job: str, kind: str) -> dict[str, str]:
        """A condition of a job; empty strings where it has none yet."""
        return self.conditions(job).get(kind, NONE_YET)

    def conditions(self, job: str) -> dict[str, dict[str, str]]:
        """The conditions of a job by type, all of one moment."""
        return {item["type"]: item for item in self.get("rlj", job).get("status", {}).get("conditions", [])}

    def step(self, job: str) -> int:
        """The last step that the job reported."""
        return int(self.get("rlj", job).get("status", {}).get("progress", {}).get("step", 0))

    def until(self, what: str, there: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not there():
            assert time.monotonic() < deadline, f"waited {seconds:.0f} s until {what}"
            time.sleep(LOOK_SECONDS)

    def until_condition(
        self, job: str, kind: str, status: str, reason: str = "", seconds: float = WAIT_SECONDS
    ) -> dict[str, str]:
        """Waits for a condition, and gives up at once when the job has failed instead."""
        deadline = time.monotonic() + seconds
        while True:
            conditions = self.conditions(job)
            found, failed, running = (conditions.get(name, NONE_YET) for name in (kind, "Failed", "Running"))
            if found["status"] == status and reason in ("", found["reason"]):
                return found
            assert kind == "Failed" or failed["status"] != "True", f"{job} failed: {failed['message']}"
            assert time.monotonic() < deadline, (
                f"waited {seconds:.0f} s for {kind}={status} {reason}; {kind} is {found['status']} {found['reason']}:"
                f" {found['message']} and Running is {running['status']} {running['reason']}: {running['message']}"
            )
            time.sleep(LOOK_SECONDS)

    def state_folder(self, job: str) -> str:
        """Where a job of `job_document` keeps its state on the results volume, relative to its root."""
        uid = self.get("rlj", job)["metadata"]["uid"]
        return f"runs/{self.namespace}/{job}-{uid}"

    def metrics(self, job: str) -> list[dict[str, Any]]:
        """What the job wrote about each of its steps, in order."""
        text = self.in_results("cat", f"{self.state_folder(job)}/metrics.jsonl")
        return [json.loads(line) for line in text.splitlines()]

    def driver_log(self, job: str, attempt: int) -> str:
        """What the driver said in an attempt."""
        return self.in_results("cat", f"{self.state_folder(job)}/logs/attempt-{attempt}.log")

    @contextmanager
    def watching(self, kind: str) -> Iterator[list[dict[str, Any]]]:
        """Collects every state in which objects of a kind are seen while the context lasts; full when it has ended.

        There must be one when it begins: before the first one a watch says nothing.
        """
        seen: list[dict[str, Any]] = []
        command = [program(), "--namespace", self.namespace, "get", kind, "--watch", "--output=json"]
        with tempfile.TemporaryFile("w+") as said, subprocess.Popen(command, stdout=said) as watch:
            try:
                self.until("the watch has begun", lambda: os.fstat(said.fileno()).st_size > 0, seconds=60)
                yield seen
            finally:
                watch.terminate()
                watch.wait()
                said.seek(0)
                seen += documents(said.read())

    def until_step(self, job: str, step: int, seconds: float = WAIT_SECONDS) -> None:
        """Waits until a job has done that many steps."""
        self.until(f"{job} has done step {step}", lambda: self.step(job) >= step, seconds)

    def suspend(self, job: str) -> dict[str, Any]:
        """Suspends a job, and returns it when its pods are gone."""
        self.kubectl("patch", "rlj", job, "--type=merge", "--patch", '{"spec": {"suspend": true}}')
        self.until_condition(job, "Suspended", "True")
        return self.get("rlj", job)

    def until_finished(self, job: str, seconds: float = 600) -> dict[str, Any]:
        """Waits for the job's end, which must be a good one."""
        timeout = f"--timeout={seconds:.0f}s"
        self.kubectl("wait", f"rlj/{job}", "--for=condition=Finished", timeout, seconds=seconds + 10)
        failed = self.condition(job, "Failed")
        assert self.condition(job, "Succeeded")["status"] == "True", f"{failed['reason']}: {failed['message']}"
        return self.get("rlj", job)

    def in_results(self, *command: str, text: str | None = None) -> str:
        """Runs a command in a pod at the root of the results volume, with a text on its standard input."""
        return self.kubectl("exec", *(() if text is None else ("-i",)), READER, "--", *command, text=text)

    def job_document(self, name: str, **spec: Any) -> dict[str, Any]:
        """The quick start's job for this cluster, with small pods; `spec` replaces parts of sections."""
        job: dict[str, Any] = yaml.safe_load((EXAMPLES / "quickstart.yaml").read_text())
        job["metadata"] = {"name": name}
        sections = {
            "head": {"pod": self.pod()},
            "rollout": {"replicas": 1, "gpusPerReplica": 0, "pod": self.pod()},
            "trainer": {"replicas": 1, "gpusPerReplica": 0, "pod": self.pod()},
            "checkpoint": {"uri": f"pvc://{RESULTS}/runs", "everySteps": 5, "keep": 2},
        }
        if self.settings.image:
            job["spec"]["image"] = self.settings.image
        for changes in (sections, spec):
            for section, value in changes.items():
                old = job["spec"].get(section)
                job["spec"][section] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
        return job

    def pod(self) -> dict[str, Any]:
        """Pod settings for a small cluster: next to no CPU is reserved, and none is forbidden."""
        pod: dict[str, Any] = {
            "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}, "limits": {"memory": "3Gi"}},
            "sharedMemory": "256Mi",
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        }
        return fitting.mounting(pod, Path(self.environment_path)) if self.settings.mounts_environment else pod


def story(
    seen: list[dict[str, Any]], job: str, kind: str, without: Collection[tuple[str, str]] = ()
) -> list[tuple[str, str]]:
    """Status and reason of a condition as they followed each other in what was seen of a job, but for some."""
    states = [
        (condition["status"], condition["reason"])
        for state in seen
        if state["metadata"]["name"] == job
        for condition in state.get("status", {}).get("conditions", [])
        if condition["type"] == kind
    ]
    told = [state for state in states if state not in without]
    return [state for before, state in itertools.pairwise([None, *told]) if state != before]


def documents(text: str) -> list[dict[str, Any]]:
    """The JSON objects that stand one after the other in a text; a last one that is cut off is left out."""
    found: list[dict[str, Any]] = []
    decoder, text = json.JSONDecoder(), text.strip()
    while text:
        try:
            item, end = decoder.raw_decode(text)
        except json.JSONDecodeError:
            break
        found.append(item)
        text = text[end:].lstrip()
    return found


def claim(name: str, storage_class: str, mode: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "storageClassName": storage_class,
            "accessModes": [mode],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }


def reader(image: str) -> dict[str, Any]:
    """A pod that looks at the results volume."""
    pod = restricted_pod(READER, image, ["bash", "-c", "sleep infinity"])
    (container,) = pod["spec"]["containers"]
    container |= {"workingDir": "/results", "volumeMounts": [{"name": RESULTS, "mountPath": "/results"}]}
    pod["spec"]["volumes"] = [{"name": RESULTS, "persistentVolumeClaim": {"claimName": RESULTS}}]
    return pod


def restricted_pod(name: str, image: str, command: list[str]) -> dict[str, Any]:
    """A pod of one small container that a `restricted` namespace admits."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": name,
                    "image": image,
                    "command": command,
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    "resources": {"requests": {"cpu": "5m", "memory": "16Mi"}},
                }
            ],
        },
    }


def program() -> str:
    """kubectl: the installed one, or the one that the test cluster was built with."""
    installed = shutil.which("kubectl")
    if installed:
        return installed
    from testcluster.programs import find

    return str(find(build=False).path("kubectl"))
