"""Reads valid jobs from text or a file: YAML, then types and bounds, then rules; all that is wrong is told at once."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rljob_api import rules, schema
from rljob_api.overrides import apply, merged
from rljob_api.problems import probably_meant, violations_of
from rljob_api.spec.job import API_VERSION, KIND, RLJob
from rljob_api.violations import JobInvalid, Violation, speaks_of, touches
from rljob_api.yaml_reading import MAX_CHARACTERS, Document, YamlError, read_documents

GROUP = API_VERSION.partition("/")[0]
FROM_THE_SERVER = frozenset(
    {
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "managedFields",
        "ownerReferences",
        "finalizers",
        "selfLink",
    }
)
"""Fields of metadata that are not the author's."""


@dataclass(frozen=True)
class Readable:
    """What can be read of a document that may have mistakes, for those who look at more than the document."""

    job: RLJob
    """The job as it is written, as far as the types are right; it may break rules."""
    wrong: frozenset[str] = frozenset()
    """Paths at which the job has a default or a stand-in, because what is written there can't be read."""

    def says(self, *paths: str) -> bool:
        """Whether the job has at these paths what the author wrote."""
        return not any(touches(path, self.wrong) for path in paths)


@dataclass(frozen=True)
class Checked:
    """The outcome for one document: a job, or why it is none."""

    job: RLJob | None
    violations: Sequence[Violation] = field(default=())
    document: Document | None = None
    readable: Readable | None = None
    """The job, or what is left of it without its wrong values; None: too little for that."""


def load_jobs(path_or_text: str | Path, assignments: Sequence[str] = (), overlays: Sequence[Path] = ()) -> list[RLJob]:
    """The jobs of a YAML file (a path) or text (anything with a line break), with the files ``overlays`` laid over each
    in order (``overrides.merged``), then ``path=value`` assignments applied.

    Objects of other kinds in the same file are left out. Raises ``JobInvalid`` with every violation of every job, of
    several jobs each under its number, and ``OSError`` when the file cannot be read.
    """
    name = None if isinstance(path_or_text, str) and "\n" in path_or_text else str(path_or_text)
    text = str(path_or_text) if name is None else read_text(Path(name))
    outcomes = check_text(text, assignments, [read_overlay(path) for path in overlays], name)
    found = [
        Violation(f"job {number}: {v.path}", v.problem, v.remedy) if len(outcomes) > 1 else v
        for number, outcome in enumerate(outcomes, 1)
        for v in outcome.violations
    ]
    if found:
        raise JobInvalid(found)
    return [outcome.job for outcome in outcomes if outcome.job is not None]


def read_overlay(path: Path) -> dict[str, Any]:
    """What a file lays over a job: one map with any part of a job in it, but not a whole one.

    Raises ``JobInvalid`` when it is none, and ``OSError`` when it cannot be read.
    """
    try:
        documents = read_documents(read_text(path))
    except YamlError as problem:
        place = f"{path}, line {problem.line}, column {problem.column}"
        raise JobInvalid([Violation(place, problem.problem, "fix the YAML syntax here")]) from None
    if len(documents) != 1 or not isinstance(documents[0].data, dict):
        violation = Violation(
            str(path),
            f"an overlay is one map, but the file contains {len(documents)} documents"
            if len(documents) != 1
            else "an overlay is a map",
            "write the fields to override, for example spec: {batch: {groups: 64}}",
        )
        raise JobInvalid([violation])
    if "kind" in documents[0].data:
        # A shell's jobs/*.yaml would lay each over the one before.
        violation = Violation(
            f"{path}, line {documents[0].line_of(('kind',))}",
            "is an object of its own, and every file after the first is laid over the job in that",
            "give each job to a call of its own, or leave apiVersion and kind out of an overlay",
        )
        raise JobInvalid([violation])
    return documents[0].data


