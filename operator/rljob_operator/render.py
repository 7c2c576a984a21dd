"""Print the Kubernetes objects that the operator would create for a job.

Made by the operator's own functions, so nothing is guessed. Tokens, UIDs and generations are only known in a cluster;
placeholders stand for them. Lines on standard error that begin with `note:` say what will not work in these pods.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rljob_api import JobInvalid, RLJob, Violation, load_jobs, resolve
from rljob_api.on_cluster import cluster_notes, refused
from rljob_operator import objects
from rljob_operator.entrypoint import driver_command
from rljob_operator.network_policy import network_policy
from rljob_operator.settings import Settings
from rljob_operator.tokens import JobTokens

PLACEHOLDER_UID = "00000000-0000-0000-0000-000000000000"
PLACEHOLDER_KEY = "00000000"
FIRST = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = Settings()
    parser.add_argument("job", help="job file; - reads standard input")
    parser.add_argument(
        "overlays", metavar="OVERLAY", type=Path, nargs="*", help="overlay files, merged over the job in order"
    )
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="override a field of the job")
    parser.add_argument("--image", default=defaults.default_image, help="the operator's default image")
    parser.add_argument("--ray-version", default=defaults.ray_version, help="Ray version in the images")
    parser.add_argument("--operator-namespace", default=defaults.operator_namespace, help="namespace of the operator")
    parser.add_argument(
        "--no-network-policy", action="store_true", help="as an operator that creates no NetworkPolicies"
    )


def run(args: argparse.Namespace) -> int:
    source = sys.stdin.read() + "\n" if args.job == "-" else args.job
    settings = Settings(
        default_image=args.image,
        ray_version=args.ray_version,
        operator_namespace=args.operator_namespace,
        network_policy=not args.no_network_policy,
    )
    for index, document in enumerate(rendered(source, args.set, settings, args.overlays)):
        if index:
            print("---")
        print(yaml.safe_dump(document, sort_keys=False, width=120, allow_unicode=True), end="")
    print(f"# then, as a Ray job on the head: {driver_command(FIRST, FIRST)}", flush=True)
    for job in _jobs(source, args.set, args.overlays):
        for note in cluster_notes(resolve(job)):
            print(f"note: {note}", file=sys.stderr)
    return 0


def rendered(
    source: str, assignments: list[str], settings: Settings, overlays: Sequence[Path] = ()
) -> list[dict[str, Any]]:
    """The objects of every job in a file or text, in the order in which they are created.

    Raises:
        JobInvalid: with everything that is wrong with the jobs, or that the operator makes no pods for, or the file
            that cannot be read.
    """
    documents = []
    for job in _jobs(source, assignments, overlays):
        resolved = resolve(job)
        if problems := list(refused(resolved)):
            raise JobInvalid(problems)
        fingerprint = objects.spec_hash(job.spec)
        derived = "<derived from the operator's key>"
        tokens = JobTokens(ray=derived, driver=derived, key=PLACEHOLDER_KEY)
        documents += [
            objects.config_map(resolved, job.spec.document(), PLACEHOLDER_UID, FIRST),
            objects.secret(resolved, PLACEHOLDER_UID, FIRST, tokens),
            *([network_policy(resolved, PLACEHOLDER_UID, settings)] if settings.network_policy else []),
            objects.ray_cluster(resolved, fingerprint, PLACEHOLDER_UID, FIRST, FIRST, PLACEHOLDER_KEY, settings),
        ]
    return documents


def _jobs(source: str, assignments: list[str], overlays: Sequence[Path]) -> list[RLJob]:
    try:
        return load_jobs(source, assignments, overlays)
    except OSError as problem:
        violation = Violation(str(problem.filename), f"cannot be read ({problem.strerror})", "check the path")
        raise JobInvalid([violation]) from None
