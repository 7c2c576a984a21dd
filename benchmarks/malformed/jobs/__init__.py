"""Malformed jobs: a sound job with up to three mistakes, held against a real API server and ``rljob validate``.

``run(plane, count, seed)`` draws so many of them, the same ones each time, and asks for three verdicts: what ``rljob
validate`` says; what the API server says of the RLJob in a dry run; and what it says of the pods and the RayCluster
that the operator would make of it. A fault is a job that one side takes and the other refuses, or that both refuse and
whose field is named by the server and not by ``validate``. What only ``validate`` can see has to have its reason
written down beside the rule (``not_in_cel``).
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.environments import ROOT
from benchmarks.malformed.jobs.mistakes import Mistake, Schemas, make
from benchmarks.malformed.jobs.parts import Document, sound_job
from rljob_api import Readable, RLJob, Violation, resolve
from rljob_operator import objects
from rljob_operator.settings import Settings

sys.path.insert(0, str(ROOT / "tests" / "integration"))
sys.path.insert(0, str(ROOT / "deploy"))

from verdicts import NOT_IN_CEL, Verdict, differences, of_ours_on, of_the_server, rules_broken_by, verdict_of

if TYPE_CHECKING:
    from kube.control_plane import ControlPlane

ACCEPTED, REFUSED, FAULT = "accepted by all", "refused by all", "fault"
BY_PODS, ALONE = "refused by validate and in its pods", "refused by validate alone, with reason"
NAMESPACE = "default"
ASKING = 3
"""Threads that ask the API server."""
PROMPTS = "the tokenizer does not know every character of the prompt"
"""What `validate` says of a row of a built-in task, and no schema can, which makes none."""
ON_THE_PODS = frozenset({"pods_pass_a_dry_run"})
"""Rules about what the API server refuses in the pods of a job, if not in the job."""
FILES = re.compile(r"(source|uri|from|function|tokenizer|revision)$")
"""Fields that name files of the machine that validates, of which the API server knows nothing."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A job and what was done to it."""

    number: int
    document: Document
    mistakes: Sequence[Mistake]


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What became of one job."""

    number: int
    kind: str
    """What was done to it last."""
    outcome: str
    says: str
    document: Document
    mistakes: Sequence[Mistake]

    def __str__(self) -> str:
        return f"job {self.number}: {'; '.join(map(str, self.mistakes))}\n{self.says}"


def run(plane: ControlPlane, count: int, seed: int) -> list[JobRecord]:
    """The records of ``count`` jobs."""
    schemas = published(plane)
    drawn = [draw(number, f"{seed} {number}", schemas) for number in range(count)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(ASKING) as pool:
        return list(pool.map(lambda job: judged(plane, job, Path(folder)), drawn))


def published(plane: ControlPlane) -> Schemas:
    """The schemas that the mistakes are drawn from."""
    crd = plane.call("GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rljobs.rljob.dev")
    pods = plane.call("GET", "/openapi/v3/api/v1")["components"]["schemas"]
    return Schemas(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"], pods)


def draw(number: int, seed: str, schemas: Schemas) -> Drawn:
    """The job of a seed."""
    dice = random.Random(seed)
    document = sound_job(dice)
    mistakes = [make(document, schemas, dice) for _ in range(dice.choice([0, 1, 1, 1, 1, 1, 1, 2, 3]))]
    return Drawn(number, document, mistakes)


def judged(plane: ControlPlane, job: Drawn, folder: Path) -> JobRecord:
    """One job before all three judges."""
    text = json.dumps(job.document, ensure_ascii=False)
    ours, theirs = of_ours_on(job.document), of_the_server(plane, NAMESPACE, text)
    beyond = _beyond(job.document, folder) if ours.accepted else []
    made = _made(job.document)
    pod = _first_refusal(plane, made) if theirs.accepted else None
    kind = job.mistakes[-1].kind if job.mistakes else "none"

    def record(outcome: str, says: str = "") -> JobRecord:
        return JobRecord(job.number, kind, outcome, says, job.document, job.mistakes)

    if beyond:
        ours = Verdict(False, frozenset(violation.path for violation in beyond), "\n".join(map(str, beyond)))
    if theirs.accepted and pod is None:
        if ours.accepted:
            return record(ACCEPTED)
        if beyond and all(PROMPTS in violation.problem for violation in beyond):
            return record(ALONE, "prompts")
        broken = rules_broken_by(job.document)
        # Of pods that cannot be made the API server says nothing.
        if broken and broken <= NOT_IN_CEL - (ON_THE_PODS if made else frozenset()):
            return record(ALONE, ", ".join(sorted(broken)))
        return record(FAULT, f"the servers accept, validate says: {ours.message}")
    if ours.accepted:
        return record(FAULT, f"validate accepts, the server says: {(pod or theirs).message}")
    if pod is None:
        unheard = differences(plane, NAMESPACE, text, theirs, ours)
    else:
        unheard = [
            f"{path}: named by the server ({pod.message}), not by validate: {ours.message}"
            for path in sorted(pod.paths)
            if not _named(path, ours.paths) and not _follows(path, pod.paths)
        ]
    if unheard:
        return record(FAULT, "\n".join(unheard))
    return record(REFUSED if pod is None else BY_PODS)


def _beyond(document: Document, folder: Path) -> list[Violation]:
    """What validate says of more than the document, but for files of the machine."""
    from rljob_trainer.preflight import preflight

    found = preflight(Readable(RLJob.model_validate(document)), base=folder, code=[folder])
    return [violation for violation in found if not FILES.search(violation.path)]


def _made(document: Document) -> list[tuple[str, Document]]:
    """What the operator would create, as templates of pods and as their RayCluster, with the path at which such objects
    are created; nothing if the job cannot be read or its template not merged."""
    try:
        job = resolve(RLJob.model_validate(document))
        cluster = objects.ray_cluster(job, "hash", "uid", 1, 1, "key", Settings())
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
    cluster["metadata"]["ownerReferences"] = []
    core = f"/api/v1/namespaces/{NAMESPACE}/podtemplates"
    made = []
    for number, group in enumerate([cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]):
        metadata = {"name": f"tiny-{number}"}
        made.append(
            (core, {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": group["template"]})
        )
    return [*made, (f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters", cluster)]


def _first_refusal(plane: ControlPlane, made: Sequence[tuple[str, Document]]) -> Verdict | None:
    """Of objects in dry runs; None: all are taken."""
    verdicts = (verdict_of(plane, kind, json.dumps(document, ensure_ascii=False)) for kind, document in made)
    return next((verdict for verdict in verdicts if not verdict.accepted), None)


def _follows(path: str, others: frozenset[str]) -> bool:
    """Whether the server names a mount because its volume is none, for another reason that it names too."""
    return bool(re.search(r"volumeMounts\[\d+\]\.name$", path)) and any(".volumes[" in other for other in others)


def _named(path: str, ours: frozenset[str]) -> bool:
    """Whether a field of the pods is named by one of our paths: it, its neighbour or what it is in, by their names,
    since places in a merged pod differ."""
    theirs = re.findall(r"[A-Za-z]\w*", re.sub(r"\{.*\}", "", path))[-2:]
    named = [re.findall(r"[A-Za-z]\w*", own) for own in ours]
    return any(theirs[-1:] == [name] for own in named for name in own) or any(
        set(theirs) & set(own[-3:]) for own in named
    )