def check_text(
    text: str, assignments: Sequence[str] = (), overlays: Sequence[dict[str, Any]] = (), name: str | None = None
) -> list[Checked]:
    """Every RLJob in the text, with overlays and assignments applied, and what is wrong with it. Never raises for a bad
    text. With overlays the document is left out, since lines would name one file of several. ``name``: what the text is
    called where all of it is wrong."""
    try:
        documents = read_documents(text)
    except YamlError as problem:
        place = f"{f'{name}, ' if name else ''}line {problem.line}, column {problem.column}"
        return [Checked(None, [Violation(place, problem.problem, "fix the YAML syntax here")])]
    jobs = [document for document in documents if not _is_another_kind(document.data)]
    if not jobs:
        return [Checked(None, [Violation(name or "the file", f"contains no {KIND}", f"write kind: {KIND}")])]
    outcomes = []
    for document in jobs:
        data, source = document.data, None if overlays else document
        for overlay in overlays:
            data = merged(data, overlay)
        try:
            data = apply(data, assignments) if assignments else data
        except ValueError as problem:
            outcomes.append(Checked(None, [Violation("--set", str(problem), "fix the assignment")], source))
            continue
        readable, violations = _read_job(data)
        job = readable.job if readable is not None and not violations else None
        outcomes.append(Checked(job, violations, source, readable))
    return outcomes


def check(data: Any) -> tuple[RLJob | None, list[Violation]]:
    """The job in plain data, and everything wrong with it. With type errors the rules see what remains without them."""
    readable, violations = _read_job(data)
    return readable.job if readable is not None and not readable.wrong else None, violations


def _read_job(data: Any) -> tuple[Readable | None, list[Violation]]:
    """What can be read of the job in plain data, and everything wrong with it."""
    if not isinstance(data, dict):
        return None, [Violation("the document", "must be a map", f"start with apiVersion: {API_VERSION}")]
    data = _as_written(data)
    try:
        job = RLJob.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as error:
        found = violations_of(error)
        wrong = {violation.path for violation in found} | probably_meant(error)
        jobs, sections = _rest(data, error)
        readable = Readable(jobs[0], frozenset(wrong | sections)) if jobs else None
        said = [v for v in _broken_in_all(jobs) if not touches(v.path, wrong) and not speaks_of(v, wrong | sections)]
        return readable, found + said
    return Readable(job), rules.broken(job)


def _as_written(data: dict[str, Any]) -> dict[str, Any]:
    """The document without what an API server adds, so that ``kubectl get -o yaml`` can be checked and run again."""
    metadata = data.get("metadata")
    if isinstance(metadata, dict):
        metadata = {name: value for name, value in metadata.items() if name not in FROM_THE_SERVER}
    written = {name: value for name, value in data.items() if name != "status"}
    return written | ({"metadata": metadata} if metadata is not None else {})


def _is_another_kind(data: Any) -> bool:
    """A complete Kubernetes object that is not ours."""
    if not isinstance(data, dict):
        return False
    version, kind = data.get("apiVersion"), data.get("kind")
    return isinstance(version, str) and isinstance(kind, str) and version.partition("/")[0] != GROUP and kind != KIND


STAND_INS: Sequence[dict[str, Any]] = tuple(
    {
        "model": {"source": "x"},
        "data": {"train": {"source": "x"}, "answer": "x"},
        "reward": {"functions": [function]},
        "algorithm": {"preset": preset},
    }
    for preset, function in (
        ("grpo", {"type": "length"}),
        ("ppo", {"type": "rewardModel", "rewardModel": {"source": "x"}}),
    )
)
"""Required sections, for those that can't be read. What rules say whichever stands there is not about them."""


def _rest(data: dict[str, Any], error: ValidationError) -> tuple[list[RLJob], set[str]]:
    """The job without its wrong values, or several with different sections in the place of those that can't be read,
    and the paths of these sections. No job: too much is wrong."""
    remaining, job, error = _without(data, error)
    if job is not None:
        return [job], set()
    sections = _wrong_sections(error)
    jobs = []
    for stand_ins in STAND_INS:
        job = _stood_in(remaining, error, sections, stand_ins)
        if job is None:
            return [], set()
        jobs.append(job)
    return jobs, {f"spec.{section}" for section in sections}


