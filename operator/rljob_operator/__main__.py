"""`python -m rljob_operator`: runs the operator."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import uuid
from pathlib import Path
from typing import Any

from rljob_api.pod_policy import PodPolicy
from rljob_operator import credentials
from rljob_operator.head import DEFAULT_ADDRESS
from rljob_operator.inventory import UnwatchedError
from rljob_operator.operator import Operator, Options
from rljob_operator.settings import Settings

log = logging.getLogger(__name__)


def parser() -> argparse.ArgumentParser:
    defaults = Settings()
    options = argparse.ArgumentParser(prog="rljob-operator", description="Runs RLJobs on Kubernetes with KubeRay.")
    options.add_argument("--key-file", type=Path, help="file with a token key, at least 32 bytes on one line")
    options.add_argument(
        "--key-secret", help="Secret in the lease's namespace that keeps all token keys; created if missing"
    )
    options.add_argument("--namespace", action="append", default=[], help="watch only this namespace (repeatable)")
    options.add_argument(
        "--lease-namespace", help="namespace of the leader election lease; without it the operator always acts"
    )
    options.add_argument("--lease-name", default="rljob-operator", help="name of the lease")
    options.add_argument("--head-address", default=DEFAULT_ADDRESS, help="template of the head's address")
    options.add_argument("--probe-host", default="0.0.0.0", help="address for probes and metrics")
    options.add_argument("--probe-port", type=int, default=8080, help="port for probes and metrics; 0: none")
    options.add_argument("--open-metrics", action="store_true", help="serve /metrics without authorization")
    options.add_argument(
        "--default-image", default=defaults.default_image, help="trainer image for jobs without spec.image"
    )
    options.add_argument("--ray-version", default=defaults.ray_version, help="Ray version in the images")
    options.add_argument(
        "--poll-seconds", type=float, default=defaults.poll_seconds, help="seconds between two polls of a driver"
    )
    options.add_argument(
        "--operator-namespace", default=defaults.operator_namespace, help="namespace of the operator's pods"
    )
    options.add_argument("--no-network-policy", action="store_true", help="create no NetworkPolicy for training pods")
    options.add_argument(
        "--ingress-rule",
        action="append",
        default=[],
        type=_ingress_rule,
        metavar="JSON",
        help="extra ingress rule of the NetworkPolicy for training pods (repeatable)",
    )
    options.add_argument(
        "--pod-policy",
        type=_pod_policy,
        default=PodPolicy(),
        metavar="JSON",
        help="what pods of jobs may do to their nodes, as the chart's podPolicy (default: nothing of it)",
    )
    options.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return options


def _ingress_rule(text: str) -> dict[str, Any]:
    rule = json.loads(text)
    if not isinstance(rule, dict):
        raise argparse.ArgumentTypeError(f"an ingress rule must be a JSON object, not {text[:80]}")
    return rule


def _pod_policy(text: str) -> PodPolicy:
    try:
        return PodPolicy.model_validate_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no pod policy: {error}") from None


def options_of(arguments: argparse.Namespace) -> Options:
    """What the command line says."""
    return Options(
        key_file=arguments.key_file,
        key_secret=arguments.key_secret,
        namespaces=tuple(arguments.namespace),
        head_address=arguments.head_address,
        lease_namespace=arguments.lease_namespace,
        lease_name=arguments.lease_name,
        # A restarted container has the same host name, but isn't the same leader.
        identity=f"{socket.gethostname()}_{os.getpid()}_{uuid.uuid4().hex[:8]}",
        probe_host=arguments.probe_host,
        probe_port=arguments.probe_port or None,
        open_metrics=arguments.open_metrics,
        settings=Settings(
            default_image=arguments.default_image,
            ray_version=arguments.ray_version,
            network_policy=not arguments.no_network_policy,
            operator_namespace=arguments.operator_namespace,
            ingress=tuple(arguments.ingress_rule),
            pod_policy=arguments.pod_policy,
            poll_seconds=arguments.poll_seconds,
            start_poll_seconds=min(Settings.start_poll_seconds, arguments.poll_seconds),
        ),
    )


async def run(options: Options) -> int:
    """Runs until SIGTERM or SIGINT, or until nothing but a start anew helps; returns the exit code."""
    operator = Operator(options, await credentials.login())
    task = asyncio.create_task(operator.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        log.info("stopped")
    except ExceptionGroup as group:
        unwatched, others = group.split(UnwatchedError)
        if unwatched is None or others is not None:
            raise
        log.error("%s", unwatched.exceptions[0])
        return 1
    return 0


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    logging.basicConfig(
        level=arguments.log_level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", stream=sys.stderr
    )
    # kopf speaks of every object that it hands on.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    # What is there by now stays: to search it for garbage takes 35 ms, in which no job is looked at.
    gc.collect()
    gc.freeze()
    return asyncio.run(run(options_of(arguments)))


if __name__ == "__main__":
    sys.exit(main())
