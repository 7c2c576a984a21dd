"""`kubectl apply` and `rljob validate` say the same: one rule set, two judges, many job files made by chance."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from kube.control_plane import ControlPlane
from specs.generated import MINIMAL, job_file
from verdicts import differences, of_ours, of_the_server, rules_broken

from rljob_api.overrides import merged
from rljob_api.rules import RULES
from rljob_api.yaml_reading import read_value

sys.path.insert(0, str(Path(__file__).parents[1] / "api"))
from test_rules import CASES, GENEROUS

pytestmark = pytest.mark.timeout(900)
GENERATED = int(os.environ.get("RLJOB_SPECS", "2000"))
SPECS_OF_CASES = [
    spec for _, good, bad, _ in CASES for text in (good, bad) if (spec := (read_value(text) or {}).get("spec"))
]


def agreed(plane: ControlPlane, generated: int) -> tuple[Counter[str], set[str]]:
    """Asserts that both say the same of so many job files; returns the verdicts, and the rules that were broken."""
    counts: Counter[str] = Counter()
    met: set[str] = set()
    found = []
    for seed in range(generated):
        text = job_file(seed, SPECS_OF_CASES)
        verdict, ours = of_the_server(plane, "default", text), of_ours(text)
        counts["accepted" if verdict.accepted else "refused"] += 1
        met |= rules_broken(text)
        differ = differences(plane, "default", text, verdict, ours)
        found += [f"seed {seed}: {difference}\n{text}" for difference in differ]
    assert not found, f"{len(found)} disagreements, the first ones:\n" + "\n".join(found[:5])
    # Neither judge may be right by always saying the same.
    assert min(counts["accepted"], counts["refused"]) > generated / 6, counts
    return counts, met


def test_generated_job_files_get_the_same_verdict_from_both(plane: ControlPlane) -> None:
    counts, met = agreed(plane, GENERATED)
    # Every rule has been asked.
    in_cel = {name for name, entry in RULES.items() if entry.cel}
    assert GENERATED < 2000 or in_cel <= met, in_cel - met
    print(f"{GENERATED} job files: {dict(counts)}; {len(met)} of {len(RULES)} rules broken at least once")


@pytest.mark.parametrize("case", CASES, ids=[f"{index}-{case[0]}" for index, case in enumerate(CASES)])
def test_the_examples_of_every_rule_get_the_same_verdict(plane: ControlPlane, case: tuple[str, str, str, str]) -> None:
    rule, good, bad, path = case
    job: dict[str, Any] = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "tiny"},
        "spec": MINIMAL,
    }
    fitting = [[read_value(GENEROUS)] if needs_room(patch) else [] for patch in (good, bad)]
    kept, broken = (
        json.dumps(reduce(merged, [job, *first, read_value(patch)]))
        for first, patch in zip(fitting, (good, bad), strict=True)
    )
    assert of_the_server(plane, "default", kept).accepted
    verdict = of_the_server(plane, "default", broken)
    assert differences(plane, "default", broken, verdict, of_ours(broken)) == []
    assert verdict.accepted == (not RULES[rule].cel and rule not in SEEN_BY_THE_SERVER_ITSELF)
    if not verdict.accepted:
        assert any(path == theirs or path.startswith((f"{theirs}.", f"{theirs}[")) for theirs in verdict.paths)


def needs_room(patch: str) -> bool:
    """Whether a case is about a random model, whose context is short, and not about lengths."""
    return "random" in patch and "maxPromptTokens" not in patch


SEEN_BY_THE_SERVER_ITSELF = {
    "variables_differ",
    "pull_secrets_differ",
    "validation_names_differ",
    "name_leaves_room_for_children",
    "name_is_a_dns_label",
}
"""Rules without CEL because the schema says the same."""