def _broken_in_all(jobs: Sequence[RLJob]) -> list[Violation]:
    """What rules say of each of the jobs."""
    told = [rules.broken(job) for job in jobs]
    return [violation for violation in told[0] if all(violation in others for others in told)] if told else []


def _without(data: dict[str, Any], error: ValidationError) -> tuple[dict[str, Any], RLJob | None, ValidationError]:
    """The document without its wrong values, the job if it is one then, and else what is wrong still.

    A required text that is wrong becomes one that fits.
    """
    remaining = copy.deepcopy(data)
    for _ in range(3):
        for details in error.errors(include_url=False, include_context=False):
            path = [part for part in details["loc"] if part != "[key]"]
            if details["type"] == "missing" and len(path) <= 2:
                # What is without it is the whole job.
                continue
            node = schema.find(path)
            _remove(remaining, path, _stand_in(node) if details["type"] != "missing" else None)
        try:
            return remaining, RLJob.model_validate(remaining, by_alias=True, by_name=False), error
        except ValidationError as again:
            error = again
    return remaining, None, error


def _stand_in(node: schema.Node | None) -> str | None:
    """A text for a field that needs one; None: the field can go, or what it is in has to."""
    if node is None or not node.required or node.kind != "string" or node.choices:
        return None
    return next((text for text in ("x", "/-") if re.search(node.pattern or "", text)), None)


def _places(error: ValidationError) -> list[tuple[str | int, ...]]:
    return [details["loc"] for details in error.errors(include_url=False, include_context=False)]


def _wrong_sections(error: ValidationError) -> set[str]:
    """The sections of the spec in which something is wrong."""
    return {str(place[1]) for place in _places(error) if place[0] == "spec" and len(place) > 1}


def _stood_in(
    data: dict[str, Any], error: ValidationError, wrong: Collection[str], sections: Mapping[str, Any]
) -> RLJob | None:
    """The job with other sections in the place of those that are wrong."""
    spec = data.get("spec")
    kept = {name: value for name, value in spec.items() if name not in wrong} if isinstance(spec, dict) else {}
    whole = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "x"} if any(place[0] == "metadata" for place in _places(error)) else data.get("metadata"),
        "spec": {**sections, **kept},
    }
    try:
        return RLJob.model_validate(whole, by_alias=True, by_name=False)
    except ValidationError:
        return None


def _remove(data: Any, path: Sequence[str | int], stand_in: str | None) -> None:
    """Removes the value at a path. A list with a wrong item goes whole, lest the others change their places."""
    holders: list[tuple[Any, str | int]] = []
    holder = data
    for part in path:
        there = (
            part in holder
            if isinstance(holder, dict)
            else isinstance(holder, list) and isinstance(part, int) and part < len(holder)
        )
        if not there:
            break
        holders.append((holder, part))
        holder = holder[part]
    if len(holders) < len(path) - 1:
        # What held it has gone with something else that was wrong in it.
        return
    while holders and isinstance(holders[-1][0], list):
        holders.pop()
        stand_in = None
    if holders:
        holder, part = holders[-1]
        del holder[part]
        if stand_in is not None and len(holders) == len(path):
            holder[part] = stand_in


def read_text(path: Path) -> str:
    """A job file's text, and no more of a file that is far too long for one than what says so.

    Raises ``JobInvalid`` when it is not UTF-8, and ``OSError``.
    """
    with path.open("rb") as file:
        data = file.read(4 * MAX_CHARACTERS + 1)
    try:
        whole = len(data) <= 4 * MAX_CHARACTERS
        return (
            data.decode("utf-8", "strict" if whole else "replace")[: MAX_CHARACTERS + 1]
            .replace("\r\n", "\n")
            .replace("\r", "\n")
        )
    except UnicodeDecodeError as problem:
        violation = Violation(str(path), f"is not UTF-8 text (byte {problem.start})", "save it as UTF-8")
        raise JobInvalid([violation]) from None
