"""What the API server and `rljob validate --schema-only` say about the same text."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from kube.control_plane import ApiCallError, ControlPlane
from pydantic import ValidationError

from rljob_api import RLJob, Violation, check, check_text
from rljob_api.rules import RULES, Job
from rljob_api.yaml_reading import YamlError, read_documents

NOT_IN_CEL = frozenset(name for name, rule in RULES.items() if rule.not_in_cel)
"""Rules that the API server doesn't know, or not whole."""

_BUSY = (429, 503, 504)
"""What a server answers that has no time on a crowded machine: it is asked again."""
_UNKNOWN = re.compile(r'(?:unknown|duplicate) field "([^"]+)"')


@dataclass(frozen=True)
class Verdict:
    """Whether a job file is accepted, and if not, the paths that are blamed."""

    accepted: bool
    paths: frozenset[str]
    message: str


def of_the_server(plane: ControlPlane, namespace: str, text: str) -> Verdict:
    """A dry run of the creation in which unknown fields are errors, as for `kubectl apply`."""
    return verdict_of(plane, f"/apis/rljob.dev/v1alpha1/namespaces/{namespace}/rljobs", text)


def verdict_of(plane: ControlPlane, kind: str, text: str) -> Verdict:
    """The same for an object of any kind; ``kind`` is the path at which such objects are created."""
    for patience in (2, 1, 0):
        try:
            plane.call("POST", f"{kind}?dryRun=All&fieldValidation=Strict", text.encode(), "application/yaml")
            break
        except ApiCallError as error:
            if error.code in _BUSY and patience:
                continue
            return _refusal(error)
    return Verdict(True, frozenset(), "")


def _refusal(error: ApiCallError) -> Verdict:
    if error.code not in (400, 422):
        # No verdict: the server failed.
        raise error
    message = str(error.answer.get("message", ""))
    causes = (error.answer.get("details") or {}).get("causes") or ()
    # "<nil>" says that rules were skipped because types are wrong.
    paths = {str(cause.get("field")).removeprefix(".") for cause in causes} - {"<nil>", "None"}
    return Verdict(False, frozenset(paths | set(_UNKNOWN.findall(message))), message)


def of_ours(text: str) -> Verdict:
    """What `rljob validate --schema-only` prints."""
    return _verdict([violation for outcome in check_text(text) for violation in outcome.violations])


def of_ours_on(document: dict[str, Any]) -> Verdict:
    """The same of a job file that has been read."""
    return _verdict(check(document)[1])


def _verdict(violations: Sequence[Violation]) -> Verdict:
    return Verdict(not violations, frozenset(v.path for v in violations), "\n".join(map(str, violations)))


def rules_broken(text: str) -> set[str]:
    """The names of the rules that a job file breaks; empty as well when its types are wrong, or it isn't YAML."""
    try:
        (document,) = read_documents(text)
    except YamlError:
        return set()
    return rules_broken_by(document.data)


def rules_broken_by(document: Any) -> set[str]:
    """The same of a job file that has been read."""
    job, _ = check(document)
    if job is None:
        return set()
    looked_at = Job(job)
    return {name for name, rule in RULES.items() if any(True for _ in rule(looked_at))}


def without_numbers_out_of_bounds(text: str) -> str | None:
    """The job file without them; None: there are none."""
    (document,) = read_documents(text)
    data = copy.deepcopy(document.data)
    try:
        RLJob.model_validate(data)
    except ValidationError as error:
        places = [e["loc"] for e in error.errors() if e["type"].startswith(("greater_than", "less_than"))]
        for *holders, name in places:
            holder = reduce(lambda inner, part: inner[part], holders, data)
            if isinstance(holder, dict):
                del holder[name]
        return json.dumps(data) if places else None
    return None


def differences(plane: ControlPlane, namespace: str, text: str, theirs: Verdict, ours: Verdict) -> list[str]:
    """Where the server and we, with these verdicts, differ about a job file without a reason that is written down."""
    if theirs.accepted and not ours.accepted:
        broken = rules_broken(text)
        if broken and broken <= NOT_IN_CEL:
            return []
        return [f"the server accepts, we say: {ours.message}"]
    if not theirs.accepted and ours.accepted:
        return [f"we accept, the server says: {theirs.message}"]
    unheard = [path for path in sorted(theirs.paths) if not explained(path, ours.paths)]
    mended = without_numbers_out_of_bounds(text) if unheard else None
    if mended is not None:
        # The server holds rules against such numbers, and says two things about one mistake. We leave them out.
        then, we = of_the_server(plane, namespace, mended), of_ours(mended)
        unheard = [path for path in unheard if path in then.paths and not explained(path, we.paths)]
    unheard = [path for path in unheard if not _hides_a_repetition(path, theirs, ours.paths)]
    return [f"{path}: named by the server ({theirs.message}), not by us: {sorted(ours.paths)}" for path in unheard]


def _hides_a_repetition(path: str, theirs: Verdict, ours: frozenset[str]) -> bool:
    """Whether the server says that an item is there twice, and we that another one of the list is none at all: a list
    that cannot be read we don't look through for repetitions."""
    items = path.rpartition("[")[0] + "["
    return f"{path}: Duplicate value" in theirs.message and any(own.startswith(items) for own in ours)


def explained(path: str, ours: frozenset[str]) -> bool:
    """Whether a path that the server names is among ours: the same place, a part of it, or what it is a part of.

    CEL blames a list or map where a rule looks at several of its items; we name the item. A map in the place of a
    number is a wrong type for us; the server looks into it for fields that don't exist.
    """
    path = _plain(path)
    return any(own == path or _is_below(own, path) or _is_below(path, own) for own in map(_plain, ours))


def _plain(path: str) -> str:
    """We write keys with points in them in brackets, the server doesn't."""
    return re.sub(r"\[([^\]]*[^\]0-9][^\]]*)\]", r".\1", path)


def _is_below(path: str, above: str) -> bool:
    return path.startswith((f"{above}.", f"{above}["))
